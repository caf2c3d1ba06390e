"""Layouts: every stored parameter of a Megatron or an engine rank as segments of canonical tensors. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from mindspeed_rl_plugin.reshard.cuts import (
    CUT_ENGINE,
    CUT_MEGATRON,
    Cut,
    Segment,
    check_heads,
    padded_engine_vocab,
    stack,
)
from mindspeed_rl_plugin.reshard.family_table import ENGINE, EXPERTS, IMPLS, LayerType, Row, Split
from mindspeed_rl_plugin.reshard.parallel import EngineParallel, Parallel, chunk_prefix
from mindspeed_rl_plugin.reshard.shape import Canonical, ModelShape

__all__ = [
    "Canonical",
    "EngineParallel",
    "Layout",
    "ModelShape",
    "Parallel",
    "Segment",
    "canonical_tensors",
    "engine_layout",
    "engine_shapes",
    "megatron_layout",
    "megatron_shapes",
    "padded_engine_vocab",
]

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

    def put(row: Row, layer: int) -> None:
        for part in row.parts:
            canonical = Canonical(shape.shape_of(part), 1 if row.split is Split.COLUMNS else 0, part.wide)
            for expert in range(shape.experts if row.layer_type is LayerType.EXPERT else 1):
                out.setdefault(shape.canonical_name(part, layer, expert), canonical)

    for row in shape.rows(LayerType.EMBEDDING):
        put(row, 0)
    for layer in range(shape.layers):
        for row in shape.layer_rows(layer):
            put(row, layer)
    for row in shape.rows(LayerType.OUTPUT):
        put(row, 0)
    return MappingProxyType(out)


def _megatron_at(shape: ModelShape, parallel: Parallel, rank: int, impl: str, experts: str) -> _Stored:
    for value, known, what in ((impl, IMPLS, "transformer implementation"), (experts, EXPERTS, "storage of experts")):
        if value not in known:
            raise ValueError(f"{what} {value!r} is unknown; known: {', '.join(known)}")
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
    out = _Stored({}, {})

    def put(chunk: int, row: Row, layer: int, local: int) -> None:
        kind = experts if row.layer_type is LayerType.EXPERT else impl
        if kind not in row.names:
            return
        name = chunk_prefix(chunk, parallel.vpp) + row.names[kind]
        if row.layer_type is not LayerType.EXPERT:
            cut = Cut(shape, row, shape.names_of(row, layer), parallel.tp, tp, impl)
            _store(out, name.format(layer=local), CUT_MEGATRON[row.split](cut))
            return
        cuts = [Cut(shape, row, shape.names_of(row, layer, e), parallel.expert_tp, etp, impl) for e in mine]
        stored = [CUT_MEGATRON[row.split](cut) for cut in cuts]
        if kind == "grouped":
            _store(out, name.format(layer=local), stack(stored, transposed=True, flat=row.split))
            return
        for j, one in enumerate(stored):
            _store(out, name.format(layer=local, expert=j), one)

    for chunk, layers in enumerate(chunks):
        if pp == 0 and chunk == 0:
            for row in shape.rows(LayerType.EMBEDDING):
                put(chunk, row, 0, 0)
        for local, layer in enumerate(layers):
            for row in shape.layer_rows(layer):
                put(chunk, row, layer, local)
        if pp == parallel.pp - 1 and chunk == len(chunks) - 1:
            for row in shape.rows(LayerType.OUTPUT):
                # A tied head shares the embedding's storage when both are on one stage, else it is a copy.
                if row.split is not Split.VOCABULARY or not shape.tied or parallel.pp > 1:
                    put(chunk, row, 0, 0)
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
    out = _Stored({}, {})
    etp = engine.tp if engine.ep == 1 else 1

    def put(row: Row, layer: int) -> None:
        name = row.names.get(ENGINE)
        if row.layer_type is LayerType.EXPERT:
            mine = engine.experts(shape.experts, rank)
            cuts = [Cut(shape, row, shape.names_of(row, layer, e), etp, rank % etp, ENGINE) for e in mine]
            stored = stack([CUT_ENGINE[row.split](cut) for cut in cuts], transposed=engine.transposed)
            _store(out, name.format(layer=layer, nested="routed_experts." if engine.nested else ""), stored)
        elif name and (engine.fused_down or row.unfused is None):
            cut = Cut(shape, row, shape.names_of(row, layer), engine.tp, rank % engine.tp, ENGINE)
            _store(out, name.format(layer=layer), CUT_ENGINE[row.split](cut))
        elif name:
            for only, part in zip(row.unfused, row.parts, strict=True):
                single = Row(row.layer_type, {ENGINE: only}, row.split, (part,))
                cut = Cut(shape, single, shape.names_of(single, layer), engine.tp, rank % engine.tp, ENGINE)
                _store(out, only.format(layer=layer), CUT_ENGINE[row.split](cut))

    for row in shape.rows(LayerType.EMBEDDING):
        put(row, 0)
    for layer in range(shape.layers):
        for row in shape.layer_rows(layer):
            put(row, layer)
    for row in shape.rows(LayerType.OUTPUT):
        if row.split is not Split.VOCABULARY or own_head:
            put(row, 0)
    return _frozen(out)


def _store(out: _Stored, name: str, stored: tuple[tuple[Segment, ...], tuple[int, ...]]) -> None:
    out.layout[name], out.shapes[name] = stored


def _frozen(out: _Stored) -> _Stored:
    return _Stored(MappingProxyType(out.layout), MappingProxyType(out.shapes))
