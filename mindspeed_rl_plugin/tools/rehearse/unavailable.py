"""Flags that ask for kernels or memory tricks that exist on an accelerator only, and flags of another Megatron."""

from __future__ import annotations

from mindspeed_rl_plugin.tools.rehearse.command_line import Flags

NOT_HERE = "not on a host: "  # how the reasons begin
# Reason -> rules of `Flags.apply`. With and without MindSpeed; the last are Megatron's fusions, which these switch off.
EVERYWHERE = {
    "its kernel is compiled for the accelerator": "--moe-grouped-gemm --moe-permute-fusion",
    "shards by NPU or GPU streams": "--use-torch-fsdp2",
    "no FP8 on a CPU": "--fp8-format --fp8-recipe",
    "is TransformerEngine's optimizer": "--use-precision-aware-optimizer",
    "captures a graph on the device": "--optimizer-cuda-graph --cuda-graph-impl --enable-cuda-graph",
    "registers buffers with NCCL": "--use-nccl-ub",
    "profiles the NPU": "--profile --profile-*",
    "the fusion is a compiled kernel": "--no-gradient-accumulation-fusion= --no-masked-softmax-fusion=",
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
# On plain Megatron.
PLAIN = {
    "the fusion is TransformerEngine's": "--no-rope-fusion=",
    "the fusion is Apex's": "--no-persist-layer-norm=",
    "flash attention is a GPU kernel": "--use-flash-attn",
    "TransformerEngine's attention splits sequences": "--context-parallel-size<=1",
    "TransformerEngine is not installed": "--transformer-impl=local",
}
# Reason -> how a flag of MindSpeed-LLM's begins, and the rule.
OF_MINDSPEED_LLM = {
    "a layer spec of MindSpeed-LLM": ("--spec mindspeed", "--spec"),
    "alltoall_seq is MindSpeed's": ("--moe-token-dispatcher-type alltoall_seq", "--moe-token-dispatcher-type=alltoall"),
    "-1 has a meaning in MindSpeed-LLM only": ("--moe-layer-freq -1", "--moe-layer-freq"),
    "hccl is no choice of plain Megatron; here it is gloo anyway": (
        "--distributed-backend hccl",
        "--distributed-backend=nccl",
    ),
}


def remove(flags: Flags, *, mindspeed: bool) -> None:
    """Take out what no host can run, with MindSpeed or on plain Megatron."""
    for why, rules in (EVERYWHERE | (MINDSPEED if mindspeed else PLAIN)).items():
        flags.apply(NOT_HERE + why, rules)


def of_mindspeed_llm(flags: Flags) -> None:
    """Without MindSpeed-LLM: put Megatron's own values for its. Flags that only it has, the parser names later."""
    for why, (words, rule) in OF_MINDSPEED_LLM.items():
        flag = words.split()[0]
        if f"{flag} {flags.get(flag)}".startswith(words):
            flags.apply(why, rule)
    if "--eval-interval" not in flags:
        flags.apply("Megatron Core 0.19 wants it, evaluation or not", "--eval-interval=1000")
