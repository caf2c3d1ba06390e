"""PPO end to end: the critic beside the policy in every layout, its checkpoint, its warm-up."""

import math

import pytest
import torch

from mindspeed_rl_plugin.checkpoints.checkpoint_files import TRACKER

PPO = ("--rl-algorithm", "ppo", "--rl-critic-lr", "3e-3")


def check_side_by_side(lines: list[dict]) -> None:
    """Critic and policy train in each of two rollouts of two steps."""
    first, second, third, _ = lines
    for line in lines:
        assert line["grad_norm"] > 1e-3 and line["critic/grad_norm"] > 1e-4
        assert all(math.isfinite(v) for v in line.values() if isinstance(v, float))
    assert first["ratio/max"] == third["ratio/max"] == 1.0 and second["ratio/max"] > 1.0
    # A fresh head says 0 everywhere; then it says something.
    assert first["critic/value_mean"] == 0.0 and abs(first["critic/explained_variance"]) < 1e-5
    assert third["critic/value_mean"] != 0.0 and "seconds/values" in first and "seconds/values" not in second


def test_critic_and_policy_train_side_by_side_until_held_out_accuracy_rises(job, arithmetic, tmp_path):
    """A short run of the smallest task, to begin with a digit; tests/examples/test_learning.py has every preset."""
    (tmp_path / "digit.py").write_text("def grade(response):\n    return float(response[:1].isdigit())\n")
    task = ("--rl-reward", f"{tmp_path / 'digit.py'}:grade", "--rl-max-response-length", "2")
    sizes = ("--global-batch-size", "64", "--micro-batch-size", "32", "--rl-samples-per-prompt", "8")
    sizes += ("--rl-rollout-prompts", "16")
    held_out = ("--rl-eval-data", str(arithmetic / "heldout.jsonl"), "--rl-eval-every", "100")
    result = job(*PPO, *task, *sizes, *held_out, "--lr", "3e-3", "--train-iters", "12").run()
    check_side_by_side(result.metrics[:4])
    before, after = (line["eval/accuracy"] for line in result.evaluations)
    assert before <= 0.6 and after >= before + 0.35, (before, after)


@pytest.mark.slow
def test_a_critic_is_saved_and_resumed_exactly(job):
    """In the middle of a rollout, and while the critic warms up: during it the policy stays where it is."""
    common = (*PPO, "--train-iters", "4", "--rl-rollout-prompts", "8", "--save-interval", "1")
    common += ("--rl-critic-warmup", "2")
    expected = job(*common, name="whole").run()
    cut = job(*common, name="cut")
    first = cut.stop_at(1)
    assert "the critic starts from the policy's weights, with a fresh value head" in first.log
    actual = cut.run()
    assert "iter_0000001/critic, its optimizer included" in actual.log
    same = [k for k in expected.metrics[-1] if k.startswith("critic/")] + ["lr", "version"]
    assert [[line.get(k) for k in same] for line in actual.metrics] == [
        [line.get(k) for k in same] for line in expected.metrics
    ]
    warm, trained = expected.metrics[:2], expected.metrics[2:]
    assert all("loss/policy" not in line and "grad_norm" not in line for line in warm)
    assert all(line["grad_norm"] > 1e-3 for line in trained)
    # The reference is the first policy: nothing moved before the third iteration.
    assert trained[0]["kl/ref"] < 1e-8 < trained[1]["kl/ref"]
    assert [line["loss/policy"] for line in actual.metrics[2:]] == [line["loss/policy"] for line in trained]


@pytest.mark.slow
def test_without_saved_optimizers_a_resume_goes_on_with_weights_schedule_and_critic(job):
    """Each rank of TP2 x PP2 leaves them out. The first line after the resume shows what the weights, the rollout and
    the schedule are; the one behind it, that Adam's moments are new."""
    split = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
    decay = ("--lr-decay-style", "linear", "--lr-decay-iters", "10", "--no-save-optim", "--no-save-rng")
    run = job(*PPO, *split, *decay, "--train-iters", "3", "--save-interval", "1", "--rl-rollout-prompts", "8", ranks=4)
    expected = run.run(280).metrics
    for folder in (run.save / "iter_0000001", run.save / "iter_0000001" / "critic" / "iter_0000001"):
        saved = [torch.load(path, weights_only=False) for path in folder.glob("*/model_optim_rng.pt")]
        assert len(saved) == 4 and not any({"optimizer", "rng_state"} & state.keys() for state in saved)
        assert not list(folder.glob("*/distrib_optim.pt"))
    (run.save / TRACKER).write_text("1")
    resumed = run.run(280)
    assert "at iteration 1, RL state included" in resumed.log
    assert resumed.log.count("--no-save-optim left a part out") == resumed.log.count("--no-save-rng left a part") == 1
    first, second, third = resumed.metrics
    names = ("loss", "grad_norm", "critic/loss", "critic/grad_norm", "critic/value_mean", "kl/old", "lr")
    assert [second[name] for name in names] == [expected[1][name] for name in names]
    assert first["grad_norm"] != second["grad_norm"] and third["lr"] == expected[2]["lr"] < second["lr"]
    assert third["grad_norm"] != expected[2]["grad_norm"] and third["logp_diff/max"] < 2e-5


@pytest.mark.slow
def test_a_critic_is_loaded_from_a_former_run_or_a_language_model(job):
    """The first keeps its head; the output layer of the second is none, so that critic starts with a fresh one."""
    former = job(*PPO, "--train-iters", "2", "--save-interval", "2", name="former")
    expected = former.run(600).metrics
    folder = former.save / "iter_0000002" / "critic"
    # So small a rate that the checkpoint after one step still holds what was loaded.
    more = (*PPO[:2], "--rl-critic-lr", "1e-12", "--train-iters", "1", "--save-interval", "1")
    again = job(*more, "--rl-critic-load", str(folder), name="again")
    result = again.run(600)
    assert f"the critic starts from the weights of {folder / 'iter_0000002'}\n" in result.log
    assert result.metrics[0]["reward/mean"] == expected[0]["reward/mean"], "policy and rollout are the former run's"
    assert result.metrics[0]["critic/value_mean"] != 0.0 == expected[0]["critic/value_mean"]
    theirs = critic_weights(folder / "iter_0000002")
    ours = critic_weights(again.save / "iter_0000001" / "critic" / "iter_0000001")
    assert theirs["output_layer.weight"].abs().max() > 0 and theirs.keys() == ours.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-9)

    fresh = job(*more, "--rl-critic-load", str(former.save), name="fresh").run(600)
    assert f"the weights of {former.save / 'iter_0000002'}, with a fresh value head" in fresh.log
    assert fresh.metrics[0]["critic/value_mean"] == 0.0 and fresh.metrics[0]["critic/grad_norm"] > 1e-4


def critic_weights(folder):
    saved = torch.load(folder / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)["model"]
    return {name: weight.float() for name, weight in saved.items() if isinstance(weight, torch.Tensor)}
