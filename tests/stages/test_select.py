"""Which groups a rollout trains on: rounds of generation played through by hand and against simulation."""

import random
from dataclasses import replace

import pytest
import torch

from mindspeed_rl_plugin.forward import plan_batches
from mindspeed_rl_plugin.loop.rollout_plan import by_epoch, samples
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId
from mindspeed_rl_plugin.stages.groups import GroupStats, Rounds, choose, group_stats, idle_steps
from mindspeed_rl_plugin.stages.select import valid_rows

pytestmark = pytest.mark.quick

YES, NO, BROKEN = GroupStats(False, True, 0.5), GroupStats(False, False, 1.0), GroupStats(True, False, 0.0)


def round_(epoch, *groups):
    return {(epoch, g): v for g, v in enumerate(groups)}


def test_without_dynamic_sampling_a_round_is_the_rollout():
    got = choose((), round_(3, YES, NO, BROKEN), 3, dynamic=False, last=False)
    assert got.trained == ((3, 0), (3, 1), (3, 2)) and not got.deferred and not got.dropped
    assert got.idle == {(3, 2)}, "groups without signal count, as in plain GRPO"


def test_after_the_last_round_silent_groups_fill_up_evenly_and_count_nowhere():
    got = choose(((0, 5), (0, 6)), round_(1, NO, NO, BROKEN, NO), 4, dynamic=True, last=True)
    assert set(got.trained) == {(0, 5), (0, 6), (1, 0), (1, 1)} and got.idle == {(1, 0), (1, 1)}
    assert got.dropped == ((1, 2), (1, 3))
    # Two steps of two groups: each has one that trains.
    plan = plan_batches(samples(got.trained, 2), global_batch_size=4, micro_batch_size=2, dp_size=1)
    assert idle_steps(plan, got.idle) == 0
    none = choose((), round_(0, NO, NO), 2, dynamic=True, last=True)
    plan = plan_batches(samples(none.trained, 2), global_batch_size=2, micro_batch_size=2, dp_size=1)
    assert idle_steps(plan, none.idle) == 2


@pytest.mark.parametrize("seed", range(20))
def test_no_group_with_signal_is_ever_thrown_away(seed):
    """100 rounds at random: each group with signal is trained exactly once, oldest first, or still waits."""
    rng = random.Random(seed)
    wanted = rng.randint(1, 8)
    deferred, trained, signal = (), [], []
    for epoch in range(100):
        sampled = round_(epoch, *(rng.choice([YES, NO, NO, BROKEN]) for _ in range(wanted)))
        signal += [g for g, v in sampled.items() if v.signal]
        last = rng.random() < 0.2
        got = choose(deferred, sampled, wanted, dynamic=True, last=last)
        assert len(got.trained) in (0, wanted) and len(got.deferred) < wanted and (got.trained or not last)
        everything = [*got.trained, *got.deferred, *got.dropped]
        assert sorted(everything) == sorted([*deferred, *sampled]), "every group has one fate"
        trained += sorted(g for g in got.trained if g not in got.idle)
        deferred = got.deferred
    assert [*trained, *deferred] == signal


def test_group_statistics_are_of_task_rewards_and_by_id():
    ids = [SampleId(e, g, m) for e, g in ((4, 1), (5, 0), (5, 1)) for m in range(2)]
    order = [3, 0, 5, 1, 4, 2]
    reward, graded = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]), torch.tensor([1, 1, 1, 1, 0, 1])
    failed = torch.tensor([0, 0, 0, 1, 1, 1])
    columns = {"reward": reward, "graded": graded, "grader_error": failed, "length": torch.arange(6)}
    rows = Rows(tuple(ids[i] for i in order), {name: column[order] for name, column in columns.items()})
    assert group_stats(rows) == {
        (4, 1): GroupStats(False, True, 0.5, (0, 1)),
        (5, 0): GroupStats(False, False, 1.0, (2, 3), errors=1),
        (5, 1): GroupStats(True, False, 0.5, (4, 5), errors=2),
    }, "of each sample by member"
    valid = torch.tensor([1, 0, 0, 0, 1, 1])[order]
    left = group_stats(rows.with_columns(valid=valid))
    assert [left[g].empty for g in ((4, 1), (5, 0), (5, 1))] == [False, True, False]
    assert left[4, 1].signal and left[5, 0].idle
    assert group_stats(Rows(())) == {}
    tokens = [[7, 1, 4], [7, 1, 3, 9], [7], [7, 8], [5], [5]]
    tokens = Ragged.from_rows([torch.tensor(tokens[i], dtype=torch.int32) for i in order])
    shared = [of_group.common for of_group in group_stats(rows.with_columns(tokens=tokens)).values()]
    assert sorted(shared) == [((0, 0), (1, 1)), ((0, 0), (1, 1)), ((1, 0), (0, 2))], "in the order of tokens"


