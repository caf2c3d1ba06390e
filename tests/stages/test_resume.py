"""A resume with other flags: what goes on, and what is refused at once, with names and numbers."""

import argparse
import contextlib
import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.checkpoints.checkpoint_files import outline
from mindspeed_rl_plugin.config import AlgorithmConfig, RLConfig, add_flags
from mindspeed_rl_plugin.config.schedule_flags import ScheduleConfig
from mindspeed_rl_plugin.dock import make_docks
from mindspeed_rl_plugin.loop import docks
from mindspeed_rl_plugin.loop.arithmetic import arithmetic_of
from mindspeed_rl_plugin.loop.inputs import Inputs
from mindspeed_rl_plugin.loop.placement import Placement
from mindspeed_rl_plugin.loop.resume import check_ahead, renamed
from mindspeed_rl_plugin.loop.rollout_plan import RolloutPlan, of_epoch
from mindspeed_rl_plugin.loop.run import Run
from mindspeed_rl_plugin.loop.schedules.schedule import Job, Schedule
from mindspeed_rl_plugin.rows import Ragged, Rows
from mindspeed_rl_plugin.stages.stage import StageSpec, columns_of, states_of
from mindspeed_rl_plugin.stages.user import WRITABLE


def inputs(*flags: str, algorithm: str = "grpo", prompts: int = 4, world: int = 1, **values) -> Inputs:
    fixed = ["--rl-algorithm", algorithm, "--rl-samples-per-prompt", "2", "--rl-rollout-prompts", str(prompts)]
    rl = add_flags(argparse.ArgumentParser()).parse_args([*fixed, *flags])
    base = {"global_batch_size": 4, "micro_batch_size": 1, "data_parallel_size": world, "world_size": world}
    args = argparse.Namespace(**{**base, "train_iters": 9, "iteration": 3, **values}, **vars(rl))
    config = RLConfig.from_args(args)
    return Inputs(
        args=args,
        config=config,
        algorithm=resolve(config.algorithm),
        sizes=arithmetic_of(args),
        tokenizer=None,
        tokenizer_path=None,
        vocab=0,
        flags={},
        forward=SimpleNamespace(max_tokens=None, budget=None),
        data=SimpleNamespace(load_state=lambda state: None, check_state=lambda cursor: None),
        graders=SimpleNamespace(names=("a",), by_group=True, close=lambda: None),
    )


def job(given: Inputs, nodes: tuple[int, ...] = (0,)) -> Job:
    """nodes: machine of each rank; the dock itself is that of a lone rank."""
    place = Placement(nodes, tuple(range(len(nodes))), tuple(range(len(nodes))))
    plan = RolloutPlan(given.sizes, place)
    table = given.table()
    owners = lambda epoch, groups: plan.owners_of_round(groups)  # noqa: E731
    (dock,) = make_docks(columns_of(table), states_of(table), [(0, 1)], owners=owners, deadline=5)
    return Job(plan, None, None, None, dock, None)


def resumed(given: Inputs, state: dict, **more) -> Run:
    run = Run()
    run.inputs = given
    run.check_state(state, given.args.iteration)
    run.loop = SimpleNamespace(job=job(given, **more), schedule=Schedule(), trained=False, rollout=None)
    run._restore(state)
    return run


def saved(given: Inputs, *, deferred: tuple[int, ...] = (), left: int = 0, more: tuple[str, ...] = ()) -> dict:
    """State of a start with these flags after epoch 5: deferred groups, or all of them in use with the columns of
    the update and `more`."""
    at = job(given)
    prompts = given.sizes.prompts
    at.dock.open(5, prompts, 2)
    groups = of_epoch(5, prompts) if left else ()
    kept = groups or tuple((5, g) for g in deferred)
    ids = tuple(at.plan.ids(kept))
    names = ("reward", "graded", "valid", "version", "advantage", *more) if left else ("reward", "graded", *more)
    ragged = ("tokens", "loss_mask", "logp_rollout", *(("logp_old",) if left else ()))
    cells = {}
    for column in columns_of(given.table()):
        if column.name in ragged or (column.ragged and column.name in more):
            cells[column.name] = Ragged.from_rows([torch.ones(3)] * len(ids), column.dtype)
        elif column.name in names:
            cells[column.name] = torch.ones(len(ids), dtype=column.dtype)
    at.dock.put(Rows(ids, cells))
    at.forget(sorted(set(of_epoch(5, prompts)) - set(kept)))
    run = Run()
    run.inputs = given
    at.plan.epoch, at.plan.groups, at.plan.deferred = 5, groups, tuple((5, g) for g in deferred)
    at.plan.lengths = {group: (3, 3) for group in kept}
    run.loop = SimpleNamespace(job=at, schedule=Schedule(), trained=True, rollout=None)
    run.inputs.data.state = dict
    state = run.state_dict()
    whole = state["dock"]
    return {**state, "steps_left": left, "dock": outline(whole), "rows": whole}


