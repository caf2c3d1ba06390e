"""The grader thread over a real dock and real graders: what it grades meanwhile, and each way in which it ends."""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import until
from stage_context import context_of

from mindspeed_rl_plugin.dock import Dock, make_docks
from mindspeed_rl_plugin.reward import RewardError, RewardPool
from mindspeed_rl_plugin.rows import Completion, GenerateRequest, Prompt, Rows, SampleId, Sampling
from mindspeed_rl_plugin.stages import generate, grading, prompts, reward
from mindspeed_rl_plugin.stages.grading import GradingThread
from mindspeed_rl_plugin.stages.groups import group_stats
from mindspeed_rl_plugin.stages.reward import Reward
from mindspeed_rl_plugin.stages.stage import StageSpec, columns_of, states_of

TABLE = [prompts.SPEC, generate.SPEC, reward.spec(1)]
ROWS = [prompts.SPEC, generate.SPEC, reward.spec(1, by_group=False)]
MEMBERS = 2
# A response is one token: tenths of a second for which the grader sleeps, 99 fails, 98 hangs.
GRADER = """
import time
def grade(response):
    assert response != "99", "the response"
    time.sleep(1000 if response == "98" else int(response) / 10)
    return int(response)
"""


def filled(groups: int, table: list[StageSpec] = TABLE) -> Dock:
    (dock,) = make_docks(columns_of(table), states_of(table), [(0, 1)])
    dock.open(0, groups, MEMBERS)
    dock.put(prompts.prompt_rows(0, [Prompt((5,), "p", "a", g) for g in range(groups)]))
    return dock


def sampled(ids: Sequence[SampleId], tokens: Iterable[int]) -> Rows:
    """What the engine makes of rows."""
    requests = [GenerateRequest(i, (5,), Sampling(1), 0) for i in ids]
    answers = [Completion(i, (t,), (-1.0,), "stop", ((0, 0),)) for i, t in zip(ids, tokens, strict=False)]
    return generate.completion_rows(requests, answers)


def answer(dock: Dock, group: int, *tokens: int, epoch: int = 0) -> None:
    """A group is sampled."""
    lease = dock.lease("generate", ids=[SampleId(epoch, group, m) for m in range(MEMBERS)], deadline=1)
    dock.commit(lease, sampled(lease.rows.ids, tokens))


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Reward]:
    """Of three groups whose responses are not there yet."""
    (tmp_path / "grader.py").write_text(GRADER)
    options = {"workers": 2, "timeout": 30, **getattr(request, "param", {})}
    with closing(RewardPool([f"{tmp_path}/grader.py:grade"], **options)) as pool:
        yield Reward(TABLE[2], context_of(filled(3), graders=pool, decode=lambda tokens: str(*tokens)))
    assert not [t for t in threading.enumerate() if t.name == "grader"], "nothing stays behind"


def by_row(dock: Dock, stage: Reward) -> Reward:
    return Reward(ROWS[2], context_of(dock, graders=stage.graders, decode=stage.context.decode))


def rewards(stage: Reward) -> dict[int, list[float]]:
    """Group -> its rewards, of those that are graded."""
    graded = {}
    for group in range(3):
        with suppress(ValueError):
            graded[group] = stage.graded([SampleId(0, group, m) for m in range(MEMBERS)])["reward"].tolist()
    return graded


def test_groups_are_graded_as_they_are_finished_and_a_slow_one_holds_nobody_up(stage: Reward) -> None:
    with GradingThread(stage, MEMBERS) as grader:
        answer(stage.dock, 1, 8, 0)
        answer(stage.dock, 2, 1, 2)
        until(lambda: rewards(stage) == {2: [1.0, 2.0]})
        answer(stage.dock, 0, 3, 4)
        grader.check()
        grader.finish()
        assert rewards(stage) == {0: [3.0, 4.0], 1: [8.0, 0.0], 2: [1.0, 2.0]}
    assert stage.dock.remaining("reward") == 0, "what is there is acknowledged"
    ids = [SampleId(0, g, m) for g in range(3) for m in range(MEMBERS)]
    stats = group_stats(stage.graded(ids))
    assert [(s.reward, s.signal, s.lengths) for s in stats.values()] == [
        (3.5, True, (2, 2)), (4.0, True, (2, 2)), (1.5, True, (2, 2))
    ]  # fmt: skip


def test_single_responses_are_graded_where_no_grader_wants_groups(stage: Reward) -> None:
    dock = filled(3, ROWS)
    single = by_row(dock, stage)
    with GradingThread(single, MEMBERS):
        lease = dock.lease("generate", deadline=1)
        ids = lease.rows.ids[::2]  # one of each group
        for i in ids:
            dock.commit_part(lease, sampled([i], [1]))
        until(lambda: dock.remaining("reward") == 3)
        assert single.graded(ids)["reward"].tolist() == [1.0] * 3


def test_quick_graders_wait_for_nothing(stage: Reward, monkeypatch) -> None:
    """One worker, and a hundred responses that are ready: in a few leases, without a pause between them."""
    dock = filled(50, ROWS)
    lease = dock.lease("generate", deadline=1)
    dock.commit(lease, sampled(lease.rows.ids, [0] * len(lease)))
    monkeypatch.setattr(grading, "PACE_SECONDS", 20.0)  # of a pause, in which nothing is graded
    leases, take = [], Reward.lease
    monkeypatch.setattr(Reward, "lease", lambda *given, **more: leases.append(1) or take(*given, **more))
    with GradingThread(by_row(dock, stage), MEMBERS) as grader:
        until(lambda: not dock.remaining("reward"), 15)
        grader.finish()
    assert 1 < len(leases) < 10


