"""Flags of the schedule: in which order the stages work on a rollout."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl_plugin.config.flag import flag


@dataclass(frozen=True)
class ScheduleConfig:
    """The schedule: which stages of a rollout work at the same time."""

    schedule: str = flag(
        "sync",
        "sync: one stage after the other; streamed: each response is graded as soon as it is finished, while the "
        "engine generates the others, with the same results bit for bit",
        choices=("sync", "streamed"),
    )