@pytest.mark.parametrize("prompts", [2, 4, 8])
def test_deferred_groups_lie_where_their_own_epoch_says(prompts: int) -> None:
    """Six prompts were sampled, now there are fewer or more: the dock and the plan agree on the owners."""
    state = saved(inputs(algorithm="dapo", prompts=6), deferred=(0, 5))
    at = resumed(inputs(algorithm="dapo", prompts=prompts), state).loop.job
    plan = at.plan
    assert plan.lengths == dict.fromkeys(plan.deferred, (3, 3))
    assert plan.deferred == ((5, 0), (5, 5)) and plan.rounds == {5: 6} and len(plan.owners(5)) == 6
    assert len(plan.owners(6)) == prompts
    lease = at.dock.lease("logp_old", ids=plan.ids(plan.deferred), deadline=5)
    assert lease.rows.ids == tuple(plan.ids(plan.deferred))
    at.dock.close()


def test_owners_of_a_former_start_on_several_machines() -> None:
    state = saved(inputs(algorithm="dapo", prompts=6), deferred=(0, 5))
    plan = resumed(inputs(algorithm="dapo", prompts=4, world=2), state, nodes=(0, 1)).loop.job.plan
    assert [plan.owner((5, g)) for g in range(6)] == [0, 0, 0, 1, 1, 1] and plan.owners(6).tolist() == [0, 1, 0, 1]
    assert plan.placement.graded_by(1, [(5, 0), (5, 5)], plan.owner) == [(5, 5)]


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ((), ("--rl-kl-loss-coef", "0.05"), "no logp_ref: --rl-kl-loss-coef was 0.0, now 0.05"),
        ((), ("--rl-kl-reward-coef", "0.1"), "no logp_ref: --rl-kl-reward-coef was 0.0, now 0.1"),
        ((), ("--rl-filtration", "best-worst"), "no multiplicity: --rl-filtration was none, now best-.* iteration 4"),
        (
            (),
            ("--rl-max-tokens-per-microbatch", "64", "--rl-share-prompts"),
            "--rl-share-prompts was None, now True: .* iteration 4",
        ),
        ((), ("--rl-ppo-epochs", "2"), "1 optimizer steps left, and --rl-ppo-epochs was 1, now 2: .* iteration 4"),
    ],
)
def test_columns_that_nobody_will_write_are_refused_in_the_middle_of_a_rollout(before, now, message) -> None:
    off = ("--rl-kl-loss-coef", "0")
    state = saved(inputs(*off, *before), left=1)
    with pytest.raises(ValueError, match=message):
        resumed(inputs(*off, *now), state)
    del state["choices"]  # of a version that did not keep them
    with pytest.raises(ValueError, match=re.search(r"--rl[a-z-]+", message)[0]):
        resumed(inputs(*off, *now), state)


@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_another_datas_cursor_is_refused_before_a_model_is_built(name: str) -> None:
    def refuse(cursor: dict) -> None:
        raise ValueError(f"cursor {cursor['position']}")

    run, state = Run(), {**saved(inputs()), "cursor": {"position": 7}}
    algorithm, data = resolve(AlgorithmConfig(algorithm=name)), SimpleNamespace(check_state=refuse)
    run.inputs = dataclasses.replace(inputs(), algorithm=algorithm, data=data)
    with pytest.raises(ValueError, match="cursor 7"):
        run.check_state(state, 3)


