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
    """A dock with these columns and states, seen by one division of the ranks; see `make_docks`."""
    division = (consumer, consumers)
    return make_docks(columns, states, [division], medium=medium, group=group, deadline=deadline)[0]


def make_docks(
    columns: Sequence[ColumnSpec],
    states: Sequence[StateSpec],
    divisions: Sequence[tuple[int, int]],
    *,
    medium: str | None = None,
    group: dist.ProcessGroup | None = None,
    deadline: float = 600.0,
) -> list[Dock]:
    """One dock, seen by several divisions of the ranks into consumers: a `Dock` for each.

    divisions: (consumer that this rank belongs to, number of consumers), such as its data parallel rank or
    its rollout engine. medium: "local" (this process) or "shared" (the ranks of the gloo `group`, see
    `SharedDock`); None takes "shared" where `group` has more than one rank. deadline: seconds that the ranks
    wait for each other. Raises ValueError for an unknown medium.
    """
    if medium is None:
        medium = "shared" if group is not None and dist.get_world_size(group) > 1 else "local"
    if medium == "local":
        return [LocalDock(columns, states)] * len(divisions)
    if medium == "shared":
        if group is None:
            raise ValueError("a shared dock needs the gloo process group of its ranks")
        local = LocalDock(columns, states) if dist.get_rank(group) == 0 else None
        return [SharedDock(local, group, consumer=c, consumers=n, deadline=deadline) for c, n in divisions]
    raise ValueError(f"dock medium {medium!r} is unknown; known: {', '.join(MEDIA)}")
