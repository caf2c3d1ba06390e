"""The replacement of torch_npu and torchair, with which MindSpeed's adaptor can be imported on a CPU.

It is installed only when mindspeed or mindspeed_llm is imported: other libraries would conclude from a torch_npu that
there is an NPU. Its names are listed one by one: a module that makes any name on demand would get more and more names,
since MindSpeed looks up the names that it patches in every loaded module.
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
    """Install the replacement when MindSpeed is first imported."""
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
    """The module of a builder. Raises NotImplementedError, with the builder's name, if there is no replacement."""
    if builder.name not in COMPILED:
        raise NotImplementedError(
            f"MindSpeed's operator {builder.name} is compiled for the NPU and has no replacement on a host; remove the "
            "flag that uses this operator"
        )
    return SimpleNamespace(**COMPILED[builder.name])


def install() -> None:
    """Put the replacement into sys.modules, unless torch_npu is there already."""
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
    """ProcessGroupHCCL.Options: `host.collectives` does not pass them to gloo."""

    hccl_config: dict[str, Any] = {}


class _ProcessGroupHCCL(_Named):
    Options = _HcclOptions


def _decorator(*args: Any, **kwargs: Any) -> Any:
    """Replaces decorators that register functions with torchair's compiler, which is missing."""
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
