"""Whole jobs with --rl-router-replay: the trainer takes the experts of an engine that chooses others."""

from pathlib import Path

import pytest
from jobs import AGREEMENT

REROUTED = Path(__file__).with_name("rerouted_script.py")
REPLAY = ("--rl-router-replay", "rollout")
LAYOUTS = {
    "EP2": "--expert-model-parallel-size 2 --rl-generate-tp 2 --rl-generate-ep 2",
    "TP2SP, full recompute": "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "PP2, trees": "--pipeline-model-parallel-size 2 --rl-share-prompts --rl-max-tokens-per-microbatch 64",
}


def run(job, monkeypatch, model, *flags, updates=2):
    monkeypatch.setenv("BIAS", "0.02")
    return job("--train-iters", str(updates), *flags, script=REROUTED, model=model).run(400)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_agree_although_the_engine_chooses_other_experts(job, monkeypatch, moe_model, layout):
    result = run(job, monkeypatch, moe_model, *LAYOUTS[layout].split(), *REPLAY)
    result.check_log_probs(2)
    for line in result.metrics:
        assert line["ratio/mean"] == line["ratio/max"] == 1.0 and line["grad_norm"] > 1e-3
        assert line["router/differ"] == line["router/differ/2"] > 0.02


@pytest.mark.slow
def test_without_replay_they_do_not(job, monkeypatch, moe_model):
    result = run(job, monkeypatch, moe_model, *LAYOUTS["EP2"].split())
    assert all(line["logp_diff/max"] > 10 * AGREEMENT for line in result.metrics)
