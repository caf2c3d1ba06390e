"""Metrics of runs whose weights change while responses are in flight: the lag of tokens, and the work of engines in
other processes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from mindspeed_rl_plugin.dock import Dock
from mindspeed_rl_plugin.dock.api import listed
from mindspeed_rl_plugin.dock.core import called
from mindspeed_rl_plugin.environment import say
from mindspeed_rl_plugin.rows import Rows, SampleId

SILENT_SECONDS = 60.0  # time without a report before a warning; engines report twice a second, but not within a step


class Engines:
    """The engines in other processes, and their work since the last rollout.

    reports: name of each engine at work -> its counts since it joined.
    reclaim: gives the rows of an engine to others; None: they stay with their engine.
    deadline: seconds that the job waits for an engine.
    clock: seconds."""

    def __init__(
        self,
        reports: Callable[[], Mapping[str, Mapping[str, float]]],
        reclaim: Callable[[str], None] | None,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reports, self._reclaim, self._deadline, self._clock = reports, reclaim, deadline, clock
        self._here: list[str] = []
        self._before: dict[str, Mapping[str, float]] = {}
        self._heard: dict[str, tuple[Mapping[str, float], float]] = {}  # the last new report of each, and its time
        self._silent: list[str] = []
        self._given_up: list[str] = []

    def told(self) -> Iterator[tuple[str, float]]:
        """For the status of this process: each engine with its weights, and the seconds since its last report."""
        for name, (counts, heard) in self._hear().items():
            weights = f" (weights {counts['weights']:g})" if "weights" in counts else ""
            yield f"the engine {called(name)}{weights}, silent", self._clock() - heard

    def text(self) -> str:
        """A text with the number of engines, for an error."""
        silent = f", of which silent: {listed(map(called, self._silent))}" if self._silent else ""
        return f"engines at work: {len(self._reports())}{silent}"

    def look(self) -> None:
        """Print which engines have joined, left, or become silent since the last look."""
        self._listen()
        before, self._here = self._here, list(self._reports())
        came, went = ([n for n in a if n not in b] for a, b in ((self._here, before), (before, self._here)))
        if came:
            say(f"engine{'s' * (len(came) > 1)} joined: {listed(map(called, came))}; {self.text()}")
        if went:
            text = f": the job waits for one to join, at most {self._deadline:g} s (--rl-wait-timeout)"
            waits = "" if self._here else text
            gone = f"engine{'s' * (len(went) > 1)} left: {listed(map(called, went))}"
            say(f"{gone}; unfinished rows are given out again; {self.text()}{waits}")

    def _listen(self) -> None:
        """Read the reports. An engine that hangs sends no new report, but keeps its rows while it is connected; so
        after half of the job's deadline its rows are given to others."""
        self._hear()
        now, half = self._clock(), self._deadline / 2
        before, self._silent = self._silent, self._quiet(now, min(SILENT_SECONDS, half))
        if new := [name for name in self._silent if name not in before]:
            say(f"warning: no report for {min(SILENT_SECONDS, half):g} s from {listed(map(called, new))}")
        before, self._given_up = self._given_up, self._quiet(now, half) if self._reclaim else []
        for name in (name for name in self._given_up if name not in before):
            self._reclaim(name)
            say(
                f"warning: no report for {half:g} s (half of --rl-wait-timeout) from {called(name)}: its unfinished "
                "rows are given out again. If it hangs, end it"
            )

    def _hear(self) -> dict[str, tuple[Mapping[str, float], float]]:
        """The last new report of each engine, and its time. Called by several threads."""
        heard, now, reports = self._heard, self._clock(), self._reports().items()
        new = {name: (counts, now) for name, counts in reports if "seconds" in counts}
        self._heard = {n: heard[n] if n in heard and heard[n][0] == of[0] else of for n, of in new.items()}
        return self._heard

    def _quiet(self, now: float, seconds: float) -> list[str]:
        return [name for name, (_, heard) in self._heard.items() if now - heard > seconds]

    def metrics(self) -> dict[str, float]:
        """Number of engines, and their work since the last rollout: per engine second, per response, per pause."""
        self.look()
        now = dict(self._reports())
        sums: Counter[str] = Counter()
        for name, counts in now.items():
            before = self._before.get(name, {})
            sums.update({key: value - before.get(key, 0.0) for key, value in counts.items()})
        self._before, result = now, {"engines": float(len(now))}
        if not sums["seconds"]:
            return result
        causes = {"back_pressure": "back-pressure", "version": "version"}
        result |= {f"idle/engines_{name}": sums[cause] / sums["seconds"] for name, cause in causes.items()}
        result["engines/tokens_per_second"] = sums["tokens"] / sums["seconds"]
        if sums["responses"]:
            result["engines/length_mean"] = sums["tokens"] / sums["responses"]
        if sums["pauses"]:
            of_one = {"pull_seconds": "pull", "pause_seconds": "pause", "bytes_pulled": "pulled"}
            result |= {f"weights/{name}": sums[key] / sums["pauses"] for name, key in of_one.items()}
        return result


def lags(dock: Dock, ids: Sequence[SampleId], lag: Callable[[int], int], most: int) -> dict[str, float]:
    """Metrics of the age of a rollout's tokens, in publications. lag: version -> its lag; most: largest valid lag.

    Raises RuntimeError for a larger lag: then admission has counted wrongly."""
    rows = dock.read(ids, ("version", "segments", "length"))
    of_rows = [lag(version) for version in rows["version"].tolist()]
    if max(of_rows) > most:
        raise RuntimeError(f"a response is {max(of_rows)} publications old, but --rl-max-staleness is {most}")
    parts = [len({version for _, version in segments.tolist()}) for segments in rows["segments"].rows()]
    return {
        "lag/mean": sum(of_rows) / len(of_rows),
        "lag/max": float(max(of_rows)),
        "lag/token_mean": token_lag(rows, lag),
        "segments/mean": sum(parts) / len(parts),
    }


def token_lag(rows: Rows, lag: Callable[[int], int]) -> float:
    """Mean lag of a response token; a token has the lag of its segment."""
    total = tokens = 0
    for segments, length in zip(rows["segments"].rows(), rows["length"].tolist(), strict=True):
        firsts, versions = segments.T.tolist()
        for first, end, version in zip(firsts, [*firsts[1:], length], versions, strict=True):
            total += lag(version) * (end - first)
            tokens += end - first
    return total / max(tokens, 1)
