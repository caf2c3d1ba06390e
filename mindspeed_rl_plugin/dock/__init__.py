"""Transfer dock: where the stages of the loop leave rows for each other, exactly once per state."""

from mindspeed_rl_plugin.dock.api import ColumnSpec, Dock, Lease, StateSpec
from mindspeed_rl_plugin.dock.distributed.client import DistributedDock
from mindspeed_rl_plugin.dock.distributed.fleet import Limits, machine
from mindspeed_rl_plugin.dock.factory import make_dock, make_docks
from mindspeed_rl_plugin.dock.local import LocalDock
from mindspeed_rl_plugin.dock.traffic import Moved, Traffic

__all__ = [
    "ColumnSpec",
    "DistributedDock",
    "Dock",
    "Lease",
    "Limits",
    "LocalDock",
    "Moved",
    "StateSpec",
    "Traffic",
    "machine",
    "make_dock",
    "make_docks",
]
