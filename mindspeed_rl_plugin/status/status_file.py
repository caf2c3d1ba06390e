"""The status of this process: what its threads do, since when, and for whom they wait.

`doing` only appends to a list. A thread writes the status every few seconds into a file of fixed size in
SAVE/rl/status. So the file is also a sign of life, and a stage costs no file access. `story` reads these files.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from pathlib import Path

from mindspeed_rl_plugin.environment import last_line, on_failure
from mindspeed_rl_plugin.processes import began, in_background, machine

STATUS_FOLDER = "status"  # in SAVE/rl
WRITE_SECONDS = 2.0  # between two writes
FILE_BYTES = 8192  # of one file
LAST_SECONDS = 3.0  # limit of the last write of a process that fails: a file system that hangs must not delay its end
IN_ORDER = "in order"
NO_SIGNAL = "none"
MOST_FACTS = 20  # of one kind in a status
Fact = tuple[str, float]  # a text, and seconds that it has lasted

# (is not the main thread, number) of a thread -> (what, whom, since) of what it does, the innermost last; see `doing`
_threads: dict[tuple[bool, int], list[tuple[str, str, float]]] = {}
_facts: dict[str, Callable[[], Iterable[Fact]]] = {}


@contextlib.contextmanager
def doing(what: str, whom: str = "") -> Iterator[None]:
    """In the context this thread does `what`: a stage, or a wait. whom: the process for which it waits, as "rank 3";
    "": it waits for nobody."""
    key = threading.current_thread() is not threading.main_thread(), threading.get_ident()
    entries = _threads.setdefault(key, [])
    entries.append((what, whom, time.monotonic()))
    try:
        yield
    finally:
        entries.pop()
        if not entries:
            _threads.pop(key, None)


def also(name: str, facts: Callable[[], Iterable[Fact]] | None) -> None:
    """Write further facts with each status. The first word of `name` is their kind: "at", what this process works on;
    "links", ranks without a sign of life; for the others see `story.LATE_AFTER`.

    facts: called in another thread; None: they are not written any more."""
    if facts is None:
        _facts.pop(name, None)
    else:
        _facts[name] = facts


class StatusFile:
    """The file of this process. name: as "rank 3"; ranks: number of trainers, 0 for a process that is no trainer;
    stacks: the signal at which the process writes the Python stacks of its threads, or NO_SIGNAL."""

    def __init__(self, folder: Path, name: str, ranks: int, stacks: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._writing = folder, threading.Lock()
        self._file = os.open(folder / name.replace(" ", "-"), os.O_CREAT | os.O_WRONLY, 0o644)
        here = {"machine": machine(), "process": os.getpid(), "began": began(os.getpid())}
        self._about, self._over = {"name": name, "ranks": ranks, "signal": stacks, **here}, threading.Event()
        if stacks != NO_SIGNAL:  # not Python's own handler: a main thread that hangs in a library does not run it
            self._stacks = open(stacks_file(folder, name), "a")  # noqa: SIM115 - open as long as the process
            faulthandler.register(signal.Signals[stacks], self._stacks, all_threads=True)
        self.write()
        threading.Thread(target=self._work, name="status", daemon=True).start()

    def end(self, how: str) -> None:
        """Write for the last time. how: IN_ORDER, or why the process ends."""
        if not self._over.is_set():
            self._over.set()
            self.write(how)

    def fail(self, why: str) -> None:
        """The same for a process that fails. Waits at most LAST_SECONDS."""
        with contextlib.suppress(FutureTimeout):
            in_background("status", partial(self.end, why)).result(LAST_SECONDS)

    def write(self, ended: str = "") -> None:
        """Write the status: name, ranks, signal (for stacks), machine, process and `began` of it; ended (why, or "");
        said, its last line; threads, (what, whom, seconds) of each, the innermost last, the main thread first; facts by
        kind. If it is too long for the file: no facts, and the innermost entries of 20 threads at most."""
        now = time.monotonic()
        threads = [[(what, whom, now - at) for what, whom, at in entries] for _, entries in sorted(_threads.items())]
        facts: dict[str, list[Fact]] = {}
        for name, told in list(_facts.items()):
            with contextlib.suppress(Exception):  # else the thread would end, and the process would seem lost
                facts.setdefault(name.split()[0], []).extend(told())
        facts = {kind: sorted(of_kind, key=lambda fact: -fact[1])[:MOST_FACTS] for kind, of_kind in facts.items()}
        status = {**self._about, "ended": ended[:500], "said": last_line()[-500:]}
        full = status | {"threads": threads, "facts": facts}
        short = status | {"threads": [entries[-1:] for entries in threads[:20]], "facts": {}}
        data = next((d for d in (json.dumps(s).encode() for s in (full, short)) if len(d) <= FILE_BYTES), b"{}")
        with self._writing, contextlib.suppress(OSError):  # the file system may be unavailable for a while
            os.pwrite(self._file, data.ljust(FILE_BYTES), 0)
            os.fdatasync(self._file)  # over NFS other machines would see it half a minute later

    def _work(self) -> None:
        while not self._over.wait(WRITE_SECONDS):
            self.write()


_own: StatusFile | None = None


def begin(save: str, name: str, ranks: int = 0, stacks: str = NO_SIGNAL) -> None:
    """From now on this process has a status file; if it cannot be written, a line says so, and the job runs without.
    Idempotent. The arguments: see `StatusFile`."""
    global _own
    if _own is not None:
        return
    try:
        _own = StatusFile(folder_of(save), name, ranks, stacks)
    except OSError as error:
        print(f"[rl] warning: {name} writes no status for `doctor --job`: {error}", flush=True)
        return
    atexit.register(_own.end, IN_ORDER)
    on_failure(_own.fail)


def folder_of(save: str) -> Path:
    """Folder of the status files of a job."""
    return Path(save, "rl", STATUS_FOLDER).absolute()


def stacks_file(folder: Path, name: str) -> Path:
    """The file into which a process writes its stacks."""
    return folder / f"{name.replace(' ', '-')}.stacks"


def own_folder() -> Path | None:
    """Folder of this job's status files; None before `begin`."""
    return _own and _own.folder


def clear(save: str) -> None:
    """Remove the files of an earlier start. The first rank calls it before any process of this start calls `begin`."""
    shutil.rmtree(folder_of(save), ignore_errors=True)
