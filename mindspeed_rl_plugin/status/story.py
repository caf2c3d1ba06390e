"""The story of a job that hangs, from its status files alone: where each process is, and which one began to be late."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from functools import cached_property
from itertools import groupby
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mindspeed_rl_plugin.processes import in_background, machine, state_of
from mindspeed_rl_plugin.status.status_file import IN_ORDER, NO_SIGNAL, WRITE_SECONDS, own_folder, stacks_file

LATE_SECONDS = 5.0  # of one call or wait; a shorter one is no sign of a hang
UNWRITTEN_SECONDS = 5 * WRITE_SECONDS  # without a write; then a process counts as stopped or dead
STORY_FILE = "story.txt"
STORY_LINES = 16  # most lines about processes
FACTS_OF_KIND = 6  # most facts of a kind
STACKS_SECONDS = 3.0  # for a process to write its stacks
STORY_SECONDS = 5.0  # limit for the story in a message: a file system that hangs must not delay the message
OF_RANKS = ("rank", "the other ranks")  # first words of ranks for which others wait
READ_ATTEMPTS = 5  # attempts to read a file that is being written
# Kinds of facts that the story tells, and after how many seconds the process of such a fact counts as late
LATE_AFTER = {"groups": inf, "engines": 20.0, "calls": LATE_SECONDS}


class Seen(SimpleNamespace):
    """What the status file of a process has, see `StatusFile.write`; and `silent`, the seconds since its last write."""

    @cached_property
    def state(self) -> str:
        """As `state_of`; "" for a process of another machine, and for one that has written its end."""
        return "" if self.ended or self.machine != machine() else state_of(self.process, self.began)

    @property
    def unwritten(self) -> bool:
        """Whether it runs on this machine, but has long written no status: code that holds Python's lock, or a file
        system, can prevent that."""
        here = not self.ended and self.machine == machine() and not self.state
        return here and self.silent > UNWRITTEN_SECONDS

    @property
    def lost(self) -> bool:
        """Whether it neither works nor has ended in order."""
        silent = self.silent > UNWRITTEN_SECONDS and not self.unwritten
        return self.ended != IN_ORDER and bool(self.ended or self.state or silent)

    @property
    def inner(self) -> list[tuple[str, str, float]]:
        """What each thread does."""
        return [(what, whom, seconds + self.silent) for *_, (what, whom, seconds) in filter(None, self.threads)]

    @property
    def host(self) -> str:
        return self.machine.split()[0]

    @property
    def at(self) -> str:
        """What it works on, as ", weights 3"; maybe ""."""
        return "".join(f", {text}" for text, _ in self.facts.get("at", ()))

    def where(self) -> str:
        """What it does, in words."""
        if self.ended == IN_ORDER:
            return "has ended"
        outer = [what for entries in self.threads[:1] for what, whom, _ in entries[:-1] if not whom]
        parts = [f"{what} for {s:.0f} s" + (f", waits for {whom}" if whom else "") for what, whom, s in self.inner]
        now = "; ".join([*(f"in {what}" for what in outer[-1:]), *parts]) or "between two stages"
        return now + f" (it runs, but has written no status for {self.silent:.0f} s)" * self.unwritten

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
        raise ValueError(
            f"{folder} does not exist; give the --save of a job; one that has only just started writes none yet"
        )
    now, paths = _now(folder), [path for path in folder.iterdir() if not path.suffix]
    statuses = ((path, _status(path)) for path in paths)
    found = [Seen(**s, silent=max(now - path.stat().st_mtime, 0.0)) for path, s in statuses if s]
    if not found:
        raise ValueError(f"{folder} has no status of a process; no process of the job has written one yet")
    return sorted(found, key=lambda seen: [int(p) if p.isdigit() else p for p in seen.name.split()])


def _status(path: Path) -> dict[str, Any]:
    """The contents of a status file; empty if there are none yet."""
    for _ in range(READ_ATTEMPTS):
        with contextlib.suppress(ValueError):
            return json.loads(path.read_bytes())
        time.sleep(0.05)
    return {}


def suspects(seen: Sequence[Seen]) -> list[tuple[str, float]]:
    """(text, seconds) of who or what is late, the longest time first. Of the kinds of `_suspicions` only the first one
    that is found is returned, since it explains those after it."""
    found = sorted(_suspicions(seen), key=lambda one: (one[0], -one[2]))
    return [(text, seconds) for kind, text, seconds in found if kind == found[0][0]]


def _suspicions(seen: Sequence[Seen]) -> Iterator[tuple[int, str, float]]:
    """(kind, text, seconds). Kinds: 0 lost processes, 1 silent links, 2 processes that are no ranks, by facts, 3 by
    what threads wait for, 4 processes that work while others wait for ranks, 5 ranks that stay in a stage which others
    have left: Megatron's own collectives say of nobody that they wait for it, 6 processes that run without a status."""
    there = {s.name: s for s in seen if not s.lost}
    alive = [s for s in there.values() if not s.ended]
    waited = any(whom.startswith(OF_RANKS) for s in alive for _, whom, _ in s.inner)
    ranks = [s.inner[0] for s in alive if s.name.startswith("rank ") and s.inner]
    apart = len({what for what, _, _ in ranks}) > 1
    behind = max([LATE_SECONDS, *(seconds - LATE_SECONDS for _, _, seconds in ranks)])  # seconds in a stage
    for s in seen:
        here = f"{s.name} on {s.host}: "
        if s.lost:
            yield 0, here + s.how() + f"; its last status: {s.where()}" * (not s.ended), s.silent
        if s.lost or s.ended:
            continue
        if s.unwritten:
            yield 6, here + s.where(), s.silent
        for other, seconds in s.facts.get("links", ()):
            if other in there:
                yield 1, f"the network between {s.name} on {s.host} and {other} on {there[other].host}", seconds
        for kind, limit in LATE_AFTER.items():
            late = (fact for fact in s.facts.get(kind, ()) if fact[1] > limit)
            yield from ((2, f"{text} for {seconds:.0f} s, for which {s.name} waits", seconds) for text, seconds in late)
        for what, whom, seconds in s.inner:
            if whom and not whom.startswith(OF_RANKS) and seconds > LATE_SECONDS:
                yield 3, f"{whom}, for which {s.name} waits ({what})", seconds
        for _, whom, seconds in s.inner[:1]:
            if waited and not whom and seconds > LATE_SECONDS:
                yield 4, here + s.where(), seconds
            if apart and s.name.startswith("rank ") and seconds > behind:
                yield 5, f"{here}{s.where()}, while other ranks are in another stage", seconds


