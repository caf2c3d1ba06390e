"""Monitor: writes an iteration's metrics to the console, metrics.jsonl, TensorBoard and W&B."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from mindspeed_rl_plugin.environment import keep, keep_in, say
from mindspeed_rl_plugin.monitor.console import LINE_LEGEND, ProgressBar, eval_line, iteration_line, write_line
from mindspeed_rl_plugin.monitor.names import Metric
from mindspeed_rl_plugin.monitor.run_files import (
    APART_FILE,
    HELD_OUT_FILE,
    LOG_FILE,
    METRICS_FILE,
    RUN_FILE,
    JsonLines,
    read_run,
    run_id,
    set_aside,
    to_json,
    write_json,
)
from mindspeed_rl_plugin.monitor.stage_clock import StageClock, drop_foreign_events
from mindspeed_rl_plugin.monitor.trace import Trace

METRIC_PREFIX = "rl/"
TEXT = 4000  # characters that are kept of a prompt or response of an evaluation
EVALUATED = METRIC_PREFIX + "eval/iteration"  # the axis of evaluations in W&B, whose own steps only grow
DOCK_FILE = "dock-rank{rank}.jsonl"
PAGE = "docs/when-something-goes-wrong.md#it-runs-but-does-not-learn"
LATEST, IDLE = 10, 8  # a warning if IDLE of the last LATEST rollouts have no prompt whose rewards differ
FAR = 0.5  # nats per token that the policy may move in a rollout without a warning


class Monitor:
    """The output of a run. Every rank makes a monitor, and calls it with the same metrics.

    Rank 0 prints and writes metrics.jsonl and run.json. Megatron has TensorBoard and W&B writers on the last rank: pass
    each rank's writers, or None. Tags have the prefix `rl/`, so that they differ from Megatron's.

    total_iterations: planned iterations of the run.
    resume_iteration: as in `JsonLines`.
    info: description of the run for the report (JSON values; `dump_dir`: folder of the dumps).
    compares: as in `LearningWatch`.
    is_terminal: whether to show the progress bar; None: if stderr is a terminal.
    on_record: called on rank 0 with each line of metrics.jsonl.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        rank: int,
        world_size: int,
        *,
        tensorboard_writer: Any = None,
        wandb: Any = None,
        is_terminal: bool | None = None,
        total_iterations: int | None = None,
        resume_iteration: int = 0,
        trace: Trace | None = None,
        meter: Any = None,
        synchronize: Callable[[], None] | None = None,
        info: Mapping[str, Any] | None = None,
        stream: TextIO | None = None,
        compares: bool = False,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.rank = rank
        self.total_iterations = total_iterations
        self._tensorboard, self._wandb, self._stream = tensorboard_writer, wandb, stream
        self._step, self._evaluated = resume_iteration, -1  # newest step in W&B, and the newest with an evaluation
        if wandb is not None:
            wandb.define_metric(METRIC_PREFIX + "eval/*", step_metric=EVALUATED)
        self._bar_shown = rank == 0 and (sys.stderr.isatty() if is_terminal is None else is_terminal)
        timing = {"trace": trace, "meter": meter, "synchronize": synchronize, "resume_iteration": resume_iteration}
        self.clock = StageClock(run_dir, rank, **timing)
        self.begin, self.stage = self.clock.begin, self.clock.stage
        self._dock = JsonLines(self.run_dir / DOCK_FILE.format(rank=rank), resume_iteration)
        self._metrics: JsonLines | None = None
        self._others: dict[str, JsonLines] = {}  # by name, opened at the first line
        self._resumed = resume_iteration
        self._legend_shown = False
        self._watch = LearningWatch(compares)
        self.on_record: Callable[[str], None] = lambda line: None
        if rank == 0:
            measured = {"memory": meter.measures} if meter else {}
            self._open_files(world_size, resume_iteration, {**measured, **(info or {})})

    def stage_metrics(self) -> dict[str, float]:
        """seconds/* and peak_bytes/* of the current iteration on this rank alone, see `StageClock.metrics`."""
        return self.clock.metrics()

    def progress(self, total: int, what: str = "generate") -> ProgressBar:
        """A progress bar on rank 0's terminal, and nothing elsewhere."""
        return ProgressBar(total, what, shown=self._bar_shown)

    def log(self, iteration: int, metrics: Mapping[str, Metric]) -> None:
        """Show and write the metrics of a training iteration, named as in `names.py`. NaN is written as null; a text
        goes to metrics.jsonl only."""
        metrics = {k: _value(v) for k, v in metrics.items()}
        self._emit("train", iteration, metrics, iteration_line(iteration, metrics, self.total_iterations))
        for remark in self._watch.remarks(metrics):
            say(f"warning: {remark}")

    def log_eval(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Show and write an evaluation made after `iteration` updates; every name gets the prefix `eval/`."""
        metrics = {f"eval/{k.removeprefix('eval/')}": _value(v) for k, v in metrics.items()}
        self._emit("eval", iteration, metrics, eval_line(iteration, metrics, self.total_iterations))

    def log_held_out(self, iteration: int, rows: Sequence[Sequence[Any]]) -> None:
        """Write, on rank 0, some responses to held-out prompts: number, prompt, response, answer, reward."""
        if self.rank == 0:
            cut = [[v[:TEXT] if isinstance(v, str) else v for v in row] for row in rows]
            self._other(HELD_OUT_FILE).append({"iteration": iteration, "rows": cut})

    def log_dock(self, iteration: int, record: Mapping[str, Any]) -> None:
        """Write this rank's traffic with the dock for the rollout that ended with an iteration."""
        self._dock.append({"iteration": iteration, **record})

    def log_apart(self, process: str, what: str, start: float, end: float) -> None:
        """Write, on rank 0, what a process outside of the ranks did, from `start` to `end`, seconds since 1970."""
        if self.rank == 0:
            record = {"iteration": self.clock.iteration, "process": process, "stage": what, "start": start, "end": end}
            self._other(APART_FILE).append(record)

    def close(self) -> None:
        """Close this rank's files. Megatron closes the writers."""
        self.clock.close()
        self._dock.close()
        for file in (*self._others.values(), *([self._metrics] if self._metrics else [])):
            file.close()

    def _other(self, name: str) -> JsonLines:
        if name not in self._others:
            self._others[name] = JsonLines(self.run_dir / name, self._resumed)
        return self._others[name]

    def _open_files(self, world_size: int, resume_iteration: int, info: dict[str, Any]) -> None:
        drop_foreign_events(self.run_dir, world_size, resume_iteration)
        self._metrics = JsonLines(self.run_dir / METRICS_FILE, resume_iteration)
        if not resume_iteration:
            for name in (APART_FILE, HELD_OUT_FILE, LOG_FILE):
                set_aside(self.run_dir / name)
        keep_in(self.run_dir / LOG_FILE)
        self._written = {(r["kind"], r["iteration"]) for r in self._metrics.lines_kept}
        before = read_run(self.run_dir).get("starts", []) if resume_iteration else []
        starts = [start for start in before if start["iteration"] < resume_iteration]
        facts = {
            "starts": [*starts, {"iteration": resume_iteration, "time": time.time()}],
            "id": resume_iteration and run_id(self.run_dir) or secrets.token_hex(8),
            "world_size": world_size,
            "total_iterations": self.total_iterations,
            "resume_iteration": resume_iteration,
            "started": time.time(),
        }
        write_json(self.run_dir / RUN_FILE, facts | info)

    def _emit(self, kind: str, iteration: int, metrics: dict[str, Metric], line: str) -> None:
        if self._metrics is not None:
            for text in (line,) if self._legend_shown else (LINE_LEGEND, line):
                write_line(text, self._stream or sys.stdout)
                keep(text)
            self._legend_shown = True
            record = {"kind": kind, "iteration": iteration, "time": time.time(), **metrics}
            # An evaluation at the iteration of a resume comes twice: before the end of the old job, and in the new one.
            if (kind, iteration) in self._written:
                self._metrics.replace(record, lambda r: (r["kind"], r["iteration"]) == (kind, iteration))
            else:
                self._metrics.append(record)
            self.on_record(to_json(record))
        numbers = {METRIC_PREFIX + k: v for k, v in metrics.items() if not isinstance(v, str)}
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, iteration)
        if self._wandb is not None and kind == "train":
            self._step = iteration
            self._wandb.log(numbers, iteration)
        elif self._wandb is not None:
            # W&B drops values of an older step, and keeps only the second of two evaluations in one step. So a late
            # evaluation gets the newest step or, if that has an evaluation, the step of the running iteration.
            step = max(self._step, self._evaluated)
            step = max(step, self.clock.iteration) if step == self._evaluated else step
            if step == self._evaluated:  # a run that ends in the middle of a rollout, during an evaluation
                write_line(f"[rl] W&B lacks an evaluation before iteration {iteration}; see {METRICS_FILE}", sys.stdout)
            self._evaluated = step
            self._wandb.log(numbers | {EVALUATED: iteration}, step)


