"""Forward passes of the model by Megatron's own pipeline schedule, with parts that the update uses too."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.utils import get_model_config
from torch import Tensor

from mindspeed_rl_plugin.forward import router_replay
from mindspeed_rl_plugin.forward.call import call_model, swapped
from mindspeed_rl_plugin.forward.collate import MicroBatch, collate, to_rows
from mindspeed_rl_plugin.forward.context_parallel import of_all_ranks, of_this_rank
from mindspeed_rl_plugin.forward.head import token_logps
from mindspeed_rl_plugin.forward.output_layer import forward_scored
from mindspeed_rl_plugin.forward.settings import ForwardSettings
from mindspeed_rl_plugin.rows import Ragged, Rows
from mindspeed_rl_plugin.weights.offload import gathered
from mindspeed_rl_plugin.weights.storages import unwrap

Model = Sequence[torch.nn.Module]  # this rank's chunks, as Megatron holds them


def data_iterators(batches: Sequence[MicroBatch], chunks: int) -> Any:
    """The micro-batches as Megatron's train_step needs them: an iterator or, for several chunks, a list of iterators.

    `RerunDataIterator`s, since Megatron may replay a step.
    """
    iterators = [RerunDataIterator(iter(batches)) for _ in range(chunks)]
    return iterators[0] if chunks == 1 else iterators


@contextlib.contextmanager
def micro_batch_count(
    count: int, train_step: Callable[..., tuple], args: tuple, kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple, dict[str, Any]]]:
    """Within the context Megatron's `train_step` runs `count` micro-batches, whatever number is configured.

    Only the schedule uses this count; learning rate and consumed samples still advance by the configured global batch.
    Yields the arguments for `train_step`. `train_step` finds the schedule in its own module (core 0.12), or gets it as
    seventh argument (later).
    """

    def counted(schedule: Callable) -> Callable:
        @functools.wraps(schedule)
        def run(*positional: Any, **named: Any) -> Any:
            return schedule(*positional, **{**named, "num_microbatches": count})

        return run

    place, name = 6, "forward_backward_func"
    if len(args) > place:
        args = (*args[:place], counted(args[place]), *args[place + 1 :])
    elif name in kwargs:
        kwargs = {**kwargs, name: counted(kwargs[name])}
    module = inspect.unwrap(train_step).__globals__
    look_up = module.get("get_forward_backward_func")
    ours = {"get_forward_backward_func": lambda *a, **k: counted(look_up(*a, **k))} if look_up else {}
    with swapped(module, **ours):
        yield args, dict(kwargs)


def run_model(
    model: torch.nn.Module, batch: MicroBatch, settings: ForwardSettings | None = None, *, entropy_grad: bool = False
) -> Tensor:
    """Run one model chunk on one micro-batch: returns the input of `head_of` on the last stage, else hidden states.

    settings: those for `head_of`, or None for the model's own output, `[mb, S, V/tp]` logits of a language model.
    Under context parallelism the output holds this rank's S / cp positions. Of a tree, hidden states are those of its T
    tokens.
    """
    batch = of_this_rank(batch)
    if settings is not None and settings.chunk_tokens:
        return forward_scored(model, batch, settings, entropy_grad=entropy_grad)
    output = call_model(model, batch)
    last = batch.tree is not None and unwrap(model).post_process
    return output.index_select(1, batch.tree.at) if last else output


def head_of(
    output: Tensor, batch: MicroBatch, settings: ForwardSettings, *, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy, `[mb, S]` by logit position, over the complete vocabulary.

    output: result of `run_model` with the same settings. With `chunk_tokens`, positions that are not scored are 0.
    Every context parallel rank gets complete rows. Collective over these ranks and the tensor parallel ranks.
    """
    if settings.chunk_tokens:
        logp, entropy = of_all_ranks(output, batch).unbind(-1)
        return logp, entropy if entropy_grad else entropy.detach()
    logp, entropy = token_logps(
        output,
        of_this_rank(batch).labels,
        vocab_size=settings.vocab_size,
        temperature=settings.temperature,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        entropy_grad=entropy_grad,
    )
    return of_all_ranks(logp, batch), of_all_ranks(entropy, batch)


def ends_here(model: Model) -> bool:
    """Whether this rank holds the end of the model: the last pipeline stage; with MindSpeed's dualpipev the first."""
    return bool(unwrap(model[-1]).post_process)


def device_of(model: Model) -> torch.device:
    """Device of the model's weights. Some chunks may have no weights."""
    return next(param for chunk in model for param in chunk.parameters()).device


