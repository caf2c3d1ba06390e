"""`generate` and the generate stage over a fake engine: order, deadlines, alignment, what reaches the dock."""

import time
from dataclasses import replace

import pytest
import torch
from stage_context import Ranks, context_of

from mindspeed_rl_plugin.dock import Dock, make_docks
from mindspeed_rl_plugin.engine.rollout_engine import generate, response_seed
from mindspeed_rl_plugin.engine.vllm_engine import Running
from mindspeed_rl_plugin.rows import Completion, Ragged, Rows, SampleId, Sampling
from mindspeed_rl_plugin.stages import generate as stage
from mindspeed_rl_plugin.stages import prompts as prompts_stage
from mindspeed_rl_plugin.stages.stage import columns_of, states_of


def _stage(dock, deadline, engine, sampling, seed) -> stage.Generate:
    context = context_of(dock, engine=engine, sampling=sampling, seed=seed, ranks=Ranks(deadline=deadline))
    return stage.Generate(stage.SPEC, context)


def test_completions_come_in_the_order_of_requests(fake_engine, request_of) -> None:
    requests = [request_of(g, (5, length)) for g, length in enumerate((3, 1, 2, 1))]
    seen = []
    completions = generate(fake_engine(), requests, deadline=5, progress=seen.append)
    assert [c.id.group for c in completions] == [0, 1, 2, 3]
    assert [len(c.tokens) for c in completions] == [3, 1, 2, 1]
    assert seen == [2, 1, 1]


def test_the_end_of_own_responses_is_not_that_of_engines_that_share_experts(fake_engine, request_of) -> None:
    engine, idle = fake_engine(), fake_engine()
    generate(engine, [request_of(0, (5, 2))], deadline=5)
    _stage(filled_dock([[7, 2]], members=1), 5, idle, Sampling(5), 0).run([])
    assert engine.log == ["submit 1", "keep step"] and idle.log == ["submit 0", "keep step"]


def test_a_late_response_is_named_and_aborted(fake_engine, request_of) -> None:
    engine = fake_engine()
    requests = [request_of(0, (5, 1)), request_of(1, (13, 1)), request_of(2, (13, 1))]
    with pytest.raises(TimeoutError, match=r"2 of 3 .* 5 s .*\(0, 1, 0\), \(0, 2, 0\)"):
        generate(engine, requests, deadline=5)
    assert engine.log == ["submit 3", "abort 2"]
    assert not engine.queue


def test_a_rollout_may_take_long_while_responses_keep_coming(fake_engine, request_of, monkeypatch) -> None:
    now, given = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    engine = fake_engine()
    inner = engine.poll

    def slow_poll(timeout: float):
        given.append(timeout)
        now[0] += 6.0
        return inner(timeout)

    monkeypatch.setattr(engine, "poll", slow_poll)
    completions = generate(engine, [request_of(g, (5, g + 1)) for g in range(3)], deadline=8)
    assert len(completions) == 3 and now[0] > 8 and set(given) == {8.0}


TABLE = [prompts_stage.SPEC, stage.SPEC]
WRITES = stage.SPEC.written


def filled_dock(prompts: list[list[int]], members: int) -> Dock:
    (dock,) = make_docks(columns_of(TABLE), states_of(TABLE), [(0, 1)])
    dock.open(4, len(prompts), members)
    ids = tuple(SampleId(4, g, 0) for g in range(len(prompts)))
    dock.put(Rows(ids, {"prompt": Ragged.from_rows([torch.tensor(p, dtype=torch.int32) for p in prompts])}))
    return dock


@pytest.mark.parametrize("calls", [[4], [1, 0, 3]])
def test_rows_are_aligned_and_complete(fake_engine, calls) -> None:
    dock = filled_dock([[7, 2], [8, 9, 3]], members=2)
    sampling = Sampling(max_tokens=5)
    ids = [SampleId(4, g, m) for g in range(2) for m in range(2)]
    left = list(ids)
    for count in calls:
        mine, left = left[:count], left[count:]
        _stage(dock, 5, fake_engine(), sampling, 11).run(mine)
    assert dock.remaining("generate") == 0
    rows = dock.read(ids, WRITES)
    for i, sample in enumerate(ids):
        prompt = [[7, 2], [8, 9, 3]][sample.group]
        token = response_seed(11, *sample) % 40
        assert rows["tokens"].row(i).tolist() == prompt + [token] * prompt[-1]
        assert rows["loss_mask"].row(i).tolist() == [0] * len(prompt) + [1] * prompt[-1]
        assert rows["logp_rollout"].row(i).tolist() == [0.0] * len(prompt) + [-0.5] * prompt[-1]
    assert rows["response_length"].tolist() == [2, 2, 3, 3]
    assert rows["length"].tolist() == [4, 4, 6, 6]
    assert rows["finish"].tolist() == [0, 0, 1, 1]
    assert rows["version"].tolist() == [3] * 4
    assert rows["weights_digest"].tolist() == [-1] * 4  # the digest ffffffffffffffff as int64
    assert [r.tolist() for r in rows["segments"].rows()] == [[[2, 3]], [[2, 3]], [[3, 3]], [[3, 3]]]


