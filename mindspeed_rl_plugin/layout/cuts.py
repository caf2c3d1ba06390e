"""Cuts: what one tensor parallel rank stores of a row of a family's table, as segments of canonical tensors. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from mindspeed_rl_plugin.layout.family_table import Row, Split
from mindspeed_rl_plugin.layout.shape import ModelShape

ENGINE_VOCAB_MULTIPLE = 64  # vllm/model_executor/layers/vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE


class Segment(NamedTuple):
    """Slices `[start, start + size)` of a canonical tensor along `axis`, as a parameter stores them."""

    name: str  # of the canonical tensor
    axis: int
    start: int
    size: int
    offset: int  # slice of the parameter at which they begin
    slot: int = -1  # index of the expert where experts are stacked in one parameter; -1: not stacked
    transposed: bool = False  # stacked experts: the two last axes are exchanged
    # stacked experts: shape `[experts, ...]` in which the parameter is viewed; None: its own
    grid: tuple[int, ...] | None = None

    @property
    def stop(self) -> int:
        return self.start + self.size

    def of(self, param: Any) -> Any:
        """The view of a stored tensor in which `offset` counts slices along `axis`, in canonical orientation."""
        if self.slot >= 0:
            param = (param.view(self.grid) if self.grid else param)[self.slot]
        return param.t() if self.transposed else param

    def view(self, param: Any, start: int, size: int) -> Any:
        """Slices `[start, start + size)` of the canonical tensor inside a stored parameter, without copying."""
        return self.of(param).narrow(self.axis, self.offset + start - self.start, size)


Stored = tuple[tuple[Segment, ...], tuple[int, ...]]


class Cut(NamedTuple):
    """One rank's part of a row, of which the segments are asked for."""

    shape: ModelShape
    row: Row
    names: tuple[str, ...]  # canonical names of the row's parts
    tp: int
    rank: int
    impl: str  # of IMPLS, or ENGINE

    def part(self, i: int = 0) -> tuple[int, ...]:
        return self.shape.shape_of(self.row.parts[i])

    def share(self, total: int, what: str) -> int:
        """Even share of a rank. Raises ValueError when there is none."""
        if total % self.tp:
            raise ValueError(f"{what} of {total} do not divide over {self.tp} tensor parallel ranks")
        return total // self.tp


def check_heads(shape: ModelShape, tp: int) -> None:
    """Raise ValueError unless attention divides over tensor parallel ranks: whole heads, and query groups whole or
    repeated evenly.

    vLLM and Megatron have the same rule, but for core 0.12, which repeats no groups: __post_init__ of
    megatron/core/transformer/transformer_config.py.
    """
    if shape.heads % tp:
        raise ValueError(f"attention heads of {shape.heads} do not divide over {tp} tensor parallel ranks")
    if shape.groups % tp and tp % shape.groups:
        raise ValueError(
            f"query groups of {shape.groups} do not divide over {tp} tensor parallel ranks, nor can as many ranks "
            "repeat them evenly"
        )


def stack(stored: Sequence[Stored], *, transposed: bool, flat: Split | None = None) -> Stored:
    """Experts in one parameter `[experts, ...]`. flat: the experts' split, where Megatron keeps it as a matrix:
    weight1 as `[H, experts x 2F]`, weight2 as `[experts x F, H]`, whose storage is that of `[experts, H, 2F]` and
    `[experts, F, H]` (GroupedMLP.forward)."""
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


def _replicated(cut: Cut) -> Stored:
    segments, at = [], 0
    for i, name in enumerate(cut.names):
        rows = cut.part(i)[0]
        segments.append(Segment(name, 0, 0, rows, at))
        at += rows
    return tuple(segments), (at, *cut.part()[1:])


def _rows(cut: Cut) -> Stored:
    """An even share of the rows of every part, stacked."""
    rows, *rest = cut.part()
    size = cut.share(rows, f"rows of {cut.names[0]}")
    stacked = tuple(Segment(name, 0, cut.rank * size, size, i * size) for i, name in enumerate(cut.names))
    return stacked, (len(stacked) * size, *rest)


def _down(cut: Cut) -> Stored:
    return _rows(cut) if cut.impl in ("local", "te_sharded") else _replicated(cut)


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
    """The rows of a rank's heads that the row is about, head after head."""
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
    """What of segments that tile a whole parameter falls on its slices `[low, low + size)`."""
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
    Split.DOWN: _down,
}

CUT_ENGINE = CUT_MEGATRON | {
    Split.VOCABULARY: _vocabulary(lambda shape: -(-shape.vocab // ENGINE_VOCAB_MULTIPLE) * ENGINE_VOCAB_MULTIPLE),
    Split.QUERY_GROUPS: _stacked_qkv,
}
