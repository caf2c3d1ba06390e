"""Multi-token prediction (MTP) under RL: its layers stay in the model and in its checkpoints, frozen.

No engine generates with them and no RL loss reaches them: they are not run, get no gradient and have no optimizer
state. Megatron itself would score them against labels, which an RL step does not hand to the model.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def freeze_mtp(chunk: torch.nn.Module) -> torch.nn.Module:
    """Freeze the MTP layers of a chunk of Megatron's GPT model, where it has some; returns the chunk.

    To be called before Megatron wraps the chunk: then its buffers and its optimizer leave them out.
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
