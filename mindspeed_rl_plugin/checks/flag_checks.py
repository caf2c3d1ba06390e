"""Refuses arguments that cannot work with RL before anything is built, most of them after Megatron's own validation.

The limits of single flags are defined in `config`, refused upstream flags in `refused_flags`; they are checked here.
`CHECKS` are conditions over several arguments, or over files: functions that read Megatron's arguments and the RL
config, and yield a message for each problem (value, limit, fix), or raise a ValueError. One error reports all problems.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl_plugin.algorithms import Algorithm, resolve
from mindspeed_rl_plugin.algorithms.presets import learns_from_pairs, unread
from mindspeed_rl_plugin.checkpoints import checkpoint_files as files
from mindspeed_rl_plugin.checkpoints import conversion, disk
from mindspeed_rl_plugin.checkpoints.dist_files import DistFiles
from mindspeed_rl_plugin.checkpoints.saved_args import other_layout, other_order, other_sizes
from mindspeed_rl_plugin.checkpoints.start_decision import NOT_SAVED, decide
from mindspeed_rl_plugin.checks import early, episode_checks, lora_checks, schedule_checks, taken_over, upstream_checks
from mindspeed_rl_plugin.checks.refusal import Refusal, lines_of
from mindspeed_rl_plugin.checks.refused_flags import RUN, WHOLE, refusals
from mindspeed_rl_plugin.checks.unsupported_models import unbuilt_family
from mindspeed_rl_plugin.config import RLConfig, limit_problems
from mindspeed_rl_plugin.config.flag import spelt
from mindspeed_rl_plugin.config.run_flags import Traced
from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.engine.engine_sizes import engine_problems, kv_cache_problems
from mindspeed_rl_plugin.engine.hf_moe import routing_problems
from mindspeed_rl_plugin.engine.hf_rope import rope_scaling
from mindspeed_rl_plugin.environment import launch_env
from mindspeed_rl_plugin.forward.settings import length_multiple, takes_boundaries
from mindspeed_rl_plugin.layout.parallel import Parallel
from mindspeed_rl_plugin.layout.shape import ModelShape
from mindspeed_rl_plugin.loop import arithmetic
from mindspeed_rl_plugin.monitor.run_files import check_dumps
from mindspeed_rl_plugin.prompts.tokenizer import chosen_tokenizer, own_code, same_vocabulary, tokenizer_path
from mindspeed_rl_plugin.reward.reward_model import SCORER, same_tokenizer
from mindspeed_rl_plugin.reward.specs import model_specs
from mindspeed_rl_plugin.weights.storages import unwrap

Check = Callable[[Any, RLConfig], Iterator[str] | None]


def check_args(args: Any) -> None:
    """Check validated arguments of an RL run. Raises a ValueError that lists every problem."""
    if problems := list(_problems(args, RLConfig.from_args(args))):
        raise Refusal.of_arguments(problems)


def check_unvalidated(args: Any) -> None:
    """The checks before Megatron's validation: the model's family (not for dpo), flags that were taken over too late,
    MindSpeed-LLM's conversion of weights, and whether ranks, sizes and batch are the multiples that they must be.
    Raises ValueError; for a wrong multiple it also lists all other problems that can be found before the validation."""
    config = RLConfig.from_args(args)
    if not learns_from_pairs(config.algorithm.algorithm) and (problem := unbuilt_family(args)):
        raise Refusal.of_arguments([problem])
    if problems := [*taken_over.problems(), *conversion.problems(args)]:
        raise Refusal.of_arguments(problems)
    trainers = config.schedule.trainers_text(getattr(args, "world_size", 0))
    problems = [*upstream_checks.ranks(args, trainers), *upstream_checks.multiples(args)]
    try:
        arithmetic.check_batch(args, trainers)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise Refusal.of_arguments([*problems, *_problems(args, config, VALIDATED)])


def _problems(args: Any, config: RLConfig, without: Collection[Check] = ()) -> Iterator[str]:
    pairs = learns_from_pairs(config.algorithm.algorithm)
    yield from refusals(args, RUN, WHOLE) if pairs else refusals(args, RUN)
    yield from limit_problems(*vars(config).values())
    checks = CHECKS if pairs else (*CHECKS, *GENERATION_CHECKS)
    for check in (c for c in checks if c not in without):
        try:
            yield from check(args, config) or ()
        except ValueError as error:
            yield from lines_of(error)
    yield from unread(config)


def warnings(args: Any) -> list[str]:
    """Warnings about valid arguments, one line each."""
    config = RLConfig.from_args(args)
    rollout, policy = config.rollout, tokenizer_path(args)
    lines = list(conversion.notes(args))
    own, others = config.data.tokenizer, {"--rl-hf-model": rollout.hf_model}
    for flag, other in (others | {"--tokenizer-model": getattr(args, "tokenizer_model", None)}).items():
        if own and other and not same_vocabulary(own, other):
            lines.append(
                f"--rl-tokenizer {own} and {flag} {other} have different vocabularies; prompts are tokenized with "
                "--rl-tokenizer: give the tokenizer with which the model was trained"
            )
    for spec in model_specs(config.graders):
        if not same_tokenizer(spec.file, policy):
            lines.append(
                f"reward {spec.name!r} has another tokenizer than the policy: it gets prompts and responses as text, "
                "and tokenizes them itself"
            )
    for name, (_, then) in NOT_SAVED.items():
        if getattr(args, name, None):
            flag = spelt(name)
            lines.append(f"{flag}: RL state, iteration and schedule resume from this run's checkpoints; {then}")
    if config.dock.dock is not None:
        lines.append(f"--rl-dock {config.dock.dock} is ignored: there is only one kind of dock")
    cut = "responses are sampled from a truncated distribution, so the ratio of the update is biased"
    if rollout.top_p < 1:
        lines.append(f"--rl-top-p {rollout.top_p}: {cut}")
    if rollout.top_k > 0:
        lines.append(f"--rl-top-k {rollout.top_k}: {cut}")
    low = config.algorithm.clip_low
    if low is not None and low >= 1:
        lines.append(f"--rl-clip-low {low}: a ratio is never below 0, so the bound 1 - {low} has no effect")
    notes = (*episode_checks.notes(config), *schedule_checks.notes(config), *lora_checks.notes(args, config))
    return [*lines, *notes, *upstream_checks.remarks(args, config)]


def check_model(model: Any) -> None:
    """Check that every chunk of the built model is Megatron's GPT decoder. Raises ValueError."""
    from megatron.core.models.gpt import GPTModel

    for chunk in map(unwrap, model):
        if not isinstance(chunk, GPTModel):
            raise ValueError(
                f"the script built a {type(chunk).__name__}; RL generates from GPT decoders only: use the script that "
                "pretrains a GPTModel"
            )


