"""Layouts: every stored parameter of a Megatron or an engine rank as segments of canonical tensors. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from mindspeed_rl_plugin.layout.cuts import CUT_ENGINE, CUT_MEGATRON, Cut, Segment, Stored, check_heads, stack
from mindspeed_rl_plugin.layout.family_table import ENGINE, EXPERTS, IMPLS, LayerType, Split
from mindspeed_rl_plugin.layout.parallel import EngineParallel, Parallel, chunk_prefix
from mindspeed_rl_plugin.layout.shape import Canonical, ModelShape

Layout = Mapping[str, tuple[Segment, ...]]
Shapes = Mapping[str, tuple[int, ...]]


class _Stored(NamedTuple):
    layout: Layout
    shapes: Shapes


def megatron_layout(
    shape: ModelShape, parallel: Parallel, rank: int, impl: str = "local", experts: str = "sequential"
) -> Layout:
    """Parameter name -> segments of one trainer rank; the same object for ranks that store the same.

    impl: an entry of `family_table.IMPLS`, whose names the model has; experts: one of `family_table.EXPERTS`, how it
    stores them. With several model chunks a name starts with `parallel.chunk_prefix`. Raises ValueError when the sizes
    do not divide.
    """
    return _megatron_at(shape, parallel, rank, impl, experts).layout


def megatron_shapes(
    shape: ModelShape, parallel: Parallel, rank: int, impl: str = "local", experts: str = "sequential"
) -> Shapes:
    """Parameter name -> shape of the tensor that this trainer rank stores."""
    return _megatron_at(shape, parallel, rank, impl, experts).shapes


def engine_layout(shape: ModelShape, engine: int | EngineParallel, rank: int, own_head: bool | None = None) -> Layout:
    """Parameter name -> segments of one engine rank (vLLM).

    engine: its sizes, or its tensor parallel size; rank: within the engine; own_head: whether the engine stores a
    head (None: unless embeddings are tied). Raises ValueError when the sizes do not divide.
    """
    return _engine_at(shape, engine, rank, own_head).layout


def engine_shapes(shape: ModelShape, engine: int | EngineParallel, rank: int, own_head: bool | None = None) -> Shapes:
    """Parameter name -> shape of the tensor that this engine rank stores."""
    return _engine_at(shape, engine, rank, own_head).shapes


@lru_cache(maxsize=16)
def canonical_tensors(shape: ModelShape) -> Mapping[str, Canonical]:
    """Every canonical tensor of the model, in the order of its layers."""
    out: dict[str, Canonical] = {}
    for row, layer in shape.rows_in_order():
        axis = 1 if row.split is Split.COLUMNS else 0
        for expert in range(shape.experts if row.layer_type is LayerType.EXPERT else 1):
            for name, part in zip(shape.names_of(row, layer, expert), row.parts, strict=True):
                out.setdefault(name, Canonical(shape.shape_of(part), axis, part.wide))
    return MappingProxyType(out)


def _megatron_at(shape: ModelShape, parallel: Parallel, rank: int, impl: str, experts: str) -> _Stored:
    assert impl in IMPLS and experts in EXPERTS, f"unknown storage: {impl}, {experts}"
    at = parallel.coordinates(rank)
    etp, ep = (at.etp, at.ep) if shape.moe_layers else (0, 0)
    return _megatron(shape, parallel, (at.tp, at.pp, etp, ep), impl, experts)


@lru_cache(maxsize=4096)
def _megatron(
    shape: ModelShape, parallel: Parallel, place: tuple[int, int, int, int], impl: str, experts: str
) -> _Stored:
    tp, pp, etp, ep = place
    check_heads(shape, parallel.tp)
    if shape.moe_layers and shape.experts % parallel.ep:
        raise ValueError(f"{shape.experts} experts do not divide over {parallel.ep} expert parallel ranks")
    mine = range(ep * shape.experts // parallel.ep, (ep + 1) * shape.experts // parallel.ep)
    chunks = parallel.stage_layers(shape.layers, pp)
    places = {layer: (chunk, at) for chunk, layers in enumerate(chunks) for layer, at in layers.items()}
    out: dict[str, Stored] = {}
    for row, layer in shape.rows_in_order():
        if row.layer_type is LayerType.EMBEDDING:
            place = (0, 0) if pp == 0 else None
        elif row.layer_type is LayerType.OUTPUT:
            # A tied head shares the embedding's storage when both are on one stage, else it is a copy.
            shared = row.split is Split.VOCABULARY and shape.tied and parallel.pp == 1
            place = (len(chunks) - 1, 0) if pp == parallel.last_stage and not shared else None
        else:
            place = places.get(layer)
        routed = row.layer_type is LayerType.EXPERT
        kind = experts if routed else impl
        if place is None or kind not in row.names:
            continue
        chunk, local = place
        name = chunk_prefix(chunk, parallel.vpp) + row.names[kind]
        size, rank, which = (parallel.expert_tp, etp, mine) if routed else (parallel.tp, tp, (0,))
        cuts = [Cut(shape, row, shape.names_of(row, layer, e), size, rank, impl) for e in which]
        stored = [CUT_MEGATRON[row.split](cut) for cut in cuts]
        if kind == "grouped":
            stored = [stack(stored, transposed=True, flat=row.split)]
        out |= {name.format(layer=local, expert=j): one for j, one in enumerate(stored)}
    return _frozen(out)


def _engine_at(shape: ModelShape, engine: int | EngineParallel, rank: int, own_head: bool | None) -> _Stored:
    engine = EngineParallel(engine) if isinstance(engine, int) else engine
    if not 0 <= rank < engine.ranks:
        group = "its tensor parallel group" if engine.ranks == engine.tp else "an engine"
        raise ValueError(f"engine rank {rank} is outside {group} of {engine.ranks}")
    return _engine(shape, engine, rank, not shape.tied if own_head is None else own_head)


@lru_cache(maxsize=1024)
def _engine(shape: ModelShape, engine: EngineParallel, rank: int, own_head: bool) -> _Stored:
    check_heads(shape, engine.tp)
    out: dict[str, Stored] = {}
    etp = engine.tp if engine.ep == 1 else 1
    for row, layer in shape.rows_in_order():
        name = row.names.get(ENGINE)
        if row.split is Split.VOCABULARY and row.layer_type is LayerType.OUTPUT and not own_head:
            continue
        if row.layer_type is LayerType.EXPERT:
            mine = engine.experts(shape.experts, rank)
            cuts = [Cut(shape, row, shape.names_of(row, layer, e), etp, rank % etp, ENGINE) for e in mine]
            stored = stack([CUT_ENGINE[row.split](cut) for cut in cuts], transposed=engine.transposed)
            out[name.format(layer=layer, nested="routed_experts." if engine.nested else "")] = stored
        elif name:
            fused = engine.fused_down or row.unfused is None
            singles = () if fused else zip(row.unfused, row.parts, strict=True)
            tp = 1 if engine.whole_shared and "shared_ffn" in row.parts[0].shape else engine.tp
            for only in [row] if fused else [replace(row, names={ENGINE: n}, parts=(p,)) for n, p in singles]:
                cut = Cut(shape, only, shape.names_of(only, layer), tp, rank % tp, ENGINE)
                out[only.names[ENGINE].format(layer=layer)] = CUT_ENGINE[row.split](cut)
    return _frozen(out)


def _frozen(out: Mapping[str, Stored]) -> _Stored:
    layout, shapes = ({name: stored[i] for name, stored in out.items()} for i in (0, 1))
    return _Stored(MappingProxyType(layout), MappingProxyType(shapes))
