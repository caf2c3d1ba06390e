"""Compares live models with layouts: names and shapes of their tensors, and in which known way they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Module

from mindspeed_rl_plugin.layout.families import FAMILIES
from mindspeed_rl_plugin.layout.family_rows import HEAD_WEIGHT
from mindspeed_rl_plugin.layout.family_table import ENGINE, EXPERTS, IMPLS
from mindspeed_rl_plugin.layout.layout import (
    Canonical,
    EngineParallel,
    ModelShape,
    Parallel,
    Shapes,
    canonical_tensors,
    engine_layout,
    megatron_layout,
)
from mindspeed_rl_plugin.layout.parallel import chunk_prefix
from mindspeed_rl_plugin.weights.storages import unwrap

ADAPTERS = "rl_lora"  # the child of a chunk that has its LoRA adapters
LISTED_DIFFERENCES = 12  # differences that an error lists
# Ends (after the layer's number) of names of Megatron's buffers that are weights.
_ROUTER_BUFFERS = tuple(
    {
        name.rpartition("}")[2]
        for family in FAMILIES.values()
        for row in family.rows
        if row.buffer
        for side, name in row.names.items()
        if side != ENGINE
    }
)
# MindSpeed-LLM moves the last norm out of the decoder if layers for multi-token prediction follow.
_MOVED = {"final_layernorm.weight": "decoder.final_layernorm.weight"}


class StoredParameters(Mapping[str, Tensor]):
    """Name -> tensor. Where a weight has LoRA adapters, these are merged into a new tensor when it is read; the last
    one is kept."""

    def __init__(self) -> None:
        self.plain: dict[str, Tensor] = {}  # as they lie in memory, without adapters: for shapes and dtypes
        self.merging: dict[str, Callable[[], Tensor]] = {}
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.merging:
            return self.plain[name]
        if self._last is None or self._last[0] != name:
            self._last = None  # frees the memory first
            self._last = name, self.merging[name]()
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain)

    def __len__(self) -> int:
        return len(self.plain)


def stored_parameters(model_chunks: Sequence[Module]) -> StoredParameters:
    """All weights of Megatron's chunks, named as `megatron_layout` names them.

    These are parameters, and buffers that a family's table lists (the router's expert bias). Layers for multi-token
    prediction are left out, since no engine uses them; so is their copy of the embedding on the last pipeline stage.
    """
    out = StoredParameters()
    for i, chunk in enumerate(model_chunks):
        model, prefix = unwrap(chunk), chunk_prefix(i, len(model_chunks))
        skipped = mtp_only(getattr(model, "mtp", None) is not None, getattr(model, "pre_process", True))
        skipped += (f"{ADAPTERS}.",)
        buffers = ((name, t) for name, t in model.named_buffers() if name.endswith(_ROUTER_BUFFERS))
        named = (*model.named_parameters(), *buffers)
        out.plain |= {prefix + table_name(name): tensor.data for name, tensor in named if not name.startswith(skipped)}
        if (adapters := getattr(model, ADAPTERS, None)) is not None:
            out.merging |= {prefix + table_name(name): merge for name, merge in adapters.merging()}
    return out


def table_name(name: str) -> str:
    """The name that a family's table has for a tensor of a Megatron chunk or of its file."""
    return _MOVED.get(name, name)


def mtp_only(predicts: bool, embeds: bool) -> tuple[str, ...]:
    """Prefixes of names in a chunk that only layers for multi-token prediction use.

    predicts: whether the chunk has such layers; embeds: whether it is the first chunk, whose embedding all layers use.
    """
    return ("mtp.", "embedding.") if predicts and not embeds else ("mtp.",)


