"""Flags that ask for kernels or memory tricks that exist on an accelerator only, as data: flag -> why it goes."""

from __future__ import annotations

from mindspeed_rl_plugin.tools.rehearse.flags import Flags

_COMPILED = "its kernel is compiled for the NPU"
_STREAMS = "overlaps streams of the NPU by kernels of its own"
_SWAP = "moves tensors between NPU and host memory by NPU streams"
_PROFILER = "profiles the NPU"

# With and without MindSpeed.
EVERYWHERE = {
    "--moe-grouped-gemm": "its matrix product is a compiled kernel",
    "--moe-permute-fusion": _COMPILED,
    "--use-torch-fsdp2": "shards by NPU or GPU streams",
    "--fp8-format": "no FP8 on a CPU",
    "--fp8-recipe": "no FP8 on a CPU",
    "--use-precision-aware-optimizer": "is TransformerEngine's optimizer",
    "--optimizer-cuda-graph": "captures a graph on the device",
    "--cuda-graph-impl": "captures a graph on the device",
    "--enable-cuda-graph": "captures a graph on the device",
    "--profile": _PROFILER,
    "--profile-step-start": _PROFILER,
    "--profile-step-end": _PROFILER,
    "--profile-ranks": _PROFILER,
    "--profile-level": _PROFILER,
    "--profile-with-cpu": _PROFILER,
    "--profile-with-stack": _PROFILER,
    "--profile-with-memory": _PROFILER,
    "--profile-record-shapes": _PROFILER,
    "--profile-save-path": _PROFILER,
    "--use-nccl-ub": "registers buffers with NCCL",
}
# Under MindSpeed, whose other switches run here: its fused operators have stand-ins (`host.npu_ops`).
MINDSPEED = {
    "--use-ascend-coc": _COMPILED,
    "--use-ascend-mc2": _COMPILED,
    "--coc-fused-kernel": _COMPILED,
    "--coc-parallel-num": _COMPILED,
    "--gemm-gradient-accumulation-fusion": _COMPILED,
    "--use-fused-moe-token-permute-and-unpermute": _COMPILED,
    "--use-fused-ring-attention-update": _COMPILED,
    "--use-fused-mlp": _COMPILED,
    "--use-fused-rotary-pos-emb": _COMPILED,
    "--use-fused-lmhead-loss": _COMPILED,
    "--mla-mm-split": _COMPILED,
    "--mla-fa-without-pad": _COMPILED,
    "--reuse-fp32-param": "casts in place by an NPU operator",
    "--moe-alltoall-overlap-comm": _STREAMS,
    "--moe-allgather-overlap-comm": _STREAMS,
    "--moe-permutation-async-comm": _STREAMS,
    "--moe-fb-overlap": _STREAMS,
    "--schedules-method": _STREAMS,
    "--swap-attention": _SWAP,
    "--swap-optimizer": _SWAP,
    "--swap-optimizer-times": _SWAP,
    "--swap-modules": _SWAP,
    "--adaptive-memory-optimization": _SWAP,
    "--adaptive-recompute-device-swap": _SWAP,
    "--smart-swap": _SWAP,
    "--npu-deterministic": "sets the NPU's deterministic mode",
}
# Megatron's own fusions, on unless they are switched off: CUDA extensions.
SWITCHED_OFF = {
    "--no-gradient-accumulation-fusion": "the fusion is a CUDA extension",
    "--no-masked-softmax-fusion": "the fusion is a CUDA extension",
    "--no-rope-fusion": "the fusion is TransformerEngine's",
    "--no-persist-layer-norm": "the fusion is Apex's",
}


def remove(flags: Flags, mindspeed: bool, known: set[str]) -> None:
    """Take out what no host can run. known: flags of the parser that will read them, empty when not known."""
    for flag, why in {**EVERYWHERE, **(MINDSPEED if mindspeed else {})}.items():
        flags.drop(flag, f"not on a host: {why}")
    if mindspeed:
        flags.set("--no-gradient-accumulation-fusion", why="not on a host: the fusion is a compiled kernel")
        flags.set("--no-masked-softmax-fusion", why="not on a host: the fusion is a compiled kernel")
        return
    flags.drop("--use-flash-attn", "not on a host: flash attention is a GPU kernel")
    for flag, why in SWITCHED_OFF.items():
        if not known or flag in known:
            flags.set(flag, why=f"not on a host: {why}")
    flags.at_most("--context-parallel-size", 1, "not on a host: TransformerEngine's attention splits rows over ranks")
    flags.set("--transformer-impl", "local", why="not on a host: TransformerEngine is not installed")


def only_known(flags: Flags, known: set[str], where: str) -> None:
    """Without MindSpeed-LLM: take out flags that only it has, and put Megatron's own values for its.

    where: "MindSpeed" or the Megatron that the arguments are for instead, as messages name it.
    """
    for flag in sorted({name for name, _ in flags.items} - known):
        flags.drop(flag, f"no flag of {where}")
    if (flags.get("--spec") or "").startswith("mindspeed"):
        flags.drop("--spec", "a layer spec of MindSpeed-LLM")
    if flags.get("--moe-token-dispatcher-type") == "alltoall_seq":
        flags.set("--moe-token-dispatcher-type", "alltoall", why="alltoall_seq is MindSpeed's")
    if flags.get("--moe-layer-freq") == "-1":
        flags.drop("--moe-layer-freq", "-1 has a meaning in MindSpeed-LLM only")
    if flags.get("--distributed-backend") == "hccl":
        flags.set("--distributed-backend", "nccl", why="hccl is no choice of plain Megatron; here it is gloo anyway")
    if "--eval-interval" in known and "--eval-interval" not in flags:
        flags.set("--eval-interval", 1000, why="Megatron Core 0.19 wants it, evaluation or not")