def tell(folder: Path, stacks: bool = False) -> str:
    """The story in lines: suspects, processes (`_lines`), facts. stacks: also the Python stacks of the processes of
    this machine. Raises ValueError as `read` does."""
    seen = read(folder)
    return "\n".join([*_verdict(seen), *_lines(seen), *_facts(seen), *(_stacks(folder, seen) if stacks else ())])


def at_deadline() -> str:
    """The story of this job for the message of a deadline; "" without status files. The first process writes it into
    the folder, the others name that file: thousands of ranks must not read all files."""
    if (folder := own_folder()) is None:
        return ""
    path = folder / STORY_FILE

    def told() -> str:
        with open(path, "x", encoding="utf-8") as file:
            try:
                file.write(text := tell(folder))
            except ValueError:
                path.unlink()
                raise
        return text

    try:
        return in_background("story", told).result(STORY_SECONDS)
    except FileExistsError:
        return f"where each process was: {path}"
    except (OSError, ValueError, FutureTimeout) as error:
        return f"where each process was is not known: {str(error) or f'{folder} was not read in {STORY_SECONDS:g} s'}"


def _verdict(seen: Sequence[Seen]) -> Iterator[str]:
    found = [what for what, _ in suspects(seen)]
    there = {s.name for s in seen}
    absent = (name for n in range(max(s.ranks for s in seen)) if (name := f"rank {n}") not in there)
    found += [f"{name}, which has not written a status here" for name in absent]
    if all(s.ended == IN_ORDER for s in seen):
        yield "the job has ended; all its processes ended in order"
    elif not found:
        yield "no process is late, as far as the status files show; `doctor --job SAVE --stacks` shows more"
    yield from (f"{'also late' if n else 'late first'}: {what}" for n, what in enumerate(found[:4]))


def _lines(seen: Sequence[Seen]) -> Iterator[str]:
    """A line for each process; neighbours in the order of names that do the same share a line."""
    same = groupby(seen, key=lambda s: (s.host, s.at, s.lost, s.unwritten, [activity[:2] for activity in s.inner]))
    groups = [list(group) for _, group in same]
    for group in groups[:STORY_LINES]:
        first, last = group[0], group[-1]
        names = first.name if first is last else f"{first.name} to {last.name}"
        said = f"; its last line: {first.said.splitlines()[-1]}" if first.said and first is last else ""
        yield f"  {names} ({first.host}{first.at}): {first.how() if first.lost else first.where()}{said}"
    if len(groups) > STORY_LINES:
        yield f"  and {len(groups) - STORY_LINES} more lines"


def _facts(seen: Sequence[Seen]) -> Iterator[str]:
    """A line for each kind in LATE_AFTER, with the facts that last longest."""
    for kind in LATE_AFTER:
        facts = sorted((fact for s in seen for fact in s.facts.get(kind, ())), key=lambda fact: -fact[1])
        texts = [f"{text} for {seconds:.0f} s" for text, seconds in facts[:FACTS_OF_KIND]]
        more = [f"and {len(facts) - FACTS_OF_KIND} more"] * (len(facts) > FACTS_OF_KIND)
        if facts:
            yield f"  {kind}: {'; '.join([*texts, *more])}"


def _stacks(folder: Path, seen: Sequence[Seen]) -> Iterator[str]:
    here = [s for s in seen if s.machine == machine() and not s.ended and s.state != "ended"]
    if not here:
        yield "no process of the job runs on this machine; call --stacks on the machine of the process"
    asked = [(s, stacks_file(folder, s.name), _ask(folder, s)) for s in here]
    end = time.monotonic() + STACKS_SECONDS
    for process, path, problem in asked:
        while not problem and not path.stat().st_size and time.monotonic() < end:
            time.sleep(0.1)
        yield f"\n{process.name} (process {process.process}):"
        yield problem or path.read_text(errors="replace").strip() or f"it wrote nothing within {STACKS_SECONDS:g} s"


def _ask(folder: Path, seen: Seen) -> str:
    """Send the signal for stacks. Returns why this is not possible, else ""."""
    if seen.signal == NO_SIGNAL:
        return f"its stacks cannot be asked for: the job was started with --rl-stack-signal {NO_SIGNAL}"
    if seen.state == "stopped":
        return f"a signal has stopped it, so it cannot write its stacks; `kill -CONT {seen.process}` lets it continue"
    try:
        os.truncate(stacks_file(folder, seen.name), 0)
        os.kill(seen.process, signal.Signals[seen.signal])
    except OSError as error:
        return f"{error.strerror}: only its user and root may ask for its stacks"
    return ""


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
