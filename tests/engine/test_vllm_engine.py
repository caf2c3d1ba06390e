"""VllmEngine over a scripted vLLM: what it hands on, what it refuses, and its states."""

import math
import queue
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mindspeed_rl_plugin.engine import vllm_api, vllm_engine
from mindspeed_rl_plugin.engine.expert_group import AGREE_EVERY
from mindspeed_rl_plugin.engine.rollout_engine import ENGINE_PARTS
from mindspeed_rl_plugin.ranks import HardDeadline
from mindspeed_rl_plugin.rows import SampleId

pytestmark = pytest.mark.quick


@pytest.fixture
def engine(make_engine):
    engine = make_engine(eos_token_ids=(2,))
    engine.update_weights(5)
    return engine


def test_tokens_and_logps_gather_over_steps(engine, fake_vllm, request_of) -> None:
    fake_vllm.script = {"0-0-0": ([7, None, 8, 2], "stop"), "0-1-0": ([9], "length")}
    engine.submit([request_of(0), request_of(1)])
    (short,) = engine.poll(5)
    assert (short.id, short.tokens, short.finish, short.version) == (SampleId(0, 1, 0), (9,), "length", 5)
    (long,) = engine.poll(5)
    assert (long.tokens, long.logps, long.finish) == ((7, 8, 2), (-0.25,) * 3, "stop")
    assert engine.poll(5) == []


def test_abort_returns_what_was_drawn(engine, fake_vllm, request_of) -> None:
    fake_vllm.script = {f"0-{g}-0": ([7] * 9, "length") for g in range(3)}
    engine.submit([request_of(g) for g in range(3)])
    engine.poll(0)
    engine.poll(0)
    assert [(c.id.group, c.tokens, c.finish) for c in engine.abort()] == [(g, (7, 7), "abort") for g in range(3)]
    assert not fake_vllm.waiting
    assert engine.abort() == []


def test_new_weights_in_flight_begin_a_segment(engine, fake_vllm, request_of) -> None:
    fake_vllm.script = {"0-0-0": ([7, 7, 8, 8], "length"), "0-1-0": ([9, 9, 9], "length")}
    engine.submit([request_of(0), request_of(1)])
    engine.poll(0)
    engine.poll(0)
    with pytest.raises(ValueError, match="2 responses are queued"):
        engine.update_weights(6)
    engine.update_weights(6, in_flight=True)
    engine.submit([request_of(2)])
    assert "reset_prefix_cache" not in fake_vllm.calls[1:]
    before, again, behind = fake_vllm.salts.values()
    assert before == again != behind, "no prefix of 5 serves what comes under 6"
    fake_vllm.script["0-2-0"] = ([4, 4], "length")
    done = {c.id.group: c for _ in range(3) for c in engine.poll(0)}
    assert {group: c.segments for group, c in done.items()} == {0: ((0, 5), (2, 6)), 1: ((0, 5), (2, 6)), 2: ((0, 6),)}
    assert [done[group].version for group in range(3)] == [5, 5, 6]


def test_no_prefix_serves_an_engine_that_goes_back_to_a_version(engine, fake_vllm, request_of) -> None:
    """What was in flight meanwhile has filled blocks by the weights between."""
    fake_vllm.script = {f"0-{group}-0": ([7] * 9, "length") for group in range(3)}
    for group, version in enumerate((5, 6, 5)):
        if group:
            engine.update_weights(version, in_flight=True)
        engine.submit([request_of(group)])
        engine.poll(0)
    assert len({*fake_vllm.salts.values()}) == 3


def test_tokens_of_steps_in_flight_count_as_the_older_weights(engine, fake_vllm, request_of) -> None:
    fake_vllm.script = {"0-0-0": ([7, 7, 7], "length"), "0-1-0": ([None, 9, 9], "length")}
    engine.submit([request_of(0), request_of(1)])
    engine.poll(0)
    fake_vllm.engine_core.engine_core.batch_queue.append("a step")
    engine.update_weights(6, in_flight=True)
    done = {c.id.group: c.segments for _ in range(2) for c in engine.poll(0)}
    assert done == {0: ((0, 5), (2, 6)), 1: ((0, 5), (1, 6))}


