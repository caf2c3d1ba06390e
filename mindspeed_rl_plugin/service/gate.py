"""What processes outside of the job may ask of its dock: rows of the states that are open to them, and looks at all.
Their rows are checked where they arrive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mindspeed_rl_plugin.dock import messages as m
from mindspeed_rl_plugin.dock.api import VersionBound, listed
from mindspeed_rl_plugin.dock.core import OUTSIDE
from mindspeed_rl_plugin.dock.storage import Warehouse
from mindspeed_rl_plugin.rows import Rows

MOST_BYTES = 128 << 20  # of the cells of one commit: no other row of the machine moves while they are checked


def called(name: str) -> str:
    """What people call a process outside of the job, by its name, which is "outside WHO NUMBER"."""
    return name.removeprefix(f"{OUTSIDE} ").rpartition(" ")[0]


class Opening(NamedTuple):
    """A state that is open. check: raises ValueError for rows of an epoch, with its bound, that may not be committed;
    beside: columns that it reads of the rows beside those that come."""

    check: Callable[[Rows, VersionBound], None]
    beside: Sequence[str] = ()


class Gate:
    """open: states from which others may lease and to which they may commit; most_bytes: cells of one commit."""

    def __init__(self, open: Mapping[str, Opening], most_bytes: int = MOST_BYTES) -> None:
        self.open, self.most_bytes = open, most_bytes

    def check(self, message: m.Message, bulk: np.ndarray | None, house: Warehouse | None) -> None:
        """Raise ValueError for a request that only the job itself may make, and for rows that it cannot take. Such a
        request changes nothing."""
        kind = type(message).__name__.lower()
        if isinstance(message, (m.Clear, m.Retire, m.Reclaim)) or (isinstance(message, m.Query) and message.epochs):
            raise ValueError(f"{kind}: only the job itself opens, clears and takes back rows")
        if isinstance(message, (m.Ask, m.Release, m.Put)) and message.state not in self.open:
            raise ValueError(
                f"{kind}: state {message.state!r} is not open to processes outside of the job, which lease and commit "
                f"rows of {listed(self.open)}"
            )
        if isinstance(message, m.Put):
            self._check_put(message, bulk, house)

    def _check_put(self, put: m.Put, bulk: np.ndarray | None, house: Warehouse) -> None:
        if put.producer or put.reserve or put.extent is not None or len(put.parts) > 1:
            raise ValueError("put: a process outside of the job commits rows of its leases, with their cells")
        put.checked = True
        rows = house.brought(put, bulk, self.open[put.state].beside)
        if len(rows):
            self.open[put.state].check(rows, house.bound(put.epoch))
