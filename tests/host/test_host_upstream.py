"""Unmodified upstream `pretrain_gpt.py` in host mode, and MindSpeed's adaptor on top of it.

The checkouts come from MEGATRON_LM_PATH (several, colon separated) and MINDSPEED_PATH.
"""

import os
import re
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.upstream


def checkouts() -> dict[str, Path]:
    """Core version (major.minor) -> checkout."""
    paths = {}
    for path in filter(None, os.environ.get("MEGATRON_LM_PATH", "").split(":")):
        info = (Path(path) / "megatron/core/package_info.py").read_text()
        numbers = [re.search(rf"^{name} = (\d+)", info, re.MULTILINE).group(1) for name in ("MAJOR", "MINOR")]
        paths[".".join(numbers)] = Path(path)
    return paths


@pytest.mark.parametrize("version", ["0.12", "0.16", "0.18", "0.19"])
def test_megatron(resumed, version, split):
    if version not in checkouts():
        pytest.skip(f"no checkout of core {version} in MEGATRON_LM_PATH")
    checkout = checkouts()[version]
    resumed(checkout / "pretrain_gpt.py", *split, "--ckpt-format", "torch", PYTHONPATH=str(checkout))


def test_mindspeed(pretrain, resumed, split):
    """MindSpeed's adaptor imports, patches, and what it patched trains to the same losses as Megatron alone."""
    if "0.12" not in checkouts() or "MINDSPEED_PATH" not in os.environ:
        pytest.skip("no checkout of core 0.12 in MEGATRON_LM_PATH, or no MINDSPEED_PATH")
    checkout = checkouts()["0.12"]
    script, paths = checkout / "pretrain_gpt.py", f"{checkout}:{os.environ['MINDSPEED_PATH']}"
    with_it = resumed(script, *split, "--ckpt-format", "torch", PYTHONPATH=paths, MINDSPEED="1")
    alone = pretrain(script, *split, iterations=4, PYTHONPATH=str(checkout))
    assert [loss for loss, _ in with_it] == pytest.approx([loss for loss, _ in alone], rel=1e-5)


# MindSpeed's context parallelism: ranks, and flags.
CONTEXT = {
    "ring, sends overlapped": (2, "megatron_cp_algo --use-cp-send-recv-overlap"),
    "double ring": (4, "megatron_cp_algo --cp-window-size 2 --megatron-cp-in-bnsd"),
    "hybrid": (4, "hybrid_cp_algo --ulysses-degree-in-cp 2"),
}


@pytest.mark.parametrize("algorithm", CONTEXT)
def test_mindspeeds_context_parallelism(pretrain, algorithm):
    """Its own exchange of keys and values between ranks trains as one rank does."""
    if "0.12" not in checkouts() or "MINDSPEED_PATH" not in os.environ:
        pytest.skip("no checkout of core 0.12 in MEGATRON_LM_PATH, or no MINDSPEED_PATH")
    ranks, flags = CONTEXT[algorithm]
    script = checkouts()["0.12"] / "pretrain_gpt.py"
    paths = f"{checkouts()['0.12']}:{os.environ['MINDSPEED_PATH']}:{os.environ.get('PYTHONPATH', '')}"  # of scipy
    grouped = ("--use-flash-attn", "--group-query-attention", "--num-query-groups", 2)
    split = ("--context-parallel-size", ranks, "--context-parallel-algo", *flags.split())
    several = pretrain(script, *grouped, *split, ranks=ranks, PYTHONPATH=paths, MINDSPEED="1")
    one = pretrain(script, *grouped, ranks=1, PYTHONPATH=paths, MINDSPEED="1")
    torch.testing.assert_close(torch.tensor(several), torch.tensor(one), rtol=1e-5, atol=0)


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
