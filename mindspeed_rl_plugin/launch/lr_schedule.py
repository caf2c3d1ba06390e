"""The learning-rate and weight-decay schedule of a run, compared on a resume as Megatron's scheduler does. Pure.

Megatron compares it while it loads the optimizer, long after the model was built, and its assertion names no
flag. Source: OptimizerParamScheduler.load_state_dict of megatron/core/optimizer_param_scheduler.py and
get_optimizer_param_scheduler of megatron/training/training.py, alike in core 0.12.1, 0.16.1 and 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl_plugin.config.flag import spelt

# Arguments that the schedule is made of, and how a user gives them.
_ALIKE = ("train_iters", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_fraction", "global_batch_size")
_ALIKE += ("lr", "min_lr", "lr_decay_style", "weight_decay_incr_style")
FLAGS = {name: spelt(name) for name in _ALIKE} | {
    "start_weight_decay": "--weight-decay or --start-weight-decay",
    "end_weight_decay": "--weight-decay or --end-weight-decay",
}


def record(args: Any) -> dict[str, Any]:
    """The schedule of validated arguments as plain values, for the RL state. --lr-decay-iters: by default all."""
    values = {name: getattr(args, name, None) for name in FLAGS}
    values["lr_decay_iters"] = values["lr_decay_iters"] or values["train_iters"]
    return values


def compared(values: Mapping[str, Any]) -> dict[str, Any]:
    """What Megatron compares, from a `record`; its unit of time is a sequence, not an iteration."""
    batch, fraction = values["global_batch_size"], values["lr_warmup_fraction"]
    decay = values["lr_decay_iters"] * batch
    return {
        "max_lr": values["lr"],
        "min_lr": values["min_lr"],
        "lr_warmup_steps": (values["lr_warmup_iters"] or 0) * batch if fraction is None else fraction * decay,
        "lr_decay_steps": decay,
        "lr_decay_style": values["lr_decay_style"],
        "start_wd": values["start_weight_decay"],
        "end_wd": values["end_weight_decay"],
        "wd_incr_steps": values["train_iters"] * batch,
        "wd_incr_style": values["weight_decay_incr_style"],
    }


def settled(recorded: Mapping[str, Any] | None, args: Any) -> dict[str, bool]:
    """Arguments with which Megatron takes a schedule that differs in its length only, and in the rates at no step.

    That is a constant learning rate after the same warm-up, and a constant weight decay: training longer changes
    nothing. Empty where Megatron's own comparison needs no help, or is to decide.
    """
    if recorded is None or getattr(args, "use_checkpoint_opt_param_scheduler", False):
        return {}
    before, now = compared(recorded), compared(record(args))
    constant = all(s["lr_decay_style"] == "constant" and s["start_wd"] == s["end_wd"] for s in (before, now))
    same = all(before[k] == now[k] for k in ("max_lr", "lr_warmup_steps", "start_wd"))
    return {"override_opt_param_scheduler": True} if before != now and constant and same else {}


def remark(recorded: Mapping[str, Any] | None, args: Any, done: int) -> str | None:
    """What to say of a batch that is not that of the `done` iterations so far: Megatron's schedule counts sequences,
    and keeps their count. None where it is, where nothing was recorded, or where the rates are constant."""
    if recorded is None or recorded["global_batch_size"] == args.global_batch_size:
        return None
    constant = args.lr_decay_style == "constant" and not (args.lr_warmup_iters or args.lr_warmup_fraction)
    if constant and args.start_weight_decay == args.end_weight_decay:
        return None
    before, now = recorded["global_batch_size"], args.global_batch_size
    return (
        f"note: --global-batch-size was {before}, now {now}. The learning-rate schedule counts sequences: for "
        f"it the {done} iterations so far are {done * before / now:g} iterations of {now} sequences"
    )


def check(recorded: Mapping[str, Any] | None, args: Any, where: str) -> None:
    """Refuse a resume from `where` that Megatron would refuse later. `recorded`: None where nothing was.

    Raises ValueError naming each value then and now, and the two flags that settle it.
    """
    flags = ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")
    if recorded is None or any(getattr(args, name, False) for name in flags) or settled(recorded, args):
        return
    now = record(args)
    if compared(now) == compared(recorded):
        return
    changed = [f"{flag} was {recorded[n]}, now {now[n]}" for n, flag in FLAGS.items() if recorded[n] != now[n]]
    raise ValueError(
        f"the checkpoint {where} was trained with another learning-rate or weight-decay schedule: "
        f"{'; '.join(changed)}. Give --override-opt_param-scheduler to go on with the new values, or "
        "--use-checkpoint-opt_param-scheduler to keep the checkpoint's schedule"
    )
