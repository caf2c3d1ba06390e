"""What MindSpeed and MindSpeed-LLM replace in torch: each name is restored for the engine, or stays for a reason."""

import ast
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkouts import checkouts, under_mindspeed

from mindspeed_rl_plugin.host.torch_originals import RESTORED, demand_compile, torch_originals

_COLLECTIVES = "wraps torch's own, for --enable-high-availability and for disaggregated training"
# Names that stay as MindSpeed has them while the engine works, and why.
STAY = {
    "torch.nn.parameter.Parameter.type": "the name of a type, cuda's in the place of npu's: vLLM asks for none",
    "torch.Tensor.type": "the same",
    "torch.distributed._all_gather_base": "its public name does the same",
    "torch.distributed._reduce_scatter_base": "its public name does the same",
    "torch.distributed.all_reduce": "differs for float64 alone, which neither vLLM nor this package reduces so",
    "torch._C._jit_set_nvfuser_enabled": "turns off a fuser that torch no longer has",
    "torch.cuda.get_device_capability": "a constant for grouped matmuls; vLLM asks its platform",
    "torch.distributed.new_group": "with --disable-gloo-group, which is taken over before it acts",
    "torch.cuda.nvtx.range_push": "marks of a profiler, core_r0.16.0's",
    "torch.cuda.nvtx.range_pop": "the same",
    "torch.utils.data._utils.collate.default_collate": "pretraining data",
    "torch.nn.Module._load_from_state_dict": "loading of checkpoints",
    "torch.distributed.checkpoint.default_planner._validate_global_plan": "writing of checkpoints",
    "torch.distributed._shard.sharding_spec._internals.": "writing of checkpoints",
    "torch.ops.mindspeed.npu_gmm": "with MindSpore",
    "torch.ops.mindspeed.npu_gmm_v2": "with MindSpore",
    "torch.distributed.barrier": _COLLECTIVES,
    "torch.distributed.all_to_all_single": _COLLECTIVES,
    "torch.distributed.all_gather_into_tensor": _COLLECTIVES,
    "torch.distributed.distributed_c10d.new_group": _COLLECTIVES,
    "torch.distributed.distributed_c10d.": _COLLECTIVES,  # and more of their names
    "torch.distributed.": _COLLECTIVES,
}


def test_what_megatron_adaptor_replaced_is_taken_back_too(monkeypatch) -> None:
    """It keeps a record of its own, below MindSpeed's, which came upon its replacement."""
    own = torch.compile
    base, upper = lambda function: function, lambda function: function  # noqa: E731
    layers = {
        "megatron_adaptor.patches.patch_manager": ("PatchesManager", own),
        "mindspeed.patch_utils": ("MindSpeedPatchesManager", base),
    }
    for module, (manager, original) in layers.items():
        patch = SimpleNamespace(orig_module=torch, orig_func_name="compile", orig_func=original)
        record = SimpleNamespace(patches_info={"torch.compile": patch})
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{manager: record}))
    monkeypatch.setattr(torch, "compile", upper)
    with torch_originals():
        assert torch.compile is own
        demand_compile()
    assert torch.compile is upper


def replaced(checkout: Path) -> set[str]:
    """Names in torch that a checkout registers patches of; of a name that is put together, its beginning."""
    names = set()
    for path in checkout.rglob("*.py"):
        text = path.read_text(errors="replace")
        if "register_patch" not in text or "tests" in path.parts:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "register_patch" and node.args:
                first = node.args[0]
                while isinstance(first, ast.BinOp):
                    first = first.left
                if isinstance(first, ast.Constant) and str(first.value).startswith("torch."):
                    names.add(first.value)
    return names


@pytest.mark.upstream
@pytest.mark.parametrize(
    "variable, package", [("MINDSPEED_PATH", "mindspeed"), ("MINDSPEED_LLM_PATH", "mindspeed_llm")]
)
def test_every_name_has_a_verdict(variable, package) -> None:
    if variable not in os.environ:
        pytest.skip(f"{variable} is not set")
    names = set().union(*(replaced(path / package) for path in checkouts(variable)))
    assert names and not names - {*RESTORED, *STAY}
    if package == "mindspeed":
        assert set(RESTORED) <= names  # else the row can go


@pytest.mark.upstream
def test_the_engine_finds_torchs_own_under_mindspeed(snippet) -> None:
    _, paths = under_mindspeed()
    snippet(
        """
        from mindspeed_rl_plugin import host
        host.activate_if_needed()
        import torch
        own = torch.compile, torch.jit.script, torch.Tensor.view
        import mindspeed.megatron_adaptor
        from mindspeed_rl_plugin.host.torch_originals import torch_originals
        names = lambda: (torch.compile, torch.jit.script, torch.Tensor.view)
        theirs = names()
        assert not set(own) & set(theirs)
        with torch_originals():
            assert names() == own
        assert names() == theirs
        """,
        PYTHONPATH=paths,
        timeout=240,
    )
