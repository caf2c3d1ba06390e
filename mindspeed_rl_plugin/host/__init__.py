"""*Host mode*: Megatron (and MindSpeed) on a machine without accelerator. `activate_if_needed` starts it.

cuda.py           the replacement of torch.cuda
collectives.py    gloo for code that asks for nccl or hccl
optimizer.py      an Adam that the distributed optimizer can save and resume; copies of loaded state
megatron_gaps.py  what Megatron lacks without TransformerEngine, Apex and a GPU, as data
npu.py            the replacement of torch_npu and torchair, with which MindSpeed's adaptor can be imported
npu_ops.py        fused operators of the NPU in torch; more of them are in grouped_matmul.py and reuse.py
vllm_live.py      vLLM on a CPU with weights that can be updated in place
on_import.py      runs an action when a module is imported
streams.py        streams and events of the replaced devices
spawn.py          host mode in spawned processes; spawned.py is their main module

Also in this folder, for every device: engine_env.py (variables that vLLM needs) and torch_originals.py.
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
    """Whether the replacements are installed in this process."""
    return _active


def activate_if_needed(announce: bool = True) -> bool:
    """Install the replacements if neither an NPU nor CUDA is found. Returns whether they are installed.

    Call it before megatron and mindspeed are imported; a second call changes nothing. Rank 0 prints one line, unless
    `announce` is False. On a machine with an accelerator nothing is installed or printed.

    Raises ValueError if Megatron is already imported: then it uses the real torch.cuda.
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
            f"host mode: no NPU and no CUDA found; Megatron runs on the CPU with gloo, {threads} thread(s) per rank",
            flush=True,
        )
    return True


def _set_environment() -> int:
    """Set defaults of variables that the user has not set. Returns the number of threads of a rank."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling takes minutes and makes nothing faster here
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron requires it with tensor parallelism
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # ranks share the cores; forked workers warn
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // launch_env()["local_world_size"])
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    return torch.get_num_threads()
