"""What the launcher put into the environment: the one room that reads it beside device.py and host/."""

from __future__ import annotations

import os
from collections.abc import Mapping


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


def child_environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment and some more, for a process that it starts."""
    return {**os.environ, **more}
