"""Jobs that train adapters: agreement with the engines, checkpoints that hold only factors, and resumes."""

import math

import pytest
import torch
from test_async_loop import ASYNC, STRICT
from test_dpo_loop import dpo  # noqa: F401
from test_torch_dist_loop import ANY_LAYOUT, EP2, PP2, check_another_layout, check_resumes

from mindspeed_rl_plugin.checkpoints.checkpoint_files import read_state
from mindspeed_rl_plugin.checkpoints.dist_files import DistFiles

LORA = ("--rl-lora-rank", "4", "--rl-lora-alpha", "8", "--lr", "2e-2")
TP2 = ("--tensor-model-parallel-size", "2", "--rl-generate-tp", "1", "--rl-verify-weights")
GATHERED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
SHARED = ("--rl-max-tokens-per-microbatch", "64", "--rl-share-prompts")
RECOMPUTED = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
SAVED = ("--train-iters", "4", "--save-interval", "2", "--ckpt-format")
MOVED = 1e-6  # nats, least KL to the reference after an update


def test_tp2_with_the_distributed_optimizer_shared_prompts_and_a_resume_from_torch_dist(job, arithmetic):
    """The reference is the model without adapters, also after a resume."""
    evaluated = ("--rl-eval-data", str(arithmetic / "heldout.jsonl"), "--rl-eval-every", "2")
    run = job(*SAVED, "torch_dist", *TP2, *LORA, *GATHERED, *SHARED, *evaluated)
    run.stop_at(2)
    files = DistFiles(run.save / "iter_0000002")
    names = [name for name in files.tensors() if not name.startswith("optimizer")]
    assert names and all(name.startswith("rl_lora.model.layers.") for name in names)
    result = run.run()
    assert "training resumes from" in result.log
    result.check_agreement(4, MOVED)
    assert [line["iteration"] for line in result.evaluations] == [0, 2, 4]
    assert read_state(str(run.save), 4)[0]["loop"]["adapter"]["--rl-lora-rank"] == 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("split, model", [(EP2, "moe_model"), (PP2, "dense_model")], ids=["MoE-EP2", "PP2-tied"])
def test_a_resume_is_the_uninterrupted_run(job, request, split, model):
    more = (*LORA, *ANY_LAYOUT, *RECOMPUTED)
    _, again, whole = check_resumes(job, *split, at=(3,), more=more, model=request.getfixturevalue(model))
    if split == PP2:
        check_another_layout(again, whole, PP2[0], "1")


@pytest.mark.slow
def test_the_bias_of_a_router_does_not_move(job, latent_model):
    """No weight does without a learning rate. Adapters of attention only."""
    still = ("--lr", "0", "--rl-lora-targets", "o_proj")
    result = job("--train-iters", "3", *EP2, *LORA, *still, "--rl-verify-weights", model=latent_model).run()
    assert "--moe-router-bias-update-rate 0.01 is 0 in this run" in result.log
    assert len({line["weights/digest"] for line in result.metrics}) == 1 < len(result.metrics)


@pytest.mark.slow
def test_files_of_ranks_hold_factors_and_other_adapters_are_refused(job, moe_model):
    spread = (
        *EP2,
        "--rl-generate-tp",
        "2",
        "--rl-generate-ep",
        "2",
        "--rl-router-replay",
        "rollout",
        "--rl-verify-weights",
    )
    run = job(*SAVED, "torch", *spread, *LORA, model=moe_model)
    run.stop_at(2)
    (file, *_) = sorted((run.save / "iter_0000002").glob("*/model_optim_rng.pt"))
    state = torch.load(file, weights_only=False)["model"]
    assert state and all(name.startswith("rl_lora.") for name in state)
    assert any("/experts/" in name for name in state)
    for flags in (("--rl-lora-rank", "8"), ("--rl-lora-alpha", "4"), ("--rl-lora-targets", "q_proj")):
        own, run.extra = run.extra, (*run.extra, *flags)
        assert f"the flags give --rl-lora-rank {8 if flags[1] == '8' else 4} " in run.fail().log
        run.extra = own
    result = run.run()
    result.check_agreement(4, MOVED)
    other = job("--train-iters", "4", *EP2, "--load", str(run.save), model=moe_model, name="other")
    assert "holds adapters only (--rl-lora-rank)" in other.fail().log


@pytest.mark.slow
def test_engines_apart_and_bfloat16(job):
    """Engines get merged weights of each version."""
    result = job("--train-iters", "4", *ASYNC, *STRICT, *LORA, "--bf16", ranks=2).run()
    lines = result.metrics
    assert lines[0]["ratio/mean"] == 1 and 0 < max(line.get("logp_diff/mean", 0) for line in lines) < 0.02
    assert all(line["kl/ref"] > 1e-5 for line in lines[1:])


@pytest.mark.slow
def test_pairs(dpo):  # noqa: F811
    """Their reference is the model without adapters."""
    lines = dpo("--train-iters", "12", *LORA).run().metrics
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and abs(lines[0]["dpo/margin"]) < 1e-4
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.003 and lines[-1]["dpo/margin"] > 0.005
