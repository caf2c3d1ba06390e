"""A launch script's own arguments as a plan needs them, read without starting anything or importing Megatron."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_rl_plugin.algorithms.advantages import ADVANTAGES
from mindspeed_rl_plugin.algorithms.presets import ALGORITHMS
from mindspeed_rl_plugin.config.upstream import EXPERTS, LATENT, MODEL, UPSTREAM, WHOLE
from mindspeed_rl_plugin.reshard.layout import ModelShape, Parallel
from mindspeed_rl_plugin.tools.plan.refusals import refusals as of_a_run
from mindspeed_rl_plugin.tools.plan.refusals import typed
from mindspeed_rl_plugin.tools.plan.vocabulary import vocabulary
from mindspeed_rl_plugin.tools.rehearse.capture import capture
from mindspeed_rl_plugin.tools.rehearse.command_line import Flags

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
    "rl_generate_ep",
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
    "moe_grouped_gemm",
    "use_distributed_optimizer",
    "bf16",
    "fp16",
)
_WORDS = {
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "pipeline_model_parallel_layout": "",
    "num_layer_list": "",
    "rl_engine_dtype": "auto",
    "rl_swap": None,
    "transformer_impl": "",
    "moe_token_dispatcher_type": "allgather",
    "moe_router_score_function": "softmax",
}
_AT_LEAST_1 = {*_NUMBERS, "num_layers", "hidden_size", "num_attention_heads", "rl_generate_tp", "rl_generate_ep"}
# Arguments that no family expresses: read too, so that the plan refuses what a run refuses. --noop-layers can be
# planned all the same.
_REFUSED = {row.name for row in UPSTREAM if row.about in (WHOLE, MODEL, EXPERTS, LATENT)} - {
    *("noop_layers", "add_bias_linear")
}
# Where the flag is not spelt like the attribute.
_SPELT = {"gtp_weight_remat_size": "--tensor-parallel-num-weight-shards"}
# Names that Megatron's config has and its command line has not.
_NO_FLAGS = {
    "--num-layers-in-first-pipeline-stage": "--decoder-first-pipeline-num-layers",
    "--num-layers-in-last-pipeline-stage": "--decoder-last-pipeline-num-layers",
}
_DTYPES = {"auto": None, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Script:
    """What a launch script asks for.

    itemsize, engine_itemsize: bytes of a weight of the trainer and of the engine; generate, bucket_mb: its RL flags
    where it has them, the first as `words.engine_layout_of` reads it; notes: what the plan takes otherwise than the
    script says; critic: whether its algorithm trains one; node: ranks a node, where it says so; experts: how it stores
    them (`rows.EXPERTS`); refused: what a run refuses of its arguments, though the plan does not need them.
    """

    shape: ModelShape
    train: Parallel
    itemsize: int
    distributed: bool
    generate: str | None
    bucket_mb: int | None
    notes: tuple[str, ...]
    critic: bool
    engine_itemsize: int
    node: int | None = None
    experts: str = "sequential"
    refused: tuple[str, ...] = ()


def read_script(path: Path, vocab: int | None = None, timeout: float = 60.0) -> Script:
    """Run the script up to its torchrun and read the arguments.

    vocab: real vocabulary, where it is not in the script or its tokenizer's files. Raises ValueError for what no
    family expresses.
    """
    with tempfile.TemporaryDirectory(prefix="plan-") as scratch:
        launch = capture(path.resolve(), Path(scratch), timeout)
        try:
            script = read_arguments(Flags.parse(launch.arguments), launch.world, vocab, launch.cwd)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return replace(script, node=launch.nproc)


def read_arguments(flags: Flags, world: int, vocab: int | None = None, folder: Path = Path()) -> Script:
    """The same from arguments that are at hand, for a world of ranks. folder: where their relative paths begin."""
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
    if idle and args.num_layer_list:
        args.num_layer_list = ""  # as MindSpeed-LLM does
        notes.append("--num-layer-list: has no effect beside --noop-layers")
    parallel = Parallel.from_megatron_args(args)
    if idle:
        parallel = _without(idle, parallel, args)
        notes.append(f"--noop-layers: {len(idle)} layers that do nothing are left out")
    vocab = vocab or args.vocab_size or vocabulary(flags, folder) or args.padded_vocab_size
    if not vocab:
        raise ValueError(
            "the script leaves the vocabulary to a tokenizer whose tokenizer.json is not here "
            f"({flags.get('--tokenizer-name-or-path') or flags.get('--tokenizer-model') or 'none is named'}); "
            "give its size with --vocab"
        )
    itemsize, bucket = 2 if args.bf16 or args.fp16 else 4, args.rl_reshard_bucket_mb
    if args.rl_swap and set(args.rl_swap.replace(",", " ").split()) != {"params", "grads", "optimizer"}:
        notes.append(f"--rl-swap {args.rl_swap}: planned as if params, grads and optimizer all leave the device")
    return Script(
        shape=ModelShape.from_megatron_args(args, vocab),
        train=parallel,
        itemsize=itemsize,
        distributed=args.use_distributed_optimizer,
        generate=_engines(args),
        bucket_mb=bucket if bucket is not None and bucket >= 1 else None,
        notes=tuple(notes),
        critic=_has_critic(flags),
        engine_itemsize=_engine_bytes(args.rl_engine_dtype) or itemsize,
        experts=_experts(args),
        refused=of_a_run(flags),
    )


def _without(idle: set[int], parallel: Parallel, args: argparse.Namespace) -> Parallel:
    """The layout without layers that do nothing, which are taken out of the arguments too."""
    sizes, start = [], 0
    for size in parallel.chunk_sizes(args.num_layers):
        sizes.append(size - len(idle & set(range(start, start + size))))
        start += size
    if isinstance(args.moe_layer_freq, list):
        args.moe_layer_freq = [f for i, f in enumerate(args.moe_layer_freq) if i not in idle]
    args.num_layers -= len(idle)
    return replace(parallel, chunk_layers=tuple(sizes), first_layers=None, last_layers=None)


def _engines(args: argparse.Namespace) -> str | None:
    """Engines of the script's RL flags, None without any."""
    if args.rl_generate_tp is None and args.rl_generate_ep is None:
        return None
    return f"tp{args.rl_generate_tp or 1},ep{args.rl_generate_ep or 1}"


