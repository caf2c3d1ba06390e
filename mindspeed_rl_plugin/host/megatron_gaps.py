"""What Megatron itself lacks on a machine with no accelerator, one row a gap.

Each row acts on one module right after it is imported (`on_import`), tests whether the gap is there,
and closes it. Rows say why, for which versions, and when they can go.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import typing_extensions
from packaging.version import Version

from mindspeed_rl_plugin.host.on_import import after_import
from mindspeed_rl_plugin.host.optimizer import HostAdam


@dataclass(frozen=True)
class Gap:
    """One gap: the module it is in, the name there, and the function that closes it on that module."""

    module: str
    name: str
    why: str
    versions: str
    remove_when: str
    close: Callable[[ModuleType], None]


def close_gaps() -> None:
    """Arrange that every gap is closed as soon as its module is imported. Imports nothing of Megatron."""
    for gap in GAPS:
        after_import(gap.module, gap.close)


def _override(module: ModuleType) -> None:
    if not hasattr(module, "override"):
        module.override = typing_extensions.override


def _product(module: ModuleType) -> None:
    if not hasattr(module, "product"):
        module.product = module.prod


def _write_item(module: ModuleType) -> None:
    """Name the format that torch writes by default. Later cores name it themselves, which overrides ours."""
    from torch.distributed.checkpoint import filesystem

    if hasattr(filesystem, "SerializationFormat"):
        torch_save = filesystem.SerializationFormat.TORCH_SAVE
        module._write_item = functools.partial(module._write_item, serialization_format=torch_save)


def _te_version(module: ModuleType) -> None:
    if hasattr(module, "_te_version") and importlib.util.find_spec("transformer_engine") is None:
        module._te_version = Version("0")


def _adam(module: ModuleType) -> None:
    """Use HostAdam, and say what Megatron would have said had it found Apex, whose layout that is."""
    if not module.Adam.__module__.startswith("torch.optim"):
        return
    module.Adam = HostAdam
    flags = {"HAVE_APEX_OR_TE": True, "USING_APEX_OPTIMIZER": True, "USING_PYTORCH_OPTIMIZER": False}
    for flag, value in flags.items():
        if hasattr(module, flag):
            setattr(module, flag, value)


def _quantize_param_shard(module: ModuleType) -> None:
    original = module.quantize_param_shard

    @functools.wraps(original)
    def quantize_param_shard(model_params: list[Any], *args: Any, **kwargs: Any) -> None:
        if model_params:
            original(model_params, *args, **kwargs)

    module.quantize_param_shard = quantize_param_shard


def _set_parameter_state(module: ModuleType) -> None:
    optimizer = module.DistributedOptimizer
    name = "_set_main_param_and_optimizer_states"
    setattr(optimizer, name, torch.no_grad()(getattr(optimizer, name)))


def _te_general_gemm(module: ModuleType) -> None:
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None


def _fused_kernels(module: ModuleType) -> None:
    def load(args: Any) -> None:
        """No nvcc, no kernels."""

    module.load = load


def _torch_norm(module: ModuleType) -> None:
    """Let torch's norms serve sequence parallel models, and ignore wishes for particular CUDA kernels."""
    wrapped = module.WrappedTorchNorm
    original = wrapped.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = plain.persist_layer_norm = plain.memory_efficient_layer_norm = False
        norm = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            # Megatron sums the gradients of marked parameters over the tensor parallel ranks.
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    wrapped.__new__ = new


