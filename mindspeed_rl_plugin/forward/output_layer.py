"""Log-probs instead of logits from a Megatron model: during a call, `forward` of its output layer is replaced."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from mindspeed_rl_plugin.forward.call import call_model, swapped
from mindspeed_rl_plugin.forward.chunked import chunked_token_logps
from mindspeed_rl_plugin.forward.collate import MicroBatch
from mindspeed_rl_plugin.forward.settings import ForwardSettings
from mindspeed_rl_plugin.weights.storages import unwrap


def forward_scored(
    model: torch.nn.Module, batch: MicroBatch, settings: ForwardSettings, *, entropy_grad: bool = False
) -> Tensor:
    """Run one model chunk on one micro-batch. Returns `[mb, S, 2]` log-prob and entropy on the last stage, 0 where no
    label is scored; on other stages hidden states.

    During the call, `forward` of the module `output_layer` is replaced by a function that scores the labels with the
    hidden states and the weight (tied or not). The module itself is still called, so its hooks run: in one of them
    Megatron's DDP waits for the gather of its parameters. All else is the user's own model: pipeline stages, virtual
    stages, 16-bit wrappers and schedules. The layer is called once, since layers of multi-token prediction are disabled
    (`launch/megatron_setup.py`). Raises ValueError for an output layer that cannot be replaced in this way.
    """
    inner = unwrap(model)
    layer = getattr(inner, "output_layer", None)
    if layer is None:
        return call_model(model, batch)
    _check(layer)
    scored: list[Tensor] = []

    def forward(input_: Tensor, weight: Tensor | None = None, *_: Any, **__: Any) -> tuple[Tensor, None]:
        weight = layer.weight if weight is None else weight
        scored.append(score(input_, weight, layer, batch, settings, entropy_grad=entropy_grad))
        return scored[-1], None

    with swapped(vars(layer), forward=forward):
        output = call_model(model, batch)
    if not scored or not _same(output.detach(), scored[-1].detach().transpose(0, 1)):
        raise ValueError(
            f"{type(inner).__name__} changes the result of its output layer, so this layer cannot compute log-probs; "
            "give --rl-logprob-chunk-tokens 0"
        )
    return output


def _same(output: Tensor, given: Tensor) -> bool:
    """Whether all numbers are equal. NaN equals NaN here: Megatron itself reports a run that diverges.

    Storages cannot be compared instead, since the model may have copied the numbers.
    """
    if (output.shape, output.dtype) != (given.shape, given.dtype):
        return False
    return bool(((output == given) | (output.isnan() & given.isnan())).all())


def score(
    hidden: Tensor,
    weight: Tensor,
    layer: torch.nn.Module,
    batch: MicroBatch,
    settings: ForwardSettings,
    *,
    entropy_grad: bool = False,
) -> Tensor:
    """Log-prob of each scored label and entropy, `[S, mb, 2]`, from the inputs of a column parallel output layer.

    hidden: `[S, mb, H]`, or `[S / tp, mb, H]` with sequence parallelism, of a tree `[T, 1, H]` or `[T / tp, 1, H]`;
    layer: the ColumnParallelLinear, for its settings. Only positions that are scored are computed; the result at the
    others is 0.
    """
    if layer.sequence_parallel:
        hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
    else:
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
    # Earlier passes score rows that the update masks; score them here, too: products of another size round differently.
    scored = batch.columns.get("scored", batch.mask).bool()
    wanted = scored.t().reshape(-1).nonzero()[:, 0]
    logp, entropy = chunked_token_logps(
        hidden.flatten(0, 1).index_select(0, wanted if batch.tree is None else batch.tree.at[wanted]),
        weight,
        batch.labels.t().reshape(-1)[wanted],
        vocab_size=settings.vocab_size,
        chunk_tokens=settings.chunk_tokens,
        temperature=settings.temperature,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        entropy_grad=entropy_grad,
        accumulate=layer.gradient_accumulation_fusion and hasattr(weight, "main_grad"),
    )
    both = torch.stack([logp, entropy], 1)
    rows, length = batch.labels.shape
    return both.new_zeros(length * rows, 2).index_copy(0, wanted, both).view(length, rows, 2)


def _check(layer: torch.nn.Module) -> None:
    """Raise ValueError if the layer does more than a product with its weight."""
    off = {
        "bias": "a bias",
        "embedding_activation_buffer": "--defer-embedding-wgrad-compute",
    }
    unknown = [what for name, what in off.items() if getattr(layer, name, None) is not None]
    if getattr(layer, "explicit_expert_comm", False):
        unknown.append("expert communication")
    if getattr(layer, "gtp_remat_size", 1) > 1:
        unknown.append("a weight that is split for rematerialisation")
    if not hasattr(layer, "sequence_parallel") or not hasattr(layer, "gradient_accumulation_fusion"):
        unknown.append("no settings of a column parallel linear")
    if unknown:
        raise ValueError(
            f"the output layer {type(layer).__name__} has {', '.join(unknown)}, and cannot compute log-probs; "
            "give --rl-logprob-chunk-tokens 0"
        )
