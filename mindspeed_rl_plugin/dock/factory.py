"""Which medium carries a dock."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from mindspeed_rl_plugin.dock.api import ColumnSpec, Dock, StateSpec
from mindspeed_rl_plugin.dock.local import LocalDock
from mindspeed_rl_plugin.dock.shared import SharedDock

MEDIA = ("local", "shared")


def make_dock(
    columns: Sequence[ColumnSpec],
    states: Sequence[StateSpec],
    *,
    medium: str | None = None,
    group: dist.ProcessGroup | None = None,
    consumer: int = 0,
    consumers: int = 1,
    deadline: float = 600.0,
) -> Dock:
    """A dock with these columns and states.

    medium: "local" (this process) or "shared" (the ranks of the gloo `group`, see `SharedDock`); None takes
    "shared" where `group` has more than one rank. consumer, consumers: which of the data consumers this rank
    belongs to (its data-parallel rank). deadline: seconds that the ranks wait for each other.
    """
    if medium is None:
        medium = "shared" if group is not None and dist.get_world_size(group) > 1 else "local"
    if medium == "local":
        return LocalDock(columns, states)
    if medium == "shared":
        if group is None:
            raise ValueError("a shared dock needs the gloo process group of its ranks")
        local = LocalDock(columns, states) if dist.get_rank(group) == 0 else None
        return SharedDock(local, group, consumer=consumer, consumers=consumers, deadline=deadline)
    raise ValueError(f"dock medium {medium!r} is unknown; known: {', '.join(MEDIA)}")
