"""Stages in the report: their time without nested stages, memory, and events of the timeline."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from mindspeed_rl_plugin.monitor.run_files import GENERATOR, PUBLISHED, WEIGHTS_PROCESS

BETWEEN = "between stages"
StageSpan = tuple[float, float, str]


def own_seconds(spans: Iterable[StageSpan]) -> dict[str, float]:
    """Seconds of each stage. spans: (start, end, stage), may nest and overlap. Each instant is counted once: for the
    running stage that started last or, if no stage runs, for `BETWEEN`. So the sum is the time from the first start to
    the last end."""
    spans = sorted(spans)
    edges = sorted({t for start, end, _ in spans for t in (start, end)})
    out: dict[str, float] = defaultdict(float)
    for left, right in zip(edges, edges[1:], strict=False):
        running = [stage for start, end, stage in spans if start <= left and end >= right]
        out[running[-1] if running else BETWEEN] += right - left
    return dict(out)


def stage_data(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per iteration and stage: `own_seconds` (mean over ranks) and peak bytes (largest over ranks); and a table. Stages
    have the order of `_stage_order`. Empty lists without events."""
    spans: dict[int, dict[int, list[StageSpan]]] = defaultdict(lambda: defaultdict(list))
    peaks: dict[int, dict[str, int]] = defaultdict(dict)
    for e in events:
        spans[e["iteration"]][e["rank"]].append((e["start"], e["end"], e["stage"]))
        if e.get("peak_bytes") is not None:
            at = peaks[e["iteration"]]
            at[e["stage"]] = max(at.get(e["stage"], 0), e["peak_bytes"])
    own = {i: {rank: own_seconds(s) for rank, s in ranks.items()} for i, ranks in spans.items()}
    iterations = sorted(own)
    names = _stage_order(of_rank for ranks in spans.values() for of_rank in ranks.values())
    if any(BETWEEN in s for ranks in own.values() for s in ranks.values()):
        names.append(BETWEEN)
    seconds = {
        n: [round(statistics.fmean(s.get(n, 0.0) for s in own[i].values()), 4) for i in iterations] for n in names
    }
    peak = {n: [peaks[i].get(n) for i in iterations] for n in names if any(n in p for p in peaks.values())}
    return {
        "names": names,
        "iterations": iterations,
        "seconds": seconds,
        "peak": peak,
        "table": [_table_row(n, own, seconds, peak) for n in names],
    }


def timeline_data(events: Sequence[dict[str, Any]], names: Sequence[str], *, limit: int = 40_000) -> dict[str, Any]:
    """Events for the timeline: [rank, stage index, iteration, start, seconds, peak bytes] in time order. Starts count
    from `origin` (Unix time). With more than `limit` events, only 16 evenly spaced ranks are kept; if that is not
    enough, the earliest iterations are left out. ranks_total: number of all ranks."""
    ranks = sorted({e["rank"] for e in events})
    kept, shown = list(events), ranks
    if len(kept) > limit and len(ranks) > 16:
        shown = sorted({ranks[round(k * (len(ranks) - 1) / 15)] for k in range(16)})
        kept = [e for e in kept if e["rank"] in set(shown)]
    iterations = sorted({e["iteration"] for e in kept})
    share = min(1.0, limit / max(1, len(kept)))
    recent = iterations[-max(1, int(share * len(iterations))) :]
    kept = [e for e in kept if e["iteration"] >= recent[0]]
    origin = min((e["start"] for e in kept), default=0.0)
    index = {name: k for k, name in enumerate(names)}
    rows = [
        [
            e["rank"],
            index[e["stage"]],
            e["iteration"],
            round(e["start"] - origin, 4),
            round(e["end"] - e["start"], 4),
            e.get("peak_bytes"),
        ]
        for e in sorted(kept, key=lambda e: e["start"])
    ]
    return {
        "origin": origin,
        "ranks": shown,
        "ranks_total": len(ranks),
        "iterations": recent,
        "iterations_left_out": len(iterations) - len(recent),
        "events": rows,
    }


def apart_data(apart: Sequence[dict[str, Any]], origin: float, *, limit: int = 20_000) -> dict[str, Any]:
    """Events of engines outside the trainers, with times from `origin` as in the timeline: processes, labels, kinds of
    work, the latest `limit` spans [process, kind, start, seconds], and marks [version, time] of published weights."""
    apart = [e for e in apart if e["end"] >= origin]  # earlier ones belong to iterations that are left out
    marks = [e for e in apart if e["process"] == WEIGHTS_PROCESS]
    spans = [e for e in apart if e["process"] != WEIGHTS_PROCESS][-limit:]
    every = dict.fromkeys(e["process"] for e in spans)
    ours = sorted((name for name in every if name.startswith(GENERATOR)), key=lambda name: (len(name), name))
    processes = [*ours, *(joined := [name for name in every if name not in ours])]
    kinds = sorted({e["stage"] for e in spans}, key=lambda kind: (kind != "generate", kind))
    at = {name: k for k, name in enumerate(processes)}, {kind: k for k, kind in enumerate(kinds)}
    return {
        "processes": processes,
        "labels": [*ours, *(f"joined engine {k + 1}" for k in range(len(joined)))],
        "kinds": kinds,
        "apart": [
            [at[0][e["process"]], at[1][e["stage"]], round(e["start"] - origin, 4), round(e["end"] - e["start"], 4)]
            for e in spans
        ],
        "marks": [[int(e["stage"].removeprefix(PUBLISHED)), round(e["end"] - origin, 4)] for e in marks],
    }


def _stage_order(spans: Iterable[Sequence[StageSpan]]) -> list[str]:
    """Stage names, sorted by the median of their start in the iteration: the order of the loop, for the legend. spans:
    those of each rank and iteration."""
    offsets: dict[str, list[float]] = defaultdict(list)
    for events in spans:
        begin = min(events)[0]
        for start, _, stage in events:
            offsets[stage].append(start - begin)
    return sorted(offsets, key=lambda name: (statistics.median(offsets[name]), name))


def _table_row(
    name: str, own: dict[int, dict[int, dict[str, float]]], seconds: dict[str, list[float]], peak: dict[str, list]
) -> dict[str, Any]:
    by_rank: Counter[int] = Counter()
    for ranks in own.values():
        by_rank.update({rank: spent.get(name, 0.0) for rank, spent in ranks.items()})
    slowest = max(by_rank, key=by_rank.__getitem__)
    total, everything = sum(seconds[name]), sum(map(sum, seconds.values()))
    ran = [s for s in seconds[name] if s > 0]
    return {
        "stage": name,
        "seconds": total,
        "share": total / everything if everything else 0.0,
        "median": statistics.median(ran) if ran else 0.0,
        "slowest_rank": slowest,
        "slowest_over_mean": by_rank[slowest] / total if total else 1.0,
        "peak": max((p for p in peak.get(name, []) if p is not None), default=None),
    }
