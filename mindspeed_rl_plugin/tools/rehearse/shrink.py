"""The changes of a rehearsal: removes flags that need an accelerator, replaces values that only MindSpeed-LLM knows,
and makes world, model and batches smaller. Parallel sizes above 1 stay above 1, as far as the ranks allow."""

from __future__ import annotations

from mindspeed_rl_plugin.tools.rehearse.command_line import Flags

HEADS, HEAD_SIZE, VOCABULARY = 4, 32, 5120
MEMBERS = 4
_SMALL, _FEWER_RANKS, _ONE_ITERATION, _BATCHES = "smaller model", "fewer ranks", "one iteration", "smaller batches"
_SHORT, _NO_EVALUATION = "shorter sequences", "no evaluation set"
_VIRTUAL = "--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank"
# Layers without experts that MindSpeed-LLM's converter takes for granted, whatever the script says.
CONVERTED_DENSE = {"glm45": 3}
# Rules of `Flags.apply`: layers {0}, experts {1}, most layers without experts {2}.
COUNT_RULES = """
    --num-layers={0} --num-experts<={1} --moe-router-topk<=2 --moe-router-num-groups<=2 --moe-router-group-topk<=1
    --first-k-dense-replace<={2} --recompute-num-layers<=1
    --num-virtual-stages-per-pipeline-rank<=2 --num-layers-per-virtual-pipeline-stage<=1
"""
# Key heads {0}, heads {1}, hidden size {2}. The sizes of a head in latent attention do not change: vLLM on a CPU only
# supports DeepSeek's (`engine_sizes.CPU_LATENT_SIZE`).
WIDTH_RULES = """
    --num-query-groups<={0} --num-attention-heads={1} --hidden-size={2} --ffn-hidden-size<=256
    --moe-ffn-hidden-size<=64 --moe-shared-expert-intermediate-size<=64 --q-lora-rank<=64
"""
# Flags that depend on the original number of layers or batches. --num-layer-list, which does too, has its own rule.
LAID_OUT = """
    --decoder-last-pipeline-num-layers --pipeline-model-parallel-layout --pipeline-model-parallel-split-rank
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
    --enable-recompute-layers-per-pp-rank --recompute-in-bubble --rampup-batch-size --step-batch-size-schedule
"""
NOT_HERE = "not on a host: "  # first words of the reasons
# Reason -> rules of `Flags.apply`, with and without MindSpeed. The last ones switch Megatron's fusions off.
EVERYWHERE = {
    "its kernel is compiled for the accelerator": "--moe-permute-fusion",
    "shards with streams of the NPU or GPU": "--use-torch-fsdp2",
    "a CPU has no FP8, and RL refuses it": "--fp8-*",
    "is TransformerEngine's optimizer": "--use-precision-aware-optimizer",
    "captures a graph on the device": "--optimizer-cuda-graph --cuda-graph-impl --enable-cuda-graph",
    "registers buffers with NCCL": "--use-nccl-ub",
    "profiles the NPU": "--profile --profile-*",
    "the fusion is a compiled kernel": "--no-gradient-accumulation-fusion= --no-masked-softmax-fusion=",
}
# With MindSpeed. Its other switches work here: fused operators have stand-ins (`host.npu_ops`).
WITH_MINDSPEED = {
    "its kernel is compiled for the NPU": """
        --use-ascend-coc --use-ascend-mc2 --coc-fused-kernel --coc-parallel-num
        --use-fused-moe-token-permute-and-unpermute --use-fused-ring-attention-update --use-fused-mlp
        --use-fused-lmhead-loss
    """,
    "needs streams of the NPU": """
        --moe-allgather-overlap-comm --moe-fb-overlap --swap-attention --swap-modules --smart-swap
        --adaptive-memory-optimization --adaptive-recompute-device-swap
    """,
    "sets the NPU's deterministic mode": "--npu-deterministic",
}
# With plain Megatron.
PLAIN_MEGATRON = {
    "the fusion is TransformerEngine's": "--no-rope-fusion=",
    "the fusion is Apex's": "--no-persist-layer-norm=",
    "flash attention is a GPU kernel": "--use-flash-attn",
    "its kernel is compiled for the GPU": "--moe-grouped-gemm",
    "only TransformerEngine's attention splits sequences": "--context-parallel-size<=1",
    "TransformerEngine is not installed": "--transformer-impl=local",
    "no engine has this norm of TransformerEngine, so RL refuses it": "--apply-layernorm-1p",
}
# Reason -> (first characters of "FLAG VALUE" of MindSpeed-LLM, rule that replaces the flag).
MINDSPEED_LLM_FLAGS = {
    "a layer spec of MindSpeed-LLM": ("--spec mindspeed", "--spec"),
    "alltoall_seq is MindSpeed's": ("--moe-token-dispatcher-type alltoall_seq", "--moe-token-dispatcher-type=alltoall"),
    "only MindSpeed-LLM knows the value -1": ("--moe-layer-freq -1", "--moe-layer-freq"),
    "plain Megatron has no hccl; the backend here is gloo anyway": (
        "--distributed-backend hccl",
        "--distributed-backend=nccl",
    ),
}


