"""What the hooks call under RL: build the model, load reference, actor and RL state, save checkpoints, run steps.

`loop.run` describes what the loop is given, in which order.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mindspeed_rl_plugin import ranks
from mindspeed_rl_plugin.adapters import adapted_chunks
from mindspeed_rl_plugin.adapters.targets import describe_adapters
from mindspeed_rl_plugin.algorithms import Algorithm, resolve
from mindspeed_rl_plugin.algorithms.describe import describe as describe_algorithm
from mindspeed_rl_plugin.checkpoints import checkpoint_files as files
from mindspeed_rl_plugin.checkpoints import conversion
from mindspeed_rl_plugin.checkpoints.disk import small_disk
from mindspeed_rl_plugin.checkpoints.reference_digest import CheckpointDigest
from mindspeed_rl_plugin.checkpoints.saved_args import check_rows
from mindspeed_rl_plugin.checkpoints.start_decision import (
    NOT_SAVED,
    decide,
    describe,
    load_arguments,
    not_saved,
    weights_arguments,
)
from mindspeed_rl_plugin.checks import early, flag_checks, taken_over
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.critic import value_head
from mindspeed_rl_plugin.environment import keep, replayed, say
from mindspeed_rl_plugin.launch import build_critic, lr_schedule, megatron_setup, memory_fit, one_job, patching
from mindspeed_rl_plugin.launch.endings import refusing, stopping
from mindspeed_rl_plugin.launch.megatron_setup import overridden
from mindspeed_rl_plugin.launch.read_inputs import read_inputs
from mindspeed_rl_plugin.launch.weights_fit import must_fit
from mindspeed_rl_plugin.layout.shape import ModelShape
from mindspeed_rl_plugin.loop import arithmetic, run
from mindspeed_rl_plugin.loop.start import TRAINED, Start
from mindspeed_rl_plugin.status import status_file


@dataclasses.dataclass
class _ProcessStart:
    """State of one process while it starts."""

    start: Start
    loop: Any
    args: Any  # Megatron's
    algorithm: Algorithm
    digest: CheckpointDigest | None = None  # of a pretrained reference; None once the digest is saved
    loading: bool = True  # the policy is not loaded yet
    critic: Any = None
    schedule: Mapping[str, Any] | None = None  # learning-rate schedule, if a complete checkpoint is resumed


_launch: _ProcessStart | None = None


def setup_model_and_optimizer(args: Any, original: Callable, positional: tuple, named: Mapping[str, Any]) -> Any:
    """Run Megatron's function so that it loads the checkpoint from which RL starts. Returns the function's result.

    Collective over all ranks. Raises ValueError on every rank if the start or the reference is not usable.
    """
    global _launch
    patching.assert_in_force()
    loop = run.current()
    algorithm = resolve(RLConfig.from_args(args).algorithm)
    _announce(args, algorithm)
    with refusing():
        ranks.on_rank_0(lambda: one_job.own(args.save))
        status_file.begin(args.save, f"rank {ranks.rank_of_job()}", args.world_size, args.rl_stack_signal)
        inputs = read_inputs(args)
        memory_fit.check(args, inputs.vocab, inputs.config.lora)
        loop.before_model(inputs)
    if getattr(args, "mtp_num_layers", None):
        call = megatron_setup.on_each_chunk(original, positional, named, megatron_setup.freeze_mtp)
        positional, named = call.args, call.kwargs
    if (lora := inputs.config.lora).lora_rank is not None:
        say(describe_adapters(ModelShape.from_megatron_args(args, inputs.vocab), lora))
        call = megatron_setup.on_each_chunk(
            original, positional, named, adapted_chunks.attaching(lora, args, inputs.vocab)
        )
        positional, named = call.args, call.kwargs
    with refusing():
        start, state = _decide(args, loop, inputs.vocab, algorithm.needs_critic)
    digest = CheckpointDigest(start.reference_path) if start.kind == "pretrained" else None
    recorded = state.get("schedule") if state else None
    absent, untrained = not_saved(state), _untrained(state)
    _launch = _ProcessStart(start, loop, args, algorithm, digest, schedule=None if absent or untrained else recorded)
    settled = lr_schedule.settled(recorded, args)
    values = load_arguments(start, args) | settled | absent | untrained
    with overridden(args, values), megatron_setup.recording(args):
        result = original(*positional, **named)
    model, optimizer, scheduler = result[:3]
    megatron_setup.report_unused_embeddings(model)
    if "no_load_optim" in absent | untrained:
        scheduler.step(increment=args.consumed_train_samples)
    _launch.loading = False
    adapted_chunks.store(model, base=False)
    _check_loaded(model, start, args)
    if start.kind == "fresh":
        start = dataclasses.replace(start, reference_digest=ranks.weights_digest(_parameters(model)))
        _launch.start = start
    if start.kind != "resume" and algorithm.needs_reference:
        loop.on_reference_loaded(model)
    if algorithm.needs_critic:
        with overridden(args, settled):
            _launch.critic, source = build_critic.build(original, positional, named, args, start, model, absent)
        say(f"the critic starts from {source}")
        loop.on_critic_built(_launch.critic)
    if start.kind == "resume":
        loop.load_state_dict(state["loop"])
    loop.on_checkpoint_loaded(model, optimizer, start)
    say(f"ready to train, {early.ready():.0f} s after the first line")
    return result


def _announce(args: Any, algorithm: Algorithm) -> None:
    say(describe_algorithm(algorithm))
    if ranks.is_rank_0():
        print(table := arithmetic.arithmetic_of(args).table(), flush=True)
        keep(table)
    for line in (*taken_over.lines(), *flag_checks.warnings(args)):
        say(f"note: {line}")


def _check_loaded(model: Any, start: Start, args: Any) -> None:
    """Check what Megatron built and loaded, and warn if checkpoints may not fit on the disk."""
    flag_checks.check_model(model)
    if args.iteration != start.iteration:
        raise ValueError(
            f"Megatron loaded iteration {args.iteration} from {start.load_dir}, expected {start.iteration}; "
            f"check whether {files.TRACKER} or a file of that checkpoint is damaged"
        )
    split = getattr(args, "tensor_model_parallel_size", 1) * getattr(args, "pipeline_model_parallel_size", 1)
    if warning := small_disk(
        args, split * sum(p.numel() for _, p in _parameters(adapted_chunks.adapters_of(model) or model))
    ):
        say(warning)


def convert_weights(args: Any, original: Callable, positional: tuple, named: Mapping[str, Any]) -> Any:
    """Run MindSpeed-LLM's conversion of --load if this start needs it. Collective over all ranks."""
    with refusing():
        ranks.on_rank_0(lambda: one_job.own(args.save))
        if reason := ranks.on_rank_0(lambda: conversion.needless(args)):
            say(reason)
            return None
        say(f"MindSpeed-LLM converts --load {args.load} to {conversion.converted_to(args)}")
        try:
            return original(*positional, **named)
        except (ValueError, KeyError, AttributeError, OSError, RuntimeError) as error:
            raise ValueError(
                f"MindSpeed-LLM could not convert --load {args.load}: {type(error).__name__}: {error}; check that "
                "--model-type-hf and the sizes are those of this model"
            ) from error


