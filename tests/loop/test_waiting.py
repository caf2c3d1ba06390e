"""`GradeWait`: what counts as progress, and what it says where there is none."""

from types import SimpleNamespace

import pytest

from mindspeed_rl_plugin.loop.schedules import waiting
from mindspeed_rl_plugin.loop.schedules.waiting import GradeWait
from mindspeed_rl_plugin.rows import SampleId

IDS = [SampleId(0, group, 0) for group in range(4)]


class Dock:
    """4 rows that are waited for, behind `others` of an evaluation, of which one is graded a question."""

    def __init__(self, others: int, goes_on: bool = True) -> None:
        self.others, self.goes_on = others, goes_on

    def remaining(self, state: str, ids: object = None) -> int:
        assert state == "reward"
        if ids is not None:
            return 4 if self.others else 0
        self.others -= self.goes_on
        return 4 + self.others


def wait_for(dock: Dock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "GRADED_LOOK_SECONDS", 0.05)
    ranks = SimpleNamespace(deadline=0.2, rank=0, broadcast=lambda value: value)
    stage = SimpleNamespace(dock=dock, spec=SimpleNamespace(name="reward"))
    grader = SimpleNamespace(check=lambda: None)
    GradeWait(ranks, stage, grader, who=lambda: "engines at work: 1").until_graded(IDS)


def test_engines_that_are_busy_with_an_evaluation_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than the deadline no row of those that are waited for is graded."""
    dock = Dock(others=10)
    wait_for(dock, monkeypatch)
    assert dock.others == 0


def test_where_no_row_at_all_is_graded_it_ends_with_who_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    said = r"4 of 4 responses .* none was graded for 0.2 s \(--rl-wait-timeout\); engines at work: 1"
    with pytest.raises(TimeoutError, match=said):
        wait_for(Dock(others=10, goes_on=False), monkeypatch)
