"""Multi-token prediction under RL: its layers stay in the model and in its checkpoints, and rest.

No engine generates with them and no RL loss reaches them: they are not run, get no gradient and have no optimizer
state. Megatron itself would score them against labels, which an RL step does not hand to the model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch


def problems(args: Any, config: Any) -> Iterator[str]:
    """Arguments with which layers that rest would stop the run."""
    stages = getattr(args, "pipeline_model_parallel_size", 1)
    if getattr(args, "mtp_num_layers", None) and stages > 1 and getattr(args, "overlap_grad_reduce", False):
        yield (
            f"--overlap-grad-reduce with --mtp-num-layers {args.mtp_num_layers} and {stages} pipeline stages: the last "
            "stage's copy of the embedding serves the resting layers only, and Megatron would wait for its gradient; "
            "remove --overlap-grad-reduce"
        )


def at_rest(chunk: torch.nn.Module) -> torch.nn.Module:
    """Let the predicting layers of a chunk of Megatron's GPT model rest, where it has some; returns the chunk.

    To be called before Megatron wraps the chunk: then its buffers and its optimizer have no room for them.
    """
    layers = getattr(chunk, "mtp", None)
    if layers is None:
        return chunk
    layers.requires_grad_(False)
    own = chunk.forward

    @functools.wraps(own)
    def forward(*positional: Any, **named: Any) -> Any:
        # For the call only: what builds, saves and reduces the model goes on to see them.
        saved = chunk.mtp_process, chunk.config.mtp_num_layers
        chunk.mtp_process, chunk.config.mtp_num_layers = False, None
        try:
            return own(*positional, **named)
        finally:
            chunk.mtp_process, chunk.config.mtp_num_layers = saved

    chunk.forward = forward
    return chunk
