"""Where rows lie and who works on them: tables of layouts, and the share of rows that change machines."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.forward import Step, TokenBudget, plan_batches, plan_tokens
from mindspeed_rl_plugin.loop.arithmetic import Arithmetic
from mindspeed_rl_plugin.loop.placement import Placement, deal
from mindspeed_rl_plugin.loop.rollout_plan import RolloutPlan, of_epoch, samples
from mindspeed_rl_plugin.rows import SampleId

MEMBERS = 16


def layout(machines: int, ranks: int, pipeline: int = 1, tensor: int = 1) -> Placement:
    """Megatron's order: tensor ranks innermost, pipeline stages outermost; an engine a rank."""
    world = machines * ranks
    dp = world // pipeline // tensor
    dp_rank = tuple(r // tensor % dp for r in range(world))
    return Placement(tuple(r // ranks for r in range(world)), dp_rank, tuple(range(world)))


def planned(place: Placement, groups: list, global_batch: int) -> list[Step]:
    sizes = {"global_batch_size": global_batch, "micro_batch_size": 2, "dp_size": max(place.dp_rank) + 1}
    return plan_batches(samples(groups, MEMBERS), **sizes)


def owners_of(place: Placement, prompts: int, global_batch: int):
    ranks = max(place.dp_rank) + 1
    sizes = Arithmetic(prompts, MEMBERS, global_batch, 1, 2, ranks, engines=ranks, train_iters=1)
    return RolloutPlan(sizes, place).owners_of_round


def away(place: Placement, plan: list[Step], owners) -> float:
    """Share of rows that no rank of their data parallel rank finds on its own machine."""
    rows = [(i, d) for step in plan for d, batches in enumerate(step.micro_batches) for b in batches for i in b]
    return sum(owners(i[:2]) not in place.trained_on[d] for i, d in rows) / len(rows)


@pytest.mark.parametrize(
    ("machines", "ranks", "pipeline", "tensor"),
    [(1, 2, 1, 1), (2, 2, 1, 1), (2, 2, 2, 1), (2, 2, 4, 1), (2, 4, 2, 2), (4, 2, 2, 1), (4, 2, 4, 1), (4, 4, 8, 1)],
)
def test_every_machine_holds_draws_and_grades_its_share(machines: int, ranks: int, pipeline: int, tensor: int) -> None:
    """Also where the pipeline, outermost, lies across the machines; then no machine is the place of all rows."""
    place, prompts = layout(machines, ranks, pipeline, tensor), 32
    owners = owners_of(place, prompts, 128)(prompts)
    assert np.bincount(owners, minlength=machines).tolist() == [prompts // machines] * machines
    groups = list(of_epoch(0, prompts))
    plan, ids = planned(place, groups, 128), samples(groups, MEMBERS)
    assert away(place, plan, lambda g: owners[g[1]]) == 0
    generated = [place.generated_by(e, ids, owners) for e in range(machines * ranks)]
    graded = [place.graded_by(r, groups, lambda g: owners[g[1]]) for r in range(machines * ranks)]
    assert sorted(sum(generated, [])) == ids and sorted(sum(graded, [])) == groups
    assert {len(part) for part in generated} == {len(ids) // machines // ranks}
    assert {len(part) for part in graded} == {prompts // machines // ranks}
    assert all(owners[i.group] == place.node[e] for e, part in enumerate(generated) for i in part)
    assert all(owners[g] == place.node[r] for r, part in enumerate(graded) for _, g in part)


def test_the_last_stage_comes_first_one_machine_stays_one_and_other_epochs_lie_in_proportion() -> None:
    """Epochs of a former start may have more or fewer prompts, whatever these flags can cut."""
    place = layout(2, 2, pipeline=2)
    assert place.trained_on == [(1, 0), (1, 0)] and place.trainers == [{0, 1}, {0, 1}]
    assert owners_of(place, 4, 64)(4).tolist() == [1, 0, 1, 0]
    assert owners_of(layout(2, 2), 4, 64)(4).tolist() == [0, 0, 1, 1]
    assert owners_of(layout(1, 4, pipeline=2), 4, 64)(4).tolist() == [0] * 4
    owners = owners_of(layout(2, 2), 6, 96)
    assert owners(6).tolist() == [0, 0, 0, 1, 1, 1]
    assert owners(8).tolist() == [0, 0, 0, 0, 1, 1, 1, 1] and owners(2).tolist() == [0, 1]


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("machines", [2, 4])
def test_rows_are_balanced_by_tokens_and_trained_at_home(machines: int, pipeline: int) -> None:
    """A few rows per step change machines to level it; no rank is over a hundredth fuller than by lengths alone."""
    place, prompts, rng = layout(machines, 4, pipeline), 64, random.Random(machines)
    owners, groups = owners_of(place, prompts, 512)(prompts), list(of_epoch(0, prompts))
    plan = planned(place, groups, 512)
    lengths = {i: min(4096, int(rng.lognormvariate(6, 1)) + 20) for i in samples(groups, MEMBERS)}
    budget = TokenBudget(8192, packed=True)
    near = {i: place.trainers[owners[i.group]] for i in lengths}
    plain, moved = plan_tokens(plan, lengths, budget), plan_tokens(plan, lengths, budget, near)
    assert [s.ids for s in moved] == [s.ids for s in plan], "the steps keep their rows"
    for one, other in zip(plain, moved, strict=True):
        full, fullest = ([sum(lengths[i] for b in rank for i in b) for rank in s.micro_batches] for s in (one, other))
        assert max(fullest) <= max(full) * 1.01 and {sum(map(len, r)) for r in other.micro_batches} == {
            512 // len(full)
        }
    assert away(place, plain, lambda g: owners[g[1]]) >= 0.4 * (1 - pipeline / machines)
    assert away(place, moved, lambda g: owners[g[1]]) < 0.05


@given(st.lists(st.integers(1, 50), min_size=4, max_size=24), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_balance_comes_before_places(lengths_given: list[int], parts: int, seed: int) -> None:
    lengths_given = lengths_given[: len(lengths_given) // parts * parts]
    ids, rng = [SampleId(0, i, 0) for i in range(len(lengths_given))], random.Random(seed)
    lengths = dict(zip(ids, lengths_given, strict=True))
    near = {i: {rng.randrange(parts)} for i in ids}
    plan = [Step(tuple((tuple(ids[p::parts]),) for p in range(parts)))]
    (plain,), (moved,) = (plan_tokens(plan, lengths, TokenBudget(200), n) for n in (None, near))
    full, fullest = ([sum(lengths[i] for b in rank for i in b) for rank in s.micro_batches] for s in (plain, moved))
    assert moved.ids == plain.ids and max(fullest) <= 1.01 * max(full)
    assert plan_tokens(plan, lengths, TokenBudget(200), {i: set(range(parts)) for i in ids}) == [plain]


@pytest.mark.parametrize("machines", [2, 4])
def test_a_choice_of_groups_is_trained_where_they_lie(machines: int) -> None:
    """Dynamic sampling: half of all groups carry signal. A step's rows are chosen by ids alone; within it they
    go to their owner as far as all ranks train equally many."""
    place, prompts, rng = layout(machines, 4), 64, random.Random(0)
    owners = owners_of(place, prompts, 512)(prompts)

    def owner(group):
        return int(owners[group[1]])

    chosen = [(e, g) for e in range(3) for g in range(prompts) if rng.random() < 0.5][:prompts]
    plain = planned(place, chosen, 512)
    moved = place.near(plain, owner)
    assert [s.ids for s in moved] == [s.ids for s in plain]
    batches = [sorted(b for rank in s.micro_batches for b in rank) for s in moved]
    assert batches == [sorted(b for rank in s.micro_batches for b in rank) for s in plain], "micro-batches stay"
    assert all(len({len(rank) for rank in s.micro_batches}) == 1 for s in moved)
    surplus = 0.0
    for step in moved:
        here = np.bincount([owner(b[0][:2]) for rank in step.micro_batches for b in rank], minlength=machines)
        surplus += np.maximum(here / here.sum() - 1 / machines, 0).sum() / len(moved)
    assert away(place, moved, owner) == pytest.approx(surplus), "no more than do not fit"
    assert away(place, moved, owner) < 0.5 * away(place, plain, owner)
    one = layout(1, 4)
    assert one.near(planned(one, chosen, 512), lambda g: 0) == planned(one, chosen, 512)


def test_grading_is_spread_where_machines_own_no_group() -> None:
    place = layout(2, 2)
    groups, owners = [(0, g) for g in range(8)], [1] * 8
    graded = [place.graded_by(r, groups, lambda g: owners[g[1]]) for r in range(4)]
    assert [len(part) for part in graded] == [2] * 4
    assert place.graded_by(2, [(0, 0)], lambda g: 1) == [(0, 0)], "a lone group is graded by its owner"


@given(
    st.lists(st.integers(0, 3), max_size=40), st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=6)
)
@settings(max_examples=100, deadline=None)
def test_shares_are_equal_and_at_home_as_far_as_that_allows(owners: list[int], places: list[set[int]]) -> None:
    dealt = deal(range(len(owners)), owners, places)
    counts = list(map(len, dealt))
    assert sorted(sum(dealt, [])) == list(range(len(owners))) and max(counts) - min(counts) <= 1
    few = len(owners) // len(places)
    for part, items in enumerate(dealt):
        for item in (i for i in items if owners[i] not in places[part]):
            own = [p for p, machines in enumerate(places) if owners[item] in machines]
            assert all(counts[p] >= few for p in own)


@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 8), st.integers(1, 3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_group_lies_with_its_first_member(nodes: int, per_node: int, groups: int, members: int, rotate: bool) -> None:
    place, ranks = layout(nodes, per_node), nodes * per_node
    ids = [SampleId(0, g, m) for g in range(groups) for m in range(members)]
    parts = [
        ids[r::ranks] if rotate else ids[r * len(ids) // ranks : (r + 1) * len(ids) // ranks] for r in range(ranks)
    ]
    owners = place.owners([Step(tuple(tuple((i,) for i in part) for part in parts))], groups)
    trained_on = {i: place.node[r] for r, part in enumerate(parts) for i in part}
    assert owners.tolist() == [trained_on[SampleId(0, g, 0)] for g in range(groups)]
