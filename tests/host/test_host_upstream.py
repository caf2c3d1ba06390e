"""Unmodified upstream `pretrain_gpt.py` in host mode, and MindSpeed's adaptor on top of it.

The checkouts come from MEGATRON_LM_PATH (several, colon separated) and MINDSPEED_PATH.
"""

import os
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.upstream

SPLITS = {
    "tp2": ("--tensor-model-parallel-size", 2),
    "pp2": ("--pipeline-model-parallel-size", 2),
    "dp2": ("--use-distributed-optimizer",),
}


def checkouts() -> dict[str, Path]:
    """Core version (major.minor) -> checkout."""
    found = {}
    for path in filter(None, os.environ.get("MEGATRON_LM_PATH", "").split(":")):
        info = (Path(path) / "megatron/core/package_info.py").read_text()
        numbers = [re.search(rf"^{name} = (\d+)", info, re.MULTILINE).group(1) for name in ("MAJOR", "MINOR")]
        found[".".join(numbers)] = Path(path)
    return found


def train_and_resume(pretrain, tmp_path, checkout, split, **env):
    """Four iterations, and the last two again from the checkpoint in the middle: bitwise the same."""
    flags = [*SPLITS[split], "--ckpt-format", "torch"]
    env = {"PYTHONPATH": str(checkout), **env}
    script, folder = checkout / "pretrain_gpt.py", tmp_path / "ckpt"
    whole = pretrain(script, *flags, "--save", folder, "--save-interval", 2, iterations=4, **env)
    assert len(whole) == 4 and all(8.3 < loss < 8.7 for loss, _ in whole)
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    assert pretrain(script, *flags, "--load", folder, iterations=4, **env) == whole[2:]
    return whole


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("version", ["0.12", "0.16", "0.19"])
def test_megatron(pretrain, tmp_path, version, split):
    if version not in checkouts():
        pytest.skip(f"no checkout of core {version} in MEGATRON_LM_PATH")
    train_and_resume(pretrain, tmp_path, checkouts()[version], split)


@pytest.mark.parametrize("split", SPLITS)
def test_mindspeed(pretrain, tmp_path, split):
    """MindSpeed's adaptor imports, patches, and what it patched trains to the same losses as Megatron alone."""
    if "0.12" not in checkouts() or "MINDSPEED_PATH" not in os.environ:
        pytest.skip("no checkout of core 0.12 in MEGATRON_LM_PATH, or no MINDSPEED_PATH")
    checkout = checkouts()["0.12"]
    paths = f"{checkout}:{os.environ['MINDSPEED_PATH']}"
    with_it = train_and_resume(pretrain, tmp_path, checkout, split, PYTHONPATH=paths, MINDSPEED="1")
    alone = pretrain(checkout / "pretrain_gpt.py", *SPLITS[split], iterations=4, PYTHONPATH=str(checkout))
    assert [loss for loss, _ in with_it] == pytest.approx([loss for loss, _ in alone], rel=1e-5)


def test_mindspeed_patches_after_transformers(snippet):
    """Its search through all modules passes over those that import more when they are asked for a name."""
    if "0.12" not in checkouts() or "MINDSPEED_PATH" not in os.environ:
        pytest.skip("no checkout of core 0.12 in MEGATRON_LM_PATH, or no MINDSPEED_PATH")
    snippet(
        """
        from mindspeed_rl_plugin import host
        host.activate_if_needed()
        import sys
        assert "torch_npu" not in sys.modules
        import transformers
        import mindspeed.megatron_adaptor
        from mindspeed.patch_utils import MindSpeedPatchesManager
        import megatron.training
        from megatron.training.training import train_step
        held = sys.modules["megatron.training"].holder = train_step

        def step_wrapper(function):
            return lambda *args: ("wrapped", function)

        MindSpeedPatchesManager.register_patch("megatron.training.training.train_step", step_wrapper)
        MindSpeedPatchesManager.apply_patches()
        from megatron.training import training
        assert training.train_step() == ("wrapped", held)
        """,
        PYTHONPATH=f"{checkouts()['0.12']}:{os.environ['MINDSPEED_PATH']}",
        timeout=240,
    )
