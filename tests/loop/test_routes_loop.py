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


@pytest.mark.slow
def test_in_bfloat16_the_mismatch_at_least_halves(job, moe_model, plain_model):
    """KL of the engine's policy to the trainer's; that of a dense model of the same sizes is the floor."""
    flags = ("--train-iters", "2", "--bf16", "--rl-samples-per-prompt", "16", "--rl-rollout-prompts", "8")
    flags += ("--global-batch-size", "128", "--init-method-std", "0.1")
    jobs = {"without": (moe_model, ()), "with": (moe_model, REPLAY), "dense": (plain_model, ())}
    kl = {}
    for name, (model, more) in jobs.items():
        result = job(*flags, *more, model=model, name=name).run(400)
        kl[name] = [line["rollout/kl"] for line in result.metrics]
        assert ("experts in bfloat16" in result.log) is (name == "without")
    print(kl)
    assert all(dense > 0 for dense in kl["dense"])
    assert 2 * sum(kl["with"]) <= sum(kl["without"]), kl


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_old_replays_the_pass_of_old_log_probs(job, moe_model, layout):
    """Rollouts of two optimizer steps: in the first the router would choose the same, in the second some others."""
    two = ("--rl-rollout-prompts", "8", "--lr", "3e-2")
    result = job("--train-iters", "4", *two, *LAYOUTS[layout].split(), "--rl-router-replay", "old", model=moe_model)
    lines = result.run(400).metrics
    for first, second in zip(lines[::2], lines[1::2], strict=True):
        assert first["ratio/mean"] == first["ratio/max"] == 1.0 and first["router/differ"] == 0.0
        assert second["router/differ"] > 0.0
