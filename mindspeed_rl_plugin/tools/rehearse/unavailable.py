"""Flags that ask for kernels or memory tricks that exist on an accelerator only, and flags of another Megatron."""

from __future__ import annotations

from mindspeed_rl_plugin.tools.rehearse.command_line import Flags

NOT_HERE = "not on a host: "  # how the reasons begin
# Reason -> flags. With and without MindSpeed.
EVERYWHERE = {
    "its kernel is compiled for the accelerator": "--moe-grouped-gemm --moe-permute-fusion",
    "shards by NPU or GPU streams": "--use-torch-fsdp2",
    "no FP8 on a CPU": "--fp8-format --fp8-recipe",
    "is TransformerEngine's optimizer": "--use-precision-aware-optimizer",
    "captures a graph on the device": "--optimizer-cuda-graph --cuda-graph-impl --enable-cuda-graph",
    "registers buffers with NCCL": "--use-nccl-ub",
    "profiles the NPU": "--profile --profile-*",
}
# Under MindSpeed, whose other switches run here: its fused operators have stand-ins (`host.npu_ops`).
MINDSPEED = {
    "its kernel is compiled for the NPU": """
        --use-ascend-coc --use-ascend-mc2 --coc-fused-kernel --coc-parallel-num --gemm-gradient-accumulation-fusion
        --use-fused-moe-token-permute-and-unpermute --use-fused-ring-attention-update --use-fused-mlp
        --use-fused-rotary-pos-emb --use-fused-lmhead-loss --mla-mm-split --mla-fa-without-pad
    """,
    "casts in place by an NPU operator": "--reuse-fp32-param",
    "needs streams of the NPU": """
        --moe-alltoall-overlap-comm --moe-allgather-overlap-comm --moe-permutation-async-comm --moe-fb-overlap
        --schedules-method --swap-* --adaptive-memory-optimization --adaptive-recompute-device-swap --smart-swap
    """,
    "sets the NPU's deterministic mode": "--npu-deterministic",
}
# Megatron's own fusions, on unless these switch them off; those of the libraries on plain Megatron only.
COMPILED = {"the fusion is a compiled kernel": "--no-gradient-accumulation-fusion --no-masked-softmax-fusion"}
OF_LIBRARIES = {
    "the fusion is TransformerEngine's": "--no-rope-fusion",
    "the fusion is Apex's": "--no-persist-layer-norm",
}


def remove(flags: Flags, *, mindspeed: bool) -> None:
    """Take out what no host can run, with MindSpeed or on plain Megatron."""
    for why, names in (EVERYWHERE | MINDSPEED if mindspeed else EVERYWHERE).items():
        flags.drop(names, NOT_HERE + why)
    for why, names in (COMPILED if mindspeed else COMPILED | OF_LIBRARIES).items():
        for flag in names.split():
            flags.set(flag, why=NOT_HERE + why)
    if not mindspeed:
        flags.drop("--use-flash-attn", NOT_HERE + "flash attention is a GPU kernel")
        flags.at_most("--context-parallel-size", 1, NOT_HERE + "TransformerEngine's attention splits sequences")
        flags.set("--transformer-impl", "local", why=NOT_HERE + "TransformerEngine is not installed")


def of_mindspeed_llm(flags: Flags) -> None:
    """Without MindSpeed-LLM: put Megatron's own values for its. Flags that only it has, the parser names later."""
    if (flags.get("--spec") or "").startswith("mindspeed"):
        flags.drop("--spec", "a layer spec of MindSpeed-LLM")
    if flags.get("--moe-token-dispatcher-type") == "alltoall_seq":
        flags.set("--moe-token-dispatcher-type", "alltoall", why="alltoall_seq is MindSpeed's")
    if flags.get("--moe-layer-freq") == "-1":
        flags.drop("--moe-layer-freq", "-1 has a meaning in MindSpeed-LLM only")
    if flags.get("--distributed-backend") == "hccl":
        flags.set("--distributed-backend", "nccl", why="hccl is no choice of plain Megatron; here it is gloo anyway")
    if "--eval-interval" not in flags:
        flags.set("--eval-interval", 1000, why="Megatron Core 0.19 wants it, evaluation or not")
