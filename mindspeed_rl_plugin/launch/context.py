"""What context parallelism asks of the other arguments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.forward.settings import length_multiple

# MindSpeed's ways whose split follows from a position alone; the adaptive ones deal positions out by the mask.
ALGORITHMS = ("megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo")
_ATTENTION = "megatron.core.transformer.dot_product_attention"


def problems(args: Any, config: RLConfig) -> Iterator[str]:
    """Arguments that `--context-parallel-size` above 1 does not go with."""
    size = args.context_parallel_size
    if size == 1:
        return
    given, multiple = f"--context-parallel-size {size}", length_multiple(args)
    if args.seq_length % multiple:
        yield (
            f"--seq-length {args.seq_length} is not a multiple of {multiple}, which {given} asks for (2 pieces a rank, "
            "each split over --tensor-model-parallel-size under --sequence-parallel); change it"
        )
    if config.forward.pack_sequences:
        yield f"--rl-pack-sequences: {given} splits no packed rows; remove one of them"
    algorithm = getattr(args, "context_parallel_algo", None)
    if algorithm not in (None, *ALGORITHMS):
        yield f"--context-parallel-algo {algorithm} is not known under RL; give one of {', '.join(ALGORITHMS)}"
    if getattr(args, "attention_mask_type", "causal") != "causal":
        yield f"--attention-mask-type {args.attention_mask_type} with {given}: RL hands over no masks; give causal"
    if getattr(args, "hybrid_context_parallel", False):
        yield "--hybrid-context-parallel splits packed rows, each its own way; remove it"
    mindspeed = hasattr(args, "pre_tockens")
    if mindspeed and getattr(args, "multi_latent_attention", False):
        yield f"{given} with --multi-latent-attention was not tried with MindSpeed; use 1"
    if getattr(args, "transformer_impl", "local") == "local" and _refuses_itself():
        yield (
            f"{given}: Megatron's own attention does not know it; give --transformer-impl transformer_engine, or run "
            "with MindSpeed"
        )


def _refuses_itself() -> bool:
    """Whether the local attention still is Megatron's: MindSpeed puts its own there when it is imported."""
    module = sys.modules.get(_ATTENTION)
    return module is None or module.DotProductAttention.__init__.__module__ == _ATTENTION
