"""Whole jobs with --rl-router-replay: the trainer takes the experts of an engine that chooses others."""

from pathlib import Path

import pytest
from jobs import AGREEMENT, ROOT
from test_lora_loop import LORA

from mindspeed_rl_plugin.tools.doctor.nodes import Nodes
from mindspeed_rl_plugin.tools.doctor.result import PASS
from mindspeed_rl_plugin.tools.doctor.train_checks import TrainBench, compare_launch
from mindspeed_rl_plugin.tools.rehearse.entry_script import Entry

REROUTED = Path(__file__).with_name("rerouted_script.py")
REPLAY = ("--rl-router-replay", "rollout")
APART = ("--rl-schedule", "async", "--rl-correction", "truncate", "--rl-generators")
LAYOUTS = {
    "EP2": "--expert-model-parallel-size 2 --rl-generate-tp 2 --rl-generate-ep 2",
    "TP2SP, full recompute": "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "PP2, trees": "--pipeline-model-parallel-size 2 --rl-share-prompts --rl-max-tokens-per-microbatch 64",
}


def run(job, monkeypatch, model, *flags, updates=2):
    monkeypatch.setenv("BIAS", "0.02")
    return job("--train-iters", str(updates), *flags, script=REROUTED, model=model).run(400)


def differing(result) -> float:
    """Mean share of slots in which the engine chose otherwise than the trainer would."""
    return sum(line["router/differ"] for line in result.metrics) / len(result.metrics)


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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("where", ["apart", "joined", "on Ray"])
def test_engines_elsewhere_tell_their_routes(request, job, joined, monkeypatch, moe_model, where):
    """Without lag. The one that joins chooses other experts; its job trains adapters. Generating ranks do not run the
    script."""
    if where == "on Ray":
        monkeypatch.setenv("RAY_ADDRESS", request.getfixturevalue("ray_cluster"))
    wanted = {"apart": "1", "joined": "0", "on Ray": "ray:1,device=cpu"}[where]
    flags = (*APART, wanted, "--rl-max-staleness", "0", "--rl-verify-weights", "--train-iters", "3", *REPLAY)
    monkeypatch.setenv("BIAS", "0.02")
    flags += ("--rl-wait-timeout", "300", *(LORA if where == "joined" else ()))
    running = job(*flags, model=moe_model, ranks=2 if where == "apart" else 1).dumping().start()
    guests = [joined(running).join()] if where == "joined" else []
    result = running.wait(400)
    assert result.code == 0 and all(guest.wait(90) == 0 for guest in guests), result.log[-4000:]
    result.check_log_probs(3)
    running.check_trained(12)
    for line in result.metrics:
        assert line["ratio/mean"] == line["ratio/max"] == 1.0 and line["grad_norm"] > 1e-3
    assert differing(result) > 0.01 if where == "joined" else differing(result) < 1e-3
    for row in running.dumped():
        assert len(row["routes"]) == 2 * (len(row["prompt_tokens"]) + row["response_length"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("inflight", ["keep", "recompute"])
def test_a_token_keeps_the_routes_with_which_it_was_sampled(job, joined, monkeypatch, moe_model, inflight):
    """Weights never change, but with each version of them the engines choose other experts. Where the first part of a
    response is computed again, its tokens have the routes from before. (Experts are in the last layer, so a log-prob
    depends on the routes of its own token.)"""
    monkeypatch.setenv("BIAS", "0.02")
    flags = (*APART, "0", "--rl-max-staleness", "2", "--rl-inflight", inflight, "--rl-max-response-length", "16")
    still = ("--rl-max-running", "7", "--lr", "0", "--min-lr", "0", "--train-iters", "8")
    running = job(*flags, *still, *REPLAY, model=moe_model, ranks=1).dumping().start()
    guest = joined(running).join("never, but slow")
    result = running.wait(400)
    assert result.code == 0 and guest.wait(90) == 0, result.log[-4000:]
    rows = running.dumped()
    gaps = [[abs(a - b) for a, b in zip(row["logp_rollout"], row["logp_old"], strict=True)] for row in rows]
    parted = [max(gap) for gap, row in zip(gaps, rows, strict=True) if len(row["segments"]) > 1]
    print(f"{len(parted)} of {len(rows)} rows have parts, which differ by {max(parted)}; all by {max(map(max, gaps))}")
    assert len(parted) > 10 and max(map(max, gaps)) < AGREEMENT
    assert differing(result) > 0.01


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("replay", [REPLAY, (*REPLAY, *LORA), ()], ids=["replay", "adapters", "none"])
def test_doctor_compares_a_launch_that_replays(job, moe_model, tmp_path, replay):
    """The engine chooses another expert for more than a quarter of the tokens, so that they part without replay."""
    words = job("--train-iters", "2", *LAYOUTS["EP2"].split(), *replay, model=moe_model).command(0, 0)
    arguments, env = words[words.index("mindspeed_rl_plugin") + 2 :], {"PYTHONPATH": str(ROOT), "BIAS": "0.1"}
    found = [*compare_launch(TrainBench(Nodes(2), tmp_path / "doctor", Entry(REROUTED, []), env, "float32", arguments))]
    print([(result.check, result.verdict, result.figure) for result in found])
    assert all(result.verdict == PASS for result in found) is bool(replay)
