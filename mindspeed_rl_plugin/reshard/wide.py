"""The router's expert bias as the one tensor that it will be: float32, however narrow the model is."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn import Module


def keep_wide(chunks: Iterable[Module]) -> None:
    """Give every router's bias its final tensor, so that it can be captured and offloaded.

    Megatron narrows it with the model and replaces it by a float32 one in the first forward pass (core 0.12), or
    while it builds the model (later cores).
    """
    for chunk in chunks:
        for module in chunk.modules():
            widen = getattr(module, "_maintain_float32_expert_bias", None)
            if widen is not None:
                widen()
