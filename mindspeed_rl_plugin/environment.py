"""What the launcher put into the environment, and what a user's code finds there: here, in device/, host/ and tools/
only."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path

SPEAK_SECONDS = 20.0  # that other ranks of a machine leave to the first one's message and the launcher
FLUSH_SECONDS = 1.0
_PART, _START = "MINDSPEED_RL_PART", "MINDSPEED_RL_START"
_before_log: list[str] = []
_log: list[str | os.PathLike[str]] = []


def launch_env() -> dict[str, int]:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun sets them; a lone process is rank 0 of 1."""
    return {
        "rank": int(os.environ.get("RANK", 0)),
        "world_size": int(os.environ.get("WORLD_SIZE", 1)),
        "local_rank": int(os.environ.get("LOCAL_RANK", 0)),
        "local_world_size": int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    }


def name_to_users(name: str, value: str) -> None:
    """A user's code in this process, and in those that it will start, finds a value as `MINDSPEED_RL_` and the name."""
    os.environ[f"MINDSPEED_RL_{name}"] = value


def become_part(first: int, ranks: int, local_ranks: int) -> None:
    """From now on this process is one of a part of the launcher's ranks, which for the launch script are all there are.

    first, ranks: of the part; local_ranks: of these on this machine. The local rank, by which devices are taken, stays.
    """
    os.environ["RANK"] = os.environ["ROLE_RANK"] = str(launch_env()["rank"] - first)
    os.environ["WORLD_SIZE"] = os.environ["ROLE_WORLD_SIZE"] = str(ranks)
    os.environ["LOCAL_WORLD_SIZE"] = str(local_ranks)
    os.environ[_PART] = "1"


def is_part() -> bool:
    """Whether `become_part` was called, here or in a process that started this one."""
    return _PART in os.environ


def may_restart() -> bool:
    """Whether the launcher may start its ranks again, which find its store as the last ones left it."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return shared and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0


def launcher_store() -> tuple[str, int, str]:
    """Host and port of the launcher's store, and the name of this start of the job in it: "" before `begin_start`."""
    if begun := os.environ.get(_START):
        name, host, port = begun.split()
        return host, int(port), name
    return *master_address(), ""


def launch_name() -> str:
    """What the starts of a job by one launcher have in common; "" where it starts its ranks once."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')} {launcher_store()[:2]}" if may_restart() else ""


def begin_start(name: str, host: str, port: str) -> None:
    """From now on MASTER_ADDR and MASTER_PORT are those of a store of this start alone."""
    os.environ[_START] = " ".join((name, *map(str, launcher_store()[:2])))
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, port


def launcher() -> int | None:
    """The torchrun agent that started this process, maybe by a script between; None where another launcher did."""
    if not (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):  # of this rank alone
        return None
    process, given = os.getppid(), f"TORCHELASTIC_ERROR_FILE={path}".encode()
    with contextlib.suppress(OSError):  # of another user
        while given in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            process = int(Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return process


def environment_apart() -> dict[str, str]:
    """For a process that is no rank of this job's launcher."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", _PART, _START)
    ours = ("MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_")
    return {k: v for k, v in os.environ.items() if k not in ranks and not k.startswith(ours)}


def say(text: str) -> None:
    """Print a text on the job's first rank, each of its lines marked, as far as stdout can."""
    if launch_env()["rank"] == 0:
        encoding, marked = sys.stdout.encoding or "utf-8", "\n".join(f"[rl] {line}" for line in text.split("\n"))
        print(marked.encode(encoding, "backslashreplace").decode(encoding), flush=True)
        keep(marked)


def keep(line: str) -> None:
    """A line that was printed, for the file of the run's own lines, which are few among Megatron's."""
    if not _log:
        return _before_log.append(line)
    with open(_log[0], "a", encoding="utf-8", errors="replace") as file:
        file.write(f"{line}\n")


def keep_in(path: str | os.PathLike[str]) -> None:
    """That file: this process appends to it what was kept, and what will be."""
    _log[:] = [path]
    if _before_log:
        keep("\n".join(_before_log))
    _before_log.clear()


def master_address() -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT of the job; an empty name outside torchrun."""
    return os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", 0))


def record_failure(reason: str, later: int = 0) -> None:
    """Leave the reason of this rank's end to torchrun, for its summary, the last lines of a job; the first one stays.

    later: seconds after now, for an end that only follows another rank's: torchrun takes the earliest for the cause.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": reason, "timestamp": str(int(time.time()) + later)}
        with contextlib.suppress(FileExistsError), open(path, "x", encoding="utf-8") as file:
            json.dump({"message": {"message": reason, "extraInfo": extra}}, file)


def last_words(line: str, later: int = 0) -> None:
    """Say why this process ends, and leave it to torchrun as `record_failure` does: of use in any thread, for the main
    one may hang with the lock of sys.stderr held."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n[rl] {line}\n".encode())
        record_failure(line, later)


def flush_output() -> None:
    """What was printed, in FLUSH_SECONDS at most: a thread that hangs may hold a lock here too."""

    def flush() -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()

    flushing = threading.Thread(target=flush, daemon=True)
    flushing.start()
    flushing.join(FLUSH_SECONDS)


def leave_to_first_rank() -> None:
    """To be called before an error is reported that all ranks have alike: the first of a machine reports it, the
    launcher then ends the others. Where that does not come, because a rank alone sees the problem, it goes on."""
    if launch_env()["local_rank"]:
        time.sleep(SPEAK_SECONDS)
