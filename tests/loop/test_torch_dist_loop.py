"""`--ckpt-format torch_dist`, Megatron's default: a run starts from it, saves it and resumes from it, bitwise."""

import re

import pytest

from mindspeed_rl_plugin.checkpoints.checkpoint_files import TRACKER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS = ("--ckpt-format", "torch_dist", "--train-iters", "4", "--rl-rollout-prompts", "8")
TP2, PP2 = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
EP2 = ("--expert-model-parallel-size", "2")
# Of core 0.16 and later: optimizer state that another tensor or pipeline layout can load.
ANY_LAYOUT = ("--dist-ckpt-optim-fully-reshardable",)
PPO = ("--rl-algorithm", "ppo", "--rl-critic-lr", "3e-3", "--rl-critic-warmup", "2", "--rl-kl-reward-coef", "0.05")


def differing(result, expected: list[dict]) -> list[tuple]:
    """Iteration, name and both values of what differs from an uninterrupted run."""
    lines = result.numbers
    assert len(lines) == len(expected)
    pairs = zip(lines, expected, strict=True)
    return [(b["iteration"], n, a.get(n), b.get(n)) for a, b in pairs for n in a | b if a.get(n) != b.get(n)]


def check_resumes(job, *split: str, at: tuple[int, ...], more: tuple[str, ...] = (), **model):
    """The job's result: it starts from a checkpoint, and resumed `at` each iteration it goes on as it did.

    The checkpoint is that of a former run's second iteration. Returns the former run, the job and its first result.
    """
    first = job(*STEPS[:2], "--train-iters", "2", "--save-interval", "2", *split, name="first", **model)
    first.run(600)
    loads = ("--load", str(first.save), "--lr", "3e-3", "--rl-kl-loss-coef", "0.05")
    again = job(*STEPS, "--save-interval", str(at[0]), *split, *more, *loads, name="again", **model)
    whole = again.run(600)
    expected = whole.numbers
    assert len({line.get("loss") for line in expected}) > 1, "nothing is trained"
    for iteration in at:
        (again.save / TRACKER).write_text(str(iteration))
        resumed = again.run(600)
        assert f"at iteration {iteration}, optimizer and RL state included" in resumed.log
        assert "reference weights loaded from" in resumed.log
        assert differing(resumed, expected) == []
    return first, again, whole


def check_another_layout(again, whole, *layout: str) -> dict:
    """Resume a job of `check_resumes`, with ANY_LAYOUT, in another layout. The metrics that are nearly the same."""
    expected = whole.metrics[3]
    (again.save / TRACKER).write_text("3")
    again.extra = (*again.extra, *layout)
    moved = again.run(600).metrics[3]
    same = [name for name in expected if name.startswith(("loss", "kl/", "critic/", "grad_norm", "entropy"))]
    of_same = {name: expected[name] for name in same}
    assert {name: moved[name] for name in same} == pytest.approx(of_same, rel=1e-3, abs=1e-6)
    return of_same


@pytest.mark.parametrize(
    "split, model, change",
    [
        pytest.param(EP2, "moe_model", ("", ""), id="MoE-EP2"),
        pytest.param(PP2, "dense_model", ("--untie-embeddings-and-output-weights", ""), id="PP2-tied"),
    ],
)
def test_a_resume_is_the_uninterrupted_run(job, request, split, model, change):
    check_resumes(job, *split, at=(3,), model=request.getfixturevalue(model).replace(*change))


@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
def test_a_resume_takes_other_rates_or_keeps_its_own(job, training_flags, ckpt_format):
    """As its refusal says, for policy and critic; with torch also where no distributed optimizer is."""
    train = training_flags if ckpt_format == "torch_dist" else training_flags.replace("--use-distributed-optimizer", "")
    more = ("--ckpt-format", ckpt_format, "--train-iters", "3", "--save-interval", "2", "--rl-rollout-prompts", "4")
    made = job(*more, *PPO[:4], "--weight-decay", "0.1", train=train)
    whole = made.run(600)
    (made.save / TRACKER).write_text("2")
    made.extra += ("--lr", "5e-4", "--min-lr", "1e-4", "--weight-decay", "0.2", "--adam-beta2", "0.5")
    made.extra += ("--rl-critic-lr", "1e-3")
    advised = re.search(r"Give (--\S+) to go on with the new values, or (--\S+) to keep", made.fail(600).log)
    flags = made.extra
    for flag, rates in zip(advised.groups(), [(5e-4, 1e-3), (1e-3, 3e-3)], strict=True):
        (made.save / TRACKER).write_text("2")
        made.extra = (*flags, flag)
        resumed = made.run(600)
        last = resumed.metrics[-1]
        assert (last["lr"], last["critic/lr"]) == rates
    assert differing(resumed, whole.numbers) == []


def test_a_run_starts_from_what_import_wrote(job, imported, tmp_path):
    """`import` writes `--ckpt-format torch`; the run saves torch_dist, and its resume still loads the reference."""
    model, loads, _ = imported("mistral", "--train", "tp2")
    run = job(*STEPS, *loads, "--rl-kl-loss-coef", "0.05", "--save-interval", "2", model=model)
    whole = run.run(600)
    assert f"training starts from the weights of {tmp_path / 'imported'}" in whole.log
    assert whole.metrics[0]["kl/ref"] < 1e-8 < whole.metrics[-1]["kl/ref"]
    assert (run.save / "iter_0000002" / "metadata.json").is_file()
    (run.save / TRACKER).write_text("2")
    resumed = run.run(600)
    assert "at iteration 2, optimizer and RL state included" in resumed.log
    assert differing(resumed, whole.numbers) == []


def test_a_critic_too_is_saved_resumed_and_loaded(job):
    """Resumed while the critic warms up, when the policy's optimizer has no state, after it has, and then in another
    layout too."""
    first, again, whole = check_resumes(job, *TP2, at=(1, 3), more=(*PPO, *ANY_LAYOUT))
    assert whole.metrics[0]["critic/value_mean"] == 0.0
    more = (*STEPS[:2], *PPO[:2], *TP2, "--train-iters", "1")
    former = again.save / "iter_0000004" / "critic"
    result = job(*more, "--rl-critic-load", str(former), name="critic").run(600)
    assert f"the critic starts from the weights of {former / 'iter_0000004'}\n" in result.log
    assert result.metrics[0]["critic/value_mean"] != 0.0
    result = job(*more, "--rl-critic-load", str(first.save), name="fresh").run(600)
    assert "with a fresh value head" in result.log and result.metrics[0]["critic/value_mean"] == 0.0
    moved = check_another_layout(again, whole, "--tensor-model-parallel-size", "1")
    assert sum(name.startswith("critic/") for name in moved) > 3