def test_a_checkpoint_that_did_not_know_a_flag_goes_on_where_it_is_off() -> None:
    state = saved(inputs("--rl-kl-loss-coef", "0"), left=1)
    assert state["cut"].pop("--rl-max-tokens-per-microbatch") is None
    assert len(steps_of(resumed(inputs("--rl-kl-loss-coef", "0"), state))) == 1


def steps_of(run: Run) -> list:
    return run.loop.job.plan.steps


def test_columns_that_nobody_reads_any_more_are_left_behind() -> None:
    state = saved(inputs("--rl-kl-loss-coef", "0.05"), left=1, more=("logp_ref",))
    assert len(steps_of(resumed(inputs("--rl-kl-loss-coef", "0"), state))) == 1
    assert len(steps_of(resumed(inputs("--rl-kl-loss-coef", "0.1"), state))) == 1, "another weight of the same KL"


def test_between_rollouts_everything_may_change() -> None:
    state = saved(inputs("--rl-kl-loss-coef", "0"))
    now = inputs("--rl-kl-loss-coef", "0.1", "--rl-filtration", "best-worst", prompts=8)
    assert resumed(now, state).loop.job.plan.epoch == 5


def test_columns_of_former_names_are_those_of_today() -> None:
    state = saved(inputs("--rl-kl-loss-coef", "0"), left=1)
    former = {"valid": "kept"}
    old = dict(state)
    for name in ("dock", "rows"):
        epochs = [dict(epoch) for epoch in state[name]["epochs"]]
        for epoch in epochs:
            if "columns" in epoch:
                epoch["columns"] = _named(epoch["columns"], former)
            else:
                epoch["held"] = [former.get(column, column) for column in epoch["held"]]
        old[name] = {**state[name], "columns": _named(state[name]["columns"], former), "epochs": epochs}
    assert "valid" not in old["rows"]["columns"] and renamed(old["rows"])["columns"] == state["rows"]["columns"]
    at = resumed(inputs("--rl-kl-loss-coef", "0"), old).loop.job
    assert at.dock.read(at.plan.ids(at.plan.groups), ["valid"])["valid"].all()


def _named(columns: dict, names: dict) -> dict:
    return {names.get(name, name): column for name, column in columns.items()}


def test_a_round_and_what_waits_must_fit_where_they_really_lie() -> None:
    """Twelve groups of two: on two machines six each, on one all of them. Under dynamic sampling groups wait, maybe all
    on one machine."""
    owners = np.arange(12) % 2
    waiting = [(rounds, groups) for rounds, groups in ((10, 6 + 11), (1, 6 + 6))]
    cases = [((), "grpo", 6, owners), ((), "grpo", 12, np.zeros(12, np.int64))]
    cases += [(("--rl-dynamic-sampling-rounds", str(rounds)), "dapo", groups, owners) for rounds, groups in waiting]
    for flags, name, groups, placed in cases:
        for rows in (2 * groups, 2 * groups - 1):
            given = inputs("--rl-dock-rows", str(rows), *flags, algorithm=name, prompts=12).dock_size()
            wrong = pytest.raises(ValueError, match=f"{groups} groups of 2 .* {2 * groups} rows")
            with contextlib.nullcontext() if rows == 2 * groups else wrong:
                given.check_placed(placed)


def test_the_early_check_refuses_what_cannot_fit_however_it_spreads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docks, "launch_env", lambda: {"world_size": 4, "local_world_size": 2})
    inputs("--rl-dock-rows", "12", prompts=12).dock_size().check_early()
    with pytest.raises(ValueError, match="6 groups of 2 .* 12 rows"):
        inputs("--rl-dock-rows", "11", prompts=12).dock_size().check_early()


def test_groups_of_a_checkpoint_must_fit_too() -> None:
    """Five were deferred from a larger rollout; with a round of two they are seven."""
    state = saved(inputs(algorithm="dapo", prompts=6), deferred=(0, 1, 2, 3, 4))
    resumed(inputs("--rl-dock-rows", "14", algorithm="dapo", prompts=2), state)
    with pytest.raises(ValueError, match="--rl-dock-rows 13: 7 groups of 2 .* 14 rows"):
        resumed(inputs("--rl-dock-rows", "13", algorithm="dapo", prompts=2), state)


