"""Which groups a rollout trains on: rounds of generation played through by hand and against simulation."""

import random

import pytest
import torch

from mindspeed_rl_plugin.forward import plan_batches
from mindspeed_rl_plugin.rows import Rows, SampleId
from mindspeed_rl_plugin.stages import select as drawing
from mindspeed_rl_plugin.stages.select import Verdict, choose

YES, NO, BROKEN = Verdict(False, True, 0.5), Verdict(False, False, 1.0), Verdict(True, False, 0.0)


def round_(epoch, *found):
    return {(epoch, g): v for g, v in enumerate(found)}


def test_without_dynamic_sampling_a_round_is_the_rollout():
    got = choose((), round_(3, YES, NO, BROKEN), 3, dynamic=False, last=False)
    assert got.trained == ((3, 0), (3, 1), (3, 2)) and not got.carried and not got.dropped
    assert got.idle == {(3, 2)}, "groups without signal count, as in plain GRPO"


def test_rounds_follow_until_the_batch_is_full_and_the_surplus_is_carried():
    first = choose((), round_(0, NO, YES, NO), 3, dynamic=True, last=False)
    assert first == drawing.Choice(carried=((0, 1),), dropped=((0, 0), (0, 2)))
    second = choose(first.carried, round_(1, YES, YES, YES), 3, dynamic=True, last=False)
    assert second.trained == ((0, 1), (1, 0), (1, 1)) and second.carried == ((1, 2),) and not second.idle
    third = choose(second.carried, round_(2, YES, BROKEN, YES), 3, dynamic=True, last=False)
    assert third.trained == ((1, 2), (2, 0), (2, 2)) and third.dropped == ((2, 1),)


def test_after_the_last_round_silent_groups_fill_up_evenly_and_count_nowhere():
    got = choose(((0, 5), (0, 6)), round_(1, NO, NO, BROKEN, NO), 4, dynamic=True, last=True)
    assert set(got.trained) == {(0, 5), (0, 6), (1, 0), (1, 1)} and got.idle == {(1, 0), (1, 1)}
    assert got.dropped == ((1, 2), (1, 3))
    # Two steps of two groups: each has one that trains.
    plan = drawing.plan_groups(got.trained, 2, global_batch_size=4, micro_batch_size=2, dp_size=1)
    assert drawing.idle_steps(plan, got.idle) == 0
    none = choose((), round_(0, NO, NO), 2, dynamic=True, last=True)
    plan = drawing.plan_groups(none.trained, 2, global_batch_size=2, micro_batch_size=2, dp_size=1)
    assert drawing.idle_steps(plan, none.idle) == 2


@pytest.mark.parametrize("seed", range(20))
def test_no_group_with_signal_is_ever_thrown_away(seed):
    """100 rounds at random: each group with signal is trained exactly once, oldest first, or still waits."""
    rng = random.Random(seed)
    wanted = rng.randint(1, 8)
    carried, trained, signal = (), [], []
    for epoch in range(100):
        drawn = round_(epoch, *(rng.choice([YES, NO, NO, BROKEN]) for _ in range(wanted)))
        signal += [g for g, v in drawn.items() if v.signal]
        last = rng.random() < 0.2
        got = choose(carried, drawn, wanted, dynamic=True, last=last)
        assert len(got.trained) in (0, wanted) and len(got.carried) < wanted and (got.trained or not last)
        everything = [*got.trained, *got.carried, *got.dropped]
        assert sorted(everything) == sorted([*carried, *drawn]), "every group has one fate"
        trained += sorted(g for g in got.trained if g not in got.idle)
        carried = got.carried
    assert [*trained, *carried] == signal


def test_verdicts_are_of_task_rewards_and_by_id():
    ids = [SampleId(e, g, m) for e, g in ((4, 1), (5, 0), (5, 1)) for m in range(2)]
    order = [3, 0, 5, 1, 4, 2]
    reward, graded = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]), torch.tensor([1, 1, 1, 1, 0, 1])
    failed = torch.tensor([0, 0, 0, 1, 1, 1])
    found = {"reward": reward, "graded": graded, "grader_error": failed}
    rows = Rows(tuple(ids[i] for i in order), {name: column[order] for name, column in found.items()})
    assert drawing.verdicts(rows) == {
        (4, 1): Verdict(False, True, 0.5),
        (5, 0): Verdict(False, False, 1.0, errors=1),
        (5, 1): Verdict(True, False, 0.5, errors=2),
    }
    assert drawing.verdicts(Rows(())) == {}


def test_one_round_in_order_is_planned_as_ever_and_others_in_the_given_order():
    sizes = {"global_batch_size": 4, "micro_batch_size": 1, "dp_size": 2}
    whole = drawing.of_epoch(7, 4)
    ids = drawing.samples(whole, 2)
    assert drawing.plan_groups(whole, 2, **sizes) == plan_batches(ids, **sizes)
    mixed = ((2, 3), (5, 0), (4, 1), (5, 1))
    first, second = drawing.plan_groups(mixed, 2, **sizes)
    assert {i[:2] for i in first.ids} == {(2, 3), (5, 0)} and {i[:2] for i in second.ids} == {(4, 1), (5, 1)}
    assert drawing.by_epoch(mixed) == {2: [3], 4: [1], 5: [0, 1]}


def test_the_tally_counts_every_round():
    tally = drawing.Tally(brought=1)
    for epoch in range(2):
        drawn = round_(epoch, YES, NO, BROKEN)
        tally.add(drawn)
    got = tally.metrics(choose(((9, 9),), drawn, 2, dynamic=True, last=True), True)
    assert got["sampling/rounds"] == 2 and got["sampling/groups_drawn"] == 6 and got["sampling/brought"] == 1
    assert got["sampling/informative"] == pytest.approx(1 / 3)
    assert got["sampling/reward_mean"] == pytest.approx(0.75), "failed grades are no rewards"
    assert got["sampling/carried"] == 0 and got["sampling/filled"] == 0


def test_failed_grades_count_wherever_their_group_goes():
    """Dropped for want of signal, broken, carried over, or of a round that was drawn again."""
    tally = drawing.Tally()
    for epoch in range(2):
        tally.add(round_(epoch, Verdict(False, False, 0.0, errors=4), Verdict(True, False, 0.0, errors=1), YES))
    assert tally.metrics(drawing.Choice(), False) == {"reward/errors": 10.0}
    assert tally.metrics(drawing.Choice(), True)["reward/errors"] == 10.0


def test_rounds_that_found_nothing_end_in_numbers_and_a_fix():
    tally = drawing.Tally()
    for epoch in range(3):
        tally.add(round_(epoch, NO, NO))
    failed = str(tally.exhausted(2, 2, 2, dynamic=False))
    assert "3 rollouts one after the other were dropped; in the last one graders failed in 2 of 2 groups" in failed
    said = str(tally.exhausted(2, 0, 2, dynamic=True))
    assert said.startswith("--rl-dynamic-sampling-rounds 3: rewards differ in 0 of the 6 groups drawn (mean reward 1;")
    assert "2 optimizer steps would train on nothing" in said and "--no-rl-dynamic-sampling" in said


def test_groups_carried_over_keep_their_size():
    drawing.check_carried([], {"--rl-samples-per-prompt": 4}, {"--rl-samples-per-prompt": 8})
    with pytest.raises(ValueError, match="1 groups of 4 responses .* --rl-samples-per-prompt is 8: resume with 4"):
        drawing.check_carried([[0, 1]], {"--rl-samples-per-prompt": 4}, {"--rl-samples-per-prompt": 8})
