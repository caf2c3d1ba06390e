"""Compares a replayed iteration with the recorded one: its numbers, rows and tokens."""

from __future__ import annotations

import itertools
import math
import operator
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mindspeed_rl_plugin.monitor.names import METRICS, NOT_REPEATED, meaning
from mindspeed_rl_plugin.rows import SampleId
from mindspeed_rl_plugin.tools.text_table import aligned

ROUNDED = 1e-5  # nats; a gap up to it is the rounding of float32
NOISE = 10.0  # a gap between engine and trainer is suspicious above so many times the median
SHOWN = 10  # rows of a table
_NO_COUNTS = ("", "nats", "share")  # units
_HEAD = ("row", "reward", "its parts", "place", "token", "weights", "engine", "trainer", "in the dump", "gap")
_HEAD += ("in this step", "ratio", "advantage", "in the dump")
Row = Mapping[str, Any]


def report(
    recorded: Row, again: Row, tokens: Sequence[Row], dump: Sequence[Row], limit: float, sample: SampleId | None
) -> str:
    """All tables. recorded, again: metrics; tokens: lines of `RecordingTrainer`; limit: relative, as in `differ`; of
    log-probs and advantages below 1 absolute."""
    dumped = {tuple(row[name] for name in SampleId._fields): row for row in dump}
    least = max(limit, 1e-6)  # a dump has float32
    tokens = [_beside(token, dumped[tuple(token["id"])], least) for token in tokens]
    parts = [numbers(recorded, again, limit), worst(tokens)]
    parts += [of_sample(tokens, sample, _real(again)["grad_norm"])] if sample else []
    return "\n".join(line for part in parts for line in ("", *part))


def differ(a: float, b: float, limit: float, least: float) -> bool:
    """Whether two numbers differ by more than `limit`, relative to the larger one, and by more than `least`."""
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) != math.isnan(b)
    return a != b and abs(a - b) > max(limit * max(abs(a), abs(b)), least)


def differ_by_name(name: str, a: float, b: float, limit: float) -> bool:
    """`differ` of a metric. Counts and learning rates differ by more than the rounding of a sum."""
    if name.endswith("lr") or meaning(name).unit not in _NO_COUNTS:
        return differ(a, b, min(limit, 1e-12), 0.0)
    return differ(a, b, limit, min(limit, 1e-6))


def numbers(recorded: Row, again: Row, limit: float) -> Iterator[str]:
    """Each number of a step beside the recorded one. Those that differ come first; in the register rewards are before
    log-probs, these before the loss, so the first is near to the cause."""
    every = [name for name in dict.fromkeys((*METRICS, *again)) if not NOT_REPEATED.fullmatch(name)]
    recorded, again = map(_real, (recorded, again))
    names = [name for name in every if name in recorded and name in again]
    wrong = [name for name in names if differ_by_name(name, recorded[name], again[name], limit)]
    how = f" within {limit:g}" if limit else " bit for bit"
    how = f"; the first that differs is {wrong[0]}" if wrong else how
    yield f"{len(names) - len(wrong)} of {len(names)} numbers are equal{how}"
    table = [("number", "recorded", "replayed", "difference")]
    for name in sorted(names, key=lambda name: name not in wrong):
        a, b = recorded[name], again[name]
        table.append((name, f"{a:.9g}", f"{b:.9g}", f"{b - a:+.3g}" if a != b else ""))
    yield from aligned(table, 1)


def worst(tokens: Sequence[Row]) -> Iterator[str]:
    """One token of each row. Rows with another advantage than in the dump come first, the largest change first: the row
    of a wrong reward, if any. Then rows with other log-probs of the trainer, and those with the largest gap between
    engine and trainer, as a multiple of the noise of tokens that the same weights sampled. The token is the first
    suspicious one, since a wrong token changes the log-probs of those after it."""
    gaps: dict[int, list[float]] = {}
    for token in tokens:
        gaps.setdefault(token["version"], []).append(token["gap"])
    noise = {version: max(NOISE * statistics.median(of), ROUNDED) for version, of in gaps.items()}
    tokens = [{**token, "far": token["gap"] / noise[token["version"]]} for token in tokens]
    rows = [[*of] for _, of in itertools.groupby(tokens, key=operator.itemgetter("id"))]
    same = sum(not any(token["changed"] for token in of) for of in rows), sum(not token["other"] for token in tokens)
    yield f"{same[0]} of {len(rows)} rows have the advantage of the dump"
    yield f"{same[1]} of {len(tokens)} tokens have the trainer's log-prob of the dump"
    far = sum(token["far"] > 1 for token in tokens)
    above = f"above {NOISE:g} times the median of their weights, and above {ROUNDED:g}"
    yield f"{far} have a gap between engine and trainer {above}; the worst rows:"
    guilt = operator.itemgetter("changed", "other", "far")
    order = sorted(rows, key=lambda of: max(map(guilt, of)), reverse=True)[:SHOWN]
    firsts = [next((t for t in of if t["other"] or t["far"] > 1), max(of, key=guilt)) for of in order]
    yield from aligned([_HEAD, *map(_cells, firsts)], 6)


def of_sample(tokens: Sequence[Row], sample: SampleId, total: float) -> Iterator[str]:
    """All tokens of one row. total: norm of the step's gradient."""
    mine = [token for token in tokens if token["id"] == list(sample)]
    if not mine:
        yield f"row {_id(sample)} counts in no loss of this iteration; {_id(tokens[0]['id'])}, for example, does"
        return
    weight, norm = mine[0]["weight"], mine[0]["norm"]
    share = norm / total if total else 0.0  # where all rewards of each group are equal
    shares = f"norm of its gradient {norm:.6g}, {share:.1%} of the step's"
    yield f"row {_id(sample)}: weight of each token in the loss {weight:.6g}; {shares}"
    yield from aligned([_HEAD, *map(_cells, mine)], 6)


def _beside(token: Row, row: Row, limit: float) -> Row:
    """A token with its row in the dump, and what this row says of it: version of its weights, log-prob, advantage."""
    token, place = _real(token), token["place"]
    logp, before = row["logp_old"][place], row["advantages"][place]
    version = [version for first, version in row["segments"] if first <= place][-1]
    found = {"row": row, "version": version, "dumped": (logp, before), "gap": _distance(token["engine"], token["old"])}
    changed = differ(token["advantage"], before, limit, limit) and _distance(token["advantage"], before)
    return {**token, **found, "changed": changed, "other": differ(token["old"], logp, limit, limit)}


def _real(row: Row) -> Row:
    """A line of JSON, in which NaN and infinity are null, with NaN for null."""
    return {name: math.nan if value is None else value for name, value in row.items()}


def _distance(a: float, b: float) -> float:
    """Infinite if one is NaN."""
    return math.inf if math.isnan(a - b) else abs(a - b)


def _cells(token: Row) -> tuple[str, ...]:
    old, now, row, (logp, before) = (token[name] for name in ("old", "now", "row", "dumped"))
    parts = ",".join(f"{part:g}" for part in row["reward_parts"])
    which = f"{row['reward']:g}", parts, str(token["place"]), repr(token["text"]), str(token["version"])
    logps = (f"{value:.6f}" for value in (token["engine"], old, logp))
    steps = f"{token['gap']:.2g}", f"{now:.6f}", f"{math.exp(now - old):.6f}"
    return _id(token["id"]), *which, *logps, *steps, f"{token['advantage']:.6g}", f"{before:.6g}"


def _id(sample: Sequence[int]) -> str:
    return ",".join(map(str, sample))