def _experts(args: argparse.Namespace) -> str:
    """How the trainer stores experts: those of a rank as one, which is MindSpeed's grouped GEMM, unless the script asks
    for TransformerEngine's. `naive` is the larger for it."""
    if not args.moe_grouped_gemm:
        return "sequential"
    return "te_grouped" if args.transformer_impl == "transformer_engine" else "grouped"


def _engine_bytes(dtype: str) -> int | None:
    """Bytes of a weight of --rl-engine-dtype, None for the trainer's."""
    if dtype not in _DTYPES:
        raise ValueError(f"--rl-engine-dtype {dtype}: known: {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _has_critic(flags: Flags) -> bool:
    """Whether the script's advantage, its own or its preset's, needs a critic's values. An unknown name needs none: the
    job itself refuses it."""
    preset = ALGORITHMS.get(flags.get("--rl-algorithm") or "")
    advantage = ADVANTAGES.get(flags.get("--rl-advantage") or (preset.advantage if preset else ""))
    return preset is not None and advantage is not None and advantage.critic


def _namespace(flags: Flags) -> argparse.Namespace:
    for flag, known in _NO_FLAGS.items():
        if flag in flags:
            raise ValueError(f"{flag}: Megatron has no such flag; write {known}")
    args = argparse.Namespace(**_WORDS, **_NUMBERS)
    for name in _WORDS:
        setattr(args, name, flags.get(_flag(name)) or getattr(args, name))
    if "--use-rotary-position-embeddings" in flags:
        args.position_embedding_type = "rope"  # as Megatron does
    for name in (*_NUMBERS, *_OPTIONAL):
        text = flags.get(_flag(name))
        if text == "":
            raise ValueError(f"{_flag(name)} has no value; is a variable of the shell empty?")
        if text is not None and not text.lstrip("-").isdigit():
            raise ValueError(f"{_flag(name)} {text}: the plan needs a whole number")
        if text is not None and int(text) < 1 and name in _AT_LEAST_1:
            raise ValueError(f"{_flag(name)} {text}: give at least 1")
        setattr(args, name, int(text) if text is not None else getattr(args, name, None))
    for name in _SWITCHES:
        setattr(args, name, _flag(name) in flags)
    for name in _REFUSED - vars(args).keys():
        text = flags.get(_SPELT.get(name, _flag(name)))
        if text is not None:
            setattr(args, name, typed(text))
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
