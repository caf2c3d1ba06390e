"""The story of a job that hangs, and the Python stacks of its processes on this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mindspeed_rl_plugin.processes import machine
from mindspeed_rl_plugin.status.status_file import NO_SIGNAL, folder_of, stacks_file
from mindspeed_rl_plugin.status.story import Seen, read, tell

STACKS_SECONDS = 3.0  # for a process to write its stacks


def story(save: str, stacks: bool = False) -> str:
    """The story of the job of `save`, as `tell`. stacks: with those of its processes on this machine. Raises ValueError
    if no process of a job has written its status."""
    folder = folder_of(save)
    text = tell(folder)
    return "\n".join([text, *_stacks(folder, read(folder))]) if stacks else text


def _stacks(folder: Path, seen: Sequence[Seen]) -> Iterator[str]:
    here = [s for s in seen if s.machine == machine() and not s.ended and s.state != "ended"]
    if not here:
        yield "no process of the job runs on this machine; call --stacks on the machine of the process"
    asked = [(s, path := stacks_file(folder, s.name), _size(path), _ask(s)) for s in here]
    end = time.monotonic() + STACKS_SECONDS
    for process, path, before, problem in asked:
        while not problem and _size(path) == before and time.monotonic() < end:
            time.sleep(0.1)
        text = path.read_text(errors="replace")[before:].strip() if path.exists() else ""
        yield f"\n{process.name} (process {process.process}):"
        yield problem or text or f"it wrote nothing within {STACKS_SECONDS:g} s"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _ask(seen: Seen) -> str:
    """Send the signal. Returns why this is not possible, else ""."""
    if seen.signal == NO_SIGNAL:
        return f"its stacks cannot be asked for: the job was started with --rl-stack-signal {NO_SIGNAL}"
    if seen.state == "stopped":
        return f"a signal has stopped it, so it cannot write its stacks; `kill -CONT {seen.process}` lets it continue"
    try:
        os.kill(seen.process, signal.Signals[seen.signal])
    except OSError as error:
        return f"{error.strerror}: only its user and root may ask for its stacks"
    return ""
