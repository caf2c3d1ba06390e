"""Rows to padded tensors and back: the only place where columns are shifted against the logits.

Logits at position t predict token t + 1. So position t of the labels, the mask and all columns of a `MicroBatch` holds
entry t + 1 of the row's column, and the last position of each row holds 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mindspeed_rl_plugin.forward.batching import padded
from mindspeed_rl_plugin.forward.router_replay import OLDER, Routes, weights_version
from mindspeed_rl_plugin.forward.settings import ForwardSettings
from mindspeed_rl_plugin.forward.tree import Branches, PrefixTree, plan_tree
from mindspeed_rl_plugin.rows import Ragged, Rows


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch: `mb` paths, padded on the right to S tokens, or all of them packed into one row of S tokens.

    A row is one path, or several if the requests of its agent forked (column `paths`). Since padding is on the right, a
    causal mask alone keeps real tokens from attending to it. Where packed paths have common prefixes, the model may run
    a tree of the tokens; all else keeps the packed layout.
    """

    index: int  # number among the rank's micro-batches of the pass
    tokens: Tensor  # `[mb, S]` int64
    labels: Tensor  # `[mb, S]` int64
    position_ids: Tensor  # `[mb, S]` int64
    explicit_mask: bool  # whether the model gets an attention mask
    mask: Tensor  # `[mb, S]` bool, whether the predicted token is trained
    lengths: Tensor  # `[mb]` int64 on the host, tokens of each path
    columns: Mapping[str, Tensor]  # further per-token columns `[mb, S]`, shifted like `labels`, 0 on padding
    rows: Tensor  # `[mb]` int64, row of each path
    segments: Tensor | None = None  # packed: `[1, S]` int64, row of each position, number of rows on padding
    bounded: bool = False  # packed: the attention itself takes row boundaries
    ranks: int = 1  # number of context parallel ranks over which the rows are split; S counts this rank's tokens
    tree: PrefixTree | None = None  # packed: what the model runs in place of `tokens`; None: the tokens themselves
    routes: Routes | None = None  # on the host, experts of the tokens that the model runs; None: routers choose
    routed: tuple[int, ...] = ()  # Megatron's numbers of the layers with experts

    @property
    def sequence(self) -> Tensor:
        """`[trained tokens]` int64, row of each trained token in order."""
        return self.rows[self.mask.nonzero()[:, 0]] if self.segments is None else self.segments[self.mask]

    @property
    def attention_mask(self) -> Tensor | None:
        """`[1, 1, S, S]` bool, True: no attention; or None. Each call makes it, since it is too large to keep."""
        return causal_mask(self.tokens.shape[1], self.tokens.device) if self.explicit_mask else None

    @property
    def branches(self) -> Branches:
        """Of packed rows or of their tree; padding, if any, is the last one."""
        if self.tree is not None:
            return self.tree.branches
        ends, total = self.lengths.cumsum(0), self.tokens.shape[1] * self.ranks
        ends = ends if ends[-1] == total else torch.cat([ends, torch.tensor([total])])
        return Branches(ends, ends)

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch on a device; `lengths` stay on the host."""
        moved = {name: getattr(self, name).to(device) for name in ("tokens", "labels", "position_ids", "mask", "rows")}
        columns = {name: column.to(device) for name, column in self.columns.items()}
        segments = None if self.segments is None else self.segments.to(device)
        tree = None if self.tree is None else self.tree.to(device)
        return dataclasses.replace(self, columns=columns, segments=segments, tree=tree, **moved)


def collate(rows: Rows, settings: ForwardSettings, *, index: int = 0, columns: Sequence[str] = ()) -> MicroBatch:
    """Pad and shift one micro-batch.

    rows: `tokens` and maybe `loss_mask`: without it all tokens are trained but the first of each row; `routes` if
    routers shall not choose; `paths` if rows may have several. columns: names of further ragged per-token columns of
    the micro-batch. Raises ValueError for a column that is not aligned with the tokens, for experts that the model
    lacks and, if rows are not packed, for a wrong number of rows or a row longer than the sequence length.
    """
    tokens, packed = by_path(rows["tokens"], rows), settings.packed
    lengths, total = tokens.lengths, len(tokens.values)
    of = torch.searchsorted(rows["tokens"].offsets, tokens.offsets[:-1], right=True) - 1
    if packed:
        length = padded(total, settings.multiple)
    elif settings.max_tokens is None and len(rows) != settings.micro_batch_size:
        raise ValueError(f"a micro-batch has {len(rows)} rows, not --micro-batch-size {settings.micro_batch_size}")
    else:
        length = settings.padded_length(int(lengths.max()))

    def laid_out(column: Ragged) -> Tensor:
        return (Ragged(column.values, torch.tensor([0, total])) if packed else column).padded(length)

    segments = None
    if packed:
        first = tokens.offsets[:-1].repeat_interleave(lengths)
        positions = laid_out(Ragged(torch.arange(total) - first, tokens.offsets))
        segments = torch.full((1, length), len(rows))
        segments[0, :total] = of.repeat_interleave(lengths)
    else:
        positions = torch.arange(length).repeat(len(lengths), 1)

    def shifted(column: Ragged, name: str) -> Ragged:
        if not torch.equal(column.lengths, rows["tokens"].lengths):
            raise ValueError(
                f"column {name!r} has rows of {column.lengths.tolist()} entries for {rows['tokens'].lengths.tolist()} "
                "tokens; give one entry for each token"
            )
        return _shifted(Ragged(column.values, tokens.offsets))

    mask = rows.columns.get("loss_mask", Ragged(torch.ones_like(tokens.values), rows["tokens"].offsets))
    tree = plan_tree(tokens, length, settings.multiple) if settings.shared else None
    routes = None
    if settings.routed and (given := rows.columns.get("routes")) is not None:  # the critic's routers choose
        _check_routes(given, settings)
        routes = Routes.laid_out(laid_out(shifted(given, "routes")), laid_out(_parts(rows, tokens)), tree)
    return MicroBatch(
        index=index,
        tokens=laid_out(tokens).long(),
        labels=laid_out(_shifted(tokens)).long(),
        position_ids=positions,
        explicit_mask=settings.causal_mask and not packed,
        mask=laid_out(shifted(mask, "loss_mask")).bool(),
        lengths=lengths,
        rows=of,
        columns={name: laid_out(shifted(rows[name], name)) for name in columns},
        segments=segments,
        bounded=settings.bounded,
        tree=tree,
        routes=routes,
        routed=settings.routed,
    )


def by_path(column: Ragged, rows: Rows) -> Ragged:
    """A per-token column with each path as a row of its own."""
    if (paths := rows.columns.get("paths")) is None:
        return column
    starts = paths.values[:, 0] + column.offsets[:-1].repeat_interleave(paths.lengths)
    return Ragged(column.values, torch.cat([starts, column.offsets[-1:]]))


def to_rows(values: Tensor, batch: MicroBatch) -> Ragged:
    """Inverse of the shift: `[mb, S, *]` by logit position, or `[1, S, *]` packed -> ragged `[L, *]` aligned with the
    tokens of the rows; the first entry of each path is 0.0."""
    lengths, rows = batch.lengths.tolist(), []
    split = values if batch.segments is None else values[0, : sum(lengths)].split(lengths)
    for row, length in zip(split, lengths, strict=True):
        rows.append(torch.cat([row.new_zeros(min(length, 1), *row.shape[1:]), row[: max(length - 1, 0)]]))
    ends = torch.bincount(batch.rows.cpu(), batch.lengths).long().cumsum(0)
    return Ragged(Ragged.from_rows(rows, dtype=values.dtype).values, torch.cat([ends.new_zeros(1), ends]))


def causal_mask(length: int, device: torch.device | str = "cpu") -> Tensor:
    """`[1, 1, S, S]` bool, True above the diagonal: Megatron attends where the mask is False."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu_(1)[None, None]


