"""Transfer dock: where the stages of the loop leave rows for each other, exactly once per state."""

from mindspeed_rl_plugin.dock.api import ColumnSpec, Dock, Lease, StateSpec
from mindspeed_rl_plugin.dock.factory import make_dock, make_docks
from mindspeed_rl_plugin.dock.local import LocalDock
from mindspeed_rl_plugin.dock.shared import SharedDock

__all__ = ["ColumnSpec", "Dock", "Lease", "LocalDock", "SharedDock", "StateSpec", "make_dock", "make_docks"]
