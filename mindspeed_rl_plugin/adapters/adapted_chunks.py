"""Puts adapters on the chunks that Megatron builds, before it wraps them; switches between the model and its base."""

from __future__ import annotations

import contextlib
import itertools
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from mindspeed_rl_plugin.adapters.adapters import AdaptedModule, Adapters, RankPlace
from mindspeed_rl_plugin.adapters.targets import adapted
from mindspeed_rl_plugin.config.run_flags import LoraConfig
from mindspeed_rl_plugin.layout.parallel import Parallel, chunk_prefix
from mindspeed_rl_plugin.layout.shape import ModelShape
from mindspeed_rl_plugin.weights.live import ADAPTERS, stored_parameters, trainer_storage
from mindspeed_rl_plugin.weights.storages import unwrap


def attaching(config: LoraConfig, args: Namespace, vocab: int) -> Callable[[Module], Module]:
    """A function that freezes a chunk and gives it adapters, to be called with this rank's chunks in their order.

    vocab: tokens of the tokenizer. The function raises ValueError if the chunk's weights are not those of the family.
    """
    shape, parallel = ModelShape.from_megatron_args(args, vocab), Parallel.from_megatron_args(args)
    rank, numbers = dist.get_rank(), itertools.count()
    place = _place(parallel, rank)

    def attach(chunk: Module) -> Module:
        prefix = chunk_prefix(next(numbers), parallel.vpp)
        live = {prefix + name: tensor for name, tensor in stored_parameters([chunk]).items()}
        kinds = trainer_storage(shape, parallel, rank, live, only=prefix)
        mine = (m for m in adapted(shape, parallel, rank, kinds, config.target_names) if m.module.startswith(prefix))
        matrices = [replace(m, module=m.module.removeprefix(prefix)) for m in mine]
        assert matrices, "lora_checks refuses stages without an adapter"
        _freeze(chunk, args)
        modules = [
            AdaptedModule(path, chunk.get_submodule(path), [m for m in matrices if m.module == path], config.lora_rank,
                          config.lora_scale, args.seed, place)
            for path in dict.fromkeys(m.module for m in matrices)
        ]  # fmt: skip
        chunk.add_module(ADAPTERS, Adapters(chunk, modules))
        _store_one_part(chunk)
        return chunk

    return attach


def adapters_of(chunks: Sequence[Module]) -> list[Adapters]:
    """The adapters of chunks, wrapped or not; empty without LoRA."""
    return [found for chunk in chunks if (found := getattr(unwrap(chunk), ADAPTERS, None)) is not None]


def store(chunks: Sequence[Module], base: bool) -> None:
    """From now on state dicts of the chunks hold and take only W (base), or only the factors."""
    for one in adapters_of(chunks):
        one.stored = "base" if base else "factors"


def check_ran(chunks: Sequence[Module]) -> None:
    """After the first step: raises ValueError if a layer, or its backward, ran without its adapter."""
    idle = [
        f"{one.path} ({'backward' if one.calls else 'forward'})"
        for adapters in adapters_of(chunks)
        for one in adapters.modules_of
        if not one.backwards
    ]
    if idle:
        raise ValueError(
            f"{len(idle)} linear modules did not run with their adapters in the first step: {', '.join(idle[:4])}; a "
            "flag of this launch uses their weights outside of them: leave it out, or leave these modules out of "
            "--rl-lora-targets"
        )


class BaseModel:
    """The model without its adapters, as the reference: nothing is copied."""

    @contextlib.contextmanager
    def swapped_into(self, model_chunks: Sequence[Module]) -> Iterator[None]:
        """Within the context the model is its base."""
        adapters = adapters_of(model_chunks)
        for one in adapters:
            one.enabled = False
        try:
            yield
        finally:
            for one in adapters:
                one.enabled = True


def _freeze(chunk: Module, args: Namespace) -> None:
    """Freeze the chunk's weights, and what else of Megatron changes them, or would add their gradients to buffers."""
    chunk.requires_grad_(False)
    for module in chunk.modules():
        for name in ("gradient_accumulation_fusion", "fuse_wgrad_accumulation"):
            if getattr(module, name, False):
                setattr(module, name, False)
    for owner in (args, chunk.config):
        owner.moe_router_bias_update_rate = 0.0
        owner.gemm_gradient_accumulation_fusion = False  # MindSpeed's
    embedding = getattr(chunk, "embedding", None)
    if embedding is not None:
        embedding.register_forward_hook(_let_gradients_pass)
    for module in (embedding, getattr(chunk, "output_layer", None)):
        for weight in module.parameters() if module is not None else ():
            weight.main_grad = weight.new_empty(0)  # stages sum that of tied embeddings


def _let_gradients_pass(_: Module, __: Any, out: Tensor) -> None:
    """Recomputed layers pass gradients on only if their input has some."""
    if torch.is_grad_enabled():
        out.requires_grad_()


def _place(parallel: Parallel, rank: int) -> RankPlace:
    from megatron.core import parallel_state

    tensor = parallel_state.get_tensor_model_parallel_group() if parallel.tp > 1 else None
    experts = parallel_state.get_expert_tensor_parallel_group() if parallel.expert_tp > 1 else None
    own_experts = parallel.expert_tp != parallel.tp and not parallel.tp_in_ep
    return RankPlace(parallel.coordinates(rank), parallel.cp, own_experts, tensor, experts)


def _store_one_part(chunk: Module) -> None:
    """Let state dicts of the chunk hold and take what `Adapters.stored` says."""
    adapters, sharded, own = getattr(chunk, ADAPTERS), chunk.sharded_state_dict, f"{ADAPTERS}."

    def only_stored(_: Any, state: dict[str, Any], prefix: str = "", *__: Any) -> None:
        for name in list(state) if adapters.stored != "all" else ():
            if name.startswith(prefix + own) == (adapters.stored == "base"):
                del state[name]

    def with_the_rest(state: dict[str, Any], prefix: str, *_: Any) -> None:
        adapters.stored, before = "all", adapters.stored
        for name, tensor in chunk.state_dict(prefix=prefix, keep_vars=True).items():
            state.setdefault(name, tensor)
        adapters.stored = before

    def sharded_state_dict(prefix: str = "", *given: Any, **named: Any) -> Mapping[str, Any]:
        if adapters.stored == "factors":
            return adapters.sharded_state_dict(prefix + own)
        only_stored(chunk, state := sharded(prefix, *given, **named), prefix)
        return state

    chunk._register_state_dict_hook(only_stored)
    chunk._register_load_state_dict_pre_hook(with_the_rest)
    chunk.sharded_state_dict = sharded_state_dict
