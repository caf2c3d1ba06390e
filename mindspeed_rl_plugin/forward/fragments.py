"""Divides rows of groups among ranks and micro-batches, if a micro-batch computes common first tokens only once.

The rows of a group are a tree: they begin with the same prompt, and some share tokens behind it. A fragment is a part
of a group's rows that are neighbours in the order of their tokens, so that they have most in common.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise

import numpy as np

from mindspeed_rl_plugin.rows import Group, Rows, SampleId

Common = tuple[tuple[int, int], ...]
"""A group's members in the order of their tokens, each with the number of tokens that it shares with the one before."""
Fragment = tuple[SampleId, ...]
Near = Mapping[SampleId, Collection[int]]  # row -> data parallel ranks on the machine that has it
SLACK = 0.01  # share of tokens by which the fullest rank may grow, so that machines train rows that they have


def common_tokens(rows: Sequence[np.ndarray]) -> Common:
    """`Common` of rows of token ids, `[L_i]` of one dtype; a row's index is its member. Any order of tokens will do,
    here that of their bytes."""
    order = sorted(range(len(rows)), key=lambda i: rows[i].tobytes())
    shared = [0, *(_shared(rows[a], rows[b]) for a, b in pairwise(order))]
    return tuple(zip(order, shared, strict=True))


def _shared(a: np.ndarray, b: np.ndarray) -> int:
    """Number of tokens with which both rows begin."""
    shorter = min(len(a), len(b))
    differs = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differs[0]) if len(differs) else shorter


def row_sizes(rows: Rows, shared: bool) -> list[int]:
    """Tokens that the model runs for each row alone, without padding. rows: `length` (or `tokens`), and `paths` if rows
    may have several; shared: paths run common first tokens once, so `tokens` is needed."""
    lengths = (rows["length"] if "length" in rows.columns else rows["tokens"].lengths).tolist() if len(rows) else []
    if "paths" not in rows.columns or not shared:
        return lengths
    starts = [paths[1:, 0].tolist() for paths in rows["paths"].rows()]
    split = (np.split(row.numpy(), at) for row, at in zip(rows["tokens"].rows(), starts, strict=True))
    return [n - sum(same for _, same in common_tokens(paths)) for n, paths in zip(lengths, split, strict=True)]


def first_paths(rows: Rows) -> list[np.ndarray]:
    """Token ids of the first path of each row."""
    tokens = [row.numpy() for row in rows["tokens"].rows()]
    if "paths" not in rows.columns:
        return tokens
    others = [paths[1:2, 0].tolist() for paths in rows["paths"].rows()]
    return [row[: start[0]] if start else row for row, start in zip(tokens, others, strict=True)]


