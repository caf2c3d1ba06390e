"""Compares a replayed iteration with the recorded one: its numbers, rows and tokens."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mindspeed_rl_plugin.monitor.names import METRICS
from mindspeed_rl_plugin.rows import SampleId
from mindspeed_rl_plugin.tools.text_table import aligned

# Numbers of time and memory, which a replay does not repeat.
_OTHERS = re.compile(r"iteration|time|.*(seconds|bytes|per_second).*")
NOISE = 10.0  # a gap between engine and trainer is suspicious above so many times the median
SHOWN = 10  # rows of a table
_HEAD = ("row", "place", "token", "engine", "trainer", "in the dump", "gap", "in this step", "ratio", "advantage")
Row = Mapping[str, Any]  # line of `RecordingTrainer`, with `dumped`: this row in the dump


def report(
    recorded: Row, again: Row, rows: Sequence[Row], dump: Sequence[Row], limit: float, sample: SampleId | None
) -> str:
    """All tables. recorded, again: metrics; rows: lines of `RecordingTrainer`; limit: as in `differ`."""
    dumped = {tuple(row[name] for name in SampleId._fields): row for row in dump}
    rows = [{**row, "dumped": dumped[tuple(row["id"])]} for row in rows]
    parts = [numbers(recorded, again, limit), advantages(rows, limit), tokens(rows)]
    parts += [of_sample(rows, sample, again["grad_norm"])] if sample else []
    return "\n".join(line for part in parts for line in ("", *part))


def differ(a: float, b: float, limit: float) -> bool:
    """Whether two numbers differ by more than `limit`, relative to the larger one, absolute below 1."""
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) != math.isnan(b)
    return a != b and abs(a - b) > limit * max(1.0, abs(a), abs(b))


def numbers(recorded: Row, again: Row, limit: float) -> Iterator[str]:
    """Each number of a step beside the recorded one. Those that differ come first; in the register rewards are before
    log-probs, these before the loss, so the first is near to the cause."""
    every = [name for name in dict.fromkeys((*METRICS, *again)) if not _OTHERS.fullmatch(name)]
    nan = {name: math.nan for name in every}  # NaN and infinity are null in metrics.jsonl
    recorded, again = ({n: nan[n] if v is None else v for n, v in row.items() if n in nan} for row in (recorded, again))
    names = [name for name in every if name in recorded and name in again]
    wrong = [name for name in names if differ(recorded[name], again[name], limit)]
    how = f"the first other one is {wrong[0]}" if wrong else f"within {limit:g}" if limit else "bit for bit"
    yield f"{len(names) - len(wrong)} of {len(names)} numbers are the recorded ones, {how}"
    table = [("number", "recorded", "replayed", "difference")]
    for name in sorted(names, key=lambda name: name not in wrong):
        a, b = recorded[name], again[name]
        table.append((name, f"{a:.9g}", f"{b:.9g}", f"{b - a:+.3g}" if a != b else ""))
    yield from aligned(table, 1)


def advantages(rows: Sequence[Row], limit: float) -> Iterator[str]:
    """Rows with another advantage than in the dump, the largest change first: the row of a wrong reward, if any."""
    pairs = [(row["dumped"], statistics.fmean(row["advantage"])) for row in rows]
    wrong = [(row, now) for row, now in pairs if differ(row["advantage"], now, max(limit, 1e-6))]  # float32 in the dump
    yield f"{len(rows) - len(wrong)} of {len(rows)} rows have the advantage of the dump"
    table = [("row", "reward", "its parts", "advantage in the dump", "replayed")]
    for row, now in sorted(wrong, key=lambda pair: -abs(pair[0]["advantage"] - pair[1]))[:SHOWN]:
        cells = f"{row['reward']:g}", _id(row["reward_parts"]), f"{row['advantage']:.6g}", f"{now:.6g}"
        table.append((_id([row[name] for name in SampleId._fields]), *cells))
    yield from aligned(table, 1) if wrong else ()


def tokens(rows: Sequence[Row]) -> Iterator[str]:
    """One token of each row, the row with the largest gap between engine and trainer first: its first token above the
    noise, since a wrong token changes the log-probs of those after it; without one, the token with the largest gap."""
    gaps = [[abs(a - b) for a, b in zip(row["engine"], row["old"], strict=True)] for row in rows]
    every = [gap for row in gaps for gap in row]
    noise = NOISE * max(statistics.median(every), 1e-7)
    yield f"worst tokens: {sum(gap > noise for gap in every)} of {len(every)} have a gap above {noise:.2g} nats"
    lines = []
    for row, gap in sorted(zip(rows, gaps, strict=True), key=lambda pair: -max(pair[1]))[:SHOWN]:
        lines.append(_token(row, next((i for i, value in enumerate(gap) if value > noise), gap.index(max(gap)))))
    yield from aligned([_HEAD, *lines], 3)


def of_sample(rows: Sequence[Row], sample: SampleId, total: float) -> Iterator[str]:
    """All tokens of one row. total: norm of the step's gradient."""
    row = next((row for row in rows if row["id"] == list(sample)), None)
    if row is None:
        yield f"row {_id(sample)} counts in no loss of this iteration; {_id(rows[0]['id'])}, for example, does"
        return
    norm = f"norm of its gradient {row['norm']:.6g}, {row['norm'] / total:.1%} of the step's"
    yield f"row {_id(sample)}: weight of each token in the loss {row['weight']:.6g}; {norm}"
    yield from aligned([_HEAD, *(_token(row, i) for i in range(len(row["text"])))], 3)


def _token(row: Row, i: int) -> tuple[str, ...]:
    engine, old, now, place = (row[name][i] for name in ("engine", "old", "now", "place"))
    logps = (f"{value:.6f}" for value in (engine, old, row["dumped"]["logp_old"][place]))
    last = f"{abs(engine - old):.2g}", f"{now:.6f}", f"{math.exp(now - old):.6f}", f"{row['advantage'][i]:.6g}"
    return _id(row["id"]), str(place), repr(row["text"][i]), *logps, *last


def _id(sample: Sequence[int]) -> str:
    return ",".join(map(str, sample))
