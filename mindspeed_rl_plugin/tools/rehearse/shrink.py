"""Smaller world, model and batches that keep the shape of the original: what was split stays split, if ranks allow."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl_plugin.tools.rehearse.command_line import Flags

HEADS, HEAD_SIZE, SEQUENCE, VOCABULARY = 4, 32, 64, 5120
MEMBERS, PROMPT, RESPONSE = 4, 16, 8
_SMALL, _FEWER, _SHORT, _BATCHES = "smaller model", "fewer ranks", "one iteration", "smaller batches"

# Largest value in the rehearsal -> flags, only where the script gives them.
LIMITS = {
    256: "--ffn-hidden-size",
    64: "--moe-ffn-hidden-size --moe-shared-expert-intermediate-size --q-lora-rank",
    32: "--kv-lora-rank --qk-head-dim --v-head-dim --kv-channels",
    16: "--qk-pos-emb-head-dim",
    4: "--num-experts",
    2: "--moe-router-topk --moe-router-num-groups",
    1: "--moe-router-group-topk --first-k-dense-replace --recompute-num-layers",
}
# Flags that lay out the original's number of layers or batches.
LAID_OUT = """
    --num-layer-list --noop-layers --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers
    --pipeline-model-parallel-layout --pipeline-model-parallel-split-rank --account-for-embedding-in-pipeline-split
    --account-for-loss-in-pipeline-split --enable-recompute-layers-per-pp-rank --recompute-in-bubble
    --rampup-batch-size --step-batch-size-schedule
"""


@dataclass(frozen=True)
class World:
    """Parallel sizes of the rehearsal."""

    ranks: int
    tp: int
    pp: int

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.pp)


def shrink(flags: Flags, ranks: int) -> World:
    """Make everything smaller, and say what. ranks: processes to run on, a power of two."""
    world = _world(flags, ranks)
    _model(flags, world)
    _batch(flags, world)
    return world


def _world(flags: Flags, ranks: int) -> World:
    left = ranks
    sizes = {}
    for flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"):
        sizes[flag] = 2 if flags.number(flag, 1) > 1 and left >= 2 else 1
        left //= sizes[flag]
        if flag in flags:
            flags.set(flag, sizes[flag], why=_FEWER)
    tp, pp = sizes.values()
    flags.at_most("--context-parallel-size", 1, "attention across ranks is done by TransformerEngine or NPU kernels")
    flags.at_most("--expert-tensor-parallel-size", tp, _FEWER)
    expert_tp = flags.number("--expert-tensor-parallel-size", tp)
    flags.at_most("--expert-model-parallel-size", max(1, ranks // (pp * expert_tp)), _FEWER)
    virtual = "--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank"
    if pp == 1:
        flags.drop(virtual, f"{_FEWER}: no pipeline is left")
    for flag, most in zip(virtual.split(), (1, 2), strict=True):
        flags.at_most(flag, most, _SMALL)
    return World(ranks, tp, pp)


def _model(flags: Flags, world: World) -> None:
    virtual = any("virtual" in flag for flag, _ in flags.items)
    flags.set("--num-layers", world.pp * 2 if virtual or world.pp == 1 else world.pp, why=_SMALL)
    flags.drop(LAID_OUT, "lays out the original's layers or batches")
    if "--num-query-groups" in flags:
        every_head = flags.number("--num-query-groups", 0) == flags.number("--num-attention-heads", -1)
        flags.at_most("--num-query-groups", HEADS if every_head else 2, _SMALL)
    flags.set("--num-attention-heads", HEADS, why=_SMALL)
    flags.set("--hidden-size", HEADS * HEAD_SIZE, why=_SMALL)
    for limit, names in LIMITS.items():
        for flag in names.split():
            flags.at_most(flag, limit, _SMALL)
    for flag in ("--seq-length", "--max-position-embeddings"):
        flags.set(flag, SEQUENCE, why="shorter sequences")
    for flag in ("--vocab-size", "--padded-vocab-size"):
        if flag in flags:
            flags.set(flag, VOCABULARY, why="vocabulary of the generated tokenizer")


def _batch(flags: Flags, world: World) -> None:
    batch = world.dp * 4
    flags.set("--micro-batch-size", 1, why=_BATCHES)
    flags.set("--global-batch-size", batch, why=_BATCHES)
    samples = "--train-samples" in flags
    flags.set("--train-samples" if samples else "--train-iters", batch if samples else 1, why=_SHORT)
    for flag in ("--lr-warmup-iters", "--lr-warmup-samples"):
        flags.at_most(flag, 0, _SHORT)
    flags.set("--log-interval", 1, why=_SHORT)
    flags.set("--eval-iters", 0, why="no evaluation set")
    if "--rl-algorithm" not in flags:
        return
    flags.set("--rl-samples-per-prompt", MEMBERS, why=_BATCHES)
    if "--rl-rollout-prompts" in flags:
        flags.set("--rl-rollout-prompts", batch // MEMBERS, why=_BATCHES)
    flags.at_most("--rl-ppo-epochs", 1, _SHORT)
    flags.set("--rl-max-prompt-length", PROMPT, why="shorter sequences")
    flags.set("--rl-max-response-length", RESPONSE, why="shorter sequences")
    flags.at_most("--rl-generate-tp", min(2, world.ranks), _FEWER)
    flags.set("--rl-kv-cache-gb", 0.05, why=_SMALL)
    flags.at_most("--rl-reward-workers", 1, _FEWER)
    flags.at_most("--rl-eval-pass-k", 0, "no evaluation set")
