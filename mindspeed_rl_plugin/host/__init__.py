"""Megatron (and MindSpeed) on a machine with no accelerator: `activate_if_needed` at the very start.

cuda.py           the stand-in for torch.cuda
collectives.py    gloo for code that asks for nccl or hccl
optimizer.py      an Adam that the distributed optimizer can save and resume; state that is loaded
megatron_gaps.py  what Megatron lacks without TransformerEngine, Apex and a GPU, as data
npu.py            the stand-in for torch_npu and torchair, so that MindSpeed's adaptor imports
npu_ops.py        fused operators of the NPU, by torch's; grouped_matmul.py, reuse.py: those that MindSpeed compiles
vllm_live.py      vLLM on CPU with weights that can be updated in place
on_import.py      acting on a module when it is imported
streams.py        streams and events of the stand-in devices
spawn.py          host mode in spawned processes; spawned.py is their main module
"""

from __future__ import annotations

import os
import sys

import torch

from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.environment import launch_env
from mindspeed_rl_plugin.host import collectives, cuda, megatron_gaps, npu, optimizer, spawn, vllm_live
from mindspeed_rl_plugin.host.on_import import after_import

__all__ = ["activate_if_needed", "active", "vllm_live"]

_active = False


def active() -> bool:
    """Whether the stand-ins are in place in this process."""
    return _active


def activate_if_needed(announce: bool = True) -> bool:
    """Install the stand-ins if neither an NPU nor CUDA is found. Returns whether they are installed.

    Call it before megatron and mindspeed are imported; a repeat changes nothing. Rank 0 prints one line, unless
    `announce` is off. On a machine with an accelerator it does and prints nothing.

    Raises ValueError when Megatron is already imported: then it uses the real torch.cuda.
    """
    global _active
    if _active or not get_device().is_cpu:
        return _active
    for name in ("megatron.core", "megatron.training"):
        if name in sys.modules:
            raise ValueError(
                f"host mode must start before {name} is imported; run the script with "
                "`python -m mindspeed_rl_plugin SCRIPT`, or make `import mindspeed_rl_plugin.adaptor` its first import"
            )
    _active = True
    threads = _set_environment()
    cuda.install()
    collectives.install()
    optimizer.own_loaded_state()
    for gap in megatron_gaps.GAPS:
        after_import(gap.module, gap.close)
    npu.install_with_mindspeed()
    spawn.install()
    if announce and launch_env()["rank"] == 0:
        print(
            f"host mode: neither NPU nor CUDA found, Megatron runs on CPU over gloo, {threads} thread(s) per rank",
            flush=True,
        )
    return True


def _set_environment() -> int:
    """Set defaults of variables that the user has not set. Returns the number of threads of a rank."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling costs minutes and gains nothing here
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron insists on it with TP
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # ranks share the cores; forked workers warn
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // launch_env()["local_world_size"])
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    return torch.get_num_threads()
