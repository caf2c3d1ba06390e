"""Stage clock: when each stage ran on this rank, for how long, and how much memory it took at most."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mindspeed_rl_plugin.monitor.run_files import JsonLines, event_files, events_file, set_aside

NOT_TRAINING = ("evaluate",)


class MemoryMeter(Protocol):
    """What the clock asks of a memory meter. measures: of what, in words: a device's memory, or the process's."""

    measures: str

    def peak(self) -> int:
        """Most bytes allocated since the last reset."""

    def reset_peak(self) -> None:
        """Start a new peak at what is allocated now."""


@dataclass
class _Running:
    """A stage that runs. aside: its time is not training's; inside: it is part of such a stage of its own thread."""

    thread: int
    aside: bool
    inside: bool
    peak: int | None = None


class StageClock:
    """Records every stage of this rank into events-rank{rank}.jsonl, one line as the stage ends.

    Stages may nest and overlap (also from several threads): each gets the peak of its whole span,
    although the meter has only one counter, because every boundary folds the counter into all stages
    that are running. synchronize: called at both ends of a stage, so that work queued on a device is
    booked where it was launched. resume_iteration: lines beyond it are dropped, they come again; at 0
    the file of an earlier run is set aside as `.old`.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        rank: int,
        *,
        meter: MemoryMeter | None = None,
        synchronize: Callable[[], None] | None = None,
        resume_iteration: int = 0,
        now: Callable[[], float] = time.time,
        tick: Callable[[], float] = time.perf_counter,
    ) -> None:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        self.rank = rank
        self._meter, self._synchronize, self._now, self._tick = meter, synchronize, now, tick
        if not resume_iteration:
            set_aside(events_file(run_dir, rank))
        self._file = JsonLines(events_file(run_dir, rank), keep=lambda e: e["iteration"] <= resume_iteration)
        self._running: list[_Running] = []
        self._lock = threading.Lock()
        self.begin(resume_iteration)

    def begin(self, iteration: int) -> None:
        """Stages from now on belong to `iteration`; its own time starts to run."""
        self.iteration = iteration
        self._began = self._tick()
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, int] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block as stage `name`. A block that raises is recorded too, with the error's name."""
        iteration = self.iteration
        running = self._enter(name)
        start, ticked = self._now(), self._tick()
        failed: str | None = None
        try:
            yield
        except BaseException as error:
            failed = type(error).__name__
            raise
        finally:
            # A device that has failed cannot be waited for; the first error is the one to see.
            if self._synchronize is not None and failed is None:
                self._synchronize()
            seconds = self._tick() - ticked
            self._leave(running)
            self._record(iteration, name, start, seconds, running, failed)

    def metrics(self) -> dict[str, float]:
        """seconds/<stage> and peak_bytes/<stage> of the current iteration on this rank, and seconds/iteration.

        seconds/iteration is the wall time since `begin`, evaluation not counted: the end-to-end time
        of equation 5. A stage that ran several times has its seconds added and its peaks maximised.
        Stages inside an evaluation are part of seconds/evaluate and peak_bytes/evaluate only; their
        events are written as all others are.
        """
        with self._lock:
            out = {f"seconds/{k}": v for k, v in self._seconds.items()}
            out |= {f"peak_bytes/{k}": v for k, v in self._peaks.items()}
            aside = sum(self._seconds.get(k, 0.0) for k in NOT_TRAINING)
        out["seconds/iteration"] = self._tick() - self._began - aside
        return out

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _enter(self, name: str) -> _Running:
        if self._synchronize is not None:
            self._synchronize()
        thread = threading.get_ident()
        with self._lock:
            self._fold_peak()
            inside = any(r.aside and r.thread == thread for r in self._running)
            running = _Running(thread, inside or name in NOT_TRAINING, inside)
            self._running.append(running)
        return running

    def _leave(self, running: _Running) -> None:
        with self._lock:
            self._fold_peak()
            # By identity: two running stages may hold equal values.
            self._running = [r for r in self._running if r is not running]

    def _fold_peak(self) -> None:
        if self._meter is None:
            return
        peak = int(self._meter.peak())
        for running in self._running:
            running.peak = peak if running.peak is None else max(running.peak, peak)
        self._meter.reset_peak()

    def _record(
        self, iteration: int, name: str, start: float, seconds: float, running: _Running, failed: str | None
    ) -> None:
        event = {"iteration": iteration, "stage": name, "rank": self.rank, "start": start, "end": start + seconds}
        event["peak_bytes"] = peak = running.peak
        if failed is not None:
            event["failed"] = failed
        self._file.append(event)
        with self._lock:
            if iteration == self.iteration and not running.inside:
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds
                if peak is not None:
                    self._peaks[name] = max(self._peaks.get(name, 0), peak)


def drop_foreign_events(run_dir: str | os.PathLike[str], world_size: int, resume_iteration: int) -> None:
    """Trim the files of ranks that this run no longer has, so that a run resumed on fewer ranks shows no stale ones."""
    for rank, path in event_files(run_dir).items():
        if rank < world_size:
            continue
        if not resume_iteration:
            set_aside(path)
        else:
            JsonLines(path, keep=lambda e: e["iteration"] <= resume_iteration).close()
