"""The model of a run: closed forms without a tail, bounds, and what more of something must not make worse."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.loop.arithmetic import Arithmetic
from mindspeed_rl_plugin.loop.run_setup import Setup
from mindspeed_rl_plugin.tools.plan.simulate import simulate
from mindspeed_rl_plugin.tools.plan.virtual import Costs, Responses, lognormal, recorded

pytestmark = pytest.mark.quick

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


@pytest.mark.parametrize(("budget", "fragments"), [(10_000, 1), (550, 2)])
def test_a_prompt_that_is_shared_is_trained_once_in_each_micro_batch(budget, fragments):
    prompt, ranks = 300, 2
    rows = setup("sync", ranks, 1, prompt_tokens=prompt, limit=TOKENS)
    rows = dataclasses.replace(rows, sizes=dataclasses.replace(rows.sizes, max_tokens=budget))
    every, shared = (simulate(dataclasses.replace(rows, shared=on), COSTS, ALIKE).rollout for on in (False, True))
    computed = PROMPTS * (fragments * prompt + MEMBERS * TOKENS)
    assert every - shared == pytest.approx(0.001 * (ROWS * (prompt + TOKENS) - computed) / ranks)


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


def test_dynamic_sampling_costs_more_groups():
    some = dataclasses.replace(tailed(), informative=0.5)
    for schedule in ("sync", "async"):
        plain, dynamic = (simulate(setup(schedule, rounds=n), COSTS, some, rollouts=15) for n in (0, 9))
        assert dynamic.rollout > plain.rollout * 1.2
        assert dynamic.tokens < plain.tokens