def test_an_aborted_response_goes_on_with_its_tokens(engine, fake_vllm, request_of) -> None:
    fake_vllm.script = {"0-0-0": ([7] * 5, "length"), "0-0-0@6": ([8, 2], "stop")}
    engine.submit([request_of(0, (5, 6))])
    engine.poll(0)
    engine.poll(0)
    (begun,) = engine.abort()
    engine.update_weights(6)
    request = replace(request_of(0, (5, 6)), begun=begun, seed=77)
    engine.submit([request])
    assert fake_vllm.calls[-1] == ("add", "0-0-0@6", [5, 6, 7, 7], (request, (2,), True))
    (done,) = engine.poll(5)
    assert (done.id, done.tokens, done.segments) == (SampleId(0, 0, 0), (7, 7, 8, 2), ((0, 5), (2, 6)))
    with pytest.raises(ValueError, match="all 2 tokens"):
        engine.submit([replace(request_of(0, max_tokens=2), begun=begun)])


def test_a_poll_makes_progress_and_ends_in_time(engine, fake_vllm, request_of) -> None:
    fake_vllm.script = {"0-0-0": ([7] * 10_000, "length")}
    engine.submit([request_of(0)])
    assert engine.poll(0) == []
    assert fake_vllm.calls.count("step") == 1
    start = time.monotonic()
    fake_vllm.script = {"0-0-0": ([7] * 10_000_000, "length")}
    assert engine.poll(0.05) == []
    assert time.monotonic() - start >= 0.05


@pytest.mark.parametrize("change", [{"prompt": ()}, {"prompt": (1,) * 25}, {"max_tokens": 0}])
def test_requests_that_vllm_would_not_answer_as_asked(engine, fake_vllm, request_of, change) -> None:
    with pytest.raises(ValueError, match=f"{len(change.get('prompt', 'ab'))} prompt tokens"):
        engine.submit([request_of(1), request_of(0, **change)])
    assert not fake_vllm.waiting  # nothing is queued when one of them is wrong


