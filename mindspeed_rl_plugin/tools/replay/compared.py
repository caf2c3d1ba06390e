"""Compares a replayed iteration with the recorded one: its numbers, its rows, its tokens."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.monitor.names import METRICS
from mindspeed_rl_plugin.rows import SampleId
from mindspeed_rl_plugin.tools.text_table import aligned

# Numbers of times, of memory, and of generation, which a replay does not repeat.
_OTHERS = re.compile(r"iteration|time|(seconds|peak_bytes|dock|reshard|weights|sampling|eval)/.*|tokens_per_second.*")
LIMIT = 1e-4  # largest relative difference of a number on another layout
NOISE = 10.0  # a token's gap between engine and trainer is suspicious above so many times the median gap
SHOWN = 10  # rows and tokens in a table
OF_A_ROW = 3  # tokens of a row in the table of tokens


def report(
    recorded: Mapping[str, Any],
    again: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    dump: Path,
    same: bool,
    sample: Sequence[int] | None,
) -> str:
    """All tables. rows: lines of `RecordingTrainer`; dump: of the rollout; same: whether the layout is the recorded one;
    sample: id of a row that is shown in full."""
    import pyarrow.parquet as pq

    dumped = {tuple(row[name] for name in SampleId._fields): row for row in pq.read_table(dump).to_pylist()}
    parts = [numbers(recorded, again, 0.0 if same else LIMIT), advantages(rows, dumped, 0.0 if same else LIMIT)]
    parts += [tokens(rows, dumped)]
    parts += [of_sample(rows, sample, again)] if sample else []
    return "\n".join(line for part in parts for line in ("", *part))


def _apart(a: float, b: float) -> float:
    """Relative difference of two numbers; absolute below 1."""
    return 0.0 if a == b else abs(a - b) / max(1.0, abs(a), abs(b))


def numbers(recorded: Mapping[str, Any], again: Mapping[str, Any], limit: float) -> Iterator[str]:
    """Each number of the step beside the recorded one. First those that differ by more than `limit`, in the order in
    which a step computes them: so the first is the nearest to the cause."""
    order = {name: place for place, name in enumerate(METRICS)}
    names = [n for n in again if n in recorded and not _OTHERS.fullmatch(n)]
    names = sorted((n for n in names if None not in (recorded[n], again[n])), key=lambda n: order.get(n, 0))
    differing = [n for n in names if _apart(recorded[n], again[n]) > limit]
    how = "bit for bit" if not limit else f"within {limit:g}"
    if differing:
        yield f"{len(differing)} of {len(names)} numbers differ from the recorded ones, first {differing[0]}"
    else:
        yield f"all {len(names)} numbers are the recorded ones, {how}"
    table = [("number", "recorded", "replayed", "difference")]
    for name in (*differing, *(n for n in names if n not in differing)):
        a, b = recorded[name], again[name]
        table.append((name, f"{a:.9g}", f"{b:.9g}", f"{b - a:+.3g}" if a != b else ""))
    yield from aligned(table, 1)


def advantages(rows: Sequence[Mapping[str, Any]], dumped: Mapping[tuple, Mapping], limit: float) -> Iterator[str]:
    """Rows whose advantage is not the dumped one, the largest change first: the row of a wrong reward before the others
    of its group."""
    changed = []
    for row in rows:
        before, now = dumped[tuple(row["id"])]["advantage"], statistics.fmean(row["advantage"] or [0.0])
        if _apart(before, now) > max(limit, 1e-6):  # the dump's mean is rounded to float32
            changed.append((abs(now - before), row["id"], before, now))
    if not changed:
        yield "the advantages of all rows are the dumped ones"
        return
    yield f"{len(changed)} of {len(rows)} rows have another advantage than in the dump, the largest change first"
    table = [("row", "reward", "its parts", "advantage in the dump", "replayed")]
    for _, of, before, now in sorted(changed, reverse=True)[:SHOWN]:
        row = dumped[tuple(of)]
        parts = " ".join(f"{part:g}" for part in row["reward_parts"])
        table.append((_id(of), f"{row['reward']:g}", parts, f"{before:.6g}", f"{now:.6g}"))
    yield from aligned(table, 1)


def tokens(rows: Sequence[Mapping[str, Any]], dumped: Mapping[tuple, Mapping]) -> Iterator[str]:
    """The tokens on which engine and trainer differ most. Rows come by their largest gap; of a row first the first token
    beyond the noise, since a wrong token changes all after it."""
    gaps = {tuple(row["id"]): [abs(a - b) for a, b in zip(row["engine"], row["old"], strict=True)] for row in rows}
    every = [gap for row in gaps.values() for gap in row]
    noise = NOISE * max(statistics.median(every), 1e-7) if every else math.inf
    beyond = sum(gap > noise for gap in every)
    yield f"worst tokens: {beyond} of {len(every)} gaps between engine and trainer are above {noise:.3g} nats"
    table = [("row", "place", "token", "engine", "trainer", "trainer in the dump", "gap")]
    for row in sorted(rows, key=lambda row: -max(gaps[tuple(row["id"])], default=0.0)):
        gap = gaps[tuple(row["id"])]
        worst = sorted(range(len(gap)), key=lambda i: -gap[i])
        first = next((i for i in range(len(gap)) if gap[i] > noise), None)
        chosen = [*dict.fromkeys(i for i in (first, *worst) if i is not None)][:OF_A_ROW]
        before = dumped[tuple(row["id"])]["logp_old"]
        for i in chosen[: None if beyond else 1]:
            place = row["place"][i]
            values = (f"{value:.6f}" for value in (row["engine"][i], row["old"][i], before[place]))
            table.append((_id(row["id"]), str(place), repr(row["text"][i]), *values, f"{gap[i]:.3g}"))
    yield from aligned(table[: SHOWN + 1], 3)


def of_sample(rows: Sequence[Mapping[str, Any]], sample: Sequence[int], again: Mapping[str, Any]) -> Iterator[str]:
    """One response in full."""
    row = next((row for row in rows if row["id"] == list(sample)), None)
    if row is None:
        yield f"row {_id(sample)} counts in no loss of this iteration: another step trains it, or it is not valid"
        return
    share = row["norm"] / again["grad_norm"] if again.get("grad_norm") else math.nan
    yield (
        f"row {_id(sample)}: weight of each of its tokens in the loss {row['weight']:.6g}; norm of its gradient "
        f"{row['norm']:.6g}, {share:.1%} of the step's"
    )
    table = [("place", "token", "engine", "trainer", "in this step", "ratio", "advantage")]
    values = zip(*(row[name] for name in ("place", "text", "engine", "old", "now", "advantage")), strict=True)
    for place, text, engine, old, now, advantage in values:
        logps = (f"{value:.6f}" for value in (engine, old, now))
        table.append((str(place), repr(text), *logps, f"{math.exp(now - old):.6f}", f"{advantage:.6g}"))
    yield from aligned(table, 2)


def _id(sample: Sequence[int]) -> str:
    return ",".join(map(str, sample))