def load_checkpoint(args: Any, original: Callable, positional: tuple, named: Mapping[str, Any]) -> Any:
    """Run Megatron's function for the decided start. At a resume, the reference's weights are loaded before the
    actor's."""
    at = _launch
    if at is None:  # training is not set up yet
        return original(*positional, **named)
    names = ("ddp_model", "optimizer", "opt_param_scheduler")
    model, optimizer, scheduler = (*positional, *(named[name] for name in names[len(positional) :]))[:3]
    adapted = bool(adapted_chunks.adapters_of(model))
    if at.loading and at.start.kind == "resume" and (at.algorithm.needs_reference or adapted):
        with refusing(), must_fit(model, str(at.start.reference_path)):
            _load_reference(original, model, at)
        if at.algorithm.needs_reference:
            at.loop.on_reference_loaded(model)
        adapted_chunks.store(model, base=False)
    # The critic loads after the policy; the file of a language model has no value head.
    free = {} if at.loading else {"free": f"{value_head.NAME}.weight"}
    rates = lr_schedule.loading(optimizer, scheduler)
    with refusing(), must_fit(model, f"the checkpoint of {args.load}", **free), rates:
        return original(*positional, **named)


def save_checkpoint(args: Any, original: Callable, positional: tuple, named: Mapping[str, Any]) -> Any:
    """Write the RL state, then run Megatron's function, which updates the tracker file: so a checkpoint that is named
    there always has its RL state. A replay saves nothing."""
    if replayed():
        return None
    iteration = positional[0] if positional else named["iteration"]
    with stopping(args), overridden(args, _save_state(args, iteration, original)):
        return original(*positional, **named)