def run_forward_only(
    model: Model,
    batches: Sequence[MicroBatch],
    settings: ForwardSettings,
    collect: Callable[[Tensor, MicroBatch], Any],
    *,
    scored: bool = False,
) -> list[Any] | None:
    """Forward pass without gradient over all micro-batches, by Megatron's schedule (PP and VPP included).

    model: chunks with complete parameters (`weights.offload.gathered`), in eval mode during the pass. collect: called
    on the last stage with the output of `run_model` and the micro-batch. scored: whether `collect` calls `head_of`.
    Returns the results of `collect` in micro-batch order on the last stage, else None. Collective over the model
    parallel ranks.
    """
    device, count = device_of(model), len(batches)
    # The chunks of MindSpeed's dualpipev: two on each rank, and no virtual stages.
    folded = len(model) > 1 and parallel_state.get_virtual_pipeline_model_parallel_world_size() is None
    if folded:  # this schedule needs enough micro-batches to fill the pipeline in both directions
        least = 2 * parallel_state.get_pipeline_model_parallel_world_size() - 1
        batches = [*batches, *[batches[-1]] * (least - count)]

    def forward_step(data_iterator: Iterator[MicroBatch], chunk: torch.nn.Module) -> tuple[Tensor, Callable]:
        batch = next(data_iterator).to(device)
        output = run_model(chunk, batch, settings if scored else None)
        if folded:
            _free(unwrap(chunk).decoder.input_tensor)

        def results(output: Tensor, non_loss_data: bool = True) -> Any:
            collected = collect(output, batch)
            if folded:
                _free(output)
            return collected

        return output, results

    # Without timers, since their names are those of the training step, and without the gather of parameters that the
    # interleaved schedule would start.
    plain = swapped(vars(get_model_config(model[0])), timers=None, param_sync_func=None)
    with torch.no_grad(), _evaluating(model), plain, _routed_as_in_training(), _uncounted(model):
        results = schedules.get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data_iterators(batches, len(model)),
            model=list(model),
            num_microbatches=len(batches),
            seq_length=settings.seq_length,
            micro_batch_size=settings.micro_batch_size,
            forward_only=True,
            collect_non_loss_data=True,
        )
    return list(results)[:count] if ends_here(model) else None


def compute_logps(model: Model, micro_batches: Sequence[Rows], settings: ForwardSettings) -> list[Ragged] | None:
    """Log-prob of each trained token, in nats, at the sampling temperature. Collective over the model parallel ranks.

    micro_batches: those of this data parallel rank, with `tokens` and `loss_mask`. Give the update's micro-batches:
    equal rows with equal padding give equal results. Returns one ragged column `[L]` float32 for each micro-batch, 0.0
    if the mask is 0; None on ranks that are not on the last pipeline stage.
    """
    batches = [collate(rows, settings, index=i) for i, rows in enumerate(micro_batches)]

    def collect(output: Tensor, batch: MicroBatch) -> Ragged:
        logp, _ = head_of(output, batch, settings)
        return to_rows(torch.where(batch.mask, logp, 0.0).cpu(), batch)

    with gathered(model):
        return run_forward_only(model, batches, settings, collect, scored=True)


def compute_routed_logps(
    model: Model, micro_batches: Sequence[Rows], settings: ForwardSettings
) -> tuple[list[Ragged], list[Ragged]] | None:
    """As `compute_logps`, and for each micro-batch a ragged column `[L, layers with experts, K]` of the experts that
    each token chose: entry t + 1 has those of token t, entry 0 is 0."""
    with swapped(vars(router_replay), recorded={}):
        logps, chosen = compute_logps(model, micro_batches, settings), router_replay.recorded
    group = parallel_state.get_pipeline_model_parallel_group()
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, chosen, group=group)
    if logps is None:
        return None
    found, columns = dict(item for of_rank in every for item in of_rank.items()), []
    for i, rows in enumerate(micro_batches):
        batch = collate(rows, settings, index=i)
        values = torch.stack([found[layer][i] for layer in range(len(settings.routed))], 1)
        if batch.tree is not None and len(values) == batch.tree.tokens.numel():
            values = values[batch.tree.at]
        values = values.unflatten(0, batch.tokens.T.shape).transpose(0, 1)
        columns.append(to_rows(values, batch))
    return logps, columns


def _free(tensor: Tensor | None) -> None:
    """Free a tensor of a micro-batch. The folded schedule would keep it until its end, for a backward pass."""
    if tensor is not None:
        tensor.untyped_storage().resize_(0)


@contextlib.contextmanager
def _evaluating(model: Model) -> Iterator[None]:
    was_training = [chunk.training for chunk in model]
    for chunk in model:
        chunk.eval()
    try:
        yield
    finally:
        for chunk, training in zip(model, was_training, strict=True):
            chunk.train(training)


@contextlib.contextmanager
def _uncounted(model: Model) -> Iterator[None]:
    """Restores, after the pass, the routers' token counts, from which the update computes the expert bias.

    Routers count if gradients are computed, and MindSpeed's layers with overlapped communication always run the router
    with gradients (moe_layer_overlap_all2all.py: their forward pass makes its own graph).
    """
    routers = (module for chunk in model for module in chunk.modules())
    counts = [getattr(module, "local_tokens_per_expert", None) for module in routers]
    before = [(count, count.clone()) for count in counts if count is not None]
    try:
        yield
    finally:
        for count, was in before:
            count.copy_(was)


def _routed_as_in_training() -> contextlib.AbstractContextManager[None]:
    """Core 0.19 sorts a token's experts only if gradients are computed, and sums their weights in this order.

    Without this context, log-probs of models with more than two experts per token would differ from those of the update
    by rounding, and the first ratio from 1. The context makes no graph: no tensor requires a gradient there.
    """
    router = sys.modules.get("megatron.core.transformer.moe.router")
    name = "topk_routing_with_score_function"
    original = getattr(router, name, None)
    if original is None:  # a dense model, or a core that always sorts in the same way
        return contextlib.nullcontext()
    return swapped(vars(router), **{name: torch.enable_grad()(original)})
