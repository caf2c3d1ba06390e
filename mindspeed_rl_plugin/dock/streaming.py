"""Streaming in one process: the distributed docks' picking over an epoch that lies in this process's memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mindspeed_rl_plugin.dock.distributed.picking import Ask, pick_ready
from mindspeed_rl_plugin.dock.distributed.records import Shape
from mindspeed_rl_plugin.dock.distributed.views import DONE, STALE, EpochView
from mindspeed_rl_plugin.dock.epoch import Epoch
from mindspeed_rl_plugin.rows import SampleId


def pick_stream(
    epochs: Mapping[int, Epoch],
    state: str,
    version_column: str | None,
    ask: Mapping[str, Any],
    waited: float,
    deadline: float,
) -> list[SampleId] | None:
    """The next rows of a state as `ask` (fields of `picking.Ask`) wants them, [] at the end, None to wait.

    waited: seconds so far, of the `deadline` that also ends a linger. Raises TypeError for a field that is unknown.
    """
    if not epochs:
        return []
    views = {number: StateView(epoch, state, version_column) for number, epoch in epochs.items()}
    asked = Ask(**ask)
    unit = max(view.unit for view in views.values())
    if asked.max_rows is not None and asked.max_rows < unit:
        raise ValueError(f"lease of state {state!r}: max_rows {asked.max_rows} is less than one group of {unit}")
    found = pick_ready(views, asked, waited if waited < deadline else float("inf"))
    return None if found is None else [i for number, rows in found for i in epochs[number].ids(rows.tolist())]


class StateView(EpochView):
    """One epoch as a state sees it; `status` is the epoch's own memory."""

    def __init__(self, epoch: Epoch, state: str, version_column: str | None) -> None:
        self.shape, self.spec = Shape(epoch.groups, epoch.members), epoch.states[state]
        self.status = epoch.status[state].numpy()
        self.home = np.zeros(epoch.groups, np.int32)
        self._epoch, self._state = epoch, state
        self.version = np.full(epoch.groups * epoch.members, -1, np.int64)
        if version_column is not None:
            slots = epoch.cells[version_column].present.nonzero().flatten().tolist()
            self.version[slots] = epoch.cells[version_column].gather(slots).numpy()

    def available(self) -> np.ndarray:
        """`[rows]` bool: can be given out now."""
        return self._epoch.available(self._state).numpy()

    def undone(self) -> np.ndarray:
        """`[rows]` bool: still to be acknowledged."""
        return self._epoch.alive.numpy() & (self.status != DONE) & (self.status != STALE)

    def lengths(self, units: np.ndarray) -> np.ndarray:
        """`[units]` tokens; zeros for a state that reads no tokens."""
        reads_tokens = any(self._epoch.cells[c].spec.level == "token" for c in self.spec.reads)
        return self._epoch.lengths.numpy()[units].sum(1) if reads_tokens else np.zeros(len(units), np.int64)
