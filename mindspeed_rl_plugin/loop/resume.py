"""What a resume takes over of the rollout in use and of groups carried over, and what it refuses before it waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_rl_plugin.algorithms import Algorithm, resolve
from mindspeed_rl_plugin.loop import docking
from mindspeed_rl_plugin.loop.arithmetic import derive_from_args
from mindspeed_rl_plugin.loop.context import Inputs, Parts
from mindspeed_rl_plugin.stages import columns
from mindspeed_rl_plugin.stages import select as drawing

# Flags behind a column of the update that another algorithm may lack.
_FLAGS = {
    "logp_ref": ("--rl-kl-loss-coef", "--rl-kl-reward-coef"),
    "times": ("--rl-filtration",),
    "values": ("--rl-advantage",),
    "returns": ("--rl-advantage",),
    "advantage": ("--rl-advantage",),
    "advantages": ("--rl-advantage",),
}


def cut(inputs: Inputs) -> dict[str, int | str | None]:
    """What decides how a rollout is cut into optimizer steps and what its rows hold; a half-used rollout cannot change
    it."""
    sizes = derive_from_args(inputs.args)
    return {
        "--rl-rollout-prompts": sizes.prompts,
        "--rl-samples-per-prompt": sizes.members,
        "--global-batch-size": sizes.global_batch,
        "--rl-ppo-epochs": sizes.epochs,
        "--rl-advantage": resolve(inputs.config.algorithm).advantage,
        "--rl-max-tokens-per-microbatch": inputs.forward.max_tokens,
    }


def choices(algorithm: Algorithm) -> dict[str, float | str]:
    """Values of the flags that decide which columns the update reads."""
    return {
        "--rl-kl-loss-coef": algorithm.kl_loss_coef,
        "--rl-kl-reward-coef": algorithm.kl_reward_coef,
        "--rl-filtration": algorithm.filtration,
        "--rl-advantage": algorithm.advantage,
    }


def check(inputs: Inputs, state: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a state of `Loop.state_dict` that these flags cannot go on with; rounds: epochs of the dock, of
    `outline`. Raises ValueError, on every rank alike."""
    left, now = state["steps_left"], cut(inputs)
    until = inputs.args.iteration + left
    if left and state["cut"] != now:
        raise ValueError(
            f"the checkpoint holds a rollout with {left} optimizer steps left, cut as {state['cut']}; these flags "
            f"cut rollouts as {now}: resume with the former values, at least until iteration {until}"
        )
    if left:
        used = {epoch for epoch, _ in state["groups"]}
        held = [set(r["held"]) for r in rounds if r["number"] in used]
        check_columns(resolve(inputs.config.algorithm), held, state.get("choices", {}), left, until)
    drawing.check_carried(state["carried"], state["cut"], now)


def check_columns(
    algorithm: Algorithm, held: Sequence[set[str]], before: Mapping[str, float | str], left: int, until: int
) -> None:
    """Refuse rows that lack a column of the update: who writes it has had its turn. held: columns of each epoch of the
    rollout; before: the `choices` that drew it, where the checkpoint has them. Raises ValueError."""
    lacking = [c for c in columns.update_reads(algorithm) if not all(c in have for have in held)]
    if not lacking:
        return
    now = choices(algorithm)
    flags = dict.fromkeys(flag for column in lacking for flag in _FLAGS.get(column, ()))
    told = [f"{flag} was {before.get(flag, 'not recorded')}, now {now[flag]}" for flag in flags]
    changed = [t for t, flag in zip(told, flags, strict=True) if before.get(flag) != now[flag]] or told
    raise ValueError(
        f"the checkpoint holds a rollout with {left} optimizer steps left, whose rows have no {', '.join(lacking)}: "
        f"{'; '.join(changed)}; resume with the former value until iteration {until}, where the rollout is used up"
    )


def check_room(p: Parts, groups: Sequence[drawing.Group], carried: Sequence[drawing.Group]) -> None:
    """Refuse a dock that does not hold, on one machine, the groups of a checkpoint, or a round beside those carried
    over. Raises ValueError."""
    used, kept = (_on_machines(p, [p.home(g) for g in part]) for part in (groups, carried))
    drawn = _on_machines(p, p.homes_of(p.sizes.prompts))
    most = max((used + kept).max(), kept.max() + drawn.max())
    docking.check_groups(p.inputs.config, len(p.inputs.graders.names), p.sizes.members, int(most))


def rounds_of(rounds: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Epoch -> its groups, as it was drawn."""
    return {r["number"]: r["groups"] for r in rounds}


def gone(rounds: Sequence[Mapping[str, Any]], kept: Sequence[drawing.Group]) -> list[drawing.Group]:
    """Groups of the dock's epochs that a checkpoint no longer holds."""
    return sorted({g for n, size in rounds_of(rounds).items() for g in drawing.of_epoch(n, size)} - set(kept))


def _on_machines(p: Parts, homes: Sequence[int] | np.ndarray) -> np.ndarray:
    """`[machines]` groups in the warehouse of each, which is one for all in the local medium."""
    found = np.bincount(np.asarray(homes, np.int64), minlength=p.placement.machines)
    return found.sum(keepdims=True) if p.inputs.config.dock.dock == "local" else found
