"""Log-probs instead of logits from an unmodified Megatron model: during one call its output layer scores the labels."""

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
    """One model chunk on one micro-batch: `[mb, S, 2]` log-prob and entropy on the last stage, 0 where nothing is
    trained; hidden states on the others.

    During the call, `forward` of the module `output_layer` is replaced by one that takes the hidden states, the weight
    (tied or not) and this micro-batch's labels. It is still called as a module, so that its hooks run (Megatron's DDP
    awaits the gather of its parameters in one). Everything around it stays the user's own model: pipeline stages,
    virtual stages, 16-bit wrappers and schedules. Layers of multi-token prediction are left out
    (`launch/megatron_setup.py`), so the layer is called once. Raises ValueError for an output layer that cannot be
    replaced so.
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
            f"{type(inner).__name__} does not return what its output layer gives, so log-probs cannot be taken there; "
            "pass --rl-logprob-chunk-tokens 0"
        )
    return output


def _same(output: Tensor, given: Tensor) -> bool:
    """Whether all numbers are equal, with NaN equal to NaN: Megatron reports a run that diverges.

    The model may have copied them, so a comparison of storages is not enough.
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

    hidden: `[S, mb, H]`, or `[S / tp, mb, H]` under sequence parallel; layer: the ColumnParallelLinear, whose settings
    are used. Only the scored rows of the micro-batch are multiplied; the others are 0.
    """
    if layer.sequence_parallel:
        hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
    else:
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
    # Not by the mask: tokens that the update drops were scored in earlier passes, so they are scored here, too.
    scored = batch.columns.get("scored", batch.mask).bool()
    wanted = scored.t().reshape(-1).nonzero()[:, 0]
    logp, entropy = chunked_token_logps(
        hidden.flatten(0, 1).index_select(0, wanted),
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
    length, rows = hidden.shape[:2]
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
        unknown.append("a weight split for rematerialisation")
    if not hasattr(layer, "sequence_parallel") or not hasattr(layer, "gradient_accumulation_fusion"):
        unknown.append("no column parallel linear")
    if unknown:
        raise ValueError(
            f"the output layer {type(layer).__name__} has {', '.join(unknown)}, which log-probs in chunks do not know; "
            "pass --rl-logprob-chunk-tokens 0"
        )
