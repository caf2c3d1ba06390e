"""Layouts: every stored parameter of a Megatron rank or an engine rank as segments of canonical tensors. Canonical
tensors are those of the Hugging Face checkpoint, unsplit and unpadded. Nothing here reads or writes a tensor's values.

First come functions that split a row of a family's table for one tensor parallel rank, then layouts of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from mindspeed_rl_plugin.layout.family_table import ENGINE, EXPERTS, IMPLS, LayerType, Row, Split
from mindspeed_rl_plugin.layout.parallel import EngineParallel, Parallel, chunk_prefix
from mindspeed_rl_plugin.layout.shape import Canonical, ModelShape

ENGINE_VOCAB_MULTIPLE = 64  # vllm/model_executor/layers/vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE


class Segment(NamedTuple):
    """Slices `[start, start + size)` of a canonical tensor along `axis`, and their place in a stored parameter."""

    name: str  # of the canonical tensor
    axis: int
    start: int
    size: int
    offset: int  # slice of the parameter at which they begin
    slot: int = -1  # index of the expert, if experts are stacked in one parameter; -1: not stacked
    transposed: bool = False  # stacked experts: the two last axes are exchanged
    grid: tuple[int, ...] | None = None  # stacked experts: shape in which the parameter is viewed; None: as stored

    @property
    def stop(self) -> int:
        return self.start + self.size

    def of(self, param: Any) -> Any:
        """The part of a stored parameter to which `axis` and `offset` refer: all of it; if experts are stacked, the
        matrix of expert `slot`, transposed back if it is stored transposed."""
        if self.slot >= 0:
            param = (param.view(self.grid) if self.grid else param)[self.slot]
        return param.t() if self.transposed else param

    def view(self, param: Any, start: int, size: int) -> Any:
        """Slices `[start, start + size)` of the canonical tensor inside a stored parameter, without copying."""
        return self.of(param).narrow(self.axis, self.offset + start - self.start, size)


Stored = tuple[tuple[Segment, ...], tuple[int, ...]]


class Cut(NamedTuple):
    """A row of the table and a tensor parallel rank: the arguments of a function that splits the row for the rank."""

    shape: ModelShape
    row: Row
    names: tuple[str, ...]  # canonical names of the row's parts
    tp: int
    rank: int

    def part(self, i: int = 0) -> tuple[int, ...]:
        return self.shape.shape_of(self.row.parts[i])

    def share(self, total: int, what: str) -> int:
        """`total / tp`. Raises ValueError if that is no whole number."""
        if total % self.tp:
            raise ValueError(f"{what} of {total} do not divide over {self.tp} tensor parallel ranks")
        return total // self.tp


def check_heads(shape: ModelShape, tp: int) -> None:
    """Raise ValueError unless tp divides the number of heads, and divides the number of query groups or is a multiple
    of it (then ranks repeat a group).

    This is the rule of vLLM and Megatron, except core 0.12, which does not repeat groups: __post_init__ of
    megatron/core/transformer/transformer_config.py.
    """
    if shape.heads % tp:
        raise ValueError(f"attention heads of {shape.heads} do not divide over {tp} tensor parallel ranks")
    if shape.groups % tp and tp % shape.groups:
        raise ValueError(
            f"query groups of {shape.groups} do not divide over {tp} tensor parallel ranks, and cannot be repeated "
            f"evenly, since {tp} is no multiple of {shape.groups}"
        )


def stack(stored: Sequence[Stored], *, transposed: bool, flat: Split | None = None) -> Stored:
    """All experts of a rank in one parameter `[experts, ...]`. flat: `Row.split`, if Megatron stores all these experts
    in one matrix: weight1 as `[H, experts x 2F]`, weight2 as `[experts x F, H]`. The bytes are in the order of
    `[experts, H, 2F]` and `[experts, F, H]` (GroupedMLP.forward)."""
    one = stored[0][1] if stored else (0, 0)
    grid = (len(stored), *(one[::-1] if transposed else one))
    see = grid if flat else None
    segments = tuple(
        s._replace(slot=j, transposed=transposed, grid=see) for j, (own, _) in enumerate(stored) for s in own
    )
    if flat is None:
        return segments, grid
    experts, rows, columns = grid
    return segments, (rows, experts * columns) if flat is Split.GATE_UP else (experts * rows, columns)


def _rows(cut: Cut) -> Stored:
    """An even share of the rows of every part, stacked."""
    segments, at = [], 0
    for i, name in enumerate(cut.names):
        size = cut.share(cut.part(i)[0], f"rows of {name}")
        segments.append(Segment(name, 0, cut.rank * size, size, at))
        at += size
    return tuple(segments), (at, *cut.part()[1:])


def _replicated(cut: Cut) -> Stored:
    return _rows(cut._replace(tp=1, rank=0))


def _columns(cut: Cut) -> Stored:
    rows, columns = cut.part()
    size = cut.share(columns, f"columns of {cut.names[0]}")
    return (Segment(cut.names[0], 1, cut.rank * size, size, 0),), (rows, size)


def _vocabulary(padded: Callable[[ModelShape], int]) -> Callable[[Cut], Stored]:
    def cut_rows(cut: Cut) -> Stored:
        size = cut.share(padded(cut.shape), "rows of the padded vocabulary")
        whole = [Segment(cut.names[0], 0, 0, cut.shape.vocab, 0)]
        return _window(whole, cut.rank * size, size), (size, *cut.part()[1:])

    return cut_rows


def _head_part(cut: Cut) -> Stored:
    """For each head of the rank, in order: skip as many rows as `Row.of_head[0]` says, take as many as `[1]` says."""
    before, size = (getattr(cut.shape, name) if name else 0 for name in cut.row.of_head)
    heads, each = cut.share(cut.shape.heads, "attention heads"), cut.part()[0] // cut.shape.heads
    first = cut.rank * heads
    rows = tuple(Segment(cut.names[0], 0, (first + i) * each + before, size, i * size) for i in range(heads))
    return rows, (heads * size, *cut.part()[1:])


def _qkv_parts(cut: Cut) -> list[tuple[str, int]]:
    """Canonical name and first row of all queries, all keys and all values."""
    if len(cut.names) == 3:
        return [(name, 0) for name in cut.names]
    queries, keys = cut.shape.heads * cut.shape.head_dim, cut.shape.groups * cut.shape.head_dim
    return [(cut.names[0], first) for first in (0, queries, queries + keys)]


def _interleaved_groups(cut: Cut) -> Stored:
    """Megatron's rows: for each query group its queries, its key, its value; cut evenly (Attention.linear_qkv)."""
    shape, ((q, at_q), (k, at_k), (v, at_v)) = cut.shape, _qkv_parts(cut)
    head, queries = shape.head_dim, shape.heads // shape.groups * shape.head_dim
    rows: list[Segment] = []
    for g in range(shape.groups):
        offset = g * (queries + 2 * head)
        rows.append(Segment(q, 0, at_q + g * queries, queries, offset))
        rows.append(Segment(k, 0, at_k + g * head, head, offset + queries))
        rows.append(Segment(v, 0, at_v + g * head, head, offset + queries + head))
    size = cut.share(shape.groups * (queries + 2 * head), f"rows of {q}, k and v")
    return _window(rows, cut.rank * size, size), (size, *cut.part()[1:])


