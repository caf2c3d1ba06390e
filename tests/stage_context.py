"""What a stage is built from, in tests: as much of a `RankContext` as a test gives."""

from types import SimpleNamespace
from typing import Any

from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.monitor.console import ProgressBar


class Ranks:
    """Rank 0 of a world whose other ranks contribute `others`, one list a collective call."""

    rank, group, barrier = 0, None, staticmethod(lambda what: None)

    def __init__(self, others: Any = (), world: int = 1, deadline: float = 5.0) -> None:
        self.world, self.deadline, self._others = world, deadline, iter(others)

    def gather(self, value: Any) -> list[Any]:
        return [value, *next(self._others, [])]

    def broadcast(self, value: Any) -> Any:
        return value


def context_of(dock: Any = None, **parts: Any) -> SimpleNamespace:
    """Of rank 0, over one dock; parts: fields of `RankContext`."""
    monitor = SimpleNamespace(progress=lambda count, what="generate": ProgressBar(count, what, shown=False))
    graders = SimpleNamespace(names=(), weights=())
    fixed = {"config": RLConfig(), "ranks": Ranks(), "monitor": monitor, "environments": None, "graders": graders}
    return SimpleNamespace(**{"dock_of": lambda resource: dock, "leader": True, "longest": 8, **fixed, **parts})
