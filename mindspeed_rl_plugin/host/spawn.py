"""Host mode in processes started by multiprocessing's spawn.

Such a process imports the main script again, and so Megatron, before it runs its target. A script that was started by
`python -m mindspeed_rl_plugin` does not activate host mode itself. So the process imports `host.spawned` as its main
module; `host.spawned` activates host mode and then runs the script.
"""

from __future__ import annotations

import functools
import multiprocessing.spawn
import os
from typing import Any

MAIN = "MINDSPEED_RL_HOST_MAIN"  # path of the main script, from parent to child


def install() -> None:
    """Let processes that are spawned from now on start in host mode."""
    original = multiprocessing.spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        data = original(name)
        path = data.pop("init_main_from_path", None)
        if path is not None:
            os.environ[MAIN] = path
            data["init_main_from_name"] = "mindspeed_rl_plugin.host.spawned"
        return data

    multiprocessing.spawn.get_preparation_data = get_preparation_data