def _run_length(args: Any, config: RLConfig) -> Iterator[str]:
    if not args.train_iters:
        yield "--train-iters is missing: give the number of optimizer steps"
    if not args.save:
        yield "--save is missing: RL stores its state, its metrics and the reference's path there; give a directory"


def _start(args: Any, config: RLConfig) -> Iterator[str]:
    if launch_env()["rank"] != 0:  # rank 0 decides for all ranks; other machines may lack the files
        return
    start = decide(args)
    resumes = start.kind == "resume"
    folder = files.iteration_dir(start.load_dir, start.iteration) if resumes else start.reference_path
    if folder is None:
        return
    for line in other_order(folder := Path(folder), args):
        yield (
            f"{folder}: {line}, so ranks would load other layers; give the flag as in the saved run, or convert the "
            "weights to this layout: `python -m mindspeed_rl_plugin export`, then `import`"
        )
    if not DistFiles.are_in(folder):
        return
    # From a distributed checkpoint Megatron loads what the model needs, and ignores the rest.
    for line in other_sizes(folder, args):
        yield f"{folder}: {line}; give the flags of the saved model"
    for line in other_layout(folder, args) if resumes else ():
        yield (
            f"{folder}: {line}, but the saved optimizer state only fits the saved layout: resume in the saved layout, "
            "and save with --dist-ckpt-optim-fully-reshardable before you change the layout (but never an "
            "--expert-model-parallel-size of 1 to more, or back)"
        )


def _algorithm(args: Any, config: RLConfig) -> Iterator[str]:
    algorithm = resolve(config.algorithm)
    yield from _group_size(algorithm, config)
    yield from _filtration(args, algorithm, config)
    limit = config.rollout.max_response_length
    if (buffer := algorithm.buffer(limit)) > limit >= 1:
        yield f"--rl-overlong-buffer {buffer} is longer than --rl-max-response-length {limit}; shorten it"