def _check_routes(routes: Ragged, settings: ForwardSettings) -> None:
    layers, most = routes.values.shape[1], int(routes.values.max())
    if layers != len(settings.routed) or most >= settings.experts:
        raise ValueError(
            f"routes name {layers} layers and experts up to {most}, the model has {len(settings.routed)} layers with "
            f"experts 0 to {settings.experts - 1}; give logical ids, in the order of the layers"
        )


def _parts(rows: Rows, tokens: Ragged) -> Ragged:
    """`[L]` uint8 for each token that a model reads: 1 in the first part of a response, 2 at the token that an
    interruption left unread, 3 after it; OLDER where older weights read it; 0 for the last token of a path, which none
    reads. tokens: by path."""
    part, firsts = torch.ones(len(tokens.values), dtype=torch.uint8), {*tokens.offsets.tolist()}
    bounds = pairwise(rows["tokens"].offsets.tolist())
    for i, (before, end) in enumerate(bounds):
        spans = rows["segments"].row(i).tolist() if "segments" in rows.columns else []
        for number, (start, version) in enumerate(spans):
            start = before + start if number else before
            if start in firsts:
                part[start:end] = 1
            else:
                start -= 1
                part[start], part[start + 1 : end] = 2, 3
            if version < weights_version[0]:
                part[start:end] = OLDER
    part[tokens.offsets[1:][tokens.lengths > 0] - 1] = 0
    return Ragged(part, tokens.offsets)


def _shifted(column: Ragged) -> Ragged:
    """Entry t + 1 of each row in the place of entry t; the last entry predicts nothing and is 0."""
    values = column.values.roll(-1, 0)
    values[column.offsets[1:][column.lengths > 0] - 1] = 0
    return Ragged(values, column.offsets)
