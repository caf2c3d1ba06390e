"""A launch script's own arguments as a plan needs them, read without starting anything or importing Megatron."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_rl_plugin.algorithms.advantages import ADVANTAGES
from mindspeed_rl_plugin.algorithms.presets import ALGORITHMS
from mindspeed_rl_plugin.host.rehearsal.capture import capture
from mindspeed_rl_plugin.host.rehearsal.flags import Flags
from mindspeed_rl_plugin.reshard.layout import ModelShape, Parallel

# Megatron's defaults of the arguments that decide about layouts; their type is that of the value.
_NUMBERS = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "make_vocab_size_divisible_by": 128,
    "num_query_groups": 1,
}
_OPTIONAL = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "kv_channels",
    "ffn_hidden_size",
    "vocab_size",
    "padded_vocab_size",
    "expert_tensor_parallel_size",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "n_shared_experts",
    "first_k_dense_replace",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_nope_head_dim",
    "qk_pos_emb_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "mtp_num_layers",
    "rl_generate_tp",
    "rl_reshard_bucket_mb",
)
_SWITCHES = (
    "group_query_attention",
    "swiglu",
    "add_qkv_bias",
    "qk_layernorm",
    "multi_latent_attention",
    "untie_embeddings_and_output_weights",
    "use_tp_pp_dp_mapping",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "moe_tp_extend_ep",
    "use_distributed_optimizer",
    "bf16",
    "fp16",
)
_WORDS = {
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "pipeline_model_parallel_layout": "",
}


@dataclass(frozen=True)
class Script:
    """What a launch script asks for. generate_tp, bucket_mb: its RL flags where it has them; notes: what the plan
    takes otherwise than the script says; critic: whether its algorithm trains one."""

    shape: ModelShape
    train: Parallel
    itemsize: int
    distributed: bool
    generate_tp: int | None
    bucket_mb: int | None
    notes: tuple[str, ...]
    critic: bool = False


def read_script(path: Path, vocab: int | None = None, timeout: float = 60.0) -> Script:
    """Run the script up to its torchrun and read the arguments.

    vocab: real vocabulary, where the script leaves it to a tokenizer. Raises ValueError for what no family expresses.
    """
    with tempfile.TemporaryDirectory(prefix="plan-") as scratch:
        launch = capture(path.resolve(), Path(scratch), timeout)
    return read_arguments(Flags.parse(launch.arguments), launch.world, vocab)


def read_arguments(flags: Flags, world: int, vocab: int | None = None) -> Script:
    """The same from arguments that are at hand, for a world of ranks."""
    args = _namespace(flags)
    args.world_size = world
    args.virtual_pipeline_model_parallel_size = _virtual(args)
    notes: list[str] = []
    if flags.get("--schedules-method"):
        notes.append(f"--schedules-method {flags.get('--schedules-method')}: planned as a plain pipeline")
    if args.mtp_num_layers:
        notes.append(
            f"--mtp-num-layers {args.mtp_num_layers}: the predicting layers are not generated with, not counted"
        )
    idle = _idle_layers(flags, args.num_layers)
    parallel = Parallel.from_megatron_args(args)
    if idle:
        sizes, start = [], 0
        for size in parallel.chunk_sizes(args.num_layers):
            sizes.append(size - len(idle & set(range(start, start + size))))
            start += size
        parallel = replace(parallel, chunk_layers=tuple(sizes), first_layers=None, last_layers=None)
        if isinstance(args.moe_layer_freq, list):
            args.moe_layer_freq = [f for i, f in enumerate(args.moe_layer_freq) if i not in idle]
        args.num_layers -= len(idle)
        notes.append(f"--noop-layers: {len(idle)} layers that do nothing are left out")
    return Script(
        ModelShape.from_megatron_args(args, vocab or args.vocab_size or args.padded_vocab_size),
        parallel,
        2 if args.bf16 or args.fp16 else 4,
        args.use_distributed_optimizer,
        args.rl_generate_tp,
        args.rl_reshard_bucket_mb,
        tuple(notes),
        _has_critic(flags),
    )


def _has_critic(flags: Flags) -> bool:
    """Whether the script's advantage, its own or its preset's, needs a critic's values. An unknown name needs none: the
    job itself refuses it."""
    preset = ALGORITHMS.get(flags.get("--rl-algorithm") or "")
    advantage = ADVANTAGES.get(flags.get("--rl-advantage") or (preset.advantage if preset else ""))
    return preset is not None and advantage is not None and advantage.critic


def _namespace(flags: Flags) -> argparse.Namespace:
    args = argparse.Namespace(**_WORDS, **_NUMBERS)
    for name in _WORDS:
        setattr(args, name, flags.get(_flag(name)) or getattr(args, name))
    for name in (*_NUMBERS, *_OPTIONAL):
        text = flags.get(_flag(name))
        if text is not None and not text.lstrip("-").isdigit():
            raise ValueError(f"{_flag(name)} {text}: the plan needs a whole number")
        setattr(args, name, int(text) if text is not None else getattr(args, name, None))
    for name in _SWITCHES:
        setattr(args, name, _flag(name) in flags)
    args.add_bias_linear = "--disable-bias-linear" not in flags
    freq = (flags.get("--moe-layer-freq") or "1").strip("'\"")
    args.moe_layer_freq = _pattern(freq)
    missing = [_flag(n) for n in ("num_layers", "hidden_size", "num_attention_heads") if getattr(args, n) is None]
    if missing:
        raise ValueError(f"the script gives no {', '.join(missing)}; is the model described in another file?")
    return args


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _virtual(args: argparse.Namespace) -> int | None:
    """Model chunks a rank, from either of Megatron's flags."""
    if args.num_virtual_stages_per_pipeline_rank:
        return args.num_virtual_stages_per_pipeline_rank
    each = args.num_layers_per_virtual_pipeline_stage
    return args.num_layers // args.pipeline_model_parallel_size // each if each else None


def _pattern(text: str) -> int | list[int]:
    """`--moe-layer-freq`: a number, or a list such as "[0]*3+[1]*58"."""
    if text.lstrip("-").isdigit():
        return int(text)
    out: list[int] = []
    for term in text.replace(" ", "").split("+"):
        body, _, times = term.partition("*")
        if not (body.startswith("[") and body.endswith("]") and (times.isdigit() or not times)):
            raise ValueError(f"--moe-layer-freq {text}: {term!r} is no list with a factor, as in [0]*3+[1]*58")
        out += json.loads(body) * int(times or 1)
    return out


def _idle_layers(flags: Flags, layers: int) -> set[int]:
    text = flags.get("--noop-layers")
    idle = {int(word) for word in text.replace(" ", ",").split(",") if word} if text else set()
    if not idle <= set(range(layers)):
        raise ValueError(f"--noop-layers {text}: the model has {layers} layers")
    return idle