@pytest.mark.parametrize("pace", [0, 1000])
def test_a_stream_submits_the_same_and_commits_rows_as_they_are_finished(fake_engine, monkeypatch, pace) -> None:
    monkeypatch.setattr(stage, "COMMIT_SECONDS", pace)
    whole, dock = (filled_dock([[7, 1], [8, 9, 3], [4, 2]], members=1) for _ in range(2))
    ids = [SampleId(4, g, 0) for g in (1, 0, 2)]
    one, other = fake_engine(), fake_engine()
    _stage(whole, 5, one, Sampling(5), 11).run(ids)
    left = []
    _stage(dock, 5, other, Sampling(5), 11).run(ids, lambda: left.append(dock.remaining("generate")))
    assert other.log == one.log == ["submit 3", "keep step"] and left == ([3, 3, 3] if pace else [3, 2, 1])
    assert not dock.remaining("generate")
    for name, column in whole.read(ids, WRITES).columns.items():
        mine = dock.read(ids, WRITES)[name]
        parts = ("values", "offsets") if isinstance(column, Ragged) else ("data",)
        assert all(torch.equal(getattr(mine, p), getattr(column, p)) for p in parts), name


def test_what_is_not_finished_in_time_goes_on_with_its_tokens_and_another_seed(fake_engine) -> None:
    dock, engine = filled_dock([[7, 1], [8, 5], [4, 3]], members=1), fake_engine()
    ids, seen = [SampleId(4, g, 0) for g in range(3)], []
    generating = _stage(dock, 5, engine, Sampling(5), 11)

    def enough(finished) -> bool:
        seen.append([c.id.group for c in finished])
        return len(seen) == 2

    assert generating.until(ids, 1, enough) == {ids[1]: 2, ids[2]: 2}
    assert seen == [[0], []] and dock.remaining("generate") == 2
    assert engine.log == ["submit 3", "abort 2", "keep step"]
    assert generating.until(ids[1:], 2, lambda finished: len(finished) == 1) == {ids[1]: 4}
    assert not generating.until(ids[1:2], 1, lambda finished: True) and not generating.begun
    first, then = (response_seed(11, *ids[2], begun=begun) % 40 for begun in (0, 2))
    assert dock.read([ids[2]], ["tokens"])["tokens"].row(0).tolist() == [4, 3, first, first, then]
    assert not dock.remaining("generate")


def test_a_response_in_the_making_has_all_that_was_sampled_of_it_before(request_of) -> None:
    begun = Completion(SampleId(0, 0, 0), (5, 6), (-0.1, -0.2), "abort", ((0, 3),))
    running = Running.of(replace(request_of(0, (1,)), begun=begun))
    running.add(7, -0.3, 4)
    assert (running.tokens, running.logps) == ([5, 6, 7], [-0.1, -0.2, -0.3]) and running.segments == [(0, 3), (2, 4)]


def test_a_stream_lets_others_look_and_ends_with_what_they_raise(fake_engine, monkeypatch) -> None:
    monkeypatch.setattr(stage, "LOOK_SECONDS", 0.01)
    engine, looks = fake_engine(), []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise KeyError("of the graders")

    with pytest.raises(KeyError):
        _stage(filled_dock([[13, 2]], members=1), 5, engine, Sampling(5), 0).run([SampleId(4, 0, 0)], look)
    with pytest.raises(TimeoutError, match=r"1 of 1 .* 0.05 s"):
        _stage(filled_dock([[13, 2]], members=1), 0.05, fake_engine(), Sampling(5), 0).run(
            [SampleId(4, 0, 0)], lambda: time.sleep(0.02)
        )


def test_only_the_leader_writes(fake_engine) -> None:
    dock = filled_dock([[7, 2]], members=1)
    with pytest.raises(ValueError, match="'tokens'"):
        _stage(dock, 5, fake_engine(leader=False), Sampling(5), 0).run([SampleId(4, 0, 0)])
