"""What a run tells about itself whose weights change while responses are in the making: the lag of tokens, and what
engines apart did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from mindspeed_rl_plugin.dock import Dock
from mindspeed_rl_plugin.rows import Rows, SampleId


class Engines:
    """What engines apart have done since the last rollout. reports: what each has counted since it joined."""

    def __init__(self, reports: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        self._reports = reports
        self._before: dict[str, Mapping[str, float]] = {}

    def text(self) -> str:
        """Who has reported, for an error."""
        return f"{len(self._reports())} engines have reported since the start"

    def metrics(self) -> dict[str, float]:
        """Means over engines, named as in `monitor.names`; empty where none has reported."""
        now = dict(self._reports())
        sums: Counter[str] = Counter()
        for name, counts in now.items():
            before = self._before.get(name, {})
            sums.update({key: value - before.get(key, 0.0) for key, value in counts.items()})
        at_work = sum(counts != self._before.get(name) for name, counts in now.items())
        self._before = now
        if not sums["seconds"]:
            return {}
        causes = {"back_pressure": "back-pressure", "version": "version"}
        result = {f"idle/engines_{name}": sums[cause] / sums["seconds"] for name, cause in causes.items()}
        result |= {"engines": float(at_work), "engines/tokens_per_second": sums["tokens"] / sums["seconds"]}
        if sums["responses"]:
            result["engines/length_mean"] = sums["tokens"] / sums["responses"]
        if sums["pauses"]:
            of_one = {"pull_seconds": "pull", "pause_seconds": "pause", "bytes_pulled": "pulled"}
            result |= {f"weights/{name}": sums[key] / sums["pauses"] for name, key in of_one.items()}
        return result


def lags(dock: Dock, ids: Sequence[SampleId], lag: Callable[[int], int], most: int) -> dict[str, float]:
    """How old the tokens of a rollout are, in publications. lag: that of a version; most: its bound.

    Raises RuntimeError above it: what is admitted was counted wrongly then."""
    rows = dock.read(ids, ("version", "segments", "length"))
    of_rows = [lag(version) for version in rows["version"].tolist()]
    if max(of_rows) > most:
        raise RuntimeError(f"a response is {max(of_rows)} publications old, --rl-max-staleness is {most}")
    return {
        "lag/mean": sum(of_rows) / len(of_rows),
        "lag/max": float(max(of_rows)),
        "lag/token_mean": token_lag(rows, lag),
        "segments/mean": float(rows["segments"].lengths.double().mean()),
    }


def token_lag(rows: Rows, lag: Callable[[int], int]) -> float:
    """Mean over all response tokens of the lag of their segment."""
    total = tokens = 0
    for segments, length in zip(rows["segments"].rows(), rows["length"].tolist(), strict=True):
        firsts, versions = segments.T.tolist()
        for first, end, version in zip(firsts, [*firsts[1:], length], versions, strict=True):
            total += lag(version) * (end - first)
            tokens += end - first
    return total / max(tokens, 1)
