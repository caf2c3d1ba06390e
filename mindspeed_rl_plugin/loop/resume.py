"""Checks at a resume: whether the present flags fit the checkpoint's rollout in use and groups for later rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mindspeed_rl_plugin.algorithms import Algorithm
from mindspeed_rl_plugin.config.run_flags import ForwardConfig, LoraConfig
from mindspeed_rl_plugin.config.schedule_flags import ScheduleConfig
from mindspeed_rl_plugin.loop.arithmetic import Arithmetic
from mindspeed_rl_plugin.loop.rollout_plan import of_epoch
from mindspeed_rl_plugin.rows import Group
from mindspeed_rl_plugin.stages.stage import StageSpec
from mindspeed_rl_plugin.stages.table import RENAMED


def cut(sizes: Arithmetic, algorithm: Algorithm, forward: ForwardConfig) -> dict[str, int | str | None]:
    """Settings that determine the division of a rollout into optimizer steps and the contents of its rows. They cannot
    change in the middle of a rollout."""
    return {
        "--rl-rollout-prompts": sizes.prompts,
        "--rl-samples-per-prompt": sizes.members,
        "--global-batch-size": sizes.global_batch,
        "--rl-ppo-epochs": sizes.epochs,
        "--rl-advantage": algorithm.advantage,
        "--rl-max-tokens-per-microbatch": forward.max_tokens_per_microbatch,
        "--rl-share-prompts": forward.share_prompts or None,  # older checkpoints have no value
        "--rl-router-replay": forward.router_replay,
    }


def choices(algorithm: Algorithm) -> dict[str, float | str]:
    """Values of the flags that decide which columns the update reads."""
    return {
        "--rl-kl-loss-coef": algorithm.kl_loss_coef,
        "--rl-kl-reward-coef": algorithm.kl_reward_coef,
        "--rl-filtration": algorithm.filtration,
        "--rl-advantage": algorithm.advantage,
    }


def adapter(lora: LoraConfig) -> dict[str, Any]:
    """Values of the flags that decide which adapters a checkpoint holds; empty without adapters."""
    if lora.lora_rank is None:
        return {}
    scale, targets = lora.lora_alpha or lora.lora_rank, sorted(lora.target_names)
    return {"--rl-lora-rank": lora.lora_rank, "--rl-lora-alpha": scale, "--rl-lora-targets": " ".join(targets) or "all"}


def check_adapter(state: Mapping[str, Any], now: Mapping[str, Any], iteration: int) -> None:
    """Refuse other adapters than those of the checkpoint. now: `adapter` of the present flags. Raises ValueError."""
    before = state.get("adapter", {})
    if before != now:
        was, are = (" ".join(f"{flag} {value}" for flag, value in each.items()) for each in (before, now))
        raise ValueError(
            f"the checkpoint of iteration {iteration} has {f'adapters of {was}' if was else 'no adapters'}, but the "
            f"flags give {are or 'none'}: resume with the former, or give another --save to begin anew"
        )


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], flags: Iterable[str]) -> list[str]:
    """For each of `flags` whose value differs, a text for an error."""
    changed = (flag for flag in flags if before.get(flag) != now[flag])
    return [f"{flag} was {before.get(flag, 'not recorded')}, now {now[flag]}" for flag in changed]


def check(
    state: Mapping[str, Any],
    now: Mapping[str, Any],
    algorithm: Algorithm,
    table: Sequence[StageSpec],
    iteration: int,
    own: Sequence[str] = (),
) -> None:
    """Refuse a state of `Run.state_dict` (its dock may lack the rows) that these flags cannot continue.

    now: `cut` of the present flags; iteration: of the checkpoint; own: columns that a user's stages write, and columns
    of stages before them that are stored as `name@stage`. Raises ValueError, the same on every rank.
    """
    left, before = state.get("steps_left", 0), state.get("cut", {})
    until = iteration + left
    if left and (changed := _changed(before, now, now)):
        raise ValueError(
            f"the checkpoint of iteration {iteration} holds a rollout with {left} optimizer steps left, and "
            f"{'; '.join(changed)}: resume with the former value until iteration {until}, when the rollout is used up"
        )
    if left:
        used = {epoch for epoch, _ in state["groups"]}
        held = [{RENAMED.get(c, c) for c in r["held"]} for r in state["dock"]["epochs"] if r["number"] in used]
        check_columns(algorithm, table, held, state.get("choices", {}), left, until)
    _check_deferred(state.get("carried", ()), before, now)
    if algorithm.dynamic_sampling:
        _check_own(state, own)


def check_ahead(
    state: Mapping[str, Any], now: Mapping[str, Any], flags: ScheduleConfig, iteration: int, dynamic: bool
) -> None:
    """Refuse flags that cannot continue with groups that were admitted ahead of training. Raises ValueError. A
    checkpoint after the last iteration has no such groups."""
    if not (many := len(ahead(state))):
        return
    problems = _changed(state["cut"], now, ("--rl-rollout-prompts", "--rl-samples-per-prompt"))
    if bool(state.get("carried")) and not dynamic:
        problems.append("dynamic sampling, which deferred some of them, was on, now off")
    carried = bool(_in_the_making(state))
    bound = state["making" if carried else "admission"]["staleness"]
    if carried and not flags.carry_unfinished:
        problems.append("--rl-carry-unfinished was on, now off")
    elif not carried and not flags.apart:
        problems.append(f"--rl-schedule was async, now {flags.schedule}")
    elif flags.max_staleness < bound:
        problems.append(f"--rl-max-staleness was {bound}, now {flags.max_staleness}")
    elif not carried and flags.async_order == "strict" and not state["admission"]["strict"]:
        problems.append("--rl-async-order was free, now strict")
    if problems:
        raise ValueError(
            f"the checkpoint of iteration {iteration} holds {many} prompts that were admitted ahead of training, and "
            f"{'; '.join(problems)}: resume with the former values, or from a checkpoint "
            "of the run's last iteration, which has no such prompts"
        )


def check_columns(
    algorithm: Algorithm,
    table: Sequence[StageSpec],
    held: Sequence[set[str]],
    before: Mapping[str, float | str],
    left: int,
    until: int,
) -> None:
    """Refuse rows without a column that the update reads: the stage that writes it does not run again. held: columns of
    each epoch of the rollout; before: `choices` of the run that sampled it, if recorded. Raises ValueError."""
    (reads,) = (spec.reads for spec in table if spec.name == "update")
    lacking = [c for c in reads if not all(c in have for have in held)]
    if not lacking:
        return
    now = choices(algorithm)
    flags_of = {column: spec.flags for spec in table for column in spec.written}
    flags = dict.fromkeys(flag for column in lacking for flag in flags_of[column])
    changed = _changed(before, now, flags) or _changed({}, now, flags)
    raise ValueError(
        f"the checkpoint holds a rollout with {left} optimizer steps left, whose rows have no {', '.join(lacking)}: "
        f"{'; '.join(changed)}; resume with the former value until iteration {until}, when the rollout is used up"
    )


def _check_deferred(deferred: Sequence, before: Mapping[str, object], now: Mapping[str, object]) -> None:
    flag = "--rl-samples-per-prompt"
    if deferred and before[flag] != now[flag]:
        raise ValueError(
            f"the checkpoint holds {len(deferred)} groups of {before[flag]} responses that dynamic sampling "
            f"deferred, but {flag} is {now[flag]}: resume with {before[flag]}"
        )


def _check_own(state: Mapping[str, Any], own: Sequence[str]) -> None:
    """Refuse a change of the user's stages if the checkpoint has deferred groups: they passed the former stages."""
    epochs = {epoch for epoch, _ in state.get("carried", ())}
    held = [epoch["held"] for epoch in state["dock"]["epochs"] if epoch["number"] in epochs] if epochs else []
    if lacking := [column for column in own if not all(column in have for have in held)]:
        raise ValueError(
            f"the checkpoint holds {len(state['carried'])} groups that dynamic sampling deferred, which lack "
            f"{', '.join(lacking)} of --rl-stage: resume without the stage that was added, or with "
            "--no-rl-dynamic-sampling, which drops these groups"
        )
    if changed := sorted({column for have in held for column in have if "@" in column} - set(own)):
        raise ValueError(
            f"the checkpoint holds {len(state['carried'])} groups that dynamic sampling deferred, with {changed[0]}: "
            "they were changed by a stage that --rl-stage does not name now; add this stage, or give "
            "--no-rl-dynamic-sampling, which drops these groups"
        )


