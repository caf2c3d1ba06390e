"""What the launcher put into the environment: the one room that reads it beside device.py and host/."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

SPEAK_SECONDS = 20.0  # that other ranks of a machine leave to the first one's message and the launcher


def launch_env() -> dict[str, int]:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun sets them; a lone process is rank 0 of 1."""
    return {
        "rank": int(os.environ.get("RANK", 0)),
        "world_size": int(os.environ.get("WORLD_SIZE", 1)),
        "local_rank": int(os.environ.get("LOCAL_RANK", 0)),
        "local_world_size": int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    }


def master_address() -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT of the job; an empty name outside torchrun."""
    return os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", 0))


def ray_address() -> str:
    """RAY_ADDRESS, the Ray cluster that the user wants to join; empty without."""
    return os.environ.get("RAY_ADDRESS", "")


@contextmanager
def said_once_a_machine() -> Iterator[None]:
    """A ValueError inside is one of all ranks alike: the first of a machine says it, the launcher then ends the others.

    They wait for that; where it does not come, because that rank alone sees the problem, a rank speaks for itself.
    """
    try:
        yield
    except ValueError:
        if launch_env()["local_rank"]:
            time.sleep(SPEAK_SECONDS)
        raise


def child_environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment and some more, for a process that it starts."""
    return {**os.environ, **more}
