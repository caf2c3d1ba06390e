"""Smaller world, model and batches that keep the shape of the original: what was split stays split, if ranks allow."""

from __future__ import annotations

from mindspeed_rl_plugin.tools.rehearse.command_line import Flags

HEADS, HEAD_SIZE, SEQUENCE, VOCABULARY = 4, 32, 64, 5120
MEMBERS, PROMPT, RESPONSE = 4, 16, 8
_SMALL, _FEWER, _ONE, _BATCHES = "smaller model", "fewer ranks", "one iteration", "smaller batches"
_SHORT, _NO_EVALUATION = "shorter sequences", "no evaluation set"
# Of the model, where the script gives them: largest value in the rehearsal -> flags.
LIMITS = {
    256: "--ffn-hidden-size",
    64: "--moe-ffn-hidden-size --moe-shared-expert-intermediate-size --q-lora-rank",
    32: "--kv-lora-rank --qk-head-dim --v-head-dim --kv-channels",
    16: "--qk-pos-emb-head-dim",
    4: "--num-experts",
    2: "--moe-router-topk --moe-router-num-groups --num-virtual-stages-per-pipeline-rank",
    1: """
        --moe-router-group-topk --first-k-dense-replace --recompute-num-layers --num-layers-per-virtual-pipeline-stage
    """,
}
# Flags that lay out the original's number of layers or batches.
LAID_OUT = """
    --num-layer-list --noop-layers --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers
    --pipeline-model-parallel-layout --pipeline-model-parallel-split-rank --account-for-embedding-in-pipeline-split
    --account-for-loss-in-pipeline-split --enable-recompute-layers-per-pp-rank --recompute-in-bubble
    --rampup-batch-size --step-batch-size-schedule
"""


def shrink(flags: Flags, ranks: int) -> None:
    """Make everything smaller, and say what. ranks: processes to run on, a power of two."""
    tp = 2 if flags.number("--tensor-model-parallel-size", 1) > 1 and ranks >= 2 else 1
    pp = 2 if flags.number("--pipeline-model-parallel-size", 1) > 1 and ranks // tp >= 2 else 1
    flags.replace("--tensor-model-parallel-size", tp, _FEWER)
    flags.replace("--pipeline-model-parallel-size", pp, _FEWER)
    flags.at_most("--context-parallel-size", 1, "attention across ranks is done by TransformerEngine or NPU kernels")
    flags.at_most("--expert-tensor-parallel-size", tp, _FEWER)
    expert_tp = flags.number("--expert-tensor-parallel-size", tp)
    flags.at_most("--expert-model-parallel-size", max(1, ranks // (pp * expert_tp)), _FEWER)
    if pp == 1:
        virtual = "--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank"
        flags.drop(virtual, f"{_FEWER}: no pipeline is left")
    _model(flags, pp)
    _batch(flags, ranks, ranks // (tp * pp))


def _model(flags: Flags, pp: int) -> None:
    virtual = any("virtual" in flag for flag in flags.values)
    flags.set("--num-layers", pp * 2 if virtual or pp == 1 else pp, why=_SMALL)
    flags.drop(LAID_OUT, "lays out the original's layers or batches")
    every_head = flags.get("--num-query-groups") == flags.get("--num-attention-heads")
    flags.at_most("--num-query-groups", HEADS if every_head else 2, _SMALL)
    flags.set("--num-attention-heads", HEADS, why=_SMALL)
    flags.set("--hidden-size", HEADS * HEAD_SIZE, why=_SMALL)
    for limit, names in LIMITS.items():
        flags.at_most(names, limit, _SMALL)
    for flag in ("--seq-length", "--max-position-embeddings"):
        flags.set(flag, SEQUENCE, why=_SHORT)
    flags.replace("--vocab-size --padded-vocab-size", VOCABULARY, "vocabulary of the generated tokenizer")


def _batch(flags: Flags, ranks: int, dp: int) -> None:
    batch = dp * 4
    flags.set("--micro-batch-size", 1, why=_BATCHES)
    flags.set("--global-batch-size", batch, why=_BATCHES)
    samples = "--train-samples" in flags
    flags.set("--train-samples" if samples else "--train-iters", batch if samples else 1, why=_ONE)
    flags.at_most("--lr-warmup-iters --lr-warmup-samples", 0, _ONE)
    flags.set("--log-interval", 1, why=_ONE)
    flags.set("--eval-iters", 0, why=_NO_EVALUATION)
    if "--rl-algorithm" in flags:
        flags.set("--rl-samples-per-prompt", MEMBERS, why=_BATCHES)
        flags.replace("--rl-rollout-prompts", batch // MEMBERS, _BATCHES)
        flags.at_most("--rl-ppo-epochs", 1, _ONE)
        flags.set("--rl-max-prompt-length", PROMPT, why=_SHORT)
        flags.set("--rl-max-response-length", RESPONSE, why=_SHORT)
        flags.at_most("--rl-generate-tp", min(2, ranks), _FEWER)
        flags.set("--rl-kv-cache-gb", 0.05, why=_SMALL)
        flags.at_most("--rl-reward-workers", 1, _FEWER)
        flags.at_most("--rl-eval-pass-k", 0, _NO_EVALUATION)
