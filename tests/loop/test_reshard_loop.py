"""The modes of the reshard in the real loop, under late copies and poisoned memory, and weights that are no numbers."""

import os
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PRETRAIN = TESTS.parent / "examples" / "pretrain_gpt.py"

# Runs pretrain_gpt.py where a copy of training state comes late and what is not waited for reads as NaN.
HOSTILE = f"""
import runpy, sys
sys.path.insert(0, {str(TESTS / "weights")!r})
import hostile
hostile.install()
runpy.run_path({str(PRETRAIN)!r}, run_name="__main__")
"""

# Runs it until iteration 3, in which rank 1 writes a NaN into a weight after the update.
BROKEN = """
import os, runpy
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
forward, models, steps = GPTModel.forward, [], []
step = DistributedOptimizer.step_with_ready_grads

def remember(self, *args, **named):
    models[:] = [self]
    return forward(self, *args, **named)

def breaking(self):
    steps.append(step(self))
    if len(steps) == 3 and os.environ["RANK"] == "1":
        dict(models[0].named_parameters())["decoder.layers.1.mlp.linear_fc2.weight"].data[3, 4] = float("nan")
    return steps[-1]

GPTModel.forward, DistributedOptimizer.step_with_ready_grads = remember, breaking
runpy.run_path({script!r}, run_name="__main__")
"""

# Rollouts of two optimizer steps, of which the second is followed by a publication.
APART = ("--rl-schedule", "async", "--rl-generators", "1", "--rl-correction", "truncate", "--rl-rollout-prompts", "8")


@pytest.mark.parametrize("mode", ["allgather", pytest.param("stream", marks=pytest.mark.slow)])
def test_modes_under_late_copies_and_poison(job, tmp_path, mode):
    script = tmp_path / "hostile.py"
    script.write_text(HOSTILE)
    layout = ("--tensor-model-parallel-size", "2", "--rl-generate-tp", "1", "--rl-swap", "params,grads,optimizer")
    # Weights as large as a trained model's, where another rotary embedding shows.
    layout += ("--init-method-std", "0.1", "--rotary-base", "1000000", "--norm-epsilon", "1e-6")
    more = ("--rl-verify-weights", "--rl-reshard", mode, "--rl-reshard-bucket-mb", "1", "--rl-old-logprobs", "auto")
    more += ("--rl-pack-sequences", "--rl-max-tokens-per-microbatch", "48")  # which only slow jobs do else
    result = job("--train-iters", "4", "--rl-temperature", "0.8", *more, *layout, script=script).run()
    result.check_agreement(4)
    for line in result.metrics:
        assert "seconds/logp_old" not in line, "a rollout of one step needs no pass for them"
        received, temporary = line["reshard/bytes_received"], line["reshard/temporary_bytes"]
        if mode == "allgather":
            assert temporary > received > 0  # each rank receives half of the model, and the buffer holds all of it
        else:
            assert 0 < temporary <= 2 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saves", "flags"),
    [("2", ()), ("3", ()), ("3", APART)],
    ids=["found by the reshard", "found by the checkpoint", "found by a checkpoint between two publications"],
)
def test_a_weight_that_is_no_number_ends_the_run_before_the_engine_and_before_a_checkpoint(job, tmp_path, saves, flags):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(script=str(PRETRAIN)))
    common = ("--train-iters", "6", "--save-interval", saves, "--tensor-model-parallel-size", "2", *flags)
    broken = job(*common, script=script, ranks=3 if flags else 2)
    result = broken.fail()
    when = "after 3 updates" if saves == "2" else "before a checkpoint"
    message = f"decoder.layers.1.mlp.linear_fc2.weight of trainer rank 1 holds NaN or infinity {when}"
    assert message in result.log and "model.layers.1.mlp.down_proj.weight [64, 128)" in result.log
    tracker = broken.save / "latest_checkpointed_iteration.txt"
    assert (tracker.read_text().strip() if tracker.exists() else None) == ("2" if saves == "2" else None)
    assert not os.path.exists(broken.save / "iter_0000004")
    if saves == "2":
        broken.script = PRETRAIN
        again = broken.run()
        assert "training resumes from" in again.log
        assert [line["iteration"] for line in again.metrics] == [1, 2, 3, 4, 5, 6]
