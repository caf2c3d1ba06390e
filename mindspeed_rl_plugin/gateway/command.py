"""Runs a command of a user, with limits, in a folder and a process group of its own."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

LAST_BYTES = 2000  # of a command's output that its failure shows
END_LOOK_SECONDS = 0.05  # between two looks whether it has ended
LOOKS_A_MEMORY = 20  # such looks between two looks at its memory
REWARD_VARIABLE = "MINDSPEED_RL_REWARD_FD"  # variable that names the descriptor for its reward


class AgentFailed(Exception):
    """An agent has failed; the text says how."""


async def run_command(
    command: Sequence[str], given: bytes, variables: Mapping[str, str], memory: float
) -> float | None:
    """Run a command, and kill its process group when it ends, or when this call is cancelled. Returns the reward that
    it wrote to its descriptor, None if it wrote nothing.

    given: its standard input; variables: its environment; memory: most that it and its children may have [GiB]. Raises
    AgentFailed.
    """
    folder = tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True)
    try:
        return await _run(command, given, {**variables, "TMPDIR": folder.name}, memory)
    finally:
        await asyncio.to_thread(folder.cleanup)  # it may have many files, and others wait


async def _run(command: Sequence[str], given: bytes, variables: Mapping[str, str], memory: float) -> float | None:
    """See `run_command`; TMPDIR is the command's folder."""
    loop, last = asyncio.get_running_loop(), bytearray()
    with ExitStack() as stack:
        source = stack.enter_context(tempfile.TemporaryFile())
        source.write(given)
        source.seek(0)
        (output, says), (rewards, gives) = _pipe(stack), _pipe(stack)

        def read() -> None:
            with suppress(BlockingIOError):
                last.extend(os.read(output, 1 << 16))
                del last[:-LAST_BYTES]

        process = subprocess.Popen(
            command,
            stdin=source,
            stdout=says,
            stderr=subprocess.STDOUT,
            cwd=variables["TMPDIR"],
            env={**variables, REWARD_VARIABLE: str(gives)},
            pass_fds=(gives,),
            start_new_session=True,
        )
        loop.add_reader(output, read)
        try:
            resident = await _end_of(process, memory)
        finally:
            loop.remove_reader(output)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        read()
        text = last.decode(errors="replace").strip()
        if resident > memory:
            raise AgentFailed(f"had {resident:.2f} GiB with its children; the limit is --rl-agent-memory {memory:g}")
        if process.returncode:
            raise AgentFailed(f"exited with code {process.returncode}; the end of its output:\n{text}")
        with suppress(BlockingIOError):
            return _reward(os.read(rewards, 256))
    return None


def _pipe(stack: ExitStack) -> tuple[int, int]:
    """The ends of a pipe; reading does not wait."""
    ends = os.pipe()
    for end in ends:
        stack.callback(os.close, end)
    os.set_blocking(ends[0], False)
    return ends


async def _end_of(process: subprocess.Popen, memory: float) -> float:
    """Wait until a command has ended, or has more memory than it may. Returns this memory [GiB], else 0."""
    looks = 0
    while process.poll() is None:
        await asyncio.sleep(END_LOOK_SECONDS)
        looks += 1
        if looks % LOOKS_A_MEMORY == 0:
            resident = _residents(int(time.monotonic()))[process.pid] / (1 << 30)
            if resident > memory:
                return resident
    return 0.0


@functools.lru_cache(maxsize=1)
def _residents(second: int) -> Counter[int]:
    """Bytes of memory by process group, read once a second for all commands: on large machines a look takes long."""
    pages = Counter[int]()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
            pages[int(fields[2])] += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return pages


def _reward(written: bytes) -> float | None:
    if not (text := written.decode(errors="replace").strip()):
        return None
    try:
        return float(text)
    except ValueError:
        raise AgentFailed(f"wrote {text!r:.80} to the descriptor {REWARD_VARIABLE}; write one number") from None
