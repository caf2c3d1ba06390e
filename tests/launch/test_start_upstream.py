"""Attaching to unmodified upstream entry scripts, and starting and resuming there: every supported Megatron.

The checkouts come from MEGATRON_LM_PATH (several, colon separated) and MINDSPEED_PATH.
"""

import shutil

import pytest
from checkouts import cores, under_mindspeed

from mindspeed_rl_plugin.tools.patch import SCRIPT, apply_to

# Upstream's scripts ask the data loader for a mask that the watching loop does not make.
FLAGS = ["--tensor-model-parallel-size", "2", "--no-create-attention-mask-in-dataloader"]


def start_and_resume(megatron, name, script, env, mode="", stored="torch"):
    """Pretrain, RL from its weights, and RL from the middle: the last equals the one before. stored: format."""
    common = {"script": script, "env": env}
    split = [*FLAGS, "--ckpt-format", stored]
    megatron(*split, "--save", f"base-{name}", "--save-interval", "4", **common)
    flags = [*split, "--load", f"base-{name}", "--save", f"out-{name}", "--save-interval", "2", "--no-load-optim"]
    whole = megatron(*flags, rl=True, mode=mode, **common)
    assert [e["event"] for e in whole.events] == ["before_model", "reference", "start"] + ["step"] * 4
    assert whole.log.count("[rl] RL is attached to Megatron") == 1
    out = megatron.folder / f"out-{name}"
    shutil.rmtree(out / "iter_0000004")
    (out / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = megatron(*flags, rl=True, mode=mode, **common)
    assert [e["event"] for e in resumed.events] == ["before_model", "reference", "state", "start", "step", "step"]
    assert resumed.of("reference") == whole.of("reference")
    assert resumed.of("step") == whole.of("step")[2:]
    return whole


@pytest.mark.upstream
@pytest.mark.parametrize("version", ["0.12", "0.16", "0.18", "0.19"])
@pytest.mark.parametrize("stored", ["torch", "torch_dist"])
def test_unmodified_script(megatron, version, stored):
    checkout = cores()[version]
    start_and_resume(megatron, f"{version}-{stored}", checkout / SCRIPT, {"PYTHONPATH": str(checkout)}, stored=stored)


@pytest.mark.upstream
@pytest.mark.parametrize("order", ["mindspeed first", "plugin first"])
def test_under_mindspeed(megatron, order):
    """Two import lines in one script, in either order, and the runner on top."""
    checkout, paths = under_mindspeed()
    mindspeed, plugin = "import mindspeed.megatron_adaptor\n", "import mindspeed_rl_plugin.adaptor\n"
    lines = mindspeed + plugin if order == "mindspeed first" else plugin + mindspeed
    script = megatron.folder / f"{order.replace(' ', '_')}.py"
    text = (checkout / SCRIPT).read_text()
    script.write_text(text.replace("import torch\n", "import torch\n" + lines, 1))
    done = start_and_resume(megatron, script.stem, script, {"PYTHONPATH": paths})
    assert done.log.count("[rl] RL is attached to Megatron, through MindSpeed's feature manager") == 1


@pytest.mark.upstream
def test_patched_script_alone(megatron):
    """The line from patches/, started by plain torchrun."""
    checkout = cores()["0.19"]
    copy = megatron.folder / "patched"
    (copy / "megatron/core").mkdir(parents=True)
    shutil.copy(checkout / "megatron/core/package_info.py", copy / "megatron/core")
    shutil.copy(checkout / SCRIPT, copy)
    apply_to(str(copy))
    shutil.rmtree(copy / "megatron")
    start_and_resume(megatron, "patched", copy / SCRIPT, {"PYTHONPATH": str(checkout)}, mode="--alone")
