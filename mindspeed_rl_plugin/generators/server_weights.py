"""Weights of a server: its own workers pull what was published, and write it while the server stands still."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

from torch import Tensor

from mindspeed_rl_plugin.dock import Gone
from mindspeed_rl_plugin.engine.server_api import ASK_SECONDS, Server
from mindspeed_rl_plugin.reshard.pull import Applied, Pulled

LOOK_SECONDS = 0.1  # between two looks at a pull


class ServerWeights:
    """What a `Service` needs of a `Puller`. address, secret: of the job's dock, which each worker joins; machines: of
    the workers, in their order. Raises ValueError where a worker cannot have the job's weights."""

    def __init__(self, server: Server, address: str, secret: bytes, machines: list[str]) -> None:
        self.server = server
        server.workers("join", address=address, secret=secret.hex(), machines=machines)

    def pull(self, version: int) -> Pulled:
        """Bring a version to the workers, beside the server's steps. Raises Gone, and what a worker says."""
        began = time.monotonic()
        self.server.workers("pull", ASK_SECONDS, version=version)
        while any(one["busy"] for one in self.server.workers("pulled", ASK_SECONDS)):
            time.sleep(LOOK_SECONDS)
        pulled = self.server.workers("pulled", ASK_SECONDS)
        if (newest := max(one["newest"] for one in pulled)) >= 0:
            raise Gone(version, newest)
        return Pulled(version, time.monotonic() - began, sum(one["nbytes"] for one in pulled))

    def apply(self, parameters: Mapping[str, Tensor]) -> Applied:
        """Stop the server between two steps, responses in the making stay as they are, and write what was pulled;
        `ServerEngine.update_weights` lets it go on."""
        began = time.monotonic()
        self.server.ask("/pause?mode=keep&clear_cache=false")
        applied = self.server.workers("apply")[0]
        self.server.ask("/update_weight_version", {"new_version": str(applied["version"])})
        return Applied(applied["version"], time.monotonic() - began, applied["digest"])

    def close(self) -> None:
        """The workers leave the job, and the server is free for another one. It may be gone."""
        with contextlib.suppress(ConnectionError, RuntimeError, TimeoutError, ValueError):
            self.server.workers("leave", ASK_SECONDS)
            self.server.ask("/resume", seconds=ASK_SECONDS)
