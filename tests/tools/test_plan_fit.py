"""Calibration: known costs come back out of measurements that they made."""

from __future__ import annotations

import dataclasses
import json
from random import Random

import pytest

from mindspeed_rl_plugin.loop.arithmetic import Arithmetic
from mindspeed_rl_plugin.loop.run_setup import Setup
from mindspeed_rl_plugin.tools.plan.fit import USUAL_RATIO, Observed, fit, observed
from mindspeed_rl_plugin.tools.plan.simulate import simulate
from mindspeed_rl_plugin.tools.plan.virtual import Costs, Responses, lognormal

pytestmark = pytest.mark.quick

PROMPTS, MEMBERS, PROMPT_TOKENS = 16, 4, 20
TRUE = Costs(step=0.02, sequence=0.001, token=0.0004, old_token=0.0001, rollout=0.3, reshard=0.7)
SIZES = Arithmetic(PROMPTS, MEMBERS, PROMPTS * MEMBERS, 1, 4, 1, 1, 100)


def record(folder, setup, costs=TRUE, rollouts=12, spread=0.3, seed=0):
    """The files of a run with one engine and one trainer, by closed forms; its setup is that of an older version."""
    rng, lines, sizes = Random(seed), [], setup.sizes
    for number in range(rollouts):
        length = lognormal(80 * (1 + spread * rng.random()), 0.7, 400)
        lengths = [length(0, 0, rng) for _ in range(sizes.samples)]
        tokens = sum(lengths) + sizes.samples * PROMPT_TOKENS
        stages = {
            "reshard": costs.reshard,
            "transfer": costs.reshard / 2,
            "generate": costs.step * max(lengths) + costs.sequence * sum(lengths),
            "reward": 0.8,
            "update": costs.token * tokens,
            "prompts": 0.2,
            "advantage": 0.05,
        }
        if setup.old_logps:
            stages["logp_old"] = costs.old_token * tokens
        stages["iteration"] = sum(stages.values()) - costs.reshard / 2 + 0.05
        lines.append(
            {
                "kind": "train",
                "iteration": number + 1,
                "response/length_mean": sum(lengths) / len(lengths),
                "response/length_max": max(lengths),
                "reward/worker_seconds": 0.025,
                "tokens_per_second_total": tokens / stages["iteration"],
                **{f"seconds/{name}": value for name, value in stages.items()},
            }
        )
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.json").write_text(json.dumps({"setup": dataclasses.asdict(setup) | {"together": 1}}))
    return folder


def test_known_costs_come_back(tmp_path):
    run = observed(record(tmp_path, Setup(SIZES, "sync", graders=2, limit=400)))
    assert run.setup.prompt_tokens == PROMPT_TOKENS
    costs = fit([run])
    assert costs.step == pytest.approx(TRUE.step, rel=0.1)
    assert costs.sequence == pytest.approx(TRUE.sequence, rel=0.3)
    assert costs.token == pytest.approx(TRUE.token, rel=0.05)
    assert costs.old_token == pytest.approx(costs.token / 3)  # no run has it
    assert costs.rollout == pytest.approx(0.3) and costs.reshard == pytest.approx(0.7)
    assert run.calls == (0.025, 1.0), "as runs of older versions say it"
    again = simulate(run.setup, costs, run.responses)
    assert again.iteration == pytest.approx(run.iteration - 0.8, rel=0.05)


def test_rollouts_that_are_all_alike_take_the_usual_ratio(tmp_path):
    alike = Responses(lambda row, member, rng: 100)
    run = dataclasses.replace(observed(record(tmp_path, Setup(SIZES, "sync"))), responses=alike)
    same = [{**r, "response/length_max": 400.0, "response/length_mean": 100.0} for r in run.rollouts]
    costs = fit([dataclasses.replace(run, rollouts=same)])
    assert costs.sequence == pytest.approx(USUAL_RATIO * costs.step)


def test_engines_apart_are_fitted_by_their_tokens(tmp_path):
    two_steps = dataclasses.replace(SIZES, engines=2, global_batch=SIZES.samples // 2)  # so old log-probs take a pass
    setup = Setup(two_steps, "async", prompt_tokens=PROMPT_TOKENS, slots=16)
    true = dataclasses.replace(TRUE, sequence=USUAL_RATIO * TRUE.step)
    responses = Responses(lognormal(80, 0.7, 400))
    outcome = simulate(setup, true, responses)
    mean = {
        "engines/tokens_per_second": outcome.tokens / 2,
        "idle/engines_back_pressure": outcome.engines["back-pressure"],
        "idle/engines_version": outcome.engines["version"],
        "seconds/update": true.token * 64 * (80 + PROMPT_TOKENS),
        "seconds/logp_old": true.old_token * 64 * (80 + PROMPT_TOKENS),
        "seconds/iteration": outcome.rollout,
        "seconds/generate": outcome.rollout * outcome.trainers["starved"],
        "seconds/publish": 0.4,
        "weights/pull_seconds": 0.3,
        "weights/pause_seconds": 0.2,
    }
    costs = fit([Observed(setup, [mean], responses)])
    assert costs.step == pytest.approx(true.step, rel=0.1)
    assert costs.token == pytest.approx(true.token, rel=0.1) and costs.old_token == pytest.approx(0.0001, rel=0.1)
    assert (costs.publish, costs.pull, costs.apply) == (0.4, 0.3, 0.2)
    assert simulate(setup, costs, responses).rollout == pytest.approx(outcome.rollout, rel=0.1)


def test_what_cannot_be_read_is_said(tmp_path):
    setup = Setup(SIZES, "sync")
    with pytest.raises(ValueError, match="has 2 rollouts, but the first 2 are not counted"):
        observed(record(tmp_path, setup, rollouts=2))
    whole = (record(tmp_path, setup, rollouts=5) / "metrics.jsonl").read_text().splitlines()
    last = {name: value for name, value in json.loads(whole[-1]).items() if name != "tokens_per_second_total"}
    (tmp_path / "metrics.jsonl").write_text("\n".join([*whole[:-1], json.dumps(last)]) + "\n")
    assert len(observed(tmp_path).rollouts) == 2  # a rollout that is not whole does not count
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="run.json has no 'setup'"):
        observed(tmp_path)
