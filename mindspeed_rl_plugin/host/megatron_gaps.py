"""Gaps of Megatron on a machine without accelerator, one row per gap.

A row changes its module right after the import of that module, if the module has the gap (`host.activate_if_needed`).
Each row has the reason, the versions, and when the row can be removed.
"""

from __future__ import annotations

import collections
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

from mindspeed_rl_plugin.host.optimizer import HostAdam


@dataclass(frozen=True)
class Gap:
    """One gap of some versions of Megatron."""

    module: str  # that has the gap
    name: str  # of the missing or wrong object
    versions: str
    remove_when: str
    close: Callable[[ModuleType], None]  # closes the gap in the module; its docstring has the reason


GAPS: list[Gap] = []
CORE_0_12 = "core 0.12 is no longer supported"
OPTIMIZER_MODULE = "megatron.core.optimizer"


def _gap(module: str, name: str, versions: str, remove_when: str) -> Callable[[Callable], Callable]:
    """A decorator: the function closes this gap."""

    def register(close: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        GAPS.append(Gap(module, name, versions, remove_when, close))
        return close

    return register


def _around(owner: Any, name: str) -> Callable[[Callable], None]:
    """A decorator: the function replaces `owner.name`, and gets the original as first argument."""
    original = getattr(owner, name)

    def replace(function: Callable[..., Any]) -> None:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, call)

    return replace


@_gap("typing", "override", "core >= 0.17 on Python < 3.12", "Python 3.12 is the oldest supported")
def _override(module: ModuleType) -> None:
    """Megatron imports a name that Python only has from 3.12 on."""
    if not hasattr(module, "override"):
        module.override = typing_extensions.override


@_gap("numpy", "product", "core 0.12 with numpy >= 2", CORE_0_12)
def _product(module: ModuleType) -> None:
    """Distributed checkpoints of core 0.12 use a name that numpy 2 has removed."""
    if not hasattr(module, "product"):
        module.product = module.prod


@_gap(
    "megatron.core.dist_checkpointing.strategies.filesystem_async", "_write_item", "core 0.12, torch >= 2.7", CORE_0_12
)
def _write_item(module: ModuleType) -> None:
    """Core 0.12 writes distributed checkpoints with a function of torch that has one more argument since torch 2.7.

    Pass torch's default for this argument, the format. Later cores pass the argument themselves, which overrides ours.
    """
    from torch.distributed.checkpoint import filesystem

    if hasattr(filesystem, "SerializationFormat"):
        torch_save = filesystem.SerializationFormat.TORCH_SAVE
        module._write_item = functools.partial(module._write_item, serialization_format=torch_save)


@_gap("megatron.core.utils", "_te_version", "core 0.12", CORE_0_12)
def _te_version(module: ModuleType) -> None:
    """When core 0.12 loads a distributed checkpoint, it reads the version of TransformerEngine; here that fails."""
    if hasattr(module, "_te_version") and importlib.util.find_spec("transformer_engine") is None:
        module._te_version = Version("0")


@_gap(OPTIMIZER_MODULE, "Adam", "all", "the distributed optimizer saves and loads torch's AdamW")
@_gap(f"{OPTIMIZER_MODULE}.distrib_optimizer", "Adam", "all", "the distributed optimizer saves and loads torch's AdamW")
def _adam(module: ModuleType) -> None:
    """torch's AdamW has no step of the parameter group: the distributed optimizer cannot resume (KeyError 'step').

    Use HostAdam. Its state has the layout of Apex, so Megatron is told that Apex is used.
    """
    if not module.Adam.__module__.startswith("torch.optim"):
        return
    module.Adam = HostAdam
    flags = {"HAVE_APEX_OR_TE": True, "USING_APEX_OPTIMIZER": True, "USING_PYTORCH_OPTIMIZER": False}
    for flag, value in flags.items():
        if hasattr(module, flag):
            setattr(module, flag, value)


@_gap(f"{OPTIMIZER_MODULE}.distrib_optimizer", "quantize_param_shard", "core 0.12", f"{CORE_0_12} (MindSpeed needs it)")
def _quantize_param_shard(module: ModuleType) -> None:
    """The function raises an error without TransformerEngine, even if there is no FP8 parameter to quantize."""

    @_around(module, "quantize_param_shard")
    def call(original: Callable[..., None], model_params: list[Any], *args: Any, **kwargs: Any) -> None:
        if model_params:
            original(model_params, *args, **kwargs)


@_gap(
    f"{OPTIMIZER_MODULE}.distrib_optimizer",
    "DistributedOptimizer._set_main_param_and_optimizer_states",
    "all, on every device; hosts train in fp32",
    "Megatron resumes an fp32 model with the distributed optimizer",
)
def _set_parameter_state(module: ModuleType) -> None:
    """In fp32 main parameters are views of the model's parameters. The function writes into the views without no_grad,
    so a resume fails."""
    optimizer = module.DistributedOptimizer
    name = "_set_main_param_and_optimizer_states"
    setattr(optimizer, name, torch.no_grad()(getattr(optimizer, name)))