@pytest.mark.parametrize(
    ("most", "unit", "asked"),
    [(1000, "row", [2, 8, 32, 128, 128]), (21, "row", [2, 8, 21, 21, 21]), (0, "row", [1] * 5), (21, "group", [8, 16])],
)
def test_no_more_is_taken_at_once_than_is_graded_in_time(most: int, unit: str, asked: list[int]) -> None:
    """However quick graders were before, all may run into their limits; while some are in grading, maybe none."""
    took: list[int] = []

    class Lease:
        rows = ()

        def __init__(self, ids, max_rows, deadline) -> None:
            took.append(max_rows)

        def __len__(self) -> int:
            return took[-1]

    pool = SimpleNamespace(wanted=2, most=lambda members: most, submit=lambda items: object())
    spec = SimpleNamespace(whole_groups=unit == "group")
    stage = SimpleNamespace(graders=pool, spec=spec, deadline=5.0, lease=Lease, items=list)
    stage.for_thread = lambda: stage
    grader = GradingThread(stage, 8)
    for _ in asked:
        assert grader._take()
        grader._leases.clear()
    assert took == asked
    grader._leases[object()] = object()
    pool.most = lambda members: 7 if unit == "group" else 0
    assert grader._take() and took == asked, "not now"


def test_it_goes_on_with_the_next_round(stage: Reward, monkeypatch) -> None:
    """In which it waits as in the first: the time between them is no wait."""
    monkeypatch.setattr(grading, "IDLE_SECONDS", 0.05)
    stage.deadline = 0.8
    grader = GradingThread(stage, MEMBERS)
    for epoch in range(2):
        if epoch:
            stage.dock.clear(0)
            stage.dock.open(1, 3, MEMBERS)
            stage.dock.put(prompts.prompt_rows(1, [Prompt((5,), "p", "a", g) for g in range(3)]))
            time.sleep(stage.deadline)
        with grader:
            for group in range(2):
                answer(stage.dock, group, 0, 0, epoch=epoch)
            threading.Timer(0.3, answer, (stage.dock, 2, 0, 0), {"epoch": epoch}).start()
            grader.finish()
        assert not stage.dock.remaining("reward")


def test_it_rests_when_what_is_in_grading_is_graded_and_takes_no_more(stage: Reward) -> None:
    with GradingThread(stage, MEMBERS) as grader:
        answer(stage.dock, 0, 4, 4)
        until(lambda: grader._leases)
        threading.Timer(0.1, answer, (stage.dock, 1, 0, 0)).start()
        grader.rest()
        assert rewards(stage) == {0: [4.0, 4.0]}
        grader.start()
        grader.start()
        until(lambda: rewards(stage) == {0: [4.0, 4.0], 1: [0.0, 0.0]})


def test_a_failure_reaches_the_main_thread(stage: Reward) -> None:
    with GradingThread(stage, MEMBERS) as grader:
        answer(stage.dock, 0, 0, 99)
        begin = time.monotonic()
        with pytest.raises(RewardError, match="(?s)AssertionError: the response.*rollout 0, prompt 0, response 1"):
            while time.monotonic() - begin < 5:
                grader.check()
        with pytest.raises(RewardError):
            grader.finish()


@pytest.mark.parametrize("stage", [{"on_error": "drop"}], indirect=True)
def test_failures_that_do_not_stop_are_counted(stage: Reward) -> None:
    with GradingThread(stage, MEMBERS) as grader:
        for group in range(3):
            answer(stage.dock, group, 0, 99 if group == 1 else 1)
        grader.finish()
    stats = group_stats(stage.graded([SampleId(0, g, m) for g in range(3) for m in range(MEMBERS)]))
    assert [(s.broken, s.errors) for s in stats.values()] == [(False, 0), (True, 1), (False, 0)]
    assert "prompt 1, response 1" in stage.graders.take_failures()["grade"]


def test_responses_that_never_come_are_waited_for_as_long_as_the_deadline(stage: Reward, monkeypatch) -> None:
    monkeypatch.setattr(grading, "IDLE_SECONDS", 0.1)
    stage.deadline = 0.8
    grader = GradingThread(stage, MEMBERS)
    with grader:
        answer(stage.dock, 0, 0, 0)
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match=r"graded for 0.8 s .*'tokens' \(written by state 'generate'"):
            grader.finish()
        assert time.monotonic() - begin >= 0.8 and rewards(stage) == {0: [0.0, 0.0]}


def test_a_stop_hands_back_what_is_in_grading(stage: Reward, monkeypatch) -> None:
    """As after an error of the engine."""
    monkeypatch.setattr(grading, "THREAD_STOP_SECONDS", 60.0)  # what does not stop is late by far
    with pytest.raises(KeyError), GradingThread(stage, MEMBERS):
        answer(stage.dock, 0, 9, 9)
        time.sleep(0.1)
        begin = time.monotonic()
        raise KeyError("of the engine")
    assert time.monotonic() - begin < 20
    assert stage.run([SampleId(0, 0, m) for m in range(MEMBERS)])["reward"].tolist() == [9.0, 9.0]
