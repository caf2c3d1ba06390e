"""Stage clock: when each stage ran on this rank, for how long, and its peak memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.monitor.run_files import JsonLines, event_files, events_file, set_aside
from mindspeed_rl_plugin.monitor.trace import Trace

NOT_TRAINING = ("evaluate",)


class StageClock:
    """Records every stage of this rank into events-rank{rank}.jsonl, one line as the stage ends.

    Stages may nest: at each begin and end of a stage, all running stages take the meter's peak if theirs is smaller, so
    that each has the peak of its complete span. meter: as `Device.memory`; synchronize: called at both ends of a stage,
    so that queued device work counts for the stage that launched it; resume_iteration: as in `JsonLines`. One thread.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        rank: int,
        *,
        trace: Trace | None = None,
        meter: Any = None,
        synchronize: Callable[[], None] | None = None,
        resume_iteration: int = 0,
        now: Callable[[], float] = time.time,
        tick: Callable[[], float] = time.perf_counter,
    ) -> None:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        self.rank = rank
        self._meter, self._synchronize, self._now, self._tick = meter, synchronize or (lambda: None), now, tick
        self._file = JsonLines(events_file(run_dir, rank), resume_iteration)
        self._running: list[dict[str, Any]] = []  # events of running stages, the innermost last
        self.trace = trace or Trace(None, Path(run_dir), "")
        self.begin(resume_iteration)

    def begin(self, iteration: int) -> None:
        """Begin an iteration: later stages belong to it, and its time starts."""
        self.trace.begin(iteration)
        self.iteration = iteration
        self._began = self._tick()
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, int] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block as stage `name`. A block that raises is recorded too, with the error's name."""
        self._synchronize()
        self._fold_peak()
        inside = any(event["stage"] in NOT_TRAINING for event in self._running)
        event = {"iteration": self.iteration, "stage": name, "rank": self.rank, "start": self._now(), "end": None}
        event["peak_bytes"] = None
        self._running.append(event)
        ticked = self._tick()
        try:
            with self.trace.stage(name):
                yield
        except BaseException as error:
            event["failed"] = type(error).__name__
            raise
        finally:
            # Waiting for a failed device would raise another error; the first error must be visible.
            if "failed" not in event:
                self._synchronize()
            seconds = self._tick() - ticked
            self._fold_peak()
            self._running.pop()
            self._file.append(event | {"end": event["start"] + seconds})
            if event["iteration"] == self.iteration and not inside:
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds
                if event["peak_bytes"] is not None:
                    self._peaks[name] = max(self._peaks.get(name, 0), event["peak_bytes"])

    def metrics(self) -> dict[str, float]:
        """seconds/<stage> and peak_bytes/<stage> of the current iteration on this rank, and seconds/iteration.

        seconds/iteration is the wall time since `begin` without evaluation. A stage that ran several times has the
        sum of its times, and its largest peak. Stages inside an evaluation only count for the evaluation.
        """
        out = {f"seconds/{k}": v for k, v in self._seconds.items()}
        out |= {f"peak_bytes/{k}": v for k, v in self._peaks.items()}
        aside = sum(self._seconds.get(k, 0.0) for k in NOT_TRAINING)
        return out | {"seconds/iteration": self._tick() - self._began - aside}

    def close(self) -> None:
        self.trace.close()
        self._file.close()

    def _fold_peak(self) -> None:
        if self._meter is None:
            return
        peak = int(self._meter.peak())
        for event in self._running:
            event["peak_bytes"] = max(event["peak_bytes"] or 0, peak)
        self._meter.reset_peak()


def drop_foreign_events(run_dir: str | os.PathLike[str], world_size: int, resume_iteration: int) -> None:
    """Trim (or, without a resume, rename) the files of ranks that this run does not have, so that a run on fewer ranks
    shows no old events."""
    for rank, path in event_files(run_dir).items():
        if rank >= world_size and resume_iteration:
            JsonLines(path, resume_iteration).close()
        elif rank >= world_size:
            set_aside(path)