@_gap("megatron.core.transformer.moe.moe_utils", "te_general_gemm", "core 0.14 to 0.16", "core 0.16 is not supported")
def _te_general_gemm(module: ModuleType) -> None:
    """The router checks whether this name is None, but without TransformerEngine the name is not defined."""
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None


@_gap("megatron.legacy.fused_kernels", "load", "core <= 0.16", "no supported version has megatron.legacy")
def _fused_kernels(module: ModuleType) -> None:
    """The function calls nvcc, and compiles CUDA kernels."""
    module.load = lambda args: None


@_gap("megatron.core.transformer.torch_norm", "WrappedTorchNorm.__new__", "all", "it marks its own parameters")
def _torch_norm(module: ModuleType) -> None:
    """The local layer spec has no norm for sequence parallelism, which MoE with TP needs in training.

    Let torch's norms accept sequence parallelism, and ignore options for CUDA kernels.
    """

    @_around(module.WrappedTorchNorm, "__new__")
    def new(original: Any, cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = plain.persist_layer_norm = plain.memory_efficient_layer_norm = False
        norm = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            # Megatron sums the gradients of marked parameters over the tensor parallel ranks.
            parameter.sequence_parallel = config.sequence_parallel
        return norm


@_gap("megatron.core.transformer.dot_product_attention", "DotProductAttention.__init__", "all", "it accepts v_channels")
def _attention_channels(module: ModuleType) -> None:
    """The attention of the local layer spec does not accept the head sizes of multi-latent attention.

    Accept these arguments, and set the size of the output, which is that of the values.
    """
    if "v_channels" in inspect.signature(module.DotProductAttention.__init__).parameters:
        return

    @_around(module.DotProductAttention, "__init__")
    def init(original: Any, self: torch.nn.Module, *args: Any, k_channels: Any = None, **kwargs: Any) -> None:
        v_channels = kwargs.pop("v_channels", None)
        original(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


@_gap(
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding",
    "YarnRotaryEmbedding.__init__",
    "core >= 0.16, with multi-latent attention",
    "it passes the device only to factory functions",
)
def _yarn(module: ModuleType) -> None:
    """It enters `with torch.device(current_device())`, but without an accelerator torch refuses a device's index.

    Build the embedding on the CPU by a keyword argument; callers pass all arguments by name. Core 0.12.1 does not enter
    the context, and would pass the argument's value on as Llama 3's `rope_scaling`.
    """
    if "cp_group" not in inspect.signature(module.YarnRotaryEmbedding.__init__).parameters:
        return

    @_around(module.YarnRotaryEmbedding, "__init__")
    def init(original: Any, self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "use_cpu_initialization": True})


@_gap("megatron.core.datasets.utils", "compile_helpers", "all", "the Makefile accepts an interpreter")
def _compile_helpers(module: ModuleType) -> None:
    """It builds for the python3 on the PATH; this is another interpreter if no environment is activated."""

    def compile_helpers() -> None:
        """Build the data sets' C++ helpers for this interpreter, unless they are built."""
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
            return
        import pybind11

        includes = f"-I{pybind11.get_include()} -I{sysconfig.get_path('include')}"
        command = ["make", "-C", str(Path(module.__file__).parent), f"CPPFLAGS={includes}"]
        subprocess.run([*command, f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}"], check=True)

    module.compile_helpers = compile_helpers


@_gap("mindspeed_llm.core.transformer.moe.router", "torch.histc", "MindSpeed-LLM, --seq-aux", "it accepts integers")
def _histc(module: ModuleType) -> None:
    """The router counts the tokens of each expert by torch.histc of integers, which torch has only on accelerators."""

    @_around(module.torch, "histc")
    def histc(original: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        exact = input if input.is_floating_point() else input.double()
        return original(exact, *args, **kwargs).to(input.dtype)


class _PatchableModules(collections.UserDict):
    """sys.modules; a copy omits modules that import other modules when a name is looked up in them."""

    def __init__(self) -> None:
        self.data = sys.modules

    def copy(self) -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if _patchable(name, module)}


def _patchable(name: str, module: ModuleType) -> bool:
    if name.split(".")[0] in ("megatron", "mindspeed", "mindspeed_llm", "torch", "__main__"):
        return True
    return type(module) is ModuleType and "__getattr__" not in vars(module)


@_gap(
    "mindspeed.patch_utils",
    "sys",
    "MindSpeed 2.3, if transformers or vllm is imported before a patch is applied",
    "MindSpeed looks into vars(module) instead of calling hasattr",
)
def _patch_scan(module: ModuleType) -> None:
    """MindSpeed looks up the names that it patches in every loaded module. Lazy modules (transformers, vllm) then
    import all their parts, and fail if one dependency is missing.
    """
    module.sys = SimpleNamespace(modules=_PatchableModules())
