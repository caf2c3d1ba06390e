"""The stand-in for torch_npu and torchair, so that MindSpeed's own adaptor imports on CPU.

It exists only after the import of mindspeed or mindspeed_llm: other libraries would take a torch_npu as a sign of an
NPU. Names are listed one by one. A module with every name would also answer MindSpeed's search in all modules for
functions to patch, and grow without end.
"""

from __future__ import annotations

import contextlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from mindspeed_rl_plugin.host import grouped_matmul
from mindspeed_rl_plugin.host.npu_ops import COMPILED, OPERATORS
from mindspeed_rl_plugin.host.on_import import after_import, before_import
from mindspeed_rl_plugin.host.streams import NullEvent, NullStream

_SAME = """
    current_device device_count is_available set_device synchronize empty_cache current_stream default_stream stream
    device default_generators _lazy_call get_rng_state set_rng_state manual_seed memory_allocated max_memory_allocated
    memory_reserved max_memory_reserved memory_stats reset_peak_memory_stats mem_get_info
"""
MINDSPEED_PACKAGES = ("mindspeed", "mindspeed_llm")


def install_with_mindspeed() -> None:
    """Install the stand-in when MindSpeed is first imported."""
    for name in MINDSPEED_PACKAGES:
        before_import(name, install)
    for builder in ("builder", "atb_builder"):
        after_import(f"mindspeed.op_builder.{builder}", _replace_compiled)
    after_import("mindspeed.ops.gmm", grouped_matmul.register)


def _replace_compiled(builder: ModuleType) -> None:
    for name in ("MindSpeedOpBuilder", "AtbOpBuilder"):
        if cls := vars(builder).get(name):
            cls.load = _load


def _load(builder: Any, verbose: bool = True) -> SimpleNamespace:
    """The module of a builder. Raises NotImplementedError, with its name, if there is no stand-in."""
    if builder.name not in COMPILED:
        raise NotImplementedError(
            f"MindSpeed's operator {builder.name} is compiled for the NPU and has no stand-in on a host; remove the "
            "flag that uses it"
        )
    return SimpleNamespace(**COMPILED[builder.name])


def install() -> None:
    """Put the stand-in into sys.modules, unless there is a torch_npu already."""
    if "torch_npu" in sys.modules:
        return
    for name, names in _modules().items():
        _make(name, names)
    torch.npu = sys.modules["torch_npu.npu"]


def _make(name: str, names: dict[str, Any]) -> None:
    module = ModuleType(name)
    module.__file__ = __file__
    module.__path__ = []
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    for key, value in names.items():
        setattr(module, key, value)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


class _Named:
    """A class for names that are only used in annotations and as a decorator's argument."""


class _HcclOptions(_Named):
    """ProcessGroupHCCL.Options: `host.collectives` drops them before gloo sees them."""

    hccl_config: dict[str, Any] = {}


class _ProcessGroupHCCL(_Named):
    Options = _HcclOptions


def _decorator(*args: Any, **kwargs: Any) -> Any:
    """Replaces decorators that register functions with a missing compiler."""
    return lambda function: function


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Nothing to do on a CPU."""


def _modules() -> dict[str, dict[str, Any]]:
    """Module -> its names; parents before children."""
    npu = {name: getattr(torch.cuda, name) for name in _SAME.split()}
    npu.update(
        Stream=NullStream,
        Event=NullEvent,
        get_device_name=lambda *args: "Ascend910B3",  # MindSpeed chooses features by the chip's name
        set_compile_mode=_nothing,
        config=type("config", (), {"allow_internal_format": False}),
    )
    graph = {"Tensor": _Named, "TensorSpec": _Named, "DataType": _Named, "Const": _nothing, "Cast": _nothing}
    return {
        "torch_npu": {"__version__": "2.7.1", "unsupported_dtype": [], **OPERATORS},
        "torch_npu.npu": npu,
        "torch_npu.contrib": {},
        "torch_npu.contrib.transfer_to_npu": {},
        "torch_npu._C": {},
        "torch_npu._C._distributed_c10d": {"ProcessGroupHCCL": _ProcessGroupHCCL},
        "torch_npu.utils": {"register_asd_hook": contextlib.nullcontext},
        "torch_npu.utils.collect_env": {"get_cann_version": lambda *args: "8.1.RC1"},
        "torchair": {"register_fx_node_ge_converter": _decorator},
        "torchair.ge": graph,
        "acl": {},
    }