def rounds_of(dock: Mapping[str, Any]) -> dict[int, int]:
    """Epoch of a dock's snapshot -> its number of groups."""
    return {epoch["number"]: epoch["groups"] for epoch in dock["epochs"]}


def ahead(state: Mapping[str, Any]) -> list[Group]:
    """Groups of a checkpoint that neither belong to the rollout in use nor were deferred by dynamic sampling."""
    queued = [group for epoch, groups in state.get("queue", ()) for group in of_epoch(epoch, groups)]
    return [*queued, *_in_the_making(state)]


def _in_the_making(state: Mapping[str, Any]) -> list[Group]:
    return [(epoch, group) for epoch, group, *_ in state.get("making", {}).get("left", ())]


def gone(rounds: Mapping[int, int], kept: Sequence[Group]) -> list[Group]:
    """Groups of the dock's epochs that are not in `kept`. rounds: epoch -> its number of groups."""
    return sorted({g for number, size in rounds.items() for g in of_epoch(number, size)} - set(kept))


def renamed(dock: Mapping[str, Any]) -> dict[str, Any]:
    """A dock's snapshot with the present names of columns."""

    def named(columns: Mapping[str, Any]) -> dict[str, Any]:
        return {RENAMED.get(name, name): column for name, column in columns.items()}

    epochs = [
        {**epoch, "columns": named(epoch["columns"])} if "columns" in epoch else dict(epoch) for epoch in dock["epochs"]
    ]
    return {**dock, "columns": named(dock["columns"]), "epochs": epochs}