class Trees:
    """Sizes of the trees of rows. lengths: tokens of each row; common: of groups; a group that is not in it shares
    nothing."""

    def __init__(self, lengths: Mapping[SampleId, int], common: Mapping[Group, Common]) -> None:
        self.lengths = lengths
        self._place: dict[SampleId, int] = {}
        self._known: dict[Fragment, list[tuple[int, int]]] = {}
        self._shared = {group: [n for _, n in members] for group, members in common.items()}
        for group, members in common.items():
            self._place |= {SampleId(*group, member): place for place, (member, _) in enumerate(members)}

    def groups(self, ids: Iterable[SampleId]) -> list[Fragment]:
        """The rows by group, each in the order of their tokens."""
        ordered = sorted(ids, key=lambda i: (i[:2], self._place.get(i, i.member)))
        return [tuple(rows) for _, rows in groupby(ordered, key=lambda i: i[:2])]

    def added(self, before: SampleId | None, row: SampleId) -> int:
        """Tokens that a row adds to those of the rows of its group up to `before`, the last one before it."""
        if before is None or before not in self._place:
            return self.lengths[row]
        places = slice(self._place[before] + 1, self._place[row] + 1)
        return self.lengths[row] - min(self._shared[row[:2]][places])

    def tokens(self, ids: Iterable[SampleId]) -> int:
        """Tokens of the trees of these rows, one tree for each group."""
        return sum(self.added(a, b) for rows in self.groups(ids) for a, b in pairwise((None, *rows)))

    def units(self, ids: Iterable[SampleId], fits: Callable[[int], bool]) -> Iterator[Fragment]:
        """Fragments of the rows, as large as possible with `fits(tokens)` true; one row is always a fragment."""
        for group in self.groups(ids):
            unit, size = [], 0
            for row in group:
                size += self.added(unit[-1] if unit else None, row)
                if unit and not fits(size):
                    yield tuple(unit)
                    unit, size = [], self.lengths[row]
                unit.append(row)
            yield tuple(unit)

    def halved(self, ids: Sequence[SampleId], whole: bool) -> list[Fragment]:
        """Rows in two parts that have few tokens together and then, if several ways are equal, a small larger part.
        whole: groups are not divided."""
        rows = [i for group in self.groups(ids) for i in group]
        points = [n for n in range(1, len(rows)) if not whole or rows[n - 1][:2] != rows[n][:2]]
        sizes = {n: (self.tokens(rows[:n]), self.tokens(rows[n:])) for n in points}
        at = min(points, key=lambda n: (sum(sizes[n]), max(sizes[n]), n))
        return [tuple(rows[:at]), tuple(rows[at:])]

    def dealt(self, ids: Iterable[SampleId], parts: int, whole: bool, near: Near | None) -> list[list[Fragment]]:
        """Fragments divided among ranks: equally many rows, and few tokens on the fullest rank. A group is divided if
        that balances better; its prompt then runs on several ranks. whole: groups are not divided; near: see
        `batching.plan_tokens`."""
        groups = self.groups(ids)
        even = self.tokens(ids) / parts * (1 + SLACK)
        plain, most = self._levelled(self._deal(groups, parts), whole, even)
        if near is None:
            return plain
        nearer, loads = self._levelled(self._deal(groups, parts, near), whole, max(even, most * (1 + SLACK)))
        return nearer if loads <= most * (1 + SLACK) else plain

    def _deal(self, groups: Sequence[Fragment], parts: int, near: Near | None = None) -> list[list[Fragment]]:
        """The largest group first, each to a rank that has place for it: if possible one near it, and of these the one
        with the fewest tokens. If none has place, a rank takes as many of its rows as it has place for."""
        free = [sum(map(len, groups)) // parts] * parts
        dealt: list[list[Fragment]] = [[] for _ in range(parts)]
        tokens = [0] * parts
        for rest in sorted(groups, key=lambda rows: (-self.tokens(rows), rows)):
            while rest:
                away = [near is not None and p not in near[rest[0]] for p in range(parts)]
                order = sorted(range(parts), key=lambda p: (free[p] < len(rest), away[p], tokens[p], p))
                part = next(p for p in order if free[p])
                taken, rest = rest[: free[part]], rest[free[part] :]
                dealt[part].append(taken)
                tokens[part] += self.tokens(taken)
                free[part] -= len(taken)
        return dealt

    def _levelled(self, dealt: list[list[Fragment]], whole: bool, limit: float) -> tuple[list[list[Fragment]], int]:
        """The fragments after swaps, and the tokens of the fullest rank. The fullest rank swaps as many rows with
        another rank, the emptiest first, as long as this helps, until it has at most `limit` tokens."""
        loads = [sum(map(self.tokens, rows)) for rows in dealt]
        while max(loads) > limit:
            full = loads.index(max(loads))
            others = sorted((p for p in range(len(dealt)) if p != full), key=lambda p: (loads[p], p))
            kinds = (True,) if whole else (True, False)  # a division costs a prompt, so it comes last
            if not any(self._swap(dealt, loads, full, other, kind) for kind in kinds for other in others):
                break
        return dealt, max(loads)

    def _swap(self, dealt: list[list[Fragment]], loads: list[int], full: int, other: int, whole: bool) -> bool:
        """Swap the first rows of a fragment of each rank, so that the fuller rank has as few tokens as possible then.
        False: no swap helps."""
        found = []
        for a, b in itertools.product(dealt[full], dealt[other]):
            ours, theirs = self._cuts(a), self._cuts(b)
            for n, ((first, rest), (given, kept)) in enumerate(zip(ours, theirs, strict=False), 1):
                if not whole or not (rest or kept):
                    after = loads[full] - ours[-1][0] + rest + given, loads[other] - theirs[-1][0] + kept + first
                    found.append((max(after), n, a, b, after))
        best = min(found, default=None)
        if best is None or best[0] >= loads[full]:
            return False
        _, n, ours, theirs, (loads[full], loads[other]) = best
        for rank, out, into, rest in ((full, ours, theirs[:n], ours[n:]), (other, theirs, ours[:n], theirs[n:])):
            dealt[rank].remove(out)
            dealt[rank] += filter(None, (rest, into))
        return True

    def _cuts(self, rows: Fragment) -> list[tuple[int, int]]:
        """For each n from 1 on: tokens of the first n rows, and tokens of the others, apart from each other."""
        if rows not in self._known:
            self._known[rows] = [(self.tokens(rows[:n]), self.tokens(rows[n:])) for n in range(1, len(rows) + 1)]
        return self._known[rows]
