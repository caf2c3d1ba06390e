"""Where training starts, decided from the arguments and the files in `--save` and `--load`."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from mindspeed_rl_plugin.checkpoints import checkpoint_files as files
from mindspeed_rl_plugin.checkpoints import conversion
from mindspeed_rl_plugin.config.flag import spelt
from mindspeed_rl_plugin.loop.start import Start

# Arguments with which Megatron loads only the weights, and with which it loads the full state.
WEIGHTS_ONLY = {"finetune": True, "no_load_optim": True, "no_load_rng": True}
FULL_STATE = {"finetune": False, "no_load_optim": False, "no_load_rng": False}
# Flag that leaves a part out of a checkpoint -> argument that keeps Megatron from looking for that part, and what a
# resume does instead.
NOT_SAVED = {
    "no_save_optim": ("no_load_optim", "Adam's moments start at zero, the main parameters at the saved weights"),
    "no_save_rng": ("no_load_rng", "Megatron's random generators, which RL does not use, start at --seed"),
}


def decide(args: Any) -> Start:
    """Look at `--save`, `--load` and `--pretrained-checkpoint`, and say where to start. Reads files, changes nothing.

    If MindSpeed-LLM converts --load, the start is the checkpoint that the conversion will write. In the result
    `reference_digest` is None; for "resume" `reference_path` is None too. The RL state, read later, has both.
    Raises ValueError if --save holds a checkpoint without RL state, and if a given --load holds no checkpoint.
    """
    saved = files.read_tracker(args.save)
    if saved is not None:
        if isinstance(saved, int) and files.has_state(args.save, saved):
            return Start("resume", os.path.abspath(args.save), saved, None, None)
        raise ValueError(
            f"--save {args.save} holds a checkpoint ({saved}) that has no RL state: RL would overwrite it; "
            "give --save another directory, and give this directory as --load"
        )
    source, iteration = _source(args)
    if source is None:
        return Start("fresh", None, 0, None, None)
    source = os.path.abspath(source)
    return Start("pretrained", source, 0, files.iteration_dir(source, iteration), None)


def not_saved(state: Mapping[str, Any] | None) -> dict[str, bool]:
    """Arguments that keep Megatron from looking for parts that the checkpoint of this RL state lacks."""
    return {NOT_SAVED[name][0]: True for name in (state or {}).get("not_saved", ())}


def describe(start: Start, args: Any, absent: Collection[str] = ()) -> str:
    """The one line that rank 0 prints. absent: for a resume, the arguments that `not_saved` returns."""
    if start.kind == "fresh":
        return "training starts from random weights: no --load was given"
    if start.kind == "pretrained":
        return (
            f"training starts from the weights of {start.reference_path}, at iteration 0; the optimizer, "
            "iteration, samples and learning-rate state of this checkpoint are not loaded"
        )
    names = [name for name in FULL_STATE if getattr(args, name, False)]
    names += [name for name in ("load", "pretrained_checkpoint", "ckpt_step") if _differs(args, name)]
    aside = ", ".join(spelt(name) for name in names)
    note = f" ({aside} of the command line: ignored, only the first start uses it)" if aside else ""
    where = f"{start.load_dir} at iteration {start.iteration}"
    last = getattr(args, "train_iters", None)
    done = f"; all {last} iterations are done, raise --train-iters for more" if last and start.iteration >= last else ""
    kept = "RL state included" if "no_load_optim" in absent else "optimizer and RL state included"
    without = [f"; {spelt(name)} left a part out: {then}" for name, (load, then) in NOT_SAVED.items() if load in absent]
    return f"training resumes from {where}, {kept}{note}{''.join(without)}{done}"


def load_arguments(start: Start, args: Any) -> dict[str, Any]:
    """Arguments as Megatron must see them while it loads what `start` says."""
    if start.kind == "resume":
        return {"load": start.load_dir, "pretrained_checkpoint": None, "ckpt_step": None, **FULL_STATE}
    if start.kind == "fresh":
        return {"load": None, "pretrained_checkpoint": None}
    return weights_arguments(start.reference_path)


def weights_arguments(path: str) -> dict[str, Any]:
    """Arguments as Megatron must see them to load only the weights of the iteration folder `path`.

    Raises ValueError if Megatron would not find this folder by the tracker file of the checkpoint.
    """
    directory, iteration = files.split_iteration_dir(path)
    tracked = files.read_tracker(directory)
    if (iteration == "release") != (tracked == "release") or files.is_empty(directory):
        holds = "is empty" if files.is_empty(directory) else f"holds {tracked!r}"
        raise ValueError(
            f"{os.path.join(directory, files.TRACKER)} {holds}, so Megatron cannot load {path}; "
            f"put {iteration!r} back into it for as long as this run needs these weights"
        )
    step = None if iteration == "release" else iteration
    return {"load": directory, "pretrained_checkpoint": None, "ckpt_step": step, **WEIGHTS_ONLY}


def _source(args: Any) -> tuple[str | None, int | str]:
    if conversion.converts(args):
        return conversion.converted_to(args), conversion.ITERATION
    names = ("load", "pretrained_checkpoint")
    given = {spelt(name): path for name in names if (path := getattr(args, name, None))}
    for directory in given.values():
        tracked = files.read_tracker(directory)
        if tracked is not None:
            step = getattr(args, "ckpt_step", None)
            return directory, step if step and tracked != "release" else tracked
    for flag, directory in given.items():
        if os.path.isfile(os.path.join(directory, "config.json")):
            raise ValueError(
                f"{flag} {directory} is a Hugging Face folder: run `python -m mindspeed_rl_plugin import` first "
                "(--help says how), and load what it writes"
            )
    if given:
        raise ValueError(
            f"{' and '.join(map(' '.join, given.items()))} holds no checkpoint ({files.TRACKER} is missing); point "
            "--load at the model to train, or leave --load out to train from random weights"
        )
    return None, 0


def _differs(args: Any, name: str) -> bool:
    value = getattr(args, name, None)
    if not value:
        return False
    return name != "load" or os.path.abspath(value) != os.path.abspath(args.save)
