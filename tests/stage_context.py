"""What a stage is built from, in tests: as much of a `RankContext` as a test gives."""

from types import SimpleNamespace
from typing import Any

from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.config.episode_flags import EpisodeConfig
from mindspeed_rl_plugin.engine.response_kind import ONE_TURN
from mindspeed_rl_plugin.episodes.episode_kind import EpisodeKind
from mindspeed_rl_plugin.episodes.setup import EpisodeSetup
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
    fixed = {"config": RLConfig(), "ranks": Ranks(), "monitor": monitor, "responses": ONE_TURN, "graders": graders}
    return SimpleNamespace(**{"dock_of": lambda resource: dock, "leader": True, "longest": 8, **fixed, **parts})


def episodes(tools: int = 1, **flags: Any) -> EpisodeKind:
    """Responses of at most four turns, with so many tools."""
    setup = EpisodeSetup(EpisodeConfig(max_turns=4, **flags), "raw", "", prompt=9, response=9, wait=1.0)
    return EpisodeKind(setup, [{"function": {"name": "ab"[i]}} for i in range(tools)], lambda rows: None)
