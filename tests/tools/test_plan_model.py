"""The model of a run: closed forms without a tail, bounds, and what more of something must not make worse."""

from __future__ import annotations

import dataclasses
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.generators.engine_state import Bound
from mindspeed_rl_plugin.loop.arithmetic import Arithmetic
from mindspeed_rl_plugin.loop.run_setup import Setup
from mindspeed_rl_plugin.rows import SampleId
from mindspeed_rl_plugin.tools.plan.simulate import Engine, Row, _Apart, simulate
from mindspeed_rl_plugin.tools.plan.virtual import Clock, Costs, Decoder, Responses, lognormal, recorded, sigma_of

PROMPTS, MEMBERS, TOKENS = 8, 4, 100
ROWS = PROMPTS * MEMBERS
ALIKE = Responses(recorded([[TOKENS]]))
COSTS = Costs(step=0.01, sequence=0.002, token=0.001, rollout=0.25)


def setup(schedule, trainers=1, engines=1, *, batch=ROWS, slots=256, graders=4, epochs=1, **more):
    sizes = Arithmetic(PROMPTS, MEMBERS, batch, epochs, 1, trainers, engines, 1000)
    return Setup(sizes, schedule, slots=slots, graders=graders, **more)


def tailed(seed=0, grading=0.0):
    return Responses(lognormal(100, 0.8, 512), lambda rng: grading * rng.random(), seed=seed)


