"""An engine's pull of weights, in a thread beside its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.reshard.pull import Puller


class Weights:
    """Pulls beside the engine's steps. ready: called when a pull is over, well or not. cost: seconds of all pulls that
    went well, and bytes that this process read for them, since `take_cost`."""

    def __init__(self, puller: Puller, ready: Callable[[int], None]) -> None:
        self.puller, self._ready = puller, ready
        self._device = get_device()
        self._current = None if self._device.is_cpu else self._device.current()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.cost = (0.0, 0)

    def begin(self, version: int) -> None:
        """Pull a version; the pull before it is over."""
        self.finish()
        self._thread = threading.Thread(target=self._pull, args=(version,), daemon=True, name="pull")
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a pull is under way."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> Exception | None:
        """Wait for the pull; why it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._error

    def take_cost(self) -> tuple[float, int]:
        """`cost`, which begins anew; no pull is under way."""
        cost, self.cost = self.cost, (0.0, 0)
        return cost

    def _pull(self, version: int) -> None:
        self._error = None
        try:
            if self._current is not None:  # a thread begins with the first device
                self._device.api.set_device(self._current)
            pulled = self.puller.pull(version)
            self.cost = self.cost[0] + pulled.seconds, self.cost[1] + pulled.nbytes
        except Exception as error:  # noqa: BLE001 - raised in the main thread, which would wait for ever otherwise
            self._error = error
        self._ready(version)
