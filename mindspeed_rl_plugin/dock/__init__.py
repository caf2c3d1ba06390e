"""Transfer dock: through it the stages of the loop pass rows to each other; a stage finishes each row exactly once."""

from mindspeed_rl_plugin.dock.api import (
    ColumnSpec,
    Gone,
    Lease,
    Moved,
    StateSpec,
    Traffic,
    VersionBound,
    from_tensordict,
    to_tensordict,
)
from mindspeed_rl_plugin.dock.dock import Dock
from mindspeed_rl_plugin.dock.factory import make_docks
from mindspeed_rl_plugin.dock.memory import DockLimits
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId

__all__ = [
    "ColumnSpec",
    "Dock",
    "Gone",
    "Lease",
    "DockLimits",
    "Moved",
    "Ragged",
    "Rows",
    "SampleId",
    "StateSpec",
    "Traffic",
    "VersionBound",
    "from_tensordict",
    "make_docks",
    "to_tensordict",
]
