"""Divides rows among optimizer steps, ranks and micro-batches, only by the rows' ids, lengths and machines."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mindspeed_rl_plugin.forward.fragments import SLACK, Common, Near, Trees
from mindspeed_rl_plugin.rows import Group, SampleId

MicroBatchIds = tuple[SampleId, ...]


@dataclass(frozen=True)
class Step:
    """Rows of one optimizer step."""

    micro_batches: tuple[tuple[MicroBatchIds, ...], ...]  # `[data parallel rank][micro-batch]` -> ids of its rows

    @property
    def ids(self) -> tuple[SampleId, ...]:
        """Ids of all rows of the step, sorted."""
        return tuple(sorted(i for rank in self.micro_batches for batch in rank for i in batch))

    def of_rank(self, dp_rank: int) -> tuple[MicroBatchIds, ...]:
        """Micro-batches of one data parallel rank, in the order in which they run."""
        return self.micro_batches[dp_rank]


def plan_batches(ids: Sequence[SampleId], *, global_batch_size: int, micro_batch_size: int, dp_size: int) -> list[Step]:
    """Cut the rows of a rollout into optimizer steps, and divide each step among the data parallel ranks.

    Rows keep the order of `ids`, and each rank gets contiguous rows of a step. So if `ids` go group by group, and sizes
    are multiples of a group, steps and ranks get complete groups. Every rank computes the same plan. Sizes are in rows.
    Raises ValueError if the sizes do not divide, or if an id occurs twice.
    """
    if len(set(ids)) != len(ids):
        raise ValueError(f"{len(ids) - len(set(ids))} of {len(ids)} ids occur twice")
    across = micro_batch_size * dp_size
    if global_batch_size % across:
        raise ValueError(
            f"--global-batch-size {global_batch_size} is not a multiple of --micro-batch-size {micro_batch_size} "
            f"x {dp_size} data parallel ranks"
        )
    if not ids or len(ids) % global_batch_size:
        raise ValueError(
            f"a rollout of {len(ids)} rows does not fill steps of --global-batch-size {global_batch_size}; "
            "--rl-rollout-prompts x --rl-samples-per-prompt must be a multiple of it"
        )
    micro = [tuple(ids[i : i + micro_batch_size]) for i in range(0, len(ids), micro_batch_size)]
    in_step = global_batch_size // micro_batch_size
    of_rank = in_step // dp_size
    return [
        Step(tuple(tuple(micro[i : i + of_rank]) for i in range(start, start + in_step, of_rank)))
        for start in range(0, len(micro), in_step)
    ]


@dataclass(frozen=True)
class TokenBudget:
    """How micro-batches are limited by tokens, instead of by a fixed number of rows."""

    tokens: int  # most tokens of a micro-batch, padding included
    packed: bool = False  # rows of a micro-batch are concatenated without padding
    multiple: int = 1  # padded lengths are multiples of this number
    rounds_of: int = 1  # the number of micro-batches is a multiple of this number (interleaved pipelines)
    shared: bool = False  # packed: rows of a group run their common first tokens once in a micro-batch
    whole: bool = False  # groups, which are preference pairs, are not divided

    @property
    def unit(self) -> str:
        """What is never divided, as a word for messages."""
        return "pair" if self.whole else "row"

    def cost(self, lengths: Sequence[int]) -> int:
        """Tokens that the model computes for a micro-batch with rows of these lengths."""
        if self.packed:
            return padded(sum(lengths), self.multiple)
        return len(lengths) * padded(max(lengths), self.multiple)


def padded(length: int, multiple: int) -> int:
    """The smallest multiple of `multiple`, above 0, that is at least `length`."""
    return -(-max(length, 1) // multiple) * multiple


def plan_tokens(
    plan: Sequence[Step],
    lengths: Mapping[SampleId, int],
    budget: TokenBudget,
    near: Near | None = None,
    common: Mapping[Group, Common] | None = None,
) -> list[Step]:
    """Divide the rows of each step again: among ranks, balanced by tokens, and into micro-batches within a budget.

    plan: result of `plan_batches`; each step keeps its rows.
    lengths: tokens of each row; near: ranks that should preferably get a row.
    common: with `budget.shared` the tokens that rows of a group share; a group that is not in it shares nothing.
    Every rank gets the same number of rows, and the same number of micro-batches: the smallest multiple of `rounds_of`
    that suffices for all ranks. With `near` the fullest rank has at most (1 + SLACK) x the tokens that it has
    without. All ranks get the same result. Raises ValueError for a row above the budget, or too few rows.
    """
    trees = Trees(lengths, common or {}) if budget.shared or budget.whole else None
    if trees is None:
        return [_dealt(step, lengths, budget, near) for step in plan]
    return [_dealt_trees(step, trees, budget, near) for step in plan]


def _dealt(step: Step, lengths: Mapping[SampleId, int], budget: TokenBudget, near: Near | None) -> Step:
    ranks = _balanced(sorted(step.ids, key=lambda i: (-lengths[i], i)), lengths, len(step.micro_batches))
    if near is not None:
        ranks = _nearer(ranks, lengths, near)

    def halves(batch: MicroBatchIds) -> list[MicroBatchIds]:
        half = -(-len(batch) // 2)
        return [batch[:half], batch[half:]]

    filled = [list(map(tuple, _fill(rows, lengths, budget))) for rows in ranks]
    return _equalled(filled, lambda batch: budget.cost([lengths[i] for i in batch]), len, halves, budget)


def _dealt_trees(step: Step, trees: Trees, budget: TokenBudget, near: Near | None) -> Step:
    """As `_dealt`, by fragments of groups."""
    parts = trees.dealt(step.ids, len(step.micro_batches), budget.whole, near)

    def filled(part: list[MicroBatchIds]) -> list[MicroBatchIds]:
        ids = [i for rows in part for i in rows]
        units = list(trees.units(ids, lambda size: budget.whole or budget.cost([size]) <= budget.tokens))
        costs = {rows: trees.tokens(rows) for rows in units}
        units.sort(key=lambda rows: (-costs[rows], rows))
        return [tuple(sorted(i for rows in batch for i in rows)) for batch in _fill(units, costs, budget)]

    def count(batch: MicroBatchIds) -> int:
        return len({i[:2] for i in batch} if budget.whole else batch)

    def halves(batch: MicroBatchIds) -> list[MicroBatchIds]:
        return [tuple(sorted(rows)) for rows in trees.halved(batch, budget.whole)]

    return _equalled([filled(p) for p in parts], lambda b: budget.cost([trees.tokens(b)]), count, halves, budget)


def _equalled(
    filled: list[list[MicroBatchIds]],
    cost: Callable[[MicroBatchIds], int],
    parts: Callable[[MicroBatchIds], int],
    halves: Callable[[MicroBatchIds], list[MicroBatchIds]],
    budget: TokenBudget,
) -> Step:
    """The step, with equally many micro-batches on each rank: repeatedly halves a rank's costliest micro-batch that has
    several parts. parts: number of rows, or of groups that are not divided."""
    count, most = max(map(len, filled)), sum(map(parts, filled[0]))
    count = min(-(-count // budget.rounds_of) * budget.rounds_of, most)
    if count % budget.rounds_of:
        raise ValueError(
            f"{most} {budget.unit}s of an optimizer step on one rank cannot make a number of micro-batches that is a "
            f"multiple of the {budget.rounds_of} pipeline stages; raise --global-batch-size"
        )
    for batches in filled:
        while len(batches) < count:
            cut = max((b for b in batches if parts(b) > 1), key=lambda b: (cost(b), -batches.index(b)))
            at = batches.index(cut)
            batches[at : at + 1] = halves(cut)
    return Step(tuple(map(tuple, filled)))


def _balanced(
    rows: Sequence[SampleId], lengths: Mapping[SampleId, int], parts: int, near: Near | None = None
) -> list[list[SampleId]]:
    """Divide rows, longest first, into parts (one per rank) of equally many rows. Each row goes to a part that is
    not full: if possible one of `near[row]`, and of these the one with the fewest tokens."""
    limit = len(rows) // parts
    dealt: list[list[SampleId]] = [[] for _ in range(parts)]
    tokens = [0] * parts
    for row in rows:
        free = [p for p in near[row] if len(dealt[p]) < limit] if near else []
        part = min(free or [p for p in range(parts) if len(dealt[p]) < limit], key=lambda p: (tokens[p], p))
        dealt[part].append(row)
        tokens[part] += lengths[row]
    return dealt


def _nearer(plain: list[list[SampleId]], lengths: Mapping[SampleId, int], near: Near) -> list[list[SampleId]]:
    """Like the parts `plain`, but with more rows in parts that are `near` them. First, rows are divided by `near`. Then
    the fullest and the emptiest part swap the two rows that balance them best, until no part has more than (1 + SLACK)
    x the tokens of the fullest part of `plain`. If at some point no swap helps, the result is `plain`."""

    def order(row: SampleId) -> tuple[int, SampleId]:
        return -lengths[row], row

    def tokens(part: Sequence[SampleId]) -> int:
        return sum(lengths[i] for i in part)

    rows, limit = sorted((i for part in plain for i in part), key=order), max(map(tokens, plain)) * (1 + SLACK)
    if all(len(near[i]) == len(plain) for i in rows):
        return plain
    parts = _balanced(rows, lengths, len(plain), near)
    loads = list(map(tokens, parts))
    while max(loads) > limit:
        full, empty = loads.index(max(loads)), loads.index(min(loads))
        pair = _levelling(parts[full], parts[empty], lengths, loads[full] - loads[empty])
        if pair is None:
            return plain
        for part, out, into in ((full, *pair), (empty, *reversed(pair))):
            parts[part][parts[part].index(out)] = into
            loads[part] += lengths[into] - lengths[out]
    return [sorted(part, key=order) for part in parts]


def _levelling(
    full: Sequence[SampleId], empty: Sequence[SampleId], lengths: Mapping[SampleId, int], gap: int
) -> tuple[SampleId, SampleId] | None:
    """A row of each part, such that their swap leaves the smallest difference of tokens; None if no swap reduces it."""
    others = sorted(empty, key=lambda i: (lengths[i], i))
    sizes = [lengths[i] for i in others]
    pairs = []
    for row in full:
        at = bisect_left(sizes, lengths[row] - gap / 2)
        pairs += [(row, others[k]) for k in (at - 1, at) if 0 <= k < len(others)]
    left = [(abs(gap - 2 * (lengths[a] - lengths[b])), a, b) for a, b in pairs]
    best = min(left)
    return best[1:] if best[0] < gap else None


def _fill(rows: Sequence[SampleId], lengths: Mapping[SampleId, int], budget: TokenBudget) -> list[list[SampleId]]:
    """Fill micro-batches by first fit. rows: longest first."""
    batches: list[list[SampleId]] = []
    for row in rows:
        if budget.cost([lengths[row]]) > budget.tokens:
            raise ValueError(
                f"a {budget.unit} has {lengths[row]} tokens, more than --rl-max-tokens-per-microbatch {budget.tokens}; "
                "raise it, or lower the limits of prompt and response"
            )
        fits = (b for b in batches if budget.cost([lengths[i] for i in (*b, row)]) <= budget.tokens)
        batch = next(fits, None)
        if batch is None:
            batches.append([row])
        else:
            batch.append(row)
    return batches