def test_old_vllm_has_only_plain_log_probs(make_engine, request_of) -> None:
    engine = make_engine(processed=False)
    engine.update_weights(0)
    engine.submit([request_of(0), request_of(1, temperature=0.0)])
    for sampling in ({"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 3}):
        with pytest.raises(ValueError, match="no processed log-probs"):
            engine.submit([request_of(2, **sampling)])


@pytest.mark.parametrize(("logprob", "finish"), [(math.nan, "stop"), (-math.inf, "stop"), (-1.0, "error")])
def test_a_response_that_cannot_be_trained_on(engine, fake_vllm, request_of, logprob, finish) -> None:
    fake_vllm.logprob = logprob
    fake_vllm.script = {"0-0-0": ([7], finish)}
    engine.submit([request_of(0)])
    with pytest.raises(RuntimeError):
        engine.poll(5)


def test_weights_come_before_responses(make_engine, fake_vllm, request_of) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="no weights"):
        engine.submit([request_of(0)])
    engine.update_weights(0, digest="d")
    assert (engine.version, engine.digest, fake_vllm.calls) == (0, "d", ["reset_prefix_cache"])
    assert fake_vllm.refreshed == [fake_vllm], "what is derived from weights follows them"
    engine.sleep()
    assert engine.version == -1
    with pytest.raises(ValueError, match="weights sleep"):
        engine.update_weights(1)
    with pytest.raises(ValueError, match=r"\['kv_cache', 'weights'\] sleep"):
        engine.submit([request_of(0)])
    engine.wake(("weights",))
    engine.update_weights(1)
    with pytest.raises(ValueError, match=r"\['kv_cache'\] sleep"):
        engine.submit([request_of(0)])
    engine.wake()
    engine.submit([request_of(0)])
    for verb in (engine.sleep, lambda: engine.update_weights(2)):
        with pytest.raises(ValueError, match="1 responses are queued"):
            verb()


def test_each_part_sleeps_and_wakes_once_and_all_are_awake_at_the_end(engine, make_engine, fake_vllm) -> None:
    fake_vllm.calls.clear()
    for _ in range(2):
        engine.sleep()
    for parts in (("weights",), ("weights",), ENGINE_PARTS):
        engine.wake(parts)
    assert fake_vllm.calls == ["reset_prefix_cache", ("sleep", 2), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]
    engine.sleep()
    for _ in range(2):
        engine.shutdown()
    assert fake_vllm.calls[-2:] == [("wake_up", ["weights", "kv_cache"]), "teardown"]
    stays, _ = make_engine(sleep_mode=False), fake_vllm.calls.clear()
    stays.sleep()
    stays.wake()
    assert fake_vllm.calls == ["reset_prefix_cache"]


def test_prefixes_held_by_a_step_in_flight(engine, fake_vllm) -> None:
    fake_vllm.calls.clear()
    fake_vllm.stuck_prefixes = 1
    engine.update_weights(6)
    assert fake_vllm.calls == ["reset_prefix_cache", "step", "reset_prefix_cache"]
    fake_vllm.stuck_prefixes = 2
    with pytest.raises(RuntimeError, match="did not reset"):
        engine.update_weights(7)


def test_replicas_are_consecutive_ranks(make_engine) -> None:
    engines = [make_engine(rank=rank, world=4, tensor_parallel=2) for rank in range(4)]
    assert [(e.replica, e.leader) for e in engines] == [(0, True), (0, False), (1, True), (1, False)]
    assert {e.replicas for e in engines} == {2}


class Peers:
    """all_reduce with a peer that says `late` and has sampled the same, or other, tokens."""

    def __init__(self, monkeypatch, late: bool = False, shift: int = 0) -> None:
        self.late, self.shift, self.count = late, shift, 0
        monkeypatch.setattr(vllm_engine.dist, "all_reduce", self)
        monkeypatch.setattr(vllm_api, "tp_group", lambda: type("Group", (), {"cpu_group": None}))

    def __call__(self, seen, op, group) -> None:
        self.count += 1
        theirs = torch.tensor([self.late, seen[1] + self.shift, seen[2] - self.shift])
        seen.copy_(torch.maximum(seen, theirs))


@pytest.fixture
def pair(make_engine, fake_vllm, request_of, monkeypatch):
    """`pair(...)` -> one of two ranks of an engine with a response of 40 tokens, and its peer."""

    def make(**peer):
        engine, peers = make_engine(world=2, tensor_parallel=2), Peers(monkeypatch, **peer)
        engine.update_weights(0)
        fake_vllm.script = {"0-0-0": ([7] * 40, "length")}
        engine.submit([request_of(0)])
        return engine, peers

    return make


@pytest.mark.parametrize(
    ("timeout", "late", "finished", "steps"),
    [(1e9, False, 1, 40), (1e9, True, 0, AGREE_EVERY), (-1, False, 0, AGREE_EVERY)],  # here, there, late here alone
)
def test_ranks_agree_on_the_time(pair, fake_vllm, timeout, late, finished, steps) -> None:
    engine, peers = pair(late=late)
    assert len(engine.poll(timeout)) == finished
    assert fake_vllm.calls.count("step") == steps and peers.count == steps // AGREE_EVERY


def test_ranks_that_sampled_other_tokens(pair) -> None:
    engine, _ = pair(shift=1)
    with pytest.raises(RuntimeError, match="2 ranks.*engine 0.*step 16"):
        engine.poll(5)


class Sharers:
    """Engines that share experts, of which others have responses for so many more steps."""

    def __init__(self, size, deadline) -> None:
        self.size, self.deadline, self.left, self.asked = size, deadline, 0, []

    def any_works(self, works) -> bool:
        self.asked.append(works)
        self.left -= 1
        return works or self.left >= 0


@pytest.fixture
def sharing(make_engine, monkeypatch):
    monkeypatch.setattr(vllm_engine, "ExpertGroup", Sharers)
    engine = make_engine(world=8, tensor_parallel=2, expert_parallel=4, deadline=7.0)
    engine.update_weights(0)
    return engine


def test_engines_that_share_experts_step_together(sharing, fake_vllm, request_of, monkeypatch) -> None:
    Peers(monkeypatch)
    group = sharing._sharers
    assert (group.size, group.deadline, sharing.options.sharing) == (4, 7.0, 2)
    fake_vllm.script, group.left = {"0-0-0": ([7] * 3, "length")}, 5
    sharing.submit([request_of(0)])
    with pytest.raises(ValueError, match="keep_step: 1 responses"):
        sharing.keep_step()
    assert len(sharing.poll(1e9)) == 1
    sharing.keep_step()
    assert [c for c in fake_vllm.calls if c in ("step", "dummy")] == ["step"] * 3 + ["dummy"] * 2
    assert group.asked == [True] * 3 + [False] * 3
    fake_vllm.stuck_prefixes = 1
    sharing.sleep()
    assert fake_vllm.calls.count("step") == 3  # none alone


@pytest.mark.parametrize("where", ["step", "dummy", "agreement", "prefixes"])
def test_a_wait_inside_vllm_that_takes_too_long_ends_the_process(where, pair, sharing, fake_vllm, monkeypatch) -> None:
    engine = sharing if where == "dummy" else pair()[0]
    ended, said = queue.SimpleQueue(), []

    def stuck(*unused, **kwargs) -> None:
        raise InterruptedError(ended.get(timeout=30))  # the status that the thread ends the process with

    monkeypatch.setattr("mindspeed_rl_plugin.ranks.last_words", lambda line, later=0: said.append(line))
    engine._limit = HardDeadline(0.05, ended.put)
    if where == "agreement":
        monkeypatch.setattr(torch.distributed, "all_reduce", stuck)
    else:
        monkeypatch.setattr(fake_vllm, "step", stuck)
        monkeypatch.setattr(vllm_api, "dummy_step", stuck)
    sharing._sharers.left = 1
    fake_vllm.stuck_prefixes = 1
    do = {"dummy": engine.keep_step, "prefixes": engine._forget_prefixes}.get(where, lambda: engine.poll(1e9))
    with pytest.raises(InterruptedError, match="1"):
        do()
    assert re.search(r"waited 0.05 s \(--rl-wait-timeout\) in .* ranks 0 to [13] .*--rl-generate-[te]p [24]\)", said[0])


@pytest.mark.parametrize(("another_each_time", "statuses"), [(True, []), (False, [1])])
def test_one_long_wait_ends_the_process_and_many_short_ones_do_not(monkeypatch, another_each_time, statuses) -> None:
    """Nor one of a job that was suspended, while a clock goes on."""
    ended, clock, looks = [], [0.0], iter(range(12 if another_each_time else 10**6))
    limit = HardDeadline(0.5, ended.append)
    limit._now = ["a step"]

    def wait(seconds: float) -> bool:
        assert seconds < 0.5
        clock[0] += 1000.0
        if another_each_time:
            limit._now = ["a step"]
        return next(looks, None) is None

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    limit._closed = SimpleNamespace(wait=wait)
    limit._look()
    assert ended == statuses and clock[0] > 9000.0


def test_an_engine_of_one_rank_waits_for_nobody(make_engine) -> None:
    assert not make_engine(world=4)._step_of


@pytest.mark.parametrize(("given", "used"), [(0.35, 0.35), (None, 0.81)])
def test_a_share_of_memory_that_is_given_stands_and_else_it_is_measured(make_engine, monkeypatch, given, used) -> None:
    monkeypatch.setattr(vllm_engine, "free_share", lambda device, deadline: 0.81)
    assert make_engine(memory_utilization=given).options.memory_utilization == used
