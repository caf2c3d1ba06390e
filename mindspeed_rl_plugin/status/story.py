"""The story of a job that hangs, from its status files alone: where each process is, and which one began to be late."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.processes import in_background, machine, state_of
from mindspeed_rl_plugin.status.status_file import FILE_BYTES, IN_ORDER, LATE_SECONDS, WRITE_SECONDS, own_folder

UNWRITTEN_SECONDS = 5 * WRITE_SECONDS  # without a write; then a process counts as stopped or dead
STORY_FILE = "story.txt"
STORY_LINES = 16  # most lines about processes
STORY_SECONDS = 5.0  # limit for the story in a message: a file system that hangs must not delay the message
READ_ATTEMPTS = 5  # attempts to read a file that is being written


@dataclass(frozen=True)
class Seen:
    """A process as its status file shows it."""

    name: str
    machine: str
    process: int
    silent: float  # seconds since its last write
    state: str  # "stopped" (by a signal) or "ended", for a process of this machine; else ""
    ended: str  # why it has ended, as it wrote itself; "": it wrote no end
    said: str  # its last line
    threads: dict[str, list[tuple[str, str, float]]]  # (what, whom, for how many seconds), the innermost last
    facts: dict[str, list[Any]]
    ranks: int  # of the trainers
    signal: str  # at which it writes its stacks

    @property
    def lost(self) -> bool:
        """Whether it neither works nor has ended in order."""
        return self.ended != IN_ORDER and bool(self.ended or self.state or self.silent > UNWRITTEN_SECONDS)

    @property
    def inner(self) -> list[tuple[str, str, float]]:
        """What each thread does, the main thread first."""
        names = sorted(self.threads, key=lambda name: name != "MainThread")
        return [self.threads[name][-1] for name in names]

    def where(self) -> str:
        """What it does, in words."""
        outer = [what for what, whom, _ in self.threads.get("MainThread", [])[:-1] if not whom]
        parts = [
            f"{what} for {seconds:.0f} s" + (f", waits for {whom}" if whom else "")
            for what, whom, seconds in self.inner
        ]
        return "; ".join([*([f"in {outer[-1]}"] if outer else []), *parts]) or "between two stages"

    def how(self) -> str:
        """Why it counts as lost."""
        if self.ended:
            return f"ended: {self.ended.splitlines()[0]}"
        state = {"stopped": "stopped by a signal", "ended": "its process does not exist any more"}.get(self.state)
        return f"{state or 'no sign of life'} for {self.silent:.0f} s"


def read(folder: Path) -> list[Seen]:
    """The processes that have a status file in `folder`, by name. Ages are by the clock of the file system, since the
    clocks of machines may differ. Raises ValueError if there is no such folder, or no file in it."""
    if not folder.is_dir():
        raise ValueError(f"{folder} does not exist; give the --save of a job that has started")
    now, here, found = _now(folder), machine(), []
    for path in (path for path in folder.iterdir() if not path.suffix):
        if not (status := _status(path)):
            continue
        silent = max(now - path.stat().st_mtime, 0.0)
        now_there = status["now"] + silent  # by the clock of its machine
        threads = {
            name: [(e["what"], e["whom"], now_there - e["since"]) for e in entries]
            for name, entries in status["threads"]
            if entries
        }
        state = state_of(status["process"], status["began"]) if status["machine"] == here else ""
        fields = {k: status[k] for k in ("name", "machine", "process", "ended", "said", "facts", "ranks", "signal")}
        found.append(Seen(silent=silent, state="" if status["ended"] else state, threads=threads, **fields))
    if not found:
        raise ValueError(f"{folder} has no status of a process; no process of the job has written one yet")
    return sorted(found, key=lambda seen: [int(p) if p.isdigit() else p for p in seen.name.split()])


def _status(path: Path) -> dict[str, Any]:
    """The contents of a status file; empty if there are none yet."""
    for _ in range(READ_ATTEMPTS):
        raw = path.read_bytes()
        with contextlib.suppress(ValueError):
            return json.loads(raw) if len(raw) == FILE_BYTES else {}
        time.sleep(0.05)
    return {}


def suspects(seen: Sequence[Seen]) -> list[tuple[str, float]]:
    """(text, seconds) of what the processes wait for, the longest time first. Only the first kind that is found is
    returned: lost processes, else silent links, else processes outside of the ranks (first those in the facts "late"),
    else ranks that work while others wait, else ranks that stay in a stage which others have left."""
    lost = [(f"{s.name} on {host(s)}: {s.how()}; its last status: {s.where()}", s.silent) for s in seen if s.lost]
    alive = [s for s in seen if not s.lost and not s.ended]
    names = {s.name: s for s in seen}
    cut = [
        (f"the network between {s.name} on {host(s)} and {other} on {host(names[other])}", seconds)
        for s in alive
        for other, seconds in s.facts.get("silent", ())
        if other in names and not names[other].lost
    ]
    late = [(f"{text}, for which {s.name} waits", seconds) for s in alive for text, seconds in s.facts.get("late", ())]
    outside = [
        (f"{whom}, for which {s.name} waits ({what})", seconds)
        for s in alive
        for what, whom, seconds in s.inner
        if whom and not whom.startswith("rank") and seconds > LATE_SECONDS
    ]
    waited = any(whom.startswith("rank") for s in alive for _, whom, _ in s.inner)
    busy = [
        (f"{s.name} on {host(s)}: {s.where()}", s.inner[0][2] if s.inner else 0.0)
        for s in alive
        if waited and not any(whom for _, whom, _ in s.inner[:1])
    ]
    busy = [(text, seconds) for text, seconds in busy if seconds > LATE_SECONDS]
    working = [(s, s.inner[0]) for s in alive if s.name.startswith("rank ") and s.inner]
    behind = [  # Megatron's own collectives say of nobody that they wait for it
        (f"{s.name} on {host(s)}: {s.where()}, while other ranks are in another stage", seconds)
        for s, (what, _, seconds) in working
        if any(other != what for _, (other, _, _) in working)
    ]
    most = max((seconds for _, seconds in behind), default=0.0) - LATE_SECONDS
    behind = [(text, seconds) for text, seconds in behind if seconds > max(most, LATE_SECONDS)]
    return next(
        ([*sorted(found, key=lambda pair: -pair[1])] for found in (lost, cut, late, outside, busy, behind) if found), []
    )


def tell(folder: Path) -> str:
    """The story in lines: the suspects, then the processes (`_lines`). Raises ValueError as `read` does."""
    seen = read(folder)
    return "\n".join([*_verdict(seen), *_lines(seen)])


def at_deadline() -> str:
    """The story of this job for the message of a deadline; "" without status files. The first process writes it into
    the folder, the others name that file: thousands of ranks must not read all files."""
    if (folder := own_folder()) is None:
        return ""
    path = folder / STORY_FILE

    def told() -> str:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text := tell(folder))
            return text

    try:
        return in_background("story", told).result(STORY_SECONDS)
    except FileExistsError:
        return f"where each process was: {path}"
    except (OSError, ValueError, FutureTimeout) as error:
        return f"where each process was is not known: {str(error) or f'{folder} was not read in {STORY_SECONDS:g} s'}"


def host(seen: Seen) -> str:
    """The host name of its machine."""
    return seen.machine.split()[0]


def _verdict(seen: Sequence[Seen]) -> Iterator[str]:
    found = [what for what, _ in suspects(seen)]
    absent = sorted({*range(max(s.ranks for s in seen))} - {_rank(s) for s in seen})
    found += [f"rank {rank}, which has not written a status here" for rank in absent]
    if all(s.ended == IN_ORDER for s in seen):
        yield "the job has ended; all its processes ended in order"
    elif not found:
        yield "no process is late, as far as the status files show; `doctor --job SAVE --stacks` shows more"
    yield from (f"{'also late' if n else 'late first'}: {what}" for n, what in enumerate(found[:4]))


def _lines(seen: Sequence[Seen]) -> Iterator[str]:
    """A line for each process; neighbours in the order of names that do the same share a line."""

    def same(one: Seen) -> tuple[object, ...]:
        return host(one), one.lost, [what_whom[:2] for what_whom in one.inner]

    groups = [list(group) for _, group in groupby(seen, key=same)]
    for group in groups[:STORY_LINES]:
        first, last = group[0], group[-1]
        names = first.name if first is last else f"{first.name} to {last.name}"
        said = f"; its last line: {first.said.splitlines()[-1]}" if first.said and first is last else ""
        yield f"  {names} ({host(first)}): {first.how() if first.lost else first.where()}{said}"
    if len(groups) > STORY_LINES:
        yield f"  and {len(groups) - STORY_LINES} more lines"


def _rank(seen: Seen) -> int:
    return int(seen.name.split()[-1]) if seen.name.startswith("rank ") else -1


def _now(folder: Path) -> float:
    """The time by the clock of the file system, or by this machine's where the folder cannot be written."""
    probe = folder.with_name(f".status.{os.getpid()}")
    try:
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now
    except OSError:
        return time.time()
