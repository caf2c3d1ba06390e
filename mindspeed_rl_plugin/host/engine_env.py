"""Environment variables that the rollout engine needs, set or refused before vLLM is imported."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch.distributed as dist

# name -> (value, why). Set for every device; a value of the user's that differs is refused.
REQUIRED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": ("0", "the engine lives in the training ranks, where the reshard writes weights"),
}
REQUIRED_NPU = {
    "VLLM_ASCEND_ENABLE_NZ": ("0", "weights in FRACTAL_NZ format cannot be rewritten after a wake"),
    "VLLM_ASCEND_ENABLE_FUSED_MC2": ("0", "it casts the weights of experts to FRACTAL_NZ whatever the former says"),
    # On A5 0.26 does so with unquantized weights too.
    "VLLM_ASCEND_ENABLE_MLAPO": ("0", "latent attention would decode with rearranged copies that no reshard reaches"),
}
# name -> value; the user's own value wins. On CPU vLLM warns some twenty times per rank of what cannot be changed.
DEFAULTS = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
DEFAULTS_CPU = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# On from 0.11, it finds no peers where a process sees a part of the machine's GPUs, as Ray's do (vllm issue 38550).
DEFAULTS_CUDA = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
# The sleep mode's memory pools and expandable segments exclude each other: vllm-ascend asserts that they are
# off, vLLM on CUDA too until 0.23, which turns them off around its pools.
ALLOCATOR_SETTINGS = {"npu": ("PYTORCH_NPU_ALLOC_CONF",), "cuda": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
CUDA_POOLS_FIXED = (0, 23)
# Until then vllm-ascend takes what others hold of the device off the engine's share of it.
ASCEND_SHARE_FREE = (0, 15)
# From 0.11 on the V1 engine is the only one, and the switch is gone.
V1_SWITCH_GONE = (0, 11)


def prepare_engine_env(kind: str, *, sleep_mode: bool) -> None:
    """Set what vLLM (and vllm-ascend) read at import. Idempotent; call it before the engine is built.

    kind: "npu" | "cuda" | "cpu"; sleep_mode: whether the engine's memory pools are used. Raises ValueError for
    a setting of the user's under which the engine cannot work, with the value to give it.
    """
    required = {**REQUIRED, **(REQUIRED_NPU if kind == "npu" else {})}
    for name, (value, why) in required.items():
        given = os.environ.setdefault(name, value)
        if given != value:
            raise ValueError(f"{name}={given} cannot be used for rollouts: {why}; set it to {value} or unset it")
    for name, value in {**DEFAULTS, **{"cpu": DEFAULTS_CPU, "cuda": DEFAULTS_CUDA}.get(kind, {})}.items():
        os.environ.setdefault(name, value)
    given = expandable_segments(kind) if sleep_mode else ""
    if given and not (kind == "cuda" and vllm_version() >= CUDA_POOLS_FIXED):
        raise ValueError(
            f"{given}: expandable segments cannot be used with the engine's sleep mode; take expandable_segments:True "
            "out of the launch script"
        )
    if vllm_version() < V1_SWITCH_GONE:
        os.environ.setdefault("VLLM_USE_V1", "1")
    if dist.is_initialized():  # vLLM's external launcher reads torchrun's variables, which are there without it too
        os.environ.setdefault("RANK", str(dist.get_rank()))
        os.environ.setdefault("WORLD_SIZE", str(dist.get_world_size()))
        os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])


def expandable_segments(kind: str) -> str:
    """The variable that turns expandable segments on, with its value; empty without."""
    given = (f"{name}={os.environ.get(name, '')}" for name in ALLOCATOR_SETTINGS.get(kind, ()))
    return next((text for text in given if "expandable_segments:True" in text.replace(" ", "")), "")


@contextlib.contextmanager
def in_group(size: int) -> Iterator[None]:
    """RANK is the rank within its group of so many consecutive ranks, for what reads it as if there were no others."""
    rank = os.environ["RANK"]
    os.environ["RANK"] = str(int(rank) % size)
    try:
        yield
    finally:
        os.environ["RANK"] = rank


def engines_share_experts() -> bool:
    """Whether vLLM's engine knows data parallel ranks of an external launcher. Read off its source: importing it takes
    seconds, and variables that are set first."""
    package = importlib.util.find_spec("vllm")
    if package is None:
        return True  # `vllm_version` says so
    source = Path(package.origin).parent / "v1" / "engine" / "llm_engine.py"
    return source.is_file() and "external_launcher_dp" in source.read_text()


def vllm_version() -> tuple[int, int]:
    """(major, minor) of the installed vLLM, read from its metadata. Raises ValueError when there is none."""
    for package in ("vllm", "vllm-cpu", "vllm-empty"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        major, minor = version.split(".")[:2]
        return int(major), int(minor)
    raise ValueError("vLLM is not installed: pip install vllm (CUDA), vllm-ascend (Ascend) or run setup.sh (CPU)")
