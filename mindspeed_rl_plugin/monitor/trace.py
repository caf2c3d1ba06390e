"""--rl-trace: torch's profiler (torch_npu's on an NPU) around some iterations, or around some of their stages."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from mindspeed_rl_plugin.config.run_flags import Traced
from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.environment import say
from mindspeed_rl_plugin.status.status_file import also, doing

TRACE_FOLDER = "trace"  # in the run's directory


class Trace:
    """Records this process. traced: None for a process that is not traced; folder: for the files; who: begin of
    the files' names, as "rank0". A file holds one continuous span: the iterations, or one stage of one iteration.

    place: gives what this process works on, for the names of stages and for its status."""

    def __init__(self, traced: Traced | None, folder: Path, who: str) -> None:
        self._traced, self._folder, self._who = traced, folder, who
        self._profiler: Any = None
        self._iteration = 0
        self.place: Callable[[], str] = lambda: f"iteration {self._iteration}"
        also("at", lambda: [(self.place(), 0.0)])

    @classmethod
    def of(cls, asked: str | None, ranks: Sequence[int], rank: int, run_dir: str | os.PathLike[str]) -> Trace:
        """The trace of a rank of the launcher. asked, ranks: --rl-trace and --rl-trace-ranks."""
        return cls(Traced.parse(asked) if asked and rank in ranks else None, Path(run_dir, TRACE_FOLDER), f"rank{rank}")

    def begin(self, iteration: int) -> None:
        """An iteration begins."""
        self._iteration, traced = iteration, self._traced
        if traced is None or traced.stages:
            return
        if self._profiler is not None and iteration > traced.last:
            self._stop(f"{traced.first}-{traced.last}")
        elif self._profiler is None and self._wanted():
            self._start()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage, in the status of this process, and a named range in any trace, also in that of Megatron's --profile
        (for nsys its `emit_nvtx` makes NVTX ranges of them)."""
        alone = self._profiler is None and self._wanted() and name in self._traced.stages
        if alone:
            self._start()
        try:
            with doing(name), record_function(f"{name}, {self.place()}"):
                yield
        finally:
            if alone:
                self._stop(f"{self._iteration}-{name}")

    def close(self) -> None:
        """Write what is recorded: the run ends within the traced iterations."""
        if self._profiler is not None:
            self._stop(f"{self._traced.first}-{self._iteration}")

    def _wanted(self) -> bool:
        return self._traced is not None and self._traced.first <= self._iteration <= self._traced.last

    def _start(self) -> None:
        self._profiler = get_device().profiler()
        self._profiler.start()

    def _stop(self, span: str) -> None:
        profiler, self._profiler = self._profiler, None
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._who}-{span}.json"
        path.unlink(missing_ok=True)  # of an earlier run with this --save
        method = multiprocessing.get_start_method(allow_none=True)
        profiler.stop()
        profiler.export_chrome_trace(str(path))
        multiprocessing.set_start_method(method, force=True)  # torch_npu's export makes it "fork"
        if path.exists():
            say(f"trace written: {path} (https://ui.perfetto.dev opens it)")
        else:  # torch_npu's profiler prints its errors and raises none
            print(f"[rl] warning: no trace: {path} is not there; the profiler's messages say why", flush=True)
