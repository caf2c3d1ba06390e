"""The learning-rate and weight-decay schedule of a run. A resume compares it with that of the checkpoint.

Megatron does so only while the optimizer is loaded, after the model is built, and Megatron's error names no flag.
Source: OptimizerParamScheduler.load_state_dict of megatron/core/optimizer_param_scheduler.py and
get_optimizer_param_scheduler of megatron/training/training.py, alike in core 0.12.1, 0.16.1 and 0.19.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mindspeed_rl_plugin.config.flag import spelt

# Arguments of the schedule, and their flags.
_SAME_NAME = ("train_iters", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_fraction", "global_batch_size")
_SAME_NAME += ("lr", "min_lr", "lr_decay_style", "weight_decay_incr_style")
FLAG_OF = {name: spelt(name) for name in _SAME_NAME} | {
    "start_weight_decay": "--weight-decay or --start-weight-decay",
    "end_weight_decay": "--weight-decay or --end-weight-decay",
}
# Arguments that are only in the optimizer's parameter groups. Below: a group's rates, and the fields that identify it.
_OF_GROUPS = {"decoupled_lr", "decoupled_min_lr", "rl_critic_lr", "adam_beta1", "adam_beta2", "adam_eps"}
FLAG_OF |= {name: spelt(name) for name in sorted(_OF_GROUPS)}
_GROUP_RATES = ("max_lr", "min_lr", "betas", "eps")
_GROUP_KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


def record(args: Any, recorded: Mapping[str, Any] | None = None, *, critic: bool) -> dict[str, Any]:
    """The schedule of validated arguments as plain values, for the RL state.

    recorded: the schedule of a resumed checkpoint, which continues if --use-checkpoint-opt_param-scheduler is given;
    critic: whether the run has a critic.
    """
    values = {name: getattr(args, name, None) for name in FLAG_OF}
    values["lr_decay_iters"] = values["lr_decay_iters"] or values["train_iters"]
    if not critic:
        del values["rl_critic_lr"]
    return values | (recorded or {}) if getattr(args, "use_checkpoint_opt_param_scheduler", False) else values


def compared(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a `record` that Megatron compares. Megatron counts sequences, not iterations."""
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
    """Arguments with which Megatron accepts a schedule that has another length but the same rates in all steps.

    The rates are the same if the learning rate is constant after the same warm-up, and the weight decay is constant. In
    other cases the result is empty, and Megatron's own comparison decides.
    """
    if recorded is None or getattr(args, "use_checkpoint_opt_param_scheduler", False):
        return {}
    before, now = compared(recorded), compared(record(args, critic=False))
    constant = all(s["lr_decay_style"] == "constant" and s["start_wd"] == s["end_wd"] for s in (before, now))
    same = all(before[k] == now[k] for k in ("max_lr", "lr_warmup_steps", "start_wd"))
    return {"override_opt_param_scheduler": True} if before != now and constant and same else {}


def remark(recorded: Mapping[str, Any] | None, args: Any, done: int) -> str | None:
    """A remark if the batch size differs from that of the `done` iterations so far: Megatron's schedule counts
    sequences. None if the batch size is the same, if nothing was recorded, or if the rates are constant."""
    if recorded is None or recorded["global_batch_size"] == args.global_batch_size:
        return None
    constant = args.lr_decay_style == "constant" and not (args.lr_warmup_iters or args.lr_warmup_fraction)
    if constant and args.start_weight_decay == args.end_weight_decay:
        return None
    before, now = recorded["global_batch_size"], args.global_batch_size
    return (
        f"note: --global-batch-size was {before}, now {now}. The learning-rate schedule counts sequences: it "
        f"takes the {done} iterations so far as {done * before / now:g} of {now} sequences"
    )


def check(
    recorded: Mapping[str, Any] | None, args: Any, where: str, absent: Collection[str] = (), *, critic: bool
) -> None:
    """Refuse a resume from `where` that Megatron would refuse later, or in which Megatron would use other rates than
    those of the flags.

    recorded: the saved schedule or None; absent: has "no_load_optim" if the schedule was not saved; critic: as in
    `record`. Raises ValueError that names each changed value, then and now, and the flags that choose between them.
    """
    flags = ["override_opt_param_scheduler"]
    flags += ["use_checkpoint_opt_param_scheduler"] if "no_load_optim" not in absent else []
    if recorded is None or any(getattr(args, name, False) for name in flags) or settled(recorded, args):
        return
    now = record(args, critic=critic)
    changed = {name: flag for name, flag in FLAG_OF.items() if name in recorded and recorded[name] != now.get(name)}
    if compared(now) == compared(recorded) and not changed.keys() & now.keys() & _OF_GROUPS:
        return
    kept = ", or --use-checkpoint-opt_param-scheduler to keep the checkpoint's schedule"
    alone = "; there is no schedule in it that --use-checkpoint-opt_param-scheduler could keep"
    raise ValueError(
        f"the checkpoint {where} was trained with another learning-rate or weight-decay schedule: "
        f"{'; '.join(f'{flag} was {recorded[n]}, now {now.get(n)}' for n, flag in changed.items())}. Give "
        f"--override-opt_param-scheduler to go on with the new values{kept if len(flags) > 1 else alone}"
    )


@contextmanager
def loading(optimizer: Any, scheduler: Any) -> Iterator[None]:
    """Within the context, this optimizer and the checkpoint that it loads have the same rates: those of the flags if
    --override-opt_param-scheduler is in effect, else those of the checkpoint.

    Megatron's optimizer loads the rates of a parameter group from the checkpoint, and its scheduler uses them: so
    --override-opt_param-scheduler has no effect in core 0.12 to 0.18. Core 0.19 identifies a group by its rates, and
    fails if they differ (KeyError). Remove when DistributedOptimizer.load_state_dict identifies groups without rates,
    and OptimizerParamScheduler.load_state_dict sets the rates.
    """
    override = getattr(scheduler, "override_opt_param_scheduler", False)
    parts = [] if optimizer is None else getattr(optimizer, "chained_optimizers", [optimizer])

    def load(part: Any, original: Any, state: Mapping[str, Any]) -> None:
        share_rates(state.get("optimizer", state).get("param_groups", ()), part.param_groups, override)
        original(state)

    for part in parts:
        part.load_state_dict = functools.partial(load, part, part.load_state_dict)
    try:
        yield
    finally:
        for part in parts:
            del part.load_state_dict
    if override or getattr(scheduler, "use_checkpoint_opt_param_scheduler", False):
        scheduler.step(0)  # again: Megatron's own call was before the weight decay of the checkpoint was loaded


def share_rates(saved: Sequence[dict], groups: Sequence[dict], override: bool) -> None:
    """With override, copy the rates of the optimizer's parameter groups to those of a checkpoint; without, in the other
    direction.

    Since core 0.16, --decoupled-lr makes groups with equal keys: optimizer and checkpoint have them in the same order.
    """
    ours = list(groups)
    for theirs in saved:
        kind = [theirs.get(name) for name in _GROUP_KEYS]
        at = next((n for n, group in enumerate(ours) if [group.get(name) for name in _GROUP_KEYS] == kind), None)
        if at is not None:
            source, target = (ours.pop(at), theirs) if override else (theirs, ours.pop(at))
            target.update({name: source[name] for name in _GROUP_RATES if name in source})
