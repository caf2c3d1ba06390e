"""Reads the launcher's environment variables, sets those for a user's code, prints [rl] lines, records why a rank ends.
Only this file, device/, host/, tools/ and generators/on_ray.py use the process environment."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# After an error on all ranks: how long ranks wait, while the machine's first rank reports and the launcher ends all.
SPEAK_SECONDS = 20.0
FLUSH_SECONDS = 1.0
_PART, _START = "MINDSPEED_RL_PART", "MINDSPEED_RL_START"
REPLAY = "MINDSPEED_RL_REPLAY"
NO_PROXY = ("NO_PROXY", "no_proxy")  # hosts that clients reach without a proxy
_before_log: list[str] = []
_log: list[str | os.PathLike[str]] = []
_last = [""]  # the last line that was printed with our mark
_at_failure: list[Callable[[str], object]] = []


def launch_env() -> dict[str, int]:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE of torchrun or `become_part`; a lone process is rank 0 of 1."""
    return {
        "rank": int(os.environ.get("RANK", 0)),
        "world_size": int(os.environ.get("WORLD_SIZE", 1)),
        "local_rank": int(os.environ.get("LOCAL_RANK", 0)),
        "local_world_size": int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    }


def replayed() -> dict[str, Any]:
    """What the command `replay` asks of this job: dumps, out (directories), iteration, sample. Of other jobs: {}."""
    return json.loads(os.environ.get(REPLAY, "{}"))


def name_to_users(name: str, value: str) -> None:
    """Set the variable `MINDSPEED_RL_` + name for a user's code in this process and in its children."""
    os.environ[f"MINDSPEED_RL_{name}"] = value


def reach_directly(host: str) -> None:
    """Clients in this process, and in its children, use no proxy for a host."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    os.environ.update(dict.fromkeys(NO_PROXY, f"{known},{host}" if known else host))


def users_variables(further: Sequence[str]) -> dict[str, str]:
    """The environment of a user's command: only variables that programs need, and `further`, by their names."""
    allowed = ("PATH", "HOME", "USER", "SHELL", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV", "MINDSPEED_RL_RUN", *further)
    return {name: os.environ[name] for name in allowed if name in os.environ}


def become_part(first: int, ranks: int, local_ranks: int) -> None:
    """From now on this process is a rank of a part of the launcher's ranks; the launch script sees only this part.

    first, ranks: the part's first rank and its number of ranks; local_ranks: number of its ranks on this machine. The
    local rank, which chooses the device, does not change.
    """
    os.environ["RANK"] = os.environ["ROLE_RANK"] = str(launch_env()["rank"] - first)
    os.environ["WORLD_SIZE"] = os.environ["ROLE_WORLD_SIZE"] = str(ranks)
    os.environ["LOCAL_WORLD_SIZE"] = str(local_ranks)
    os.environ[_PART] = "1"


def is_part() -> bool:
    """Whether `become_part` was called, here or in a process that started this one."""
    return _PART in os.environ


def may_restart() -> bool:
    """Whether the launcher may restart its ranks; then its store still has keys of earlier starts."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return shared and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0


def launcher_store() -> tuple[str, int, str]:
    """Host and port of the launcher's store, and the name of this start of the job in it: "" before `begin_start`."""
    if begun := os.environ.get(_START):
        name, host, port = begun.split()
        return host, int(port), name
    return *master_address(), ""


def launch_name() -> str:
    """A name that is the same for all starts of a job by one launcher; "" if the launcher does not restart ranks."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')} {launcher_store()[:2]}" if may_restart() else ""


def begin_start(name: str, host: str, port: str) -> None:
    """Set MASTER_ADDR and MASTER_PORT to a store that only this start uses."""
    os.environ[_START] = " ".join((name, *map(str, launcher_store()[:2])))
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, port


def launcher() -> int | None:
    """Id of the torchrun process that started this process, maybe through a script; None for another launcher."""
    if not (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):  # torchrun sets it to a different file in each rank
        return None
    process, given = os.getppid(), f"TORCHELASTIC_ERROR_FILE={path}".encode()
    with contextlib.suppress(OSError):  # a process of another user
        while given in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            process = int(Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return process


def environment_apart() -> dict[str, str]:
    """The environment for a process that is not a rank of this job."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", _PART, _START)
    ours = ("MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_")
    return {k: v for k, v in os.environ.items() if k not in ranks and not k.startswith(ours)}


def say(text: str) -> None:
    """Print a text on rank 0 (after `become_part`: rank 0 of each part), see `tell`."""
    if launch_env()["rank"] == 0:
        tell(text)


def tell(text: str) -> None:
    """Print a text on this rank, with [rl] before each line. Characters that stdout cannot encode are escaped."""
    encoding, marked = sys.stdout.encoding or "utf-8", "\n".join(f"[rl] {line}" for line in text.split("\n"))
    print(marked.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    keep(marked)


def keep(line: str) -> None:
    """Append a printed line to the file of `keep_in`, which has only our lines; before `keep_in`, store the line."""
    _last[0] = line
    if not _log:
        return _before_log.append(line)
    with open(_log[0], "a", encoding="utf-8", errors="replace") as file:
        file.write(f"{line}\n")


def last_line() -> str:
    """The last line that this process kept, "" if there is none."""
    return _last[0]


def on_failure(call: Callable[[str], object]) -> None:
    """Register a function; it is called with the reason when this process fails."""
    _at_failure.append(call)


def keep_in(path: str | os.PathLike[str]) -> None:
    """From now on append lines of `keep` to this file; first append the stored lines."""
    _log[:] = [path]
    if _before_log:
        keep("\n".join(_before_log))
    _before_log.clear()


def master_address() -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT of the job; "" and 0 without torchrun."""
    return os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", 0))


def record_failure(reason: str, later: int = 0) -> None:
    """Write the reason of this rank's end for torchrun's summary, the last lines of a job; the first reason is kept.

    later: seconds added to the time if another rank's end is the cause: torchrun calls the earliest failure the cause.
    """
    for call in _at_failure:
        call(reason)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": reason, "timestamp": str(int(time.time()) + later)}
        with contextlib.suppress(FileExistsError), open(path, "x", encoding="utf-8") as file:
            json.dump({"message": {"message": reason, "extraInfo": extra}}, file)


def last_words(line: str, later: int = 0) -> None:
    """Print why this process ends, and call `record_failure`. This works in any thread, even if the main thread hangs
    and holds the lock of sys.stderr."""
    with contextlib.suppress(OSError):
        marked = line.replace("\n", "\n[rl] ")
        os.write(2, f"\n[rl] {marked}\n".encode())
        record_failure(line, later)


def flush_output() -> None:
    """Flush printed text. Waits at most FLUSH_SECONDS, since a hanging thread may hold the lock."""

    def flush() -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()

    flushing = threading.Thread(target=flush, daemon=True)
    flushing.start()
    flushing.join(FLUSH_SECONDS)


def leave_to_first_rank() -> None:
    """Call this before reporting an error that all ranks should have. The first rank of a machine reports it, and the
    launcher ends the other ranks, which wait here. If only this rank has the error, its report follows the wait."""
    if launch_env()["local_rank"]:
        time.sleep(SPEAK_SECONDS)
