"""Transfer dock: where the stages of the loop leave rows for each other, exactly once per state."""

from mindspeed_rl_plugin.dock.api import ColumnSpec, Dock, Lease, StateSpec
from mindspeed_rl_plugin.dock.distributed.client import DistributedDock
from mindspeed_rl_plugin.dock.distributed.fleet import Limits, machine
from mindspeed_rl_plugin.dock.edge import from_tensordict, to_tensordict
from mindspeed_rl_plugin.dock.factory import make_dock, make_docks, usual_medium
from mindspeed_rl_plugin.dock.local import LocalDock
from mindspeed_rl_plugin.dock.traffic import Moved, Traffic
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId

__all__ = [
    "ColumnSpec",
    "DistributedDock",
    "Dock",
    "Lease",
    "Limits",
    "LocalDock",
    "Moved",
    "Ragged",
    "Rows",
    "SampleId",
    "StateSpec",
    "Traffic",
    "from_tensordict",
    "machine",
    "make_dock",
    "make_docks",
    "to_tensordict",
    "usual_medium",
]