def test_groups_are_planned_in_the_given_order():
    mixed = ((2, 3), (5, 0), (4, 1), (5, 1))
    first, second = plan_batches(samples(mixed, 2), global_batch_size=4, micro_batch_size=1, dp_size=2)
    assert {i[:2] for i in first.ids} == {(2, 3), (5, 0)} and {i[:2] for i in second.ids} == {(4, 1), (5, 1)}
    assert by_epoch(mixed) == {2: [3], 4: [1], 5: [0, 1]}


def sampled_in(rounds, *epochs):
    """Rounds of two groups each, until the rollout is whole; a plan has steps of one group."""
    cut = lambda groups: plan_batches(samples(groups, 2), global_batch_size=2, micro_batch_size=2, dp_size=1)  # noqa: E731
    selecting = Rounds(((-1, 9),) if rounds else (), 2, rounds, cut)
    return selecting, [selecting.add(round_(epoch, *groups)) for epoch, groups in enumerate(epochs)]


def test_a_rollout_is_sampled_again_where_a_step_has_nothing_to_train_on():
    selecting, whole = sampled_in(0, (YES, replace(BROKEN, errors=2)), (NO, YES))
    assert whole == [False, True] and selecting.selection.trained == ((1, 0), (1, 1))
    assert selecting.dropped == "graders failed in 1 of 2 groups, so 1 optimizer steps would train on nothing"
    assert [step.ids[0].group for step in selecting.steps] == [0, 1] and selecting.metrics() == {"reward/errors": 2.0}


def test_dynamic_sampling_goes_on_until_the_groups_at_hand_carry_signal():
    """Every round is counted, and failed grades wherever their group goes: they are no rewards."""
    failed = GroupStats(False, False, 1.0, errors=4), GroupStats(True, False, 0.0, errors=1)
    selecting, whole = sampled_in(5, failed, failed, (YES, YES))
    assert whole == [False, False, True] and selecting.dropped is None
    assert selecting.selection.trained == ((-1, 9), (2, 0)) and selecting.selection.deferred == ((2, 1),)
    got = {name.removeprefix("sampling/"): value for name, value in selecting.metrics().items()}
    assert got.pop("informative") == pytest.approx(1 / 3) and got.pop("reward_mean") == pytest.approx(5 / 6)
    counts = {"rounds": 3, "groups_drawn": 6, "brought": 1, "carried": 1, "filled": 0, "reward/errors": 10}
    assert got == counts


def test_rounds_that_found_nothing_end_in_numbers_and_a_fix():
    with pytest.raises(ValueError, match="5 rollouts .* 2 of 2 groups"):
        sampled_in(0, *[(BROKEN, BROKEN)] * 6)
    match = "^--rl-dynamic-sampling-rounds 3: rewards differ in 0 of the 6 .* 1 optimizer steps .* --no-rl-dynamic"
    with pytest.raises(ValueError, match=match):
        sampled_in(3, *[(NO, NO)] * 4)


def test_past_the_limit_small_rounds_fill_up_with_all_that_is_sampled():
    """Rounds of one group, as engines apart may have them, for a rollout of three."""
    cut = lambda groups: plan_batches(samples(groups, 1), global_batch_size=3, micro_batch_size=1, dp_size=1)  # noqa: E731
    selecting = Rounds((), 3, 1, cut)
    assert not any(selecting.add(round_(epoch, NO)) for epoch in range(4)) and not selecting.selection.dropped
    assert selecting.selection.kept == ((2, 0), (3, 0)), "those before the limit were replaced"
    assert selecting.add(round_(4, YES)) and selecting.selection.trained == ((2, 0), (4, 0), (3, 0))
    assert selecting.selection.idle == {(2, 0), (3, 0)} and selecting.metrics()["sampling/filled"] == 2


def test_what_counts_is_whole_groups_but_for_a_users_own_say():
    reward = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    graded = torch.tensor([1, 1, 1, 1, 0, 1], dtype=torch.int8)
    rows = Rows(tuple(SampleId(0, g, m) for g in range(3) for m in range(2)), {"reward": reward, "graded": graded})
    assert valid_rows(rows, dynamic=False).tolist() == [True] * 4 + [False] * 2
    assert valid_rows(rows, dynamic=True).tolist() == [True] * 2 + [False] * 4
    own = rows.with_columns(valid=torch.tensor([1, 0, 1, 1, 1, 1], dtype=torch.int8))
    assert valid_rows(own, dynamic=False).tolist() == [True, False, True, True, False, False]
