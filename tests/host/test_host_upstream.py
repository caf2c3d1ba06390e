"""Unmodified upstream `pretrain_gpt.py` in host mode, and MindSpeed's adaptor on top of it.

The checkouts come from MEGATRON_LM_PATH (several, colon separated) and MINDSPEED_PATH.
"""

import os

import pytest
import torch
from checkouts import cores, under_mindspeed

pytestmark = pytest.mark.upstream


@pytest.mark.parametrize("version", ["0.12", "0.16", "0.18", "0.19"])
def test_megatron(resumed, version, split):
    if version not in cores():
        pytest.skip(f"no checkout of core {version} in MEGATRON_LM_PATH")
    checkout = cores()[version]
    resumed(checkout / "pretrain_gpt.py", *split, "--ckpt-format", "torch", PYTHONPATH=str(checkout))


def test_mindspeed(pretrain, resumed, split):
    """MindSpeed's adaptor imports, patches, and what it patched trains to the same losses as Megatron alone."""
    checkout, paths = under_mindspeed()
    script = checkout / "pretrain_gpt.py"
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
    (checkout, paths), (ranks, flags) = under_mindspeed(), CONTEXT[algorithm]
    script, paths = checkout / "pretrain_gpt.py", f"{paths}:{os.environ.get('PYTHONPATH', '')}"  # of scipy
    grouped = ("--use-flash-attn", "--group-query-attention", "--num-query-groups", 2)
    split = ("--context-parallel-size", ranks, "--context-parallel-algo", *flags.split())
    several = pretrain(script, *grouped, *split, ranks=ranks, PYTHONPATH=paths, MINDSPEED="1")
    one = pretrain(script, *grouped, ranks=1, PYTHONPATH=paths, MINDSPEED="1")
    torch.testing.assert_close(torch.tensor(several), torch.tensor(one), rtol=1e-5, atol=0)


def test_mindspeed_patches_after_transformers(snippet):
    """Its search through all modules passes over those that import more when they are asked for a name."""
    _, paths = under_mindspeed()
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
        PYTHONPATH=paths,
        timeout=240,
    )
