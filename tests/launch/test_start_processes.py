"""Attaching, starting and resuming for real: Megatron, two ranks, its own checkpoints in format torch."""

import pickle
import re
import shutil

import pytest
import torch
from torch.utils._pytree import tree_flatten

from mindspeed_rl_plugin.checkpoints import checkpoint_files as files

LAYOUTS = {
    "distributed": ["--use-distributed-optimizer", "--bf16"],
    "tensor": ["--tensor-model-parallel-size", "2"],
}


@pytest.fixture(scope="module", params=["distributed", pytest.param("tensor", marks=pytest.mark.slow)])
def layout(request):
    return request.param


@pytest.fixture(scope="module")
def pretrained(megatron, layout):
    """Five pretraining iterations through the runner, without any RL flag."""
    return megatron(*LAYOUTS[layout], "--train-iters", "5", "--save", f"base-{layout}", "--save-interval", "5")


def test_without_rl_flags_pretraining_is_bitwise_unchanged(megatron, layout, pretrained):
    assert pretrained.events == [], "the loop is never asked"
    flags = [*LAYOUTS[layout], "--train-iters", "5", "--save", f"alone-{layout}", "--save-interval", "5"]
    alone = megatron(*flags, mode="--host-only")
    assert "mindspeed_rl_plugin.launch" not in alone.log and "[rl]" not in pretrained.log
    assert losses(alone) == losses(pretrained) and len(losses(alone)) == 5
    left, right = (megatron.folder / f"{kind}-{layout}" / "iter_0000005" for kind in ("alone", "base"))
    names = sorted(str(p.relative_to(left)) for p in left.rglob("*.pt"))
    assert names == sorted(str(p.relative_to(right)) for p in right.rglob("*.pt")) and names
    for name in names:
        assert content(left / name) == content(right / name), name


def test_resume_equals_the_uninterrupted_run(megatron, layout, pretrained):
    """Weights of --load only at first; then everything from --save, whatever the script says of loading."""
    folder = megatron.folder
    out, again = f"out-{layout}", f"again-{layout}"
    script = [*LAYOUTS[layout], "--load", f"base-{layout}", "--save-interval", "2"]
    script += ["--no-load-optim", "--no-load-rng", "--finetune"]
    whole = megatron(*script, "--save", out, rl=True)
    (start,) = whole.of("start")
    assert (start["kind"], start["iteration"]) == ("pretrained", 0)
    assert whole.of("reference")[0]["weights"] == start["weights"]
    assert [e["cursor"] for e in whole.of("step")] == [1, 2, 3, 4]
    assert whole.log.count("[rl] RL is attached to Megatron; wrapped functions: add_megatron_arguments, ") == 1
    assert whole.log.count("[rl] training starts from the weights of") == 1
    for iteration in (2, 4):
        assert files.has_state(str(folder / out), iteration)

    (folder / again).mkdir()
    shutil.copytree(folder / out / "iter_0000002", folder / again / "iter_0000002")
    (folder / again / files.TRACKER).write_text("2")
    resumed = megatron(*script, "--save", again, rl=True)
    assert [e["event"] for e in resumed.events] == ["before_model", "reference", "state", "start", "step", "step"]
    (start,) = resumed.of("start")
    assert (start["kind"], start["iteration"]) == ("resume", 2)
    assert resumed.of("reference") == whole.of("reference")
    assert start["weights"] == whole.of("step")[1]["weights"]
    assert resumed.of("step") == whole.of("step")[2:]
    unused = "--finetune, --no-load-optim, --no-load-rng, --load"
    assert f"({unused} of the command line: ignored, only the first start uses it)" in resumed.log
    for name in sorted(str(p.relative_to(folder / out)) for p in (folder / out / "iter_0000004").rglob("*.pt")):
        assert content(folder / out / name) == content(folder / again / name), name


@pytest.mark.slow
def test_without_saved_optimizer_the_schedule_goes_on_and_moments_start_at_zero(megatron, layout):
    """Without the arguments that launch.py adds, Megatron itself ends here."""
    out = f"lean-{layout}"
    script = [*LAYOUTS[layout], "--save", out, "--save-interval", "2", "--no-save-optim", "--no-save-rng"]
    whole = megatron(*script, rl=True)
    shutil.rmtree(megatron.folder / out / "iter_0000004")
    (megatron.folder / out / files.TRACKER).write_text("2")
    resumed = megatron(*script, rl=True)
    (start,) = resumed.of("start")
    assert (start["kind"], start["iteration"], start["moments"]) == ("resume", 2, 0)
    assert [e["cursor"] for e in resumed.of("step")] == [3, 4]
    rates = re.compile(r"iteration +(\d+)/.*?learning rate: ([\d.E+-]+)")
    assert rates.findall(resumed.log) == rates.findall(whole.log)[2:] and len(rates.findall(whole.log)) == 4
    assert resumed.of("step")[0]["losses"] == whole.of("step")[2]["losses"], "weights and rows are those that were"


def test_bad_arguments_end_the_job_before_anything_is_built(megatron):
    job = megatron("--save", "bad", "--save-interval", "2", "--attention-dropout", "0.1", rl=True, code=None)
    assert job.code != 0
    assert job.log.count("[rl] RL cannot run with these arguments:\n  - --attention-dropout 0.1: ") == 1
    summary = job.log.rpartition("Root Cause")[2]
    assert "RL cannot run with these arguments:\n    - --attention-dropout 0.1: " in summary, "it stands last too"
    assert job.log.count("Traceback") == 1, "torchrun's own"
    assert job.events == [] and "initialized" not in job.log and not (megatron.folder / "bad").exists()


def losses(job):
    """(iteration, loss, grad norm) as printed."""
    pattern = r"iteration +(\d+)/.*?lm loss: ([\d.E+-]+).*?grad norm: ([\d.]+)"
    return re.findall(pattern, job.log)


def content(path):
    """A file of a checkpoint without the parsed arguments, which name different folders and flags: structure, and each
    value as bytes."""
    state = torch.load(path, weights_only=False)
    state.pop("args", None)
    values, structure = tree_flatten(state)
    tensors = (v.detach().reshape(-1).view(torch.uint8).numpy() if torch.is_tensor(v) else v for v in values)
    return str(structure), [getattr(v, "dtype", None) for v in values], [pickle.dumps(v) for v in tensors]
