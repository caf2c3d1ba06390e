"""Reads the arguments of a launch script for a plan, without starting its training or importing Megatron."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path

from mindspeed_rl_plugin.algorithms import Algorithm, resolve
from mindspeed_rl_plugin.checks import lora_checks
from mindspeed_rl_plugin.checks.flag_checks import token_budget
from mindspeed_rl_plugin.checks.refused_flags import RUN, UPSTREAM, refusals
from mindspeed_rl_plugin.checks.taken_over import take_over
from mindspeed_rl_plugin.checks.unsupported_models import unbuilt_family
from mindspeed_rl_plugin.config import RLConfig, add_flags, limit_problems
from mindspeed_rl_plugin.config.flag import spelt
from mindspeed_rl_plugin.engine.hf_config import load_reference
from mindspeed_rl_plugin.layout.layout import ModelShape, Parallel
from mindspeed_rl_plugin.prompts.tokenizer import TOKENIZER_FLAGS, vocabulary_size
from mindspeed_rl_plugin.tools.plan.dock_volume import rollout_bytes
from mindspeed_rl_plugin.tools.plan.estimate import PlannedRun
from mindspeed_rl_plugin.tools.rehearse.capture import CapturedLaunch, capture
from mindspeed_rl_plugin.tools.rehearse.command_line import Flags

# Arguments that are read, with Megatron's defaults: sizes of at least 1, other numbers, switches, others.
_COUNTS = dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "global_batch_size")) | {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "make_vocab_size_divisible_by": 128,
    "num_query_groups": 1,
}
_OTHER_NUMBERS = """
    kv_channels ffn_hidden_size vocab_size padded_vocab_size expert_tensor_parallel_size
    decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers num_layers_per_virtual_pipeline_stage
    num_virtual_stages_per_pipeline_rank num_experts moe_ffn_hidden_size moe_intermediate_size
    moe_shared_expert_intermediate_size n_shared_experts first_k_dense_replace q_lora_rank kv_lora_rank qk_head_dim
    qk_nope_head_dim qk_pos_emb_head_dim qk_rope_head_dim v_head_dim mtp_num_layers swap_optimizer_times
"""
_SWITCHES = """
    group_query_attention add_qkv_bias qk_layernorm multi_latent_attention untie_embeddings_and_output_weights
    use_tp_pp_dp_mapping account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    use_distributed_optimizer bf16 fp16 swiglu reuse_fp32_param swap_optimizer
"""
_OTHER_ARGS = {
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "moe_token_dispatcher_type": "allgather",
    "norm_epsilon": 1e-5,
    "rotary_base": 10000,
    "rotary_scaling_factor": 1.0,
    "rope_scaling_factor": 8.0,
}
_SWAP_TIMES = 16  # default of MindSpeed's --swap-optimizer-times
_ATTRIBUTES = {row.spelt: row.name for row in UPSTREAM}  # flag -> attribute; the names of some differ
# Fields of Megatron's config, which are not flags -> the flag to use.
_NO_FLAGS = {
    "--num-layers-in-first-pipeline-stage": "--decoder-first-pipeline-num-layers",
    "--num-layers-in-last-pipeline-stage": "--decoder-last-pipeline-num-layers",
}
SCRIPT_SECONDS = 60.0  # time in which a script must reach its torchrun
_ENGINE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of an engine's weight; other dtypes: as in the trainer


def launched(path: Path) -> CapturedLaunch:
    """The torchrun that a script would start. Raises ValueError if it starts none."""
    with tempfile.TemporaryDirectory(prefix="plan-") as scratch:
        return capture(path.resolve(), Path(scratch), SCRIPT_SECONDS)


def read_script(path: Path, vocab: int | None = None) -> PlannedRun:
    """Run the script without its training, and read the arguments. vocab: as in `read_arguments`. Raises ValueError for
    wrong arguments and for a model of an unknown family."""
    launch = launched(path)
    try:
        script = read_arguments(Flags.parse(take_over(launch.arguments)[0]), launch.world, vocab, launch.cwd)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return replace(script, node=launch.nproc)


def read_arguments(flags: Flags, world: int, vocab: int | None = None, folder: Path = Path()) -> PlannedRun:
    """The planned run of these arguments on `world` ranks. vocab: size of the vocabulary; None: that of the script or
    of its tokenizer; folder: relative paths start here."""
    args = namespace(flags)
    args.world_size = world
    if problem := unbuilt_family(args):
        raise ValueError(problem)
    config, algorithm, refused = rl_flags(flags)
    refused += [*token_budget(args, config), *lora_checks.problems(args, config)] if algorithm else ()
    notes: list[str] = []
    if args.mtp_num_layers:
        notes.append(f"--mtp-num-layers {args.mtp_num_layers}: the engine has no such layers; not counted")
    if "--rl-swap" in flags and set(config.reshard.swap_names) != {"params", "grads", "optimizer"}:
        notes.append(f"--rl-swap {flags.get('--rl-swap')}: not planned; the plan assumes params,grads,optimizer")
    pieces = (args.swap_optimizer_times or _SWAP_TIMES) if args.swap_optimizer else None
    if pieces:
        notes.append(f"--swap-optimizer: optimizer state is on the host, and 1/{pieces} of it at a time on a device")
    itemsize, bucket_mb = 2 if args.bf16 or args.fp16 else 4, config.reshard.reshard_bucket_mb
    engines = "--rl-generate-tp" in flags or "--rl-generate-ep" in flags
    vocab = vocab or args.vocab_size or _vocabulary(flags, folder) or args.padded_vocab_size
    if not vocab:
        named = flags.get("--tokenizer-name-or-path") or flags.get("--tokenizer-model") or "none is named"
        raise ValueError(
            f"the script does not give the size of the vocabulary, and its tokenizer ({named}) has no tokenizer.json "
            "here; give --vocab"
        )
    return PlannedRun(
        shape=ModelShape.from_megatron_args(args, vocab),
        train=Parallel.from_megatron_args(args),
        itemsize=itemsize,
        engine_itemsize=_ENGINE_BYTES.get(config.rollout.engine_dtype, itemsize),
        reused=2 * bool(args.reuse_fp32_param),  # bytes of a float32 main parameter that its weight stores
        distributed=bool(args.use_distributed_optimizer),
        pieces=pieces,
        generate=f"tp{config.rollout.generate_tp},ep{config.rollout.generate_ep}" if engines else None,
        bucket_bytes=bucket_mb << 20 if bucket_mb >= 1 else PlannedRun.bucket_bytes,
        critic=algorithm is not None and algorithm.needs_critic,
        lora=PlannedRun.lora if limit_problems(config.lora) else config.lora,
        reference=algorithm and (algorithm.needs_reference or algorithm.from_pairs),
        dock_bytes=rollout_bytes(args, config, algorithm) if algorithm else 0,
        notes=tuple(notes),
        refused=(*refusals(args, RUN), *refused),
    )


def rl_flags(flags: Flags) -> tuple[RLConfig, Algorithm | None, list[str]]:
    """RL's flags in a script, the algorithm (None: no valid one), and the errors of a run with these flags."""
    parser = add_flags(argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False))
    words = Flags({f: v for f, v in flags.values.items() if f.startswith(("--rl-", "--no-rl-"))}).argv()
    try:
        parsed, rest = parser.parse_known_args(words)
        config = RLConfig.from_args(parsed)
    except (ValueError, argparse.ArgumentError) as error:
        return RLConfig(), None, [str(error)]
    algorithm = None
    with contextlib.suppress(ValueError):
        algorithm = resolve(config.algorithm) if config.algorithm.algorithm else None
    unknown = (word for word in rest if word.startswith("--"))
    problems = [f"{flag} is unknown; `python -m mindspeed_rl_plugin flags` lists them" for flag in unknown]
    return config, algorithm, problems + limit_problems(*vars(config).values())