def _attention_channels(module: ModuleType) -> None:
    """Take the sizes of heads that multi-latent attention hands over; the plain kernel needs that of the values."""
    attention = module.DotProductAttention
    original = attention.__init__
    if "v_channels" in inspect.signature(original).parameters:
        return

    @functools.wraps(original)
    def init(
        self: torch.nn.Module,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        original(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    attention.__init__ = init


def _yarn(module: ModuleType) -> None:
    """Make it on the CPU, which it is asked for by a keyword. Its callers name all arguments."""
    embedding = module.YarnRotaryEmbedding
    original = embedding.__init__

    @functools.wraps(original)
    def init(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "use_cpu_initialization": True})

    embedding.__init__ = init


def _compile_helpers(module: ModuleType) -> None:
    def compile_helpers() -> None:
        """Build the data sets' C++ helpers for the interpreter that runs, unless they are built."""
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
            return
        import pybind11

        includes = f"-I{pybind11.get_include()} -I{sysconfig.get_path('include')}"
        command = ["make", "-C", str(Path(module.__file__).parent), f"CPPFLAGS={includes}"]
        subprocess.run([*command, f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}"], check=True)

    module.compile_helpers = compile_helpers


class _PatchableModules:
    """sys.modules, but a copy of it leaves out modules that import more when they are asked for a name."""

    def copy(self) -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if _patchable(name, module)}

    def __getitem__(self, name: str) -> ModuleType:
        return sys.modules[name]

    def __setitem__(self, name: str, module: ModuleType) -> None:
        sys.modules[name] = module


def _patchable(name: str, module: ModuleType) -> bool:
    if name.split(".")[0] in ("megatron", "mindspeed", "mindspeed_llm", "torch", "__main__"):
        return True
    return type(module) is ModuleType and "__getattr__" not in vars(module)


def _patch_scan(module: ModuleType) -> None:
    module.sys = SimpleNamespace(modules=_PatchableModules())


_OPTIMIZER = "megatron.core.optimizer"
_ADAM_WHY = "torch's AdamW has no step of the group: the distributed optimizer cannot resume (KeyError 'step')"
_ADAM_GOES = "Megatron saves and loads torch's AdamW in its distributed optimizer"

GAPS = (
    Gap(
        "typing",
        "override",
        "Megatron imports a name that Python has from 3.12 on",
        "core >= 0.17 on Python < 3.12",
        "Python 3.12 is the oldest supported",
        _override,
    ),
    Gap(
        "numpy",
        "product",
        "distributed checkpoints of core 0.12 use a name that numpy 2 dropped",
        "core 0.12 with numpy >= 2",
        "core 0.12 is no longer supported",
        _product,
    ),
    Gap(
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
        "_write_item",
        "writes distributed checkpoints with a function of torch that takes one argument more since torch 2.7",
        "core 0.12 with torch >= 2.7",
        "core 0.12 is no longer supported",
        _write_item,
    ),
    Gap(
        "megatron.core.utils",
        "_te_version",
        "asked for the version of TransformerEngine when it loads a distributed checkpoint, it imports it",
        "core 0.12",
        "core 0.12 is no longer supported",
        _te_version,
    ),
    Gap(_OPTIMIZER, "Adam", _ADAM_WHY, "all", _ADAM_GOES, _adam),
    Gap(f"{_OPTIMIZER}.distrib_optimizer", "Adam", _ADAM_WHY, "all", _ADAM_GOES, _adam),
    Gap(
        f"{_OPTIMIZER}.distrib_optimizer",
        "quantize_param_shard",
        "raises without TransformerEngine even when there is no FP8 parameter to quantize",
        "core 0.12",
        "core 0.12 is no longer supported (MindSpeed moves on)",
        _quantize_param_shard,
    ),
    Gap(
        f"{_OPTIMIZER}.distrib_optimizer",
        "DistributedOptimizer._set_main_param_and_optimizer_states",
        "in fp32 the main parameters are views of the model's, and it writes into them without no_grad: no resume",
        "all, on every device; fp32 is what hosts train in",
        "Megatron resumes an fp32 model with the distributed optimizer",
        _set_parameter_state,
    ),
    Gap(
        "megatron.core.transformer.moe.moe_utils",
        "te_general_gemm",
        "the router asks whether it is None, but without TransformerEngine it is not defined at all",
        "core 0.14 to 0.16",
        "core 0.16 is no longer supported",
        _te_general_gemm,
    ),
    Gap(
        "megatron.legacy.fused_kernels",
        "load",
        "asks nvcc for its version and compiles CUDA kernels",
        "core <= 0.16",
        "megatron.legacy is gone from all supported versions",
        _fused_kernels,
    ),
    Gap(
        "megatron.core.datasets.utils",
        "compile_helpers",
        "builds for the python3 on the PATH, which without an activated environment is another interpreter",
        "all",
        "the Makefile takes the interpreter from its caller",
        _compile_helpers,
    ),
    Gap(
        "megatron.core.transformer.torch_norm",
        "WrappedTorchNorm.__new__",
        "the local layer spec has no norm that accepts sequence parallel, without which MoE with TP cannot train",
        "all",
        "WrappedTorchNorm marks its parameters itself",
        _torch_norm,
    ),
    Gap(
        "megatron.core.transformer.dot_product_attention",
        "DotProductAttention.__init__",
        "the local layer spec's attention refuses the head sizes that multi-latent attention gives it",
        "all",
        "DotProductAttention takes k_channels and v_channels",
        _attention_channels,
    ),
    Gap(
        "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding",
        "YarnRotaryEmbedding.__init__",
        "enters `with torch.device(current_device())`, which torch refuses for an index without an accelerator",
        "core >= 0.16, with multi-latent attention",
        "it passes the device to the factories only",
        _yarn,
    ),
    Gap(
        "mindspeed.patch_utils",
        "sys",
        "asks every loaded module for the names it patches; lazy ones (transformers, vllm) then import all they have, "
        "and fail where one dependency is missing",
        "MindSpeed 2.3, with whatever transformers or vllm is imported before a patch is applied",
        "MindSpeed looks into vars(module) instead of calling hasattr",
        _patch_scan,
    ),
)
