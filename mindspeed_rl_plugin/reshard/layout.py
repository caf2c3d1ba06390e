"""Layouts: every stored parameter of a Megatron or an engine rank as segments of canonical tensors. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from mindspeed_rl_plugin.reshard.families import Row, Split, Stage
from mindspeed_rl_plugin.reshard.parallel import Parallel, chunk_prefix
from mindspeed_rl_plugin.reshard.shape import Canonical, ModelShape

__all__ = [
    "Canonical",
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

ENGINE_VOCAB_MULTIPLE = 64  # vllm/model_executor/layers/vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE


class Segment(NamedTuple):
    """Slices `[start, start + size)` of canonical tensor `name` along `axis`, stored from slice `offset` on."""

    name: str
    axis: int
    start: int
    size: int
    offset: int

    @property
    def stop(self) -> int:
        return self.start + self.size


Layout = Mapping[str, tuple[Segment, ...]]
Shapes = Mapping[str, tuple[int, ...]]


class _Stored(NamedTuple):
    layout: Layout
    shapes: Shapes


def megatron_layout(shape: ModelShape, parallel: Parallel, rank: int, impl: str = "local") -> Layout:
    """Parameter name -> segments of one trainer rank; the same object for ranks that differ in DP or CP only.

    impl: "local" or "te", whose names the model has. With several model chunks a name starts with
    `parallel.chunk_prefix`. Raises ValueError when the sizes do not divide.
    """
    at = parallel.coordinates(rank)
    return _megatron(shape, parallel, at.tp, at.pp, impl).layout


def megatron_shapes(shape: ModelShape, parallel: Parallel, rank: int, impl: str = "local") -> Shapes:
    """Parameter name -> shape of the tensor that this trainer rank stores."""
    at = parallel.coordinates(rank)
    return _megatron(shape, parallel, at.tp, at.pp, impl).shapes


def engine_layout(shape: ModelShape, tp: int, rank: int, own_head: bool | None = None) -> Layout:
    """Parameter name -> segments of one engine rank (vLLM).

    rank: tensor parallel rank; own_head: whether the engine stores a head (None: unless embeddings are
    tied). Raises ValueError when the sizes do not divide by `tp`.
    """
    return _engine(shape, tp, rank, not shape.tied if own_head is None else own_head).layout


def engine_shapes(shape: ModelShape, tp: int, rank: int, own_head: bool | None = None) -> Shapes:
    """Parameter name -> shape of the tensor that this engine rank stores."""
    return _engine(shape, tp, rank, not shape.tied if own_head is None else own_head).shapes


def padded_engine_vocab(shape: ModelShape) -> int:
    """Rows of the engine's embedding, all its ranks together."""
    return -(-shape.vocab // ENGINE_VOCAB_MULTIPLE) * ENGINE_VOCAB_MULTIPLE


@lru_cache(maxsize=16)
def canonical_tensors(shape: ModelShape) -> Mapping[str, Canonical]:
    """Every canonical tensor of the model, in the order of its layers."""
    out: dict[str, Canonical] = {}
    for stage, layers in ((Stage.FIRST, 1), (Stage.LAYER, shape.layers), (Stage.LAST, 1)):
        for layer in range(layers):
            for row in shape.rows(stage):
                for part in row.parts:
                    canonical = Canonical(shape.shape_of(part), 1 if row.split is Split.COLUMNS else 0)
                    out.setdefault(shape.canonical_name(part, layer), canonical)
    return MappingProxyType(out)


@lru_cache(maxsize=4096)
def _megatron(shape: ModelShape, parallel: Parallel, tp_rank: int, pp_rank: int, impl: str) -> _Stored:
    if impl not in ("local", "te"):
        raise ValueError(f"transformer implementation {impl!r} is unknown; known: local, te")
    chunks = parallel.stage_layers(shape.layers, pp_rank)
    layout: dict[str, tuple[Segment, ...]] = {}
    shapes: dict[str, tuple[int, ...]] = {}

    def put(chunk: int, row: Row, layer: int, local: int) -> None:
        name = chunk_prefix(chunk, parallel.vpp) + getattr(row, impl).format(layer=local)
        names = tuple(shape.canonical_name(part, layer) for part in row.parts)
        layout[name], shapes[name] = _CUT_MEGATRON[row.split](_Cut(shape, row, names, parallel.tp, tp_rank))

    for chunk, layers in enumerate(chunks):
        if pp_rank == 0 and chunk == 0:
            for row in shape.rows(Stage.FIRST):
                put(chunk, row, 0, 0)
        for local, layer in enumerate(layers):
            for row in shape.rows(Stage.LAYER):
                put(chunk, row, layer, local)
        if pp_rank == parallel.pp - 1 and chunk == len(chunks) - 1:
            for row in shape.rows(Stage.LAST):
                # A tied head shares the embedding's storage when both are on one stage, else it is a copy.
                if row.split is not Split.VOCABULARY or not shape.tied or parallel.pp > 1:
                    put(chunk, row, 0, 0)
    return _Stored(MappingProxyType(layout), MappingProxyType(shapes))


@lru_cache(maxsize=1024)
def _engine(shape: ModelShape, tp: int, rank: int, own_head: bool) -> _Stored:
    if not 0 <= rank < tp:
        raise ValueError(f"engine rank {rank} is outside its tensor parallel group of {tp}")
    layout: dict[str, tuple[Segment, ...]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for stage, layers in ((Stage.FIRST, 1), (Stage.LAYER, shape.layers), (Stage.LAST, 1)):
        for layer in range(layers):
            for row in shape.rows(stage):
                if stage is Stage.LAST and row.split is Split.VOCABULARY and not own_head:
                    continue
                name = row.engine.format(layer=layer)
                names = tuple(shape.canonical_name(part, layer) for part in row.parts)
                layout[name], shapes[name] = _CUT_ENGINE[row.split](_Cut(shape, row, names, tp, rank))
    return _Stored(MappingProxyType(layout), MappingProxyType(shapes))


class _Cut(NamedTuple):
    """What one rank stores of a row is asked for: `names` are the canonical names of its parts."""

    shape: ModelShape
    row: Row
    names: tuple[str, ...]
    tp: int
    rank: int

    def part(self, i: int = 0) -> tuple[int, ...]:
        """Canonical shape of part i."""
        return self.shape.shape_of(self.row.parts[i])

    def share(self, total: int, what: str) -> int:
        """Even share of a rank. Raises ValueError when there is none."""
        if total % self.tp:
            raise ValueError(f"{what} of {total} do not divide over {self.tp} tensor parallel ranks")
        return total // self.tp


Stored = tuple[tuple[Segment, ...], tuple[int, ...]]


def _replicated(cut: _Cut) -> Stored:
    shape = cut.part()
    return (Segment(cut.names[0], 0, 0, shape[0], 0),), shape


def _columns(cut: _Cut) -> Stored:
    rows, columns = cut.part()
    size = cut.share(columns, f"columns of {cut.names[0]}")
    return (Segment(cut.names[0], 1, cut.rank * size, size, 0),), (rows, size)


def _gate_up(cut: _Cut) -> Stored:
    rows, columns = cut.part()
    size = cut.share(rows, f"rows of {cut.names[0]}")
    stacked = tuple(Segment(name, 0, cut.rank * size, size, i * size) for i, name in enumerate(cut.names))
    return stacked, (len(stacked) * size, columns)


def _vocabulary(padded: Callable[[ModelShape], int]) -> Callable[[_Cut], Stored]:
    def cut_rows(cut: _Cut) -> Stored:
        size = cut.share(padded(cut.shape), "rows of the padded vocabulary")
        whole = [Segment(cut.names[0], 0, 0, cut.shape.vocab, 0)]
        return _window(whole, cut.rank * size, size), (size, *cut.part()[1:])

    return cut_rows


def _interleaved_groups(cut: _Cut) -> Stored:
    """Megatron's rows: for each query group its queries, its key, its value; cut evenly (Attention.linear_qkv)."""
    shape, (q, k, v) = cut.shape, cut.names
    head, queries = shape.head_dim, shape.heads // shape.groups * shape.head_dim
    rows: list[Segment] = []
    for g in range(shape.groups):
        offset = g * (queries + 2 * head)
        rows.append(Segment(q, 0, g * queries, queries, offset))
        rows.append(Segment(k, 0, g * head, head, offset + queries))
        rows.append(Segment(v, 0, g * head, head, offset + queries + head))
    size = cut.share(shape.groups * (queries + 2 * head), f"rows of {q}, k and v")
    return _window(rows, cut.rank * size, size), (size, *cut.part()[1:])


def _stacked_qkv(cut: _Cut) -> Stored:
    """vLLM's rows: a share of the queries, of the keys, of the values (QKVParallelLinear)."""
    shape, (q, k, v) = cut.shape, cut.names
    queries = cut.share(shape.heads, "attention heads") * shape.head_dim
    if shape.groups >= cut.tp:
        keys = cut.share(shape.groups, "query groups") * shape.head_dim
        start = cut.rank * keys
    else:
        if cut.tp % shape.groups:
            raise ValueError(f"{cut.tp} engine ranks cannot repeat {shape.groups} query groups evenly")
        keys, start = shape.head_dim, cut.rank // (cut.tp // shape.groups) * shape.head_dim
    stacked = (
        Segment(q, 0, cut.rank * queries, queries, 0),
        Segment(k, 0, start, keys, queries),
        Segment(v, 0, start, keys, queries + keys),
    )
    return stacked, (queries + 2 * keys, *cut.part()[1:])


def _window(segments: Iterable[Segment], low: int, size: int) -> tuple[Segment, ...]:
    """What of segments that tile a whole parameter falls on its slices `[low, low + size)`."""
    out = []
    for s in segments:
        first, last = max(s.offset, low), min(s.offset + s.size, low + size)
        if first < last:
            out.append(Segment(s.name, s.axis, s.start + first - s.offset, last - first, first - low))
    return tuple(out)


_CUT_MEGATRON: dict[Split, Callable[[_Cut], Stored]] = {
    Split.REPLICATED: _replicated,
    Split.VOCABULARY: _vocabulary(lambda shape: shape.padded_vocab),
    Split.COLUMNS: _columns,
    Split.GATE_UP: _gate_up,
    Split.QUERY_GROUPS: _interleaved_groups,
}

_CUT_ENGINE = _CUT_MEGATRON | {
    Split.VOCABULARY: _vocabulary(padded_engine_vocab),
    Split.QUERY_GROUPS: _stacked_qkv,
}