def namespace(flags: Flags) -> argparse.Namespace:
    """The script's arguments, with defaults for those that the plan reads. Raises ValueError for invalid ones."""
    for flag, known in _NO_FLAGS.items():
        if flag in flags:
            raise ValueError(f"{flag}: Megatron has no such flag; write {known}")
    numbers = _OTHER_NUMBERS.split()
    args = argparse.Namespace(
        **dict.fromkeys(numbers) | dict.fromkeys(_SWITCHES.split(), False) | _COUNTS | _OTHER_ARGS
    )
    for flag in flags.values:
        setattr(args, _ATTRIBUTES.get(flag) or flag[2:].replace("-", "_"), _typed(flags.get(flag) or ""))
    args.add_bias_linear = "--disable-bias-linear" not in flags
    args.spec = flags.values.get("--spec")
    if "--use-rotary-position-embeddings" in flags:
        args.position_embedding_type = "rope"  # as Megatron does
    if isinstance(pattern := getattr(args, "moe_layer_freq", None), str):
        args.moe_layer_freq = _pattern(pattern)
    for flag, value, size in ((spelt(name), getattr(args, name), name in _COUNTS) for name in (*_COUNTS, *numbers)):
        if value is True:
            raise ValueError(f"{flag} has no value; is a variable of the shell empty?")
        if not isinstance(value, int | None):
            raise ValueError(f"{flag} {value}: the plan needs a whole number")
        if size and value is not None and value < 1:
            raise ValueError(f"{flag} {value}: give at least 1")
    missing = [spelt(n) for n in ("num_layers", "hidden_size", "num_attention_heads") if getattr(args, n) is None]
    if missing:
        raise ValueError(f"the script's command line has no {', '.join(missing)}, which the plan needs")
    # Model chunks per rank, from either of Megatron's flags.
    each, chunks = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    stage = args.num_layers // args.pipeline_model_parallel_size
    args.virtual_pipeline_model_parallel_size = chunks or (stage // each if each else None)
    return args


def _typed(text: str) -> bool | int | float | str:
    """The value of a flag as int, float or str; True if the flag has no value."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text or True


def _pattern(text: str) -> list[int]:
    """The list that a `--moe-layer-freq` such as "[0]*3+[1]*58" describes."""
    terms = text.strip("'\"").replace(" ", "").split("+")
    matches = [re.fullmatch(r"(\[\d(?:,\d)*\])(?:\*(\d+))?", term) for term in terms]
    if not all(matches):
        raise ValueError(f"--moe-layer-freq {text}: give a number, or lists with factors, as in [0]*3+[1]*58")
    return [layer for body, times in (m.groups() for m in matches) for layer in json.loads(body) * int(times or 1)]


def _vocabulary(flags: Flags, folder: Path) -> int | None:
    """Size of the vocabulary by config.json of --rl-hf-model, as in a run, else by the first tokenizer.json in the
    folders of TOKENIZER_FLAGS; None if neither exists. Raises ValueError if this tokenizer.json has no vocabulary."""
    model = folder / (flags.get("--rl-hf-model") or "")
    if "--rl-hf-model" in flags and (model / "config.json").is_file():
        return load_reference(str(model))["vocab_size"]
    for path in (folder / text for text in map(flags.get, TOKENIZER_FLAGS) if text):
        path = path.parent if path.name == "tokenizer.json" else path
        if (path / "tokenizer.json").is_file():
            if size := vocabulary_size(path):
                return size
            raise ValueError(f"{path / 'tokenizer.json'} holds no vocabulary; give its size with --vocab")
    return None