def test_deferred_groups_keep_their_size() -> None:
    state = saved(inputs(algorithm="dapo", prompts=6), deferred=(5,))
    with pytest.raises(ValueError, match="1 groups of 2 .* --rl-samples-per-prompt is 4: .* 2"):
        resumed(inputs("--rl-samples-per-prompt", "4", algorithm="dapo", prompts=2), state)


@pytest.mark.parametrize(("column", "stored"), [("valid", "valid@bonus"), ("reward", "reward@reward")])
def test_a_stage_that_deferred_groups_have_not_passed_is_refused_and_one_that_they_have(column, stored) -> None:
    plain, dropping = inputs(algorithm="dapo"), inputs("--no-rl-dynamic-sampling", algorithm="dapo")
    spec = StageSpec("bonus", ("graded",), (WRITABLE[column],), "cpu")
    added, both = (dataclasses.replace(each, own_stages=((spec, None),)) for each in (plain, dropping))
    state = saved(plain, deferred=(1,))
    with pytest.raises(ValueError, match=f"1 groups .* lack {stored} of --rl-stage"):
        resumed(added, state)
    resumed(both, state)
    passed = saved(added, deferred=(1,), more=(stored,))
    at = resumed(added, passed).loop.job
    assert at.dock.read(at.plan.ids(at.plan.deferred), [stored])[stored].all(), "with what the stage made of it"
    with pytest.raises(ValueError, match=f"1 groups .* {stored}: .* --rl-stage"):
        resumed(plain, passed)


CUT = {"--rl-rollout-prompts": 4, "--rl-samples-per-prompt": 2}
QUEUED = {"queue": [(3, 4), (4, 2)], "carried": [(2, 0)], "admission": {"staleness": 2, "strict": False}}
STRICT = QUEUED | {"admission": {"staleness": 2, "strict": True}}
MAKING = {"making": {"staleness": 2, "left": [[3, 1, 0], [4, 0]]}}
ASYNC = {"schedule": "async", "max_staleness": 2}
CARRYING = {"schedule": "streamed", "carry_unfinished": True, "max_staleness": 2}
AHEAD = {  # state, flags now, whether sampling is dynamic, what is said
    "the same": (QUEUED, ASYNC, True, ""),
    "staler is no harm": (QUEUED, ASYNC | {"max_staleness": 3}, True, ""),
    "strict goes on free": (STRICT, ASYNC, True, ""),
    "synchronous": (QUEUED, ASYNC | {"schedule": "sync"}, True, "--rl-schedule was async, now sync"),
    "less stale": (QUEUED, ASYNC | {"max_staleness": 1}, True, "--rl-max-staleness was 2, now 1"),
    "free goes on strict": (QUEUED, ASYNC | {"async_order": "strict"}, True, "--rl-async-order was free, now strict"),
    "without what deferred": (QUEUED, ASYNC, False, "dynamic sampling, which deferred some of them, was on, now off"),
    "carried, the same": (MAKING, CARRYING, False, ""),
    "carried, staler is no harm": (MAKING, CARRYING | {"max_staleness": 3}, False, ""),
    "without": (MAKING, CARRYING | {"carry_unfinished": False}, False, "--rl-carry-unfinished was on, now off"),
    "carried, less stale": (MAKING, CARRYING | {"max_staleness": 1}, False, "--rl-max-staleness was 2, now 1"),
}


@pytest.mark.parametrize("case", AHEAD)
def test_flags_that_cannot_go_on_with_what_is_admitted_or_begun_are_refused(case):
    state, flags, dynamic, said = AHEAD[case]
    now, prompts = ScheduleConfig(**flags), 6 if "queue" in state else 2
    with pytest.raises(ValueError, match=f"holds {prompts} prompts .*{said}") if said else contextlib.nullcontext():
        check_ahead({"cut": CUT, **state}, CUT, now, 9, dynamic)
    with pytest.raises(ValueError, match="--rl-samples-per-prompt was 2, now 8"):
        check_ahead({"cut": CUT, **state}, CUT | {"--rl-samples-per-prompt": 8}, now, 9, dynamic)
    empty = {"queue": []} if "queue" in state else {"making": {"staleness": 2, "left": []}}
    check_ahead({"cut": CUT, **state, **empty}, CUT, now, 9, dynamic)