def _stacked_qkv(cut: Cut) -> Stored:
    """vLLM's rows: a share of the queries, of the keys, of the values (QKVParallelLinear)."""
    shape, ((q, at_q), (k, at_k), (v, at_v)) = cut.shape, _qkv_parts(cut)
    queries = cut.share(shape.heads, "attention heads") * shape.head_dim
    if shape.groups >= cut.tp:
        keys = shape.groups // cut.tp * shape.head_dim
        start = cut.rank * keys
    else:
        keys, start = shape.head_dim, cut.rank // (cut.tp // shape.groups) * shape.head_dim
    stacked = (
        Segment(q, 0, at_q + cut.rank * queries, queries, 0),
        Segment(k, 0, at_k + start, keys, queries),
        Segment(v, 0, at_v + start, keys, queries + keys),
    )
    return stacked, (queries + 2 * keys, *cut.part()[1:])


def _window(segments: Iterable[Segment], low: int, size: int) -> tuple[Segment, ...]:
    """The parts of segments within slices `[low, low + size)` of a complete (not split) parameter."""
    out = []
    for s in segments:
        first, last = max(s.offset, low), min(s.offset + s.size, low + size)
        if first < last:
            out.append(Segment(s.name, s.axis, s.start + first - s.offset, last - first, first - low))
    return tuple(out)