def build_train_valid_test_data_iterators(args: Any, original: Callable, positional: tuple, named: Mapping) -> Any:
    """Opens no pretraining data: `train_step` supplies the rows of a step."""
    # Megatron sets these three while it builds its data loaders, and its train loop reads them.
    args.do_train, args.do_valid, args.do_test = True, False, False
    return run.current().train_iterator(), None, None


def train_step(args: Any, original: Callable, positional: tuple, named: Mapping[str, Any]) -> Any:
    """Run a rollout if one is due, then Megatron's own step on rows that are in the dock."""
    # With do_train MindSpeed-LLM's group_limited_greedy logs a balance loss, which a pass without gradients lacks.
    with stopping(args), overridden(args, {"do_train": False}):
        return run.current().train_step(original, positional, named)


def _save_state(args: Any, iteration: int, save: Callable) -> dict[str, Any]:
    """On rank 0 write the RL state of `iteration` under --save; on all ranks write the critic with `save`.

    Returns arguments that must be set while Megatron saves the policy.
    """
    if _launch is None:
        raise ValueError("a checkpoint is being saved before training has started; there is no RL state for it yet")
    if _launch.digest is not None:
        _launch.start = dataclasses.replace(_launch.start, reference_digest=_first_digest(_launch))
        _launch.digest = None
    state = {
        "reference": {"path": _launch.start.reference_path, "digest": _launch.start.reference_digest},
        "schedule": lr_schedule.record(args, _launch.schedule, critic=_launch.critic is not None),
        "not_saved": [name for name in NOT_SAVED if getattr(args, name, None)],
        "loop": _launch.loop.state_dict(),
    }
    if ranks.is_rank_0():
        files.write_state(args.save, iteration, state)
    if _launch.critic is not None:
        build_critic.save(save, _launch.critic, args, iteration)
    # Megatron cannot save an optimizer that has no state yet.
    return {} if state["loop"].get(TRAINED, True) else {"no_save_optim": True}


def _decide(args: Any, loop: Any, vocab: int, critic: bool) -> tuple[Start, dict[str, Any] | None]:
    """The start and, for a resume, the RL state. The reference that the state names is added to the start. Only on rank
    0 the state has the dock's rows. vocab: number of tokens of the tokenizer; critic: whether the run has a critic."""

    def decided() -> Start:
        start = decide(args)
        if start.kind == "pretrained":
            _refuse_adapters(start.reference_path)
            check_rows(start.reference_path, vocab)
        return start

    start = ranks.on_rank_0(decided)
    if start.kind != "resume":
        say(describe(start, args))
        return start, None
    folder = files.iteration_dir(start.load_dir, start.iteration)
    rows: list[Any] = []

    def read() -> dict[str, Any]:
        state, dock = files.read_state(start.load_dir, start.iteration)
        rows.append(dock)
        return state

    state = ranks.on_rank_0(read)
    say(describe(start, args, not_saved(state)))
    loop.check_state(state["loop"], start.iteration)
    lr_schedule.check(state.get("schedule"), args, folder, not_saved(state) | _untrained(state), critic=critic)
    if note := lr_schedule.remark(state.get("schedule"), args, start.iteration):
        say(note)
    if rows and rows[0] is not None:  # on rank 0, which puts the rows of all ranks back into the dock
        state["loop"]["rows"] = rows[0]
    reference = state["reference"]
    return dataclasses.replace(start, reference_path=reference["path"], reference_digest=reference["digest"]), state


