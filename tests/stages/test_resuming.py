"""A resume with other flags: what goes on, and what is refused at once, with names and numbers."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.config import RLConfig, add_flags
from mindspeed_rl_plugin.dock import make_docks
from mindspeed_rl_plugin.launch.checkpoint_files import outline
from mindspeed_rl_plugin.loop import docking
from mindspeed_rl_plugin.loop import resume as resuming
from mindspeed_rl_plugin.loop.arithmetic import derive_from_args
from mindspeed_rl_plugin.loop.context import Parts
from mindspeed_rl_plugin.loop.docking import make_homes
from mindspeed_rl_plugin.loop.loop import Loop
from mindspeed_rl_plugin.loop.placement import Placement
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId
from mindspeed_rl_plugin.stages import columns
from mindspeed_rl_plugin.stages.select import of_epoch, plan_groups


def inputs(*flags: str, algorithm: str = "grpo", prompts: int = 4, world: int = 1, **values) -> SimpleNamespace:
    fixed = ["--rl-algorithm", algorithm, "--rl-samples-per-prompt", "2", "--rl-rollout-prompts", str(prompts)]
    rl = add_flags(argparse.ArgumentParser()).parse_args([*fixed, *flags])
    base = {"global_batch_size": 4, "micro_batch_size": 1, "data_parallel_size": world, "world_size": world}
    args = argparse.Namespace(**{**base, "train_iters": 9, "iteration": 3, **values}, **vars(rl))
    return SimpleNamespace(
        args=args,
        config=RLConfig.from_args(args),
        forward=SimpleNamespace(max_tokens=None, budget=None),
        graders=SimpleNamespace(names=("a",)),
        prompts=SimpleNamespace(load_state=lambda state: None),
    )


class FewParts(SimpleNamespace):
    """What a resume touches of `Parts`, with a real dock."""

    homes, home, ids, forget, plan = Parts.homes, Parts.home, Parts.ids, Parts.forget, Parts.plan


def parts(given: SimpleNamespace, medium: str = "local", nodes: tuple[int, ...] = (0,)) -> FewParts:
    """nodes: machine of each rank; the dock itself is that of a lone rank."""
    sizes, algorithm = derive_from_args(given.args), resolve(given.config.algorithm)
    place = Placement(nodes, tuple(range(len(nodes))), tuple(range(len(nodes))))
    batch = {"global_batch_size": sizes.global_batch, "micro_batch_size": 1, "dp_size": len(nodes)}
    homes = make_homes(place, sizes.prompts, lambda groups: plan_groups(groups, sizes.members, **batch))
    declared = columns.grpo_columns(1), columns.grpo_states(algorithm)
    (dock,) = make_docks(*declared, [(0, 1)], medium=medium, homes=lambda epoch, groups: homes(groups), deadline=5)
    topology = SimpleNamespace(dp_size=len(nodes), rank=0)
    more = {"forward": given.forward, "topology": topology, "homes_of": homes, "rounds": {}, "dock": dock}
    return FewParts(inputs=given, sizes=sizes, algorithm=algorithm, placement=place, **more)


def resumed(given: SimpleNamespace, state: dict, **more) -> Loop:
    loop = Loop()
    loop.inputs = given
    loop.load_state_dict(state)
    loop.parts = parts(given, **more)
    loop._restore(state)
    return loop


def saved(given: SimpleNamespace, *, carried: tuple[int, ...] = (), left: int = 0, more: tuple[str, ...] = ()) -> dict:
    """State of a start with these flags after epoch 5: groups carried over, or all of them in use with the columns of
    the update and `more`."""
    p = parts(given)
    p.dock.open(5, p.sizes.prompts, 2)
    groups = of_epoch(5, p.sizes.prompts) if left else ()
    kept = groups or tuple((5, g) for g in carried)
    ids = tuple(p.ids(kept))
    names = ("reward", "graded", "kept", "version", "advantage", *more) if left else ("reward", "graded")
    ragged = ("tokens", "loss_mask", "logp_rollout", *(("logp_old",) if left else ()))
    found = {}
    for column in columns.grpo_columns(1):
        if column.name in ragged or (column.ragged and column.name in more):
            found[column.name] = Ragged.from_rows([torch.ones(3)] * len(ids), column.dtype)
        elif column.name in names:
            found[column.name] = torch.ones(len(ids), dtype=column.dtype)
    p.dock.put(Rows(ids, found))
    p.forget(sorted(set(of_epoch(5, p.sizes.prompts)) - set(kept)))
    return {
        "epoch": 5,
        "groups": [list(g) for g in groups],
        "carried": [list((5, g)) for g in carried],
        "lengths": [[3, 3] for _ in kept],
        "steps_left": left,
        "cut": resuming.cut(given),
        "choices": resuming.choices(p.algorithm),
        "rollout": None,
        "cursor": {},
        "dock": outline(p.dock.snapshot()),
        "rows": p.dock.snapshot(),
    }


@pytest.mark.parametrize("medium", ["local", "shm"])
@pytest.mark.parametrize("prompts", [2, 4, 8])
def test_groups_carried_over_lie_where_their_own_epoch_says(medium: str, prompts: int) -> None:
    """Six prompts were drawn, now there are fewer or more: the dock and the loop agree on the homes."""
    state = saved(inputs(algorithm="dapo", prompts=6), carried=(0, 5))
    loop = resumed(inputs(algorithm="dapo", prompts=prompts), state, medium=medium)
    p = loop.parts
    assert loop.carried == ((5, 0), (5, 5)) and p.rounds == {5: 6} and len(p.homes(5)) == 6
    assert len(p.homes(6)) == prompts
    lease = p.dock.lease("logp_old", ids=p.ids(loop.carried), deadline=5)
    assert lease.rows.ids == tuple(p.ids(loop.carried))
    p.dock.close()


def test_homes_of_a_former_start_on_several_machines() -> None:
    state = saved(inputs(algorithm="dapo", prompts=6), carried=(0, 5))
    p = resumed(inputs(algorithm="dapo", prompts=4, world=2), state, nodes=(0, 1)).parts
    assert [p.home((5, g)) for g in range(6)] == [0, 0, 0, 1, 1, 1] and p.homes(6).tolist() == [0, 1, 0, 1]
    assert p.placement.graded_by(1, [(5, 0), (5, 5)], p.home) == [(5, 5)]


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ((), ("--rl-kl-loss-coef", "0.05"), "no logp_ref: --rl-kl-loss-coef was 0.0, now 0.05; resume with the former"),
        ((), ("--rl-kl-reward-coef", "0.1"), "no logp_ref: --rl-kl-reward-coef was 0.0, now 0.1; resume with the form"),
        (
            (),
            ("--rl-filtration", "best-worst"),
            "rows have no times: --rl-filtration was none, now best-worst; .* iteration 4",
        ),
        ((), ("--rl-ppo-epochs", "2"), "1 optimizer steps left, cut as .*'--rl-ppo-epochs': 1.*'--rl-ppo-epochs': 2"),
    ],
)
def test_columns_that_nobody_will_write_are_refused_in_the_middle_of_a_rollout(before, now, message) -> None:
    off = ("--rl-kl-loss-coef", "0")
    state = saved(inputs(*off, *before), left=1)
    with pytest.raises(ValueError, match=message):
        resumed(inputs(*off, *now), state)
    del state["choices"]  # of a version that did not keep them
    with pytest.raises(ValueError, match=message.split(": --")[0]):
        resumed(inputs(*off, *now), state)


def test_columns_that_nobody_reads_any_more_are_left_behind() -> None:
    state = saved(inputs("--rl-kl-loss-coef", "0.05"), left=1, more=("logp_ref",))
    loop = resumed(inputs("--rl-kl-loss-coef", "0"), state)
    assert len(loop.steps) == 1
    assert len(resumed(inputs("--rl-kl-loss-coef", "0.1"), state).steps) == 1, "another weight of the same KL"


def test_between_rollouts_everything_may_change() -> None:
    state = saved(inputs("--rl-kl-loss-coef", "0"))
    assert resumed(inputs("--rl-kl-loss-coef", "0.1", "--rl-filtration", "best-worst", prompts=8), state).epoch == 5


def test_an_outline_knows_sizes_and_columns_and_no_rows() -> None:
    (epoch,) = saved(inputs(prompts=6), left=1)["dock"]["epochs"]
    assert (epoch["number"], epoch["groups"], epoch["members"]) == (5, 6, 2)
    assert set(epoch["held"]) >= {"tokens", "logp_old", "advantage"} and "logp_ref" not in epoch["held"]
    assert not any(isinstance(v, torch.Tensor) for v in epoch.values())


# how much a dock must hold


def test_a_round_must_fit_where_it_really_lies() -> None:
    """Twelve groups of two: on two machines six each, on one all of them, whatever the number of agents."""
    given = inputs("--rl-dock-rows", "12", "--rl-dock", "shm", prompts=12)
    sizes = derive_from_args(given.args)
    docking.check_homes(given.config, 1, sizes, np.arange(12) % 2)
    with pytest.raises(ValueError, match="--rl-dock-rows 12: 12 groups of 2 samples on one machine are 24 rows"):
        docking.check_homes(given.config, 1, sizes, np.zeros(12, np.int64))
    given = inputs("--rl-dock-rows", "12", "--rl-dock", "local", prompts=12)
    with pytest.raises(ValueError, match="12 groups of 2 samples"):
        docking.check_homes(given.config, 1, sizes, np.arange(12) % 2)


@pytest.mark.parametrize(("rounds", "groups"), [(10, 6 + 11), (1, 6 + 6)])
def test_groups_that_wait_may_all_lie_on_one_machine(rounds: int, groups: int) -> None:
    flags = ("--rl-dock", "shm", "--rl-dynamic-sampling-rounds", str(rounds))
    for rows, fits in ((2 * groups, True), (2 * groups - 1, False)):
        given = inputs("--rl-dock-rows", str(rows), *flags, algorithm="dapo", prompts=12)
        check = (given.config, 1, derive_from_args(given.args), np.arange(12) % 2)
        if fits:
            docking.check_homes(*check)
            continue
        with pytest.raises(ValueError, match=f"{groups} groups of 2 samples on one machine are {2 * groups} rows"):
            docking.check_homes(*check)


def test_the_early_check_refuses_what_cannot_fit_however_it_spreads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docking, "launch_env", lambda: {"world_size": 4, "local_world_size": 2})
    for rows, fits in ((12, True), (11, False)):
        given = inputs("--rl-dock-rows", str(rows), "--rl-dock", "shm", prompts=12)
        if fits:
            docking.check_dock(given.args, given.config, 1)
            continue
        with pytest.raises(ValueError, match="6 groups of 2 samples on one machine are 12 rows; raise it, or lower"):
            docking.check_dock(given.args, given.config, 1)


def test_groups_of_a_checkpoint_must_fit_too() -> None:
    """Five were carried over from a larger rollout; with a round of two they are seven."""
    state = saved(inputs(algorithm="dapo", prompts=6), carried=(0, 1, 2, 3, 4))
    resumed(inputs("--rl-dock-rows", "14", algorithm="dapo", prompts=2), state)
    with pytest.raises(ValueError, match="--rl-dock-rows 13: 7 groups of 2 samples on one machine are 14 rows"):
        resumed(inputs("--rl-dock-rows", "13", algorithm="dapo", prompts=2), state)


def test_sample_ids_are_untouched_by_a_smaller_rollout() -> None:
    state = saved(inputs(algorithm="dapo", prompts=6), carried=(5,))
    loop = resumed(inputs(algorithm="dapo", prompts=2), state)
    assert loop.lengths == {(5, 5): (3, 3)} and loop.parts.ids(loop.carried) == [SampleId(5, 5, 0), SampleId(5, 5, 1)]
