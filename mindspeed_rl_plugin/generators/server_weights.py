"""Weights of a server: its own workers pull what was published, and write it while the server stands still."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from mindspeed_rl_plugin.dock import Gone
from mindspeed_rl_plugin.engine.server_api import ASK_SECONDS, Server
from mindspeed_rl_plugin.weights.pull import Applied, Pulled

LOOK_SECONDS = 0.1  # between two looks at a pull
STAY_SECONDS = 5.0  # between two words to the server, which waits `server_worker.HELD_SECONDS` for one
FAILURES = (ConnectionError, RuntimeError, TimeoutError, ValueError)  # of a server that is gone, or refuses


class ServerWeights:
    """What an `EngineLoop` needs of a `Puller`.

    address, secret: of the job's dock, which each worker joins; machines: of the workers, in their order; lost: called,
    in a thread, where the server has another client, or is silent for half of its deadline. Raises ValueError where it
    has a client already, or a worker cannot have the job's weights.
    """

    def __init__(
        self,
        server: Server,
        address: str,
        secret: bytes,
        machines: list[str],
        lost: Callable[[Exception], None],
    ) -> None:
        self.server, self._client, self._lost = server, secrets.token_hex(8), lost
        try:
            self._workers("join", None, address=address, secret=secret.hex(), machines=machines)
        except BaseException:
            with contextlib.suppress(*FAILURES):  # of those that have not joined
                self._workers("leave", ASK_SECONDS)
            raise
        self._closing, self._heard = threading.Event(), time.monotonic()
        threading.Thread(target=self._stay, daemon=True, name="stay").start()

    def pull(self, version: int) -> Pulled:
        """Bring a version to the workers, beside the server's steps. Raises Gone, and what a worker says."""
        began = time.monotonic()
        self._workers("pull", ASK_SECONDS, version=version)
        while any(one["busy"] for one in self._workers("pulled", ASK_SECONDS)):
            time.sleep(LOOK_SECONDS)
        pulled = self._workers("pulled", ASK_SECONDS)
        if (newest := max(one["newest"] for one in pulled)) >= 0:
            raise Gone(version, newest)
        return Pulled(version, time.monotonic() - began, sum(one["nbytes"] for one in pulled))

    def apply(self, parameters: Mapping[str, Tensor]) -> Applied:
        """Stop the server between two steps, responses in the making stay as they are, and write what was pulled;
        `ServerEngine.update_weights` lets it go on."""
        began = time.monotonic()
        self.server.ask("/pause?mode=keep&clear_cache=false")
        applied = self._workers("apply")[0]
        self.server.ask("/update_weight_version", {"new_version": str(applied["version"])})
        return Applied(applied["version"], time.monotonic() - began, applied["digest"])

    def close(self) -> None:
        """The workers leave the job, and the server is free for another one. It may be gone; one that was silent for
        long already is left soon, for the job waits for the rows."""
        self._closing.set()
        patience = max(ASK_SECONDS - (time.monotonic() - self._heard), STAY_SECONDS)
        with contextlib.suppress(*FAILURES):
            self._workers("leave", patience)
            self.server.ask("/resume", seconds=patience)

    def _stay(self) -> None:
        """Let the server know that its client is there. One that does not answer is lost before the job has waited for
        its responses in vain."""
        while not self._closing.wait(STAY_SECONDS):
            try:
                self._workers("stay", ASK_SECONDS)
                self._heard = time.monotonic()
            except FAILURES as error:
                if isinstance(error, ValueError) or time.monotonic() - self._heard > self.server.deadline / 2:
                    self._lost(error)
                    return

    def _workers(self, name: str, seconds: float | None = None, **arguments: Any) -> list[Any]:
        return self.server.workers(name, seconds, client=self._client, **arguments)
