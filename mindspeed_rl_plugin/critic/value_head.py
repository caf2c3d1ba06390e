"""The value head: a critic has it in the place of the policy's output layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

NAME = "output_layer"  # attribute of Megatron's GPTModel: the last module that it calls


class ValueHead(torch.nn.Module):
    """`[S, mb, H]` hidden states to `[S, mb, 1]` values in float32, called as Megatron calls its output layer.

    config: Megatron's config of the model. The weight is `[1, H]`, the same on every tensor parallel rank, and begins
    as zeros: all values of a new critic are 0, in every layout. With sequence parallelism the hidden states are
    gathered first. Each rank then computes the same loss, so the gradient of these states is split over the ranks,
    not summed.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.sequence_parallel = bool(config.sequence_parallel)
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def reset_parameters(self) -> None:
        """Set the head to zeros."""
        torch.nn.init.zeros_(self.weight)

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """Values, and None in the place of an output layer's bias. weight: of tied embeddings; a critic has none."""
        assert weight is None, "a critic's embeddings are never tied to its head"
        if self.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden.float() @ self.weight.float().t(), None

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Ignores the output layer of a language model, which has the same name: then the head keeps its zeros."""
        loaded = state.get(f"{prefix}weight")
        if isinstance(loaded, Tensor) and loaded.shape == self.weight.shape:
            super()._load_from_state_dict(state, prefix, *rest)


def give_value_head(model: torch.nn.Module) -> torch.nn.Module:
    """Replace the output layer, if any, of a chunk of Megatron's GPT model by a new value head; returns the chunk.

    Raises ValueError for a model whose output layer has another name.
    """
    if getattr(model, "post_process", False):
        if not hasattr(model, NAME):
            raise ValueError(f"{type(model).__name__} has no {NAME}, so a critic cannot be made of it")
        setattr(model, NAME, ValueHead(model.config))
    return model