def _critic(args: Any, config: RLConfig) -> Iterator[str]:
    load, warmup, iterations = config.algorithm.critic_load, config.algorithm.critic_warmup, args.train_iters
    if iterations and warmup >= iterations:
        yield (
            f"--rl-critic-warmup {warmup} leaves no iteration of --train-iters {iterations} to train the policy; "
            "lower it"
        )
    if load and launch_env()["rank"] == 0:  # as in `_start`
        yield from critic_problems(load, args)


def critic_problems(directory: str, args: Any) -> Iterator[str]:
    """Arguments of the checkpoint of --rl-critic-load that do not fit a critic of this run's model. Other differences
    are refused when the checkpoint is loaded (`launch.weights_fit`).

    Raises ValueError if there is no checkpoint.
    """
    folder = Path(files.critic_source(directory))
    for line in (*other_sizes(folder, args), *other_order(folder, args)):
        yield (
            f"--rl-critic-load {directory}: {line}; a critic has the policy's own architecture: give a checkpoint of "
            "this model, or leave the flag out"
        )


def _group_size(algorithm: Algorithm, config: RLConfig) -> Iterator[str]:
    members = config.rollout.samples_per_prompt
    if 0 < members < algorithm.members:
        yield (
            f"--rl-samples-per-prompt 1: the advantage {algorithm.advantage!r} compares the responses of one prompt, "
            "so it would be 0 for every token; sample at least 2"
        )
    elif members == 1 and algorithm.dynamic_sampling:
        yield (
            "--rl-samples-per-prompt 1: dynamic sampling keeps only prompts whose responses get different rewards; "
            "sample at least 2, or give --no-rl-dynamic-sampling"
        )


def _filtration(args: Any, algorithm: Algorithm, config: RLConfig) -> Iterator[str]:
    members, whole = config.rollout.samples_per_prompt, algorithm.filtration_whole_batch
    if not algorithm.filters or whole or members < 1:
        return
    if members == 1:
        yield (
            f"--rl-filtration {algorithm.filtration}: with --rl-samples-per-prompt 1 there is nothing to choose from; "
            "sample at least 2, or give --rl-filtration-whole-batch"
        )
    elif args.global_batch_size % members:
        yield (
            f"--rl-filtration {algorithm.filtration} resamples complete groups, but --global-batch-size "
            f"{args.global_batch_size} is no multiple of --rl-samples-per-prompt {members}; make it a multiple, or "
            "give --rl-filtration-whole-batch"
        )


def _batch_arithmetic(args: Any, config: RLConfig) -> None:
    # Other checks report values below 1.
    if min(config.rollout.samples_per_prompt, config.rollout.generate_tp, args.train_iters or 0) >= 1:
        arithmetic.arithmetic_of(args)


def _tokenizer(args: Any, config: RLConfig) -> Iterator[str]:
    chosen = chosen_tokenizer(args)
    if chosen is None:
        yield "no tokenizer: give a Hugging Face tokenizer directory with --rl-tokenizer"
    elif not os.path.isdir(chosen[1]):
        yield f"{' '.join(chosen)} is not a directory: give a Hugging Face tokenizer directory with --rl-tokenizer"
    hf_model = config.rollout.hf_model
    if hf_model and not os.path.isfile(os.path.join(hf_model, "config.json")):
        yield f"--rl-hf-model {hf_model}: this directory has no config.json"


def _code_of_rewards(args: Any, config: RLConfig) -> Iterator[str]:
    with suppress(ValueError):  # reported by `early.rewards`
        for spec in () if config.data.trust_remote_code else model_specs(config.graders):
            for code in filter(None, (own_code(spec.file, kind) for kind in ("AutoTokenizer", f"AutoModel{SCORER}"))):
                yield f"reward {spec.given}: {code}"


def _model(args: Any, config: RLConfig) -> Iterator[str]:
    """Problems of the model in the trainer's layout and in the engine. Both are built much later."""
    if min(config.rollout.generate_tp, config.rollout.generate_ep) < 1:
        return  # reported by the limits of these flags
    shape = ModelShape.from_megatron_args(args, vocab=1)  # the tokenizer's size is checked when it has been read
    Parallel.from_megatron_args(args).chunk_sizes(shape.layers)
    rope_scaling(args)
    dtype = config.rollout.engine_dtype
    itemsize = (args.params_dtype if dtype == "auto" else getattr(torch, dtype)).itemsize
    ranks = max(config.rollout.generate_tp, config.rollout.generate_ep)
    world = (config.schedule.generator_ranks or ranks) if config.schedule.apart else args.world_size
    sizes = dict(world=world, max_positions=args.max_position_embeddings, itemsize=itemsize)
    if not config.schedule.apart:
        yield from kv_cache_problems(config.rollout.kv_cache_gb, launch_env()["local_world_size"])
    yield from engine_problems(shape, config, kind=get_device().kind, **sizes)
    if shape.table.experts:
        yield from routing_problems(args, shape)


