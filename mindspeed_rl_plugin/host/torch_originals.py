"""What MindSpeed puts in the place of torch's functions, taken back while the engine works.

MindSpeed keeps a record of what it replaced, and so does MegatronAdaptor, on which its core_r0.17.0 and later ones
build. Records are read each time, because adaptors may be imported, and their patches may be applied, after this
package. Without them nothing is done.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

# name -> why the engine needs torch's own. tests/host/test_torch_originals.py lists what else MindSpeed replaces in
# torch, and why it may stay.
RESTORED = {
    "torch.compile": "MindSpeed's returns the function as it is: the engine would decode without graphs, silently, or "
    "with torch 2.10 not start",
    "torch.jit.script": "MindSpeed's returns the function as it is",
    "torch.Tensor.view": "MindSpeed's is a view of a copy where the tensor is not contiguous: writes into it are lost",
}


@contextlib.contextmanager
def torch_originals() -> Iterator[None]:
    """Within the context the names of `RESTORED` are torch's own, or those of torch_npu that MindSpeed came upon."""
    replaced = [
        (patch.orig_module, patch.orig_func_name, getattr(patch.orig_module, patch.orig_func_name), patch.orig_func)
        for patch in map(_record().get, RESTORED)
        if patch is not None and patch.orig_module is not None
    ]
    try:
        for module, name, _, original in replaced:
            setattr(module, name, original)
        yield
    finally:
        for module, name, replacement, _ in replaced:
            setattr(module, name, replacement)


def demand_compile() -> None:
    """Raise ValueError where torch.compile, within `torch_originals`, is not torch's own all the same."""
    module = getattr(torch.compile, "__module__", "") or ""
    if module.partition(".")[0] not in ("torch", "torch_npu"):
        raise ValueError(
            f"torch.compile is {module}.{torch.compile.__qualname__}, and no record known here says what it replaced: "
            "the engine would decode without graphs; take a MindSpeed that README names, or do without that patch"
        )


def _record() -> dict[str, Any]:
    """The patches by the name of what they replace; empty where nothing of the kind is imported."""
    above = getattr(sys.modules.get("mindspeed.patch_utils"), "MindSpeedPatchesManager", None)
    below = getattr(sys.modules.get("megatron_adaptor.patches.patch_manager"), "PatchesManager", None)
    return {**getattr(above, "patches_info", {}), **getattr(below, "patches_info", {})}  # that below came upon torch's