def _value(value: Any) -> Metric:
    """A text, or a Python int or float; one-element tensors and numpy scalars become floats."""
    return value if isinstance(value, (int, str)) else float(value)


class LearningWatch:
    """Warns when metrics show that a run learns nothing, or takes too large steps; each warning once.
    compares: whether the algorithm compares the responses of a prompt, and so learns nothing from equal rewards."""

    def __init__(self, compares: bool) -> None:
        self._idle: deque[bool] | None = deque(maxlen=LATEST) if compares else None  # None: warned already, or not used
        self._kl, self._far = None, False

    def remarks(self, metrics: Mapping[str, Metric]) -> Iterator[str]:
        if self._idle is not None and "groups/informative" in metrics:  # the first iteration of a rollout
            self._idle.append(metrics["groups/informative"] == 0)
            if (idle := sum(self._idle)) >= IDLE:
                seen, self._idle = len(self._idle), None
                yield (
                    f"in {idle} of the last {seen} rollouts the responses of every prompt had equal rewards (differ 0, "
                    f"solved {metrics['groups/solved']:.2f}): the run learns nothing from them; see {PAGE}"
                )
        before, self._kl = self._kl, metrics.get("kl/ref", self._kl)
        moved = max(0.0 if before is None else self._kl - before, metrics.get("kl/old", 0.0))
        if moved > FAR and not self._far:
            self._far = True
            yield f"the policy moved by {moved:.2g} nats per token in a rollout (limit {FAR:g}); lower --lr; see {PAGE}"
