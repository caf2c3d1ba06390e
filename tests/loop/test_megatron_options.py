"""The loop under options of Megatron that change how weights, gradients and steps come about."""

import pyarrow.parquet as pq
import pytest

AGREEMENT = 2e-5  # nats, fp32: log-probs of the engine against the trainer's
# Nats, bf16. An untrained model's logits are below 1 (initial std 0.02 x 8 = sqrt(hidden), times a normal), and bf16
# rounds them by up to 2^-9 on each side; hidden states rounded before them add as much again: 4 x 2^-9 for the
# worst token. One update at the learning rate of these tests moves log-probs by 0.1 and more.
AGREEMENT_BF16 = 2**-7
OVERLAP = ("--overlap-param-gather", "--overlap-grad-reduce")
SAME = ("loss", "kl/ref", "kl/old", "ratio/mean", "ratio/max", "clip_fraction", "grad_norm", "entropy", "logp_diff/max")


def measured(lines: list[dict]) -> list[list[float]]:
    """What two equal runs have bitwise in common."""
    return [[line[name] for name in SAME] for line in lines]


@pytest.mark.slow
def test_bf16_with_one_group_on_two_engines_and_failing_graders(job, arithmetic, tmp_path):
    """Fewer groups than ranks and engines, one evaluation prompt for two engines; failed grades count as zero."""
    grader = tmp_path / "grader.py"
    grader.write_text(
        "def grade(prompt, response, answer):\n"
        "    assert sum(map(ord, response)) % 3, 'a multiple of three'\n"
        "    return sum(map(ord, response)) % 5 / 4\n"
    )
    few = ("--rl-rollout-prompts", "1", "--rl-samples-per-prompt", "8", "--global-batch-size", "8")
    graded = ("--rl-reward", f"{grader}:grade", "--rl-reward-on-error", "zero")
    held_out = ("--rl-eval-data", str(arithmetic / "heldout.jsonl"), "--rl-eval-every", "1", "--rl-eval-prompts", "1")
    small = job("--bf16", "--train-iters", "3", "--rl-verify-weights", *few, *graded, *held_out).dumping()
    result = small.run()

    assert [line["ratio/mean"] for line in result.metrics] == [1.0, 1.0, 1.0]
    assert [line["ratio/max"] for line in result.metrics] == [1.0, 1.0, 1.0]
    worst = [line["logp_diff/max"] for line in result.metrics]
    assert max(worst) < AGREEMENT_BF16, worst
    assert min(worst) > 10 * AGREEMENT, f"{worst}: not bf16"
    assert result.metrics[0]["kl/ref"] == 0.0 and result.metrics[2]["kl/ref"] > 1e-4

    assert [line["eval/accuracy"] in (0.0, 1.0) for line in result.evaluations] == [True] * 4
    for epoch, line in enumerate(result.metrics):
        rows = pq.read_table(small.save / "dump" / f"rollout-{epoch:06d}.parquet").to_pylist()
        assert [(row["group"], row["member"]) for row in rows] == [(0, member) for member in range(8)]
        sums = [sum(map(ord, row["response"])) for row in rows]
        assert [row["reward"] for row in rows] == [s % 5 / 4 if s % 3 else 0.0 for s in sums]
        assert line["reward/errors"] == sum(s % 3 == 0 for s in sums)
        assert line["groups/dropped"] == 0.0 and line["trained/sequences"] == 8
    assert sum(line["reward/errors"] for line in result.metrics) > 0


@pytest.mark.slow
def test_evaluation_in_the_middle_of_a_rollout_changes_no_training(job, arithmetic):
    """The engine wakes between two optimizer steps of a rollout, with parameters that were not gathered yet."""
    common = ("--train-iters", "5", "--rl-rollout-prompts", "12", "--lr", "3e-3", *OVERLAP)
    held_out = ("--rl-eval-data", str(arithmetic / "heldout.jsonl"), "--rl-eval-every", "1", "--rl-eval-pass-k", "2")
    without = job(*common, name="without").run()
    evaluated = job(*common, *held_out, name="with").run()
    assert [line["iteration"] for line in evaluated.evaluations] == [0, 1, 2, 3, 4, 5]
    assert without.metrics[2]["ratio/max"] > 1.0, "the third step must not begin a rollout"
    assert measured(evaluated.metrics) == measured(without.metrics)


@pytest.mark.slow
def test_resume_in_the_second_pass_of_a_rollout_under_bf16(job):
    common = ("--bf16", "--train-iters", "6", "--rl-rollout-prompts", "8", "--rl-ppo-epochs", "2", "--lr", "3e-3")
    whole = job(*common, name="whole").dumping()
    expected = whole.run()
    # Four steps per rollout: the third opens the second pass.
    cut = job(*common, "--save-interval", "3", name="cut").dumping()
    cut.stop_at(3)
    actual = cut.run()
    assert "training resumes from" in actual.log
    assert expected.metrics[2]["ratio/max"] > 1.0 and expected.metrics[4]["ratio/max"] == 1.0
    assert measured(actual.metrics) == measured(expected.metrics)
    for name in ("rollout-000000.parquet", "rollout-000004.parquet"):
        one, two = (pq.read_table(j.save / "dump" / name) for j in (whole, cut))
        assert one.equals(two), name


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["grpo", "dapo", "ppo --rl-kl-reward-coef 0"])
def test_old_logprobs_of_the_update_itself_train_the_same(job, preset):
    """One optimizer step per rollout: a pass for them changes nothing but the time; where they are read it is taken."""
    more = ("--rl-algorithm", *preset.split(), "--train-iters", "3", "--lr", "3e-3", "--rl-kl-loss-coef", "0.1")
    runs = {
        how: job(*more, "--rl-old-logprobs", how, name=how, ranks=1).run(timeout=400).metrics
        for how in ("auto", "pass")
    }
    assert measured(runs["auto"]) == measured(runs["pass"]) and len(runs["auto"]) == 3
    assert all("seconds/logp_old" in line for line in runs["pass"])
    assert not any("seconds/logp_old" in line for line in runs["auto"])
    two = job(*more, "--rl-old-logprobs", "auto", "--rl-rollout-prompts", "8", name="two", ranks=1).run(timeout=400)
    assert "seconds/logp_old" in two.metrics[0] and two.metrics[1]["ratio/max"] > 1.0
