"""Restores torch functions that MindSpeed has replaced, while the engine works.

MindSpeed records what it replaces, and so does MegatronAdaptor, which MindSpeed imports from core_r0.17.0 on. The
records are read each time, since adaptors may be imported, or apply patches, after this package. Without adaptors
nothing is done.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

# name -> why the engine needs torch's function. tests/host/test_torch_originals.py lists the other functions of torch
# that MindSpeed replaces, and why their replacements may stay.
RESTORED = {
    "torch.compile": "MindSpeed's function returns its argument: the engine would decode without graphs; with torch "
    "2.10 it would not start",
    "torch.jit.script": "MindSpeed's function returns its argument",
    "torch.Tensor.view": "MindSpeed's function returns a view of a copy if the tensor is not contiguous: writes "
    "into it are lost",
}


@contextlib.contextmanager
def torch_originals() -> Iterator[None]:
    """Within the context the names of `RESTORED` have the functions that MindSpeed found: torch's, or torch_npu's."""
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
    """Raise ValueError if torch.compile is not that of torch or torch_npu. To be called within `torch_originals`."""
    module = getattr(torch.compile, "__module__", "") or ""
    if module.partition(".")[0] not in ("torch", "torch_npu"):
        raise ValueError(
            f"torch.compile is {module}.{torch.compile.__qualname__}, and the function that this replaces is not "
            "recorded: the engine would decode without graphs; install a MindSpeed that README names, or omit the patch"
        )


def _record() -> dict[str, Any]:
    """The recorded patches by the names that they replace; empty without adaptors."""
    mindspeed = getattr(sys.modules.get("mindspeed.patch_utils"), "MindSpeedPatchesManager", None)
    adaptor = getattr(sys.modules.get("megatron_adaptor.patches.patch_manager"), "PatchesManager", None)
    # MegatronAdaptor's records take precedence: it patched first, so they have torch's own functions.
    return {**getattr(mindspeed, "patches_info", {}), **getattr(adaptor, "patches_info", {})}