def trainer_storage(
    shape: ModelShape, parallel: Parallel, rank: int, live: Mapping[str, Tensor], file: str = "", only: str = ""
) -> tuple[str, str]:
    """How a trainer rank stores the model: an entry of IMPLS and one of EXPERTS. file: of `live`, for errors; only: the
    prefix of the only chunk in `live`, if it has not all chunks.

    Raises ValueError if no such pair fits, with the differences to the pair that fits best.
    """
    kinds = EXPERTS if shape.moe_layers else EXPERTS[:1]
    known = [(impl, kind) for impl in IMPLS for kind in kinds]
    sizes = sizes_of(live)
    layouts = {k: megatron_layout(shape, parallel, rank, *k).shapes.items() for k in known}
    wrong = {k: differences({n: s for n, s in each if n.startswith(only)}, sizes) for k, each in layouts.items()}
    best = min(known, key=lambda k: len(wrong[k]))
    ours = f"Megatron's parameters on rank {rank} are not those of {shape}"
    raise_if(wrong[best], f"{file} does not hold the tensors that its arguments describe" if file else ours)
    return best


def engine_storage(shape: ModelShape, engine: EngineParallel, rank: int, live: Mapping[str, Tensor]) -> EngineParallel:
    """Returns `engine` with the fields that say how it stores the head, experts and latent attention, found from names
    and shapes of the live tensors.

    rank: within the engine. Raises ValueError, with the differences, if no way of storage fits.
    """
    engine = replace(engine, own_head=shape.tied and HEAD_WEIGHT in live)
    if shape.moe_layers:
        engine = replace(engine, nested=any(".routed_experts." in name for name in live))
    if shape.table.mla:
        engine = replace(engine, fused_down=any("fused_qkv_a_proj" in name for name in live))
    transposed = (False, True) if shape.moe_layers else (False,)
    whole = (False, True) if shape.shared_ffn and engine.ep > engine.tp > 1 else (False,)
    ways = [replace(engine, transposed=t, whole_shared=w) for t in transposed for w in whole]
    wrong = {way: differences(engine_layout(shape, way, rank).shapes, sizes_of(live)) for way in ways}
    best = min(ways, key=lambda way: len(wrong[way]))
    raise_if(wrong[best], f"the parameters of engine rank {rank} are not those of {shape}")
    return best


def engine_tensors(
    shape: ModelShape, engine: EngineParallel, rank: int, live: Mapping[str, Tensor], dtype: torch.dtype
) -> Mapping[str, Canonical]:
    """The canonical tensors for comparing trainer and engine: a `wide` tensor counts as not wide if the engine stores
    it in `dtype`, the dtype of its other weights. engine: as `engine_storage` returns it.

    Raises ValueError for parameters of another dtype.
    """
    tensors, layout = canonical_tensors(shape), engine_layout(shape, engine, rank)
    wide = {name for name, segments in layout.items() if any(tensors[s.name].wide for s in segments)}
    problems = [
        f"{name} is {tensor.dtype}, not {dtype}" + (" or torch.float32" if name in wide else "")
        for name, tensor in live.items()
        if tensor.dtype != dtype and not (name in wide and tensor.dtype == torch.float32)
    ]
    raise_if(problems, f"the parameters of engine rank {rank} are not those of {shape}")
    narrow = {s.name for name in wide if live[name].dtype != torch.float32 for s in layout[name]}
    return {**tensors, **{name: replace(tensors[name], wide=False) for name in narrow}}


def sizes_of(live: Mapping[str, Tensor]) -> Shapes:
    live = live.plain if isinstance(live, StoredParameters) else live
    return {name: tuple(tensor.shape) for name, tensor in live.items()}


def differences(expected: Shapes, live: Shapes) -> list[str]:
    """Differences of names and shapes, each as a text."""
    out = [f"{name} {shape} is missing" for name, shape in expected.items() if name not in live]
    out += [f"{name} {shape} is unknown" for name, shape in live.items() if name not in expected]
    both = ((name, shape) for name, shape in expected.items() if name in live and live[name] != shape)
    return out + [f"{name} has shape {live[name]}, not {shape}" for name, shape in both]


def raise_if(problems: Sequence[str], what: str) -> None:
    """Raises ValueError that lists the first problems, if there are any."""
    if problems:
        more = f"\n  and {len(problems) - LISTED_DIFFERENCES} more" if len(problems) > LISTED_DIFFERENCES else ""
        raise ValueError(f"{what}:\n  " + "\n  ".join(problems[:LISTED_DIFFERENCES]) + more)