def remove_unavailable(flags: Flags, *, mindspeed: bool) -> None:
    """Remove or switch off what no host can run. mindspeed: with MindSpeed; else with plain Megatron."""
    for why, rules in (EVERYWHERE | (WITH_MINDSPEED if mindspeed else PLAIN_MEGATRON)).items():
        flags.apply(NOT_HERE + why, rules)


def replace_mindspeed_llm(flags: Flags) -> None:
    """For a run without MindSpeed-LLM: replace values that only MindSpeed-LLM knows. Flags that only MindSpeed-LLM has
    are found later, by the parser."""
    for why, (words, rule) in MINDSPEED_LLM_FLAGS.items():
        flag = words.split()[0]
        if f"{flag} {flags.get(flag)}".startswith(words):
            flags.apply(why, rule)
    if "--eval-interval" not in flags:
        flags.apply("Megatron Core 0.19 needs it even without evaluation", "--eval-interval=1000")


def ranks_of_split(flags: Flags) -> int:
    """Number of processes of the rehearsal: 4 if the script has several parallel sizes above 1, so that two of them
    can be 2; else 2."""
    sizes = ("tensor-model", "context", "pipeline-model", "expert-model")
    return 2 if sum(flags.number(f"--{size}-parallel-size", 1) > 1 for size in sizes) < 2 else 4


