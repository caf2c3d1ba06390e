"""Only one job may use a `--save` directory. The job's first rank is the *owner*: a file in the directory names it, and
the file's modification time is a heartbeat."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.checkpoints.checkpoint_files import mend_tracker
from mindspeed_rl_plugin.environment import last_words, launch_name, say
from mindspeed_rl_plugin.monitor.run_files import write_json
from mindspeed_rl_plugin.processes import began, machine
from mindspeed_rl_plugin.service.guest_dock import here
from mindspeed_rl_plugin.status import status_file

FILE = "owner.json"  # in SAVE/rl
BEAT_SECONDS = 5.0  # between two heartbeats
DEAD_SECONDS = 60.0  # after this time without a heartbeat an owner on another machine counts as dead

NAMED = {"machine", "process", "began", "name", "since", "launch"}  # fields of the file

_over = threading.Event()


def own(save: str) -> None:
    """Make this process the owner until it ends, and repair an empty tracker file. Called by the first rank before
    anything is built. Idempotent. Raises ValueError if another owner is alive; for an owner on another machine the
    check takes up to DEAD_SECONDS."""
    path = Path(save, "rl", FILE).absolute()  # absolute: a user's code may change the directory
    me = {"machine": machine(), "process": os.getpid(), "began": began(os.getpid()), "name": here("a job"),
          "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"), "launch": launch_name()}  # fmt: skip
    if (owner := _read(path)) and _same(owner, me):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if owner:
        _wait_for_its_end(path, owner, me)
        say(f"--save {save}: its owner, {_text(owner)}, is gone; this job takes it over")
    write_json(path, me)
    if not _same(owner := _read(path) or me, me):
        raise ValueError(_refusal(save, owner))  # two jobs started at once, and the other wrote the file last
    status_file.clear(save)
    threading.Thread(target=_beat, args=(path, me, _over), daemon=True).start()
    atexit.register(_leave, path, me)
    mend_tracker(save)


def _wait_for_its_end(path: Path, owner: dict[str, Any], me: dict[str, Any]) -> None:
    save, first = path.parent.parent, path.stat().st_mtime
    if owner["machine"] == me["machine"]:
        if began(owner["process"]) == owner["began"]:
            raise ValueError(_refusal(save, owner))
        return
    if me["launch"] and owner["launch"] == me["launch"]:
        return  # an earlier start of this job had rank 0 on that machine; the processes of that start end by themselves
    (probe := path.with_name(f".{FILE}.{me['process']}")).touch()  # clocks of machines may differ
    age = max(probe.stat().st_mtime - first, 0.0)
    probe.unlink()
    sign = f"last sign of life {age:.0f} s ago"
    if (left := DEAD_SECONDS - age) > 0:
        say(f"--save {save} is owned by {_text(owner)}, {sign}; if none follows in {left:.0f} s this job takes it over")
    end = time.monotonic() + left
    while time.monotonic() < end:
        time.sleep(min(1.0, left))
        try:
            if path.stat().st_mtime != first:
                raise ValueError(_refusal(save, owner))
        except FileNotFoundError:  # the owner has ended normally
            return
    owner["name"] += f" ({sign})"


def _beat(path: Path, me: dict[str, Any], over: threading.Event) -> None:
    while not over.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError, ValueError):  # the file system may be unavailable for a while
            if (owner := _read(path)) is None:
                write_json(path, me)
            elif not _same(owner, me):
                last_words(f"--save {path.parent.parent} was taken over by {_text(owner)}, so this job ends")
                os._exit(1)
            os.utime(path)


def _leave(path: Path, me: dict[str, Any]) -> None:
    _over.set()
    with contextlib.suppress(ValueError):
        if (owner := _read(path)) and _same(owner, me):
            path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any] | None:
    """The owner in the file; None without a file. Raises ValueError for invalid contents."""
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        owner = None
    if not isinstance(owner, dict) or not owner.keys() >= NAMED:
        raise ValueError(f"{path} names no job; remove it if no job uses this --save")
    return owner


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[name] == other[name] for name in ("machine", "process", "began"))


def _text(owner: dict[str, Any]) -> str:
    return f"{owner['name']} since {owner['since']}"


def _refusal(save: object, owner: dict[str, Any]) -> str:
    return (
        f"--save {save} belongs to {_text(owner)}, which runs: two jobs would overwrite each other's checkpoints; "
        "wait until that job ends, end it, or give this job another --save"
    )