CUT_MEGATRON: dict[Split, Callable[[Cut], Stored]] = {
    Split.REPLICATED: _replicated,
    Split.VOCABULARY: _vocabulary(lambda shape: shape.padded_vocab),
    Split.ROWS: _rows,
    Split.COLUMNS: _columns,
    Split.GATE_UP: _rows,
    Split.QUERY_GROUPS: _interleaved_groups,
    Split.HEAD_PART: _head_part,
}

CUT_ENGINE = CUT_MEGATRON | {
    Split.VOCABULARY: _vocabulary(lambda shape: -(-shape.vocab // ENGINE_VOCAB_MULTIPLE) * ENGINE_VOCAB_MULTIPLE),
    Split.QUERY_GROUPS: _stacked_qkv,
}

Layout = Mapping[str, tuple[Segment, ...]]  # parameter name -> its segments
Shapes = Mapping[str, tuple[int, ...]]  # parameter name -> shape of the stored tensor


class RankLayout(dict[str, tuple[Segment, ...]]):
    """The layout of one rank, and the `shapes` of its stored tensors. Ranks with equal layouts share one object."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        super().__init__({name: segments for name, (segments, _) in stored.items()})
        self.shapes = {name: shape for name, (_, shape) in stored.items()}


def megatron_layout(
    shape: ModelShape, parallel: Parallel, rank: int, impl: str = "local", experts: str = "sequential"
) -> RankLayout:
    """The layout of one trainer rank.

    impl: an entry of `family_table.IMPLS`; experts: an entry of `family_table.EXPERTS`. If a
    rank has several chunks, names start with the text of `chunk_prefix`. Raises ValueError if sizes do not divide.
    """
    assert impl in IMPLS and experts in EXPERTS, f"unknown storage: {impl}, {experts}"
    at = parallel.coordinates(rank)
    etp, ep = (at.etp, at.ep) if shape.moe_layers else (0, 0)
    return _megatron(shape, parallel, (at.tp, at.pp, etp, ep), impl, experts)


def engine_layout(shape: ModelShape, engine: EngineParallel, rank: int) -> RankLayout:
    """The layout of one rank of an engine (vLLM); rank: within the engine. Raises ValueError if sizes do not divide."""
    if not 0 <= rank < engine.ranks:
        raise ValueError(f"engine rank {rank} is outside an engine of {engine.ranks}")
    return _engine(shape, engine, rank)


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


@lru_cache(maxsize=4096)
def _megatron(
    shape: ModelShape, parallel: Parallel, place: tuple[int, int, int, int], impl: str, experts: str
) -> RankLayout:
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
            # A tied head uses the embedding's storage if there is one pipeline stage; else it is a copy.
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
        cuts = [Cut(shape, row, shape.names_of(row, layer, e), size, rank) for e in which]
        stored = [CUT_MEGATRON[row.split](cut) for cut in cuts]
        if kind == "grouped":
            stored = [stack(stored, transposed=True, flat=row.split)]
        out |= {name.format(layer=local, expert=j): one for j, one in enumerate(stored)}
    return RankLayout(out)


@lru_cache(maxsize=1024)
def _engine(shape: ModelShape, engine: EngineParallel, rank: int) -> RankLayout:
    check_heads(shape, engine.tp)
    out: dict[str, Stored] = {}
    etp = engine.tp if engine.ep == 1 else 1
    for row, layer in shape.rows_in_order():
        name = row.names.get(ENGINE)
        if row.split is Split.VOCABULARY and row.layer_type is LayerType.OUTPUT and shape.tied and not engine.own_head:
            continue
        if row.layer_type is LayerType.EXPERT:
            mine = engine.experts(shape.experts, rank)
            cuts = [Cut(shape, row, shape.names_of(row, layer, e), etp, rank % etp) for e in mine]
            stored = stack([CUT_ENGINE[row.split](cut) for cut in cuts], transposed=engine.transposed)
            out[name.format(layer=layer, nested="routed_experts." if engine.nested else "")] = stored
        elif name:
            unfused = row.unfused and not engine.fused_down
            tp = 1 if engine.whole_shared and "shared_ffn" in row.parts[0].shape else engine.tp
            for only in [replace(row, names={ENGINE: p.name}, parts=(p,)) for p in row.parts] if unfused else [row]:
                cut = Cut(shape, only, shape.names_of(only, layer), tp, rank % tp)
                out[only.names[ENGINE].format(layer=layer)] = CUT_ENGINE[row.split](cut)
    return RankLayout(out)
