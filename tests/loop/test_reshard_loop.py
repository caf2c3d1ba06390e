"""The modes of the reshard in the real loop, under late copies and poisoned memory, and weights that are no numbers."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PRETRAIN = TESTS.parent / "examples" / "pretrain_gpt.py"

# Runs pretrain_gpt.py where a copy of training state comes late and what is not waited for reads as NaN.
HOSTILE = f"""
import runpy, sys
sys.path.insert(0, {str(TESTS / "reshard")!r})
import hostile
hostile.install()
runpy.run_path({str(PRETRAIN)!r}, run_name="__main__")
"""

# Runs it until iteration 3, in which rank 1 writes a NaN into a weight, `where` it says.
BROKEN = """
import os, runpy, torch
from mindspeed_rl_plugin.loop.loop import Loop
from mindspeed_rl_plugin.reshard.resharder import stored_parameters
original = Loop._optimize

def after(self, done, call):
    result = original(self, done, call)
    if done + 1 == 3 and os.environ["RANK"] == "1":
        stored_parameters(call.args[2])["decoder.layers.1.mlp.linear_fc2.weight"][3, 4] = float("nan")
    return result

Loop._optimize = after
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    "mode", ["allgather", pytest.param("naive", marks=pytest.mark.slow), pytest.param("stream", marks=pytest.mark.slow)]
)
def test_modes_under_late_copies_and_poison(job, tmp_path, mode):
    script = tmp_path / "hostile.py"
    script.write_text(HOSTILE)
    layout = ("--tensor-model-parallel-size", "2", "--rl-generate-tp", "1", "--rl-swap", "params,grads,optimizer")
    more = ("--train-iters", "4", "--rl-verify-weights", "--rl-reshard", mode, "--rl-reshard-bucket-mb", "1", *layout)
    result = job(*more, script=script).run()
    assert len(result.metrics) == 4 and len({line["weights/digest"] for line in result.metrics}) == 4
    for line in result.metrics:
        assert line["logp_diff/max"] < 2e-5 and math.isfinite(line["grad_norm"]) and line["grad_norm"] > 1e-3
        received, temporary = line["reshard/bytes_received"], line["reshard/temporary_bytes"]
        assert received == line["reshard/bytes_sent"] > 0
        if mode == "allgather":
            assert temporary > received  # each rank receives half of the model, and the buffer holds all of it
        else:
            assert 0 < temporary <= 2 << 20


@pytest.mark.slow
@pytest.mark.parametrize("saves", ["2", "3"], ids=["found by the reshard", "found by the checkpoint"])
def test_a_weight_that_is_no_number_ends_the_run_before_the_engine_and_before_a_checkpoint(job, tmp_path, saves):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(script=str(PRETRAIN)))
    broken = job("--train-iters", "6", "--save-interval", saves, "--tensor-model-parallel-size", "2", script=script)
    broken.start()
    result = broken.wait(240)
    assert result.code != 0
    when = "after 3 updates" if saves == "2" else "before a checkpoint"
    told = f"decoder.layers.1.mlp.linear_fc2.weight of trainer rank 1 holds NaN or infinity {when}"
    assert told in result.log and "model.layers.1.mlp.down_proj.weight [64, 128)" in result.log
    tracker = broken.save / "latest_checkpointed_iteration.txt"
    assert (tracker.read_text().strip() if tracker.exists() else None) == ("2" if saves == "2" else None)
    assert not os.path.exists(broken.save / "iter_0000004")
    if saves == "2":
        broken.script = PRETRAIN
        again = broken.run()
        assert "training resumes from" in again.log
        assert [line["iteration"] for line in again.metrics] == [1, 2, 3, 4, 5, 6]