def token_budget(args: Any, config: RLConfig) -> Iterator[str]:
    """Refuses limits of tokens that are missing or too small, and flags with which rows cannot be packed."""
    budget, packed = config.forward.max_tokens_per_microbatch, config.forward.packed_by
    if packed and budget is None:
        yield f"{packed} needs a limit of tokens; give --rl-max-tokens-per-microbatch too"
    prompt, response = config.data.max_prompt_length, config.rollout.max_response_length
    multiple = length_multiple(args)
    tokens, sizes = prompt + response, early.longest(config)
    if pairs := learns_from_pairs(config.algorithm.algorithm):  # both rows of a pair are in one micro-batch
        shared = config.forward.share_prompts
        tokens = tokens + response if shared else 2 * tokens
        sizes = sizes.replace("+ ", "+ 2 x ") if shared else f"2 x ({sizes})"
    longest = -(-tokens // multiple) * multiple
    if budget is not None and pairs and not packed:
        yield (
            f"--rl-max-tokens-per-microbatch {budget} with --rl-algorithm dpo needs packed rows; give "
            "--rl-pack-sequences, or remove it"
        )
    elif budget is not None and budget < longest:
        padded = f", padded to {longest}" if longest > tokens else ""
        yield (
            f"--rl-max-tokens-per-microbatch {budget} is less than the longest {'pair' if pairs else 'row'}, {sizes} = "
            f"{tokens} tokens{padded}; raise it"
        )
    if packed and getattr(args, "position_embedding_type", "rope") not in ("rope", "none", "learned_absolute"):
        yield f"{packed} does not fit --position-embedding-type {args.position_embedding_type}; remove it"
    if packed:
        try:
            takes_boundaries(args)
        except ValueError as error:
            yield str(error).replace("--rl-pack-sequences", packed)


def _dumps(args: Any, config: RLConfig) -> None:
    if config.monitor.dump_dir and args.save:
        resumed = files.read_tracker(args.save) is not None
        check_dumps(config.monitor.dump_dir, config.monitor.directory(args.save), resumed=resumed)


def _one_profiler(args: Any, config: RLConfig) -> Iterator[str]:
    """torch's profiler cannot start while it runs: neither the second file nor the run would be right."""
    asked, ranks = config.monitor.trace, {*config.monitor.trace_ranks} & {*getattr(args, "profile_ranks", ())}
    if asked and ranks and getattr(args, "profile", False) and getattr(args, "use_pytorch_profiler", False):
        traced, first, last = Traced.parse(asked), args.profile_step_start, args.profile_step_end
        if traced.first <= last and first <= traced.last:
            yield (
                f"--rl-trace {asked}: --use-pytorch-profiler records iterations {first} to {last} on rank {min(ranks)}"
                ", too, and torch records one trace at a time; give other iterations, or another --rl-trace-ranks"
            )


CHECKS: tuple[Check, ...] = (
    _run_length,
    _one_profiler,
    _start,
    disk.problems,
    _algorithm,
    _critic,
    _batch_arithmetic,
    early.prompt_data,
    _tokenizer,
    early.lengths,
    token_budget,
    upstream_checks.context_parallel,
    upstream_checks.packed_rows,
    upstream_checks.router_replay,
    lora_checks.problems,
    upstream_checks.flash_attention,
    upstream_checks.gradients,
    upstream_checks.shared_memory,
    upstream_checks.folded_pipeline,
    upstream_checks.latent_attention,
    upstream_checks.sequence_balance,
)
# Further checks for algorithms that sample and grade responses.
GENERATION_CHECKS: tuple[Check, ...] = (
    schedule_checks.problems,
    episode_checks.problems,
    early.rewards,
    _code_of_rewards,
    _model,
    upstream_checks.swapped_memory,
    _dumps,
)
# Checks that read arguments set by Megatron's validation.
VALIDATED: tuple[Check, ...] = (_batch_arithmetic, _model)