def test_sync_is_the_sum_of_its_parts():
    costs = dataclasses.replace(COSTS, reshard=0.5, old_token=0.0005)
    responses = Responses(recorded([[TOKENS]]), lambda rng: 0.3)
    outcome = simulate(setup("sync", 2, 2, graders=4), costs, responses)
    generate = TOKENS * (0.01 + 0.002 * ROWS / 2)
    reward = 0.3 * ROWS / 4
    update = 0.001 * TOKENS * ROWS / 2
    assert outcome.rollout == pytest.approx(0.5 + generate + reward + 0.25 + update)
    assert outcome.trainers["starved"] == pytest.approx(reward / outcome.rollout)
    # Two optimizer steps a rollout need old log-probs.
    old = 0.0005 * TOKENS * ROWS / 2
    several = simulate(setup("sync", 2, 2, batch=ROWS // 2), costs, responses)
    assert several.rollout == pytest.approx(outcome.rollout + old)
    assert several.iteration == pytest.approx(several.rollout / 2)


def test_sync_waits_for_the_longest_response_and_the_slower_engine():
    lengths = recorded([[50], [50], [50], [400]])
    outcome = simulate(setup("sync", 1, 2), COSTS, Responses(lengths))  # rows 0..3 and 4..7: one long group each
    first, then = 0.01 + 0.002 * 16, 0.01 + 0.002 * 4
    assert outcome.rollout == pytest.approx(50 * first + 350 * then + 0.25 + 0.001 * 4 * (6 * 50 + 2 * 400))


def test_streamed_hides_all_grading_but_that_of_the_last_response():
    lengths = recorded([[n * 10] * MEMBERS for n in range(1, PROMPTS + 1)])
    slow = Responses(lengths, lambda rng: 0.1)
    sync, streamed = (simulate(setup(name, graders=4), COSTS, slow).rollout for name in ("sync", "streamed"))
    assert sync - streamed == pytest.approx(0.1 * (ROWS / 4 - 1))


@pytest.mark.parametrize("train", [0.0001, 0.001, 0.003])
def test_async_is_the_longer_of_its_sides(train):
    costs = dataclasses.replace(COSTS, token=train, rollout=0.0, publish=0.125)
    outcome = simulate(setup("async", slots=ROWS, staleness=2), costs, ALIKE)
    update, generate = train * TOKENS * ROWS + 0.125, TOKENS * (0.01 + 0.002 * ROWS)
    assert outcome.rollout == pytest.approx(max(update, generate), rel=0.01)
    assert outcome.trainers["starved"] == pytest.approx(max(0.0, 1 - update / generate), abs=0.01)
    assert outcome.engines["back-pressure"] == pytest.approx(max(0.0, 1 - generate / update), abs=0.01)


def test_without_staleness_async_is_sync_with_a_publication():
    costs = dataclasses.replace(COSTS, publish=0.2, pull=0.3, apply=0.1)
    lengths = Responses(recorded([[n * 20] * MEMBERS for n in range(1, PROMPTS + 1)]))
    outcome = simulate(setup("async", staleness=0), costs, lengths)
    sync = simulate(setup("sync"), COSTS, lengths)
    assert outcome.rollout == pytest.approx(sync.rollout + 0.2 + 0.3 + 0.1, rel=1e-6)
    assert outcome.lag == 0


def test_a_strict_order_waits_for_each_rollout():
    costs = dataclasses.replace(COSTS, token=0.0)
    free = simulate(setup("async", engines=2, slots=8), costs, tailed())
    strict = simulate(setup("async", engines=2, slots=8, order="strict"), costs, tailed())
    assert strict.rollout > free.rollout
    assert strict.lag == 1  # exactly: each rollout by one version


@given(
    slots=st.integers(1, 40),
    number=st.integers(1, 3),
    staleness=st.integers(0, 3),
    order=st.sampled_from(["free", "strict"]),
    inflight=st.sampled_from(["keep", "recompute", "drain"]),
    rounds=st.sampled_from([0, 5]),
    train=st.sampled_from([0.0, 0.0002, 0.002]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_admission_holds_and_everything_goes_on(slots, number, staleness, order, inflight, rounds, train, seed):
    """`simulate` raises where a response is older than the bound, and where everybody waits."""
    costs = dataclasses.replace(COSTS, token=train, publish=0.3, pull=0.7, apply=0.2, notice=0.05)
    what = setup(
        "async", engines=number, slots=slots, staleness=staleness, order=order, inflight=inflight, rounds=rounds
    )
    responses = dataclasses.replace(tailed(seed, 1.0), informative=0.7 if rounds else 1.0)
    outcome = simulate(what, costs, responses, rollouts=4)
    assert 0 <= outcome.lag <= staleness
    assert 0 <= sum(outcome.engines.values()) <= 1 + 1e-9 and 0 <= outcome.trainers["starved"] <= 1


def test_the_model_asks_admission(monkeypatch):
    """With one rollout more admitted than allowed the check of the lag speaks."""
    allowed = _Apart._admit

    def one_more(self):
        allowed(self)
        if self.admission.published == 3:
            self.admission.dropped += PROMPTS
            allowed(self)

    monkeypatch.setattr(_Apart, "_admit", one_more)
    with pytest.raises(RuntimeError, match="2 publications old, the bound is 1"):
        simulate(setup("async"), dataclasses.replace(COSTS, token=0.01), tailed())


def test_dynamic_sampling_costs_more_groups():
    some = dataclasses.replace(tailed(), informative=0.5)
    for schedule in ("sync", "async"):
        plain, dynamic = (simulate(setup(schedule, rounds=n), COSTS, some, rollouts=15) for n in (0, 9))
        assert dynamic.rollout > plain.rollout * 1.2
        assert dynamic.tokens < plain.tokens


def test_decoder_counts_steps():
    decoder = Decoder(Costs(step=1.0, sequence=0.5), 2)
    a, b, c = (SampleId(0, 0, m) for m in range(3))
    decoder.add([(a, 3), (b, 5), (c, 4)])  # c waits
    assert decoder.next_end == pytest.approx(3 * 2.0)
    assert decoder.boundary(3.0) == pytest.approx(4.0)
    assert decoder.advance(4.0) == [] and decoder.at == pytest.approx(4.0)
    assert decoder.advance(decoder.next_end) == [a] and decoder.at == pytest.approx(6.0)
    assert decoder.drain() == [(pytest.approx(10.0), b), (pytest.approx(13.0), c)]
    assert len(decoder) == 0


def test_a_clock_that_stands_still_says_so():
    with pytest.raises(RuntimeError, match="everybody waits at 0 s"):
        Clock().run(lambda: False)


def test_an_engine_looks_for_weights_at_a_poll():
    """News come in the middle of a step; weights are pulled from the end of the poll of 0.2 s on, and then applied."""
    clock, log = Clock(), []
    rows = [Row(SampleId(0, 0, 0), Bound(0), 100)]
    job = SimpleNamespace(
        clock=clock,
        costs=Costs(step=0.03, pull=1.0, apply=0.5),
        setup=setup("async", slots=4),
        announced=-1,
        take=lambda engine, most: [rows.pop()] if rows else [],
        done=lambda row, version: log.append((clock.now, version)),
    )
    one = Engine(job, 0)

    def announce(version):
        job.announced = version
        one.wake()

    one.at(0.0)
    clock.at(1.0, announce, 0)  # pulled by 2.0, in by 2.5
    clock.at(3.01, announce, 1)  # 17 steps by then; seen at 3.1 or at the next step, pulled a second later
    clock.run(lambda: bool(log))
    assert one.work.version == 1
    assert log == [(pytest.approx(2.5 + 100 * 0.03 + 0.5), 0)]
    assert one.idle["version"] == pytest.approx(2.0)


def test_lognormal_lengths_have_the_mean_that_was_asked_for():
    rng = Random(1)
    for mean, sigma in ((100, 0.0), (200, 0.8), (400, 1.0)):
        length = lognormal(mean, sigma, 512)
        drawn = [length(0, 0, rng) for _ in range(5000)]
        assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.04) and max(drawn) <= 512
    with pytest.raises(ValueError, match="a mean of 600 tokens is not between 1 and the limit of 512"):
        lognormal(600, 1.0, 512)
    assert sigma_of(100, 100, 64, 512) == pytest.approx(0, abs=1e-6)
    length = lognormal(100, 0.6, 10**6)
    drawn = [max(length(0, 0, rng) for _ in range(64)) for _ in range(400)]
    assert sigma_of(100, sorted(drawn)[200], 64, 10**6) == pytest.approx(0.6, rel=0.05)
