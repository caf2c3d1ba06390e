"""A round of partial rollouts, with stages by hand; prompts whose responses were long come first."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mindspeed_rl_plugin.loop.schedules import partial
from mindspeed_rl_plugin.loop.schedules.in_flight import InFlight
from mindspeed_rl_plugin.loop.schedules.longest_first import LongestFirst
from mindspeed_rl_plugin.loop.schedules.partial import PartialSchedule
from mindspeed_rl_plugin.loop.schedules.schedule import SyncSchedule
from mindspeed_rl_plugin.rows import Completion, Prompt, Ragged, SampleId
from mindspeed_rl_plugin.stages.stage import Stages

pytestmark = pytest.mark.quick

PROMPTS, MEMBERS, MOST = 2, 2, 5


class Engine:
    """Finishes every row at once. asked: the rows of each call."""

    leader, progress = True, 0.0

    def __init__(self) -> None:
        self.asked: list[list[SampleId]] = []

    def until(self, rows, steps, enough):
        self.asked.append(rows)
        assert enough([Completion(row, (1,), (0.0,), "stop", ((0, 0),)) for row in rows])
        return {}


class Dropping(PartialSchedule):
    """forgotten: groups that left the dock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("GradingThread", "GradeWait"):
            monkeypatch.setattr(partial, name, lambda *_: SimpleNamespace(check=int, until_graded=len))
        self.engine, self.forgotten = Engine(), []
        plan = SimpleNamespace(
            sizes=SimpleNamespace(members=MEMBERS),
            ids=lambda groups: [SampleId(*group, member) for group in groups for member in range(MEMBERS)],
        )
        job = SimpleNamespace(
            plan=plan,
            ranks=SimpleNamespace(gather=lambda value: [value]),
            topology=SimpleNamespace(engine=0),
            monitor=SimpleNamespace(stage=lambda name: nullcontext()),
            forget=self.forgotten.extend,
        )
        self.generate = SimpleNamespace(engine=self.engine, deadline=9.0, begun={}, until=self.engine.until)
        stages = Stages({"generate": self.generate, "reward": None})
        in_flight = InFlight(PROMPTS, MEMBERS, MOST, staleness=0)
        parts = {"colocation": None, "evaluation": None}
        super().__init__(job, stages, 10, in_flight=in_flight, carries=False, longest=16, **parts)

    def _compare(self, groups):
        return dict.fromkeys(groups)


def test_new_groups_stay_where_what_dynamic_sampling_deferred_is_enough(monkeypatch) -> None:
    """The round ends before they begin: nothing was sampled of them, and nothing of them is dropped."""
    schedule = Dropping(monkeypatch)
    in_flight = schedule.in_flight
    in_flight.begin(0)
    first = [(0, group) for group in range(MOST)]
    in_flight.start(first, engines=1)
    assert list(schedule._round()) == first, "all have finished in the time of two"
    in_flight.end(first[:PROMPTS])  # trained; the others are deferred
    in_flight.begin(1)
    second = [(1, group) for group in range(in_flight.wanted(None))]
    in_flight.start(second, engines=1)
    assert list(schedule._round()) == [] and len(schedule.engine.asked) == 1
    assert schedule.forgotten == schedule._dropped == [] and sorted(in_flight.unfinished) == second
    in_flight.end(first[PROMPTS : 2 * PROMPTS])
    in_flight.begin(2)
    assert list(schedule._round()) == second, "now it is their turn"


def test_what_is_dropped_is_counted_whether_it_was_finished_or_not(monkeypatch) -> None:
    """Of five groups of two the first two are trained; one response of the third was finished, too."""
    schedule = Dropping(monkeypatch)
    monkeypatch.setattr(SyncSchedule, "_sample", lambda self: (self._round(), {})[1])

    def until(rows, steps, enough):
        ended = rows[: PROMPTS * MEMBERS + 1]
        assert enough([Completion(row, (1,) * (2 + row.group), (), "stop", ((0, 0),)) for row in ended])
        return dict.fromkeys(rows[len(ended) :], 7)

    schedule.generate.until, schedule.rounds = until, 0
    for epoch in range(2):  # counts begin anew
        groups = [(epoch, group) for group in range(MOST)]
        schedule.in_flight.begin(epoch)
        schedule.in_flight.start(groups, engines=1)
        schedule.job.plan.groups = groups[:PROMPTS]
        metrics = schedule._sample()
        assert (metrics["dropped/responses"], metrics["dropped/length_mean"]) == (6.0, (4 + 5 * 7) / 6)
        assert schedule.forgotten[-3:] == groups[PROMPTS:]


def test_what_is_begun_comes_back_from_a_checkpoint_whole() -> None:
    begun = Completion(SampleId(3, 1, 0), (5, 6, 7), (-0.1, -0.2, -0.3), "abort", ((0, 4), (2, 5)))
    assert partial._unpacked(partial._packed(begun)) == begun
    saved = partial._packed(replace(begun, columns={"routes": Ragged.from_rows([torch.arange(24).view(6, 2, 2)])}))
    column = partial._unpacked(saved).columns["routes"]
    assert len(column) == 1 and torch.equal(column.row(0), torch.arange(24).view(6, 2, 2))
    del saved["columns"]  # of a checkpoint without routes
    assert partial._unpacked(saved) == begun


def prompts(*rows: int) -> list[Prompt]:
    return [Prompt(tokens=(1, 2, 3), text="", answer="", row=row, record={}) for row in rows]


def test_longest_first_within_a_step_and_unknown_ones_as_the_mean():
    order = LongestFirst(step=3)
    rows = lambda epoch, *given: [p.row for p in order.order(epoch, prompts(*given))]  # noqa: E731
    assert rows(0, 0, 1, 2, 3, 4, 5) == [0, 1, 2, 3, 4, 5], "nothing is known"
    order.finished({(0, 0): (13, 13), (0, 1): (43, 83), (0, 2): (3 + 30, 3 + 30), (0, 4): (3, 203)})
    # Means without the prompt: 10, 60, 30, 100; of all 50.
    assert rows(1, 0, 1, 2, 3, 4, 5) == [1, 2, 0, 4, 3, 5]
    assert rows(2, 9, 4, 0, 1) == [4, 9, 0, 1], "the last step is a short one"
    order.finished({(2, 0): (3,), (7, 0): (99,)})  # (2, 0) is row 4 now; the other one is of a former start
    assert rows(3, 3, 4, 9) == [3, 9, 4]


def test_where_a_step_trains_on_a_part_of_a_group_prompts_stay_in_their_order():
    order = LongestFirst(step=0)
    assert [p.row for p in order.order(0, prompts(0, 1))] == [0, 1]
    order.finished({(0, 0): (4,), (0, 1): (9,)})
    assert [p.row for p in order.order(1, prompts(0, 1))] == [0, 1]
