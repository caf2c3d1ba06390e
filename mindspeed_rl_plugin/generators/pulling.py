"""An engine's pull of weights, in a thread, during its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

from torch import Tensor

from mindspeed_rl_plugin.generators.description import Description, weights_of
from mindspeed_rl_plugin.layout.layout import EngineParallel
from mindspeed_rl_plugin.processes import in_background
from mindspeed_rl_plugin.service.guest_dock import GuestDock
from mindspeed_rl_plugin.weights.machine_staging import Shared
from mindspeed_rl_plugin.weights.published_memory import sources_of
from mindspeed_rl_plugin.weights.pull import Puller


def puller_of(
    dock: GuestDock,
    job: Description,
    parallel: EngineParallel,
    parameters: Mapping[str, Tensor],
    rank: int,
    here: list[int],
) -> Puller:
    """A puller of the weights that a job publishes, for a rank of an engine. here: ranks of the engine on this machine;
    one of them reads for all."""
    limits = {"deadline": job.deadline, "sharing": partial(Shared, dock.calls.me)}
    return Puller(weights_of(dock), parallel, parameters, sources_of(dock), rank=rank, ranks=here, **limits)


class Weights:
    """Pulls weights during the engine's steps. ready: called when a pull has ended, also with an error. cost: seconds
    of all successful pulls, and bytes that this process read for them, since the last `take_cost`."""

    def __init__(self, puller: Puller, ready: Callable[[int], None]) -> None:
        self.puller, self._ready = puller, ready
        self._last: Future[None] | None = None
        self.cost = (0.0, 0)

    def pull(self, version: int) -> None:
        """Begin to pull a version, once the previous pull has ended."""
        self.finish()
        self._last = in_background("pull", partial(self._pull, version))

    @property
    def busy(self) -> bool:
        return self._last is not None and not self._last.done()

    def finish(self) -> BaseException | None:
        """Wait for the last pull. Returns its error, or None."""
        return None if self._last is None else self._last.exception()

    def take_cost(self) -> tuple[float, int]:
        """Returns `cost` and sets it to 0. No pull may be running."""
        cost, self.cost = self.cost, (0.0, 0)
        return cost

    def _pull(self, version: int) -> None:
        try:
            pulled = self.puller.pull(version)
            self.cost = self.cost[0] + pulled.seconds, self.cost[1] + pulled.nbytes
        finally:
            self._ready(version)