def _refuse_adapters(path: str) -> None:
    directory, iteration = files.split_iteration_dir(path)
    known = isinstance(iteration, int) and files.has_state(directory, iteration)
    if known and files.read_state(directory, iteration)[0]["loop"].get("adapter"):
        raise ValueError(
            f"--load {directory} holds adapters only (--rl-lora-rank): merge them with `python -m mindspeed_rl_plugin "
            "export`, then `import`; to go on with them, give this directory as --save"
        )


def _untrained(state: Mapping[str, Any] | None) -> dict[str, bool]:
    """As `not_saved`, but for the policy's optimizer, which is not saved while only the critic is trained."""
    return {"no_load_optim": True} if state is not None and not state["loop"].get(TRAINED, True) else {}


def _load_reference(original: Callable, model: Any, at: _ProcessStart) -> None:
    start = at.start
    if start.reference_path is None:
        if ranks.weights_digest(_parameters(model)) != start.reference_digest:
            raise ValueError(
                "the reference of this run is its random initialisation, but this start initialises other weights; "
                f"resume with the same --seed and parallel sizes{_or_without(at)}"
            )
        return
    if start.reference_digest is None:
        raise ValueError(
            f"the reference {start.reference_path} could not be read when its digest had to be recorded, so it is "
            f"unknown whether the reference has changed; start a new run{_or_without(at)}"
        )
    if _digest(at) != start.reference_digest:
        raise ValueError(
            f"the reference {start.reference_path} has changed since the start of this run (its SHA-256 was "
            f"{start.reference_digest}); restore the reference{_or_without(at)}"
        )
    arguments = ranks.on_rank_0(lambda: weights_arguments(start.reference_path))
    with overridden(at.args, arguments):
        original(model, None, None)
    say(f"reference weights loaded from {start.reference_path} (SHA-256 {start.reference_digest[:12]})")


def _or_without(at: _ProcessStart) -> str:
    """The end of a message about a missing reference: how to resume without a reference. Algorithms that train on pairs
    always need it, and so do adapters, whose base it is."""
    algorithm = at.algorithm
    if algorithm.from_pairs or at.args.rl_lora_rank is not None:
        return ""
    coefficients = {"--rl-kl-loss-coef": algorithm.kl_loss_coef, "--rl-kl-reward-coef": algorithm.kl_reward_coef}
    return f", or resume with {' '.join(f'{flag} 0' for flag, value in coefficients.items() if value)}"


def _digest(at: _ProcessStart) -> str:
    """Digest of the reference. Prints a line if it took long to read. Raises ValueError if it is missing."""
    began = time.monotonic()
    try:
        digest = CheckpointDigest(at.start.reference_path).result(at.args.rl_wait_timeout)
    except ValueError as error:
        raise ValueError(f"{error}; this is the reference of this run: restore it{_or_without(at)}") from error
    seconds = time.monotonic() - began
    if seconds > 5:
        say(f"digest of {at.start.reference_path} took {seconds:.0f} s")
    return digest


def _first_digest(at: _ProcessStart) -> str | None:
    """The digest whose computation began at the start. If it fails, prints a line and returns None, since training has
    begun already."""
    try:
        return at.digest.result(at.args.rl_wait_timeout)
    except ValueError as error:
        say(
            f"warning: no digest of the reference is recorded ({error}), so a resume of this checkpoint cannot use the "
            f"reference: start a new run{'' if at.args.rl_lora_rank else ' from this checkpoint'}{_or_without(at)}"
        )
        return None


def _parameters(model: Any) -> Iterator[tuple[str, Any]]:
    for chunk in model:
        yield from chunk.named_parameters()
