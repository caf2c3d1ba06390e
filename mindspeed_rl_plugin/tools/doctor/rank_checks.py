"""The checks of ranks, one on each device: of the device, its memory, and the links between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from functools import partial

from mindspeed_rl_plugin.device.device import get_device
from mindspeed_rl_plugin.environment import launch_env
from mindspeed_rl_plugin.generators.launcher_ranks import init_group, store
from mindspeed_rl_plugin.ranks import gather_all, wait_at_most
from mindspeed_rl_plugin.tools.doctor.links import LINK_CHECKS, link_steps
from mindspeed_rl_plugin.tools.doctor.machine import DEVICE_CHECKS, device_results
from mindspeed_rl_plugin.tools.doctor.memory_checks import MEMORY_CHECKS, memory_steps
from mindspeed_rl_plugin.tools.doctor.program import CheckCall, work
from mindspeed_rl_plugin.tools.doctor.result import Check

RANKS_START = Check(
    "links",
    "start of the ranks",
    "",
    "the message, or the log that --keep keeps, says why",
    "machine memory links trainer",
)
RANK_CHECKS = (RANKS_START, *DEVICE_CHECKS, *MEMORY_CHECKS, *LINK_CHECKS)


def steps(seconds: float) -> Iterator[CheckCall]:
    """All checks of a rank, in the same order on all ranks. seconds: limit for all; a fifth of it for each wait."""
    device, limit = get_device(), seconds / 5

    def start() -> tuple[bool, str]:
        wait_at_most(limit)
        init_group(store(), timedelta(seconds=limit))
        return True, ""

    yield CheckCall(RANKS_START, start)
    yield CheckCall(DEVICE_CHECKS[0], partial(device_results, device, launch_env()["local_rank"], gather_all))
    yield from memory_steps(device)
    yield from link_steps(device, limit)


if __name__ == "__main__":
    work(steps)
