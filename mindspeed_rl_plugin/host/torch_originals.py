"""Restores torch functions that MindSpeed has replaced, while the engine works.

MindSpeed records what it replaces, and so does MegatronAdaptor, on which core_r0.17.0 and later build. The records are
read each time, since adaptors may be imported, or apply patches, after this package. Without adaptors nothing is done.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

# name -> why the engine needs torch's own. tests/host/test_torch_originals.py lists other replacements of MindSpeed in
# torch, and why they may stay.
RESTORED = {
    "torch.compile": "MindSpeed's returns the function as it is: the engine would silently decode without graphs; with "
    "torch 2.10 it would not start",
    "torch.jit.script": "MindSpeed's returns the function as it is",
    "torch.Tensor.view": "MindSpeed's is a view of a copy where the tensor is not contiguous: writes into it are lost",
}


@contextlib.contextmanager
def torch_originals() -> Iterator[None]:
    """Within the context the names of `RESTORED` are torch's own, or those of torch_npu that MindSpeed found."""
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
    """Raise ValueError if torch.compile is not torch's own within `torch_originals`."""
    module = getattr(torch.compile, "__module__", "") or ""
    if module.partition(".")[0] not in ("torch", "torch_npu"):
        raise ValueError(
            f"torch.compile is {module}.{torch.compile.__qualname__}, and no record known here says what it replaced: "
            "the engine would decode without graphs; take a MindSpeed that README names, or do without that patch"
        )


def _record() -> dict[str, Any]:
    """The recorded patches by the names that they replace; empty without adaptors."""
    above = getattr(sys.modules.get("mindspeed.patch_utils"), "MindSpeedPatchesManager", None)
    below = getattr(sys.modules.get("megatron_adaptor.patches.patch_manager"), "PatchesManager", None)
    # `below` patched first, so its records win: they have torch's own functions
    return {**getattr(above, "patches_info", {}), **getattr(below, "patches_info", {})}
