"""Divides rows of groups among ranks and micro-batches, if a micro-batch computes common first tokens only once.

The rows of a group are a tree: they begin with the same prompt, and some share tokens behind it. A fragment is a part
of a group's rows that are neighbours in the order of their tokens, so that they have most in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise

import numpy as np

from mindspeed_rl_plugin.rows import Group, SampleId

Common = tuple[tuple[int, int], ...]
"""A group's members in the order of their tokens, each with the number of tokens that it shares with the one before."""
Fragment = tuple[SampleId, ...]


def common_tokens(rows: Sequence[np.ndarray]) -> Common:
    """`Common` of rows of token ids, `[L_i]` of one dtype; a row's index is its member. Any order of tokens will do,
    here that of their bytes."""
    order = sorted(range(len(rows)), key=lambda i: rows[i].tobytes())
    shared = [0, *(_shared(rows[a], rows[b]) for a, b in pairwise(order))]
    return tuple(zip(order, shared, strict=True))


def _shared(a: np.ndarray, b: np.ndarray) -> int:
    shorter = min(len(a), len(b))
    differs = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differs[0]) if len(differs) else shorter


class Trees:
    """Sizes of the trees of rows. lengths: tokens of each row; common: of groups; a group that is not in it shares
    nothing."""

    def __init__(self, lengths: Mapping[SampleId, int], common: Mapping[Group, Common]) -> None:
        self.lengths = lengths
        self._place: dict[SampleId, int] = {}
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
        """Fragments of the rows, each as large as `fits`, which is asked about tokens, lets it be; at least one row."""
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
        """Fragment in two parts, whose larger one has as few tokens as possible. whole: groups are not divided."""
        rows = [i for group in self.groups(ids) for i in group]
        points = [n for n in range(1, len(rows)) if not whole or rows[n - 1][:2] != rows[n][:2]]
        at = min(points, key=lambda n: (max(self.tokens(rows[:n]), self.tokens(rows[n:])), n))
        return [tuple(rows[:at]), tuple(rows[at:])]

    def dealt(self, ids: Sequence[SampleId], parts: int, whole: bool) -> list[list[Fragment]]:
        """Fragments divided among ranks: equally many rows, and few tokens on the fullest rank. Groups are cut into
        equal pieces if that balances better; their prompts then run on several ranks. whole: groups are not divided."""
        groups = self.groups(ids)
        counts = [1] if whole else [2**n for n in range(max(map(len, groups)).bit_length())]
        plans = [self._deal([f for rows in groups for f in _pieces(rows, n)], parts) for n in counts]
        return min(plans, key=lambda plan: max(self.tokens(i for rows in part for i in rows) for part in plan))

    def _deal(self, fragments: Sequence[Fragment], parts: int) -> list[list[Fragment]]:
        """The largest fragment first, each to the rank with the fewest tokens that has place for it. If none has, the
        rank takes as many of its rows as it has place for."""
        free = [sum(map(len, fragments)) // parts] * parts
        dealt: list[list[Fragment]] = [[] for _ in range(parts)]
        tokens = [0] * parts
        for rest in sorted(fragments, key=lambda rows: (-self.tokens(rows), rows)):
            while rest:
                open_ = [p for p in range(parts) if free[p]]
                part = min(open_, key=lambda p: (free[p] < len(rest), tokens[p], p))
                taken, rest = rest[: free[part]], rest[free[part] :]
                dealt[part].append(taken)
                tokens[part] += self.tokens(taken)
                free[part] -= len(taken)
        return dealt


def _pieces(rows: Fragment, count: int) -> list[Fragment]:
    """Fragment cut into at most `count` pieces of equally many rows, up to one."""
    size = -(-len(rows) // count)
    return [rows[i : i + size] for i in range(0, len(rows), size)]