def shrink(flags: Flags, ranks: int, widths: bool = True) -> None:
    """Make everything smaller, and record the changes. ranks: number of processes, a power of two; widths: False leaves
    the sizes of heads, hidden states and MLPs as they are."""
    tp = 2 if flags.number("--tensor-model-parallel-size", 1) > 1 and ranks >= 2 else 1
    least = 4 if flags.get("--context-parallel-algo") == "hybrid_cp_algo" else 2
    cp = least if flags.number("--context-parallel-size", 1) > 1 and ranks // tp >= least else 1
    pp = 2 if flags.number("--pipeline-model-parallel-size", 1) > 1 and ranks // (tp * cp) >= 2 else 1
    sizes = "--tensor-model-parallel-size~{0} --pipeline-model-parallel-size~{1} --expert-tensor-parallel-size<={0}"
    flags.apply(_FEWER_RANKS, sizes, tp, pp)
    flags.apply(_FEWER_RANKS, "--context-parallel-size<={0} --ulysses-degree-in-cp<=2 --cp-window-size<=1", cp)
    expert_tp = flags.number("--expert-tensor-parallel-size", tp)
    flags.apply(_FEWER_RANKS, "--expert-model-parallel-size<={0}", max(1, ranks // (pp * expert_tp)))
    if flags.number("--expert-model-parallel-size", 1) == 1:
        flags.apply(f"{_FEWER_RANKS}: experts are not split", "--moe-alltoall-overlap-comm")
    if pp == 1:
        rules = "--num-layer-list --schedules-method --dualpipev-dw-detach --decoder-first-pipeline-num-layers"
        flags.apply(f"{_FEWER_RANKS}: no pipeline is left", f"{_VIRTUAL} {rules}")
    _model(flags, pp, widths)
    _batch(flags, ranks, ranks // (tp * cp * pp) * 4)


def _model(flags: Flags, pp: int, widths: bool) -> None:
    virtual = "--schedules-method" in flags or any("virtual" in flag for flag in flags.values)
    every_head = flags.get("--num-query-groups") == flags.get("--num-attention-heads")
    flags.apply("depends on the original number of layers or batches", LAID_OUT)
    dense = "--first-k-dense-replace" in flags  # MindSpeed-LLM needs a layer with experts in each stage
    most = CONVERTED_DENSE.get(flags.get("--model-type-hf"), 1) if "--enable-hf2mg-convert" in flags else 1
    layers = pp * (most + 1) if virtual or pp == 1 or dense else pp
    noop = "--noop-layers" in flags  # one no-op layer is kept, in a chunk with a normal layer
    layers *= 2 if noop else 1
    layers += "--num-layer-list" in flags  # so that its stages differ
    # Two experts per rank: with one, MindSpeed's --moe-zero-memory frees tokens that no permutation has copied.
    spread = flags.number("--tensor-model-parallel-size", 1) if "--moe-tp-extend-ep" in flags else 1
    experts = max(4, 2 * spread * flags.number("--expert-model-parallel-size", 1))
    flags.apply(_SMALL, COUNT_RULES, layers, experts, most)
    if "[" in (pattern := flags.get("--moe-layer-freq") or ""):
        flags.apply(_SMALL, "--moe-layer-freq=[{0}]+[1]*{1}", int("[0" not in pattern), layers - 1)
    if widths:
        flags.apply(_SMALL, WIDTH_RULES, HEADS if every_head else 2, HEADS, HEADS * HEAD_SIZE)
        if "--multi-latent-attention" not in flags:
            flags.apply(_SMALL, "--kv-channels<={0}", HEAD_SIZE)
    if noop:
        flags.apply(_SMALL, "--noop-layers~{0} --num-layers-per-virtual-pipeline-stage~2", layers - 1)
    flags.apply(_SMALL, "--num-layer-list~{0},1 --decoder-first-pipeline-num-layers~{1}", layers - 1, layers // pp)
    flags.apply(_SHORT, "--seq-length=64 --max-position-embeddings=64")
    vocabulary = "--vocab-size~{0} --padded-vocab-size~{0}"
    flags.apply("vocabulary of the generated tokenizer", vocabulary, VOCABULARY)


def _batch(flags: Flags, ranks: int, batch: int) -> None:
    rl = "--rl-algorithm" in flags
    steps, why = (2, "one iteration, and one after a resume") if rl else (1, _ONE_ITERATION)
    length = f"--train-samples={steps * batch}" if "--train-samples" in flags else f"--train-iters={steps}"
    flags.apply(_BATCHES, "--micro-batch-size=1 --global-batch-size={0}", batch)
    flags.apply(why, f"{length} --lr-warmup-iters<=0 --lr-warmup-samples<=0 --log-interval=1")
    flags.apply(_NO_EVALUATION, "--eval-iters=0")
    if rl:
        flags.apply(_BATCHES, "--rl-samples-per-prompt={0} --rl-rollout-prompts~{1}", MEMBERS, batch // MEMBERS)
        flags.apply(_ONE_ITERATION, "--rl-ppo-epochs<=1")
        flags.apply(_SHORT, "--rl-max-prompt-length=16 --rl-max-response-length=8")
        flags.apply(_SMALL, "--rl-kv-cache-gb=0.05")
        engines = "--rl-generate-tp<={0} --rl-generate-ep<={1} --rl-reward-workers<=1"
        flags.apply(_FEWER_RANKS, engines, min(2, ranks), ranks)
        flags.apply(_BATCHES, "--rl-eval-prompts=4 --rl-eval-pass-k<=2")
