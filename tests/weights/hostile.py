"""A device on which every forgotten wait shows: copies come late, and memory that is taken again is full of NaN."""

import time
from collections.abc import Callable

import torch

from mindspeed_rl_plugin.device import Device
from mindspeed_rl_plugin.device.device import ThreadCopier
from mindspeed_rl_plugin.weights import offload

POISON = 0xFF  # as float32, bfloat16 and float64: NaN


class SlowCopier(ThreadCopier):
    """A thread that is late."""

    seconds = 0.02

    def start(self, copies: Callable[[], None]):
        def late() -> None:
            time.sleep(self.seconds)
            copies()

        return super().start(late)


def poison(storage: torch.UntypedStorage) -> None:
    """Fill it."""
    torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).fill_(POISON)


def poisoned_revive(storage: torch.UntypedStorage, nbytes: int) -> None:
    """In the place of `offload._revive`: whoever reads before the copy reads NaN."""
    storage.resize_(nbytes)
    poison(storage)


def poisoned_release(storage: torch.UntypedStorage) -> None:
    """In the place of `offload._release`: whoever still reads it then, reads NaN."""
    poison(storage)
    storage.resize_(0)


def install() -> None:
    """Slow copies and poison for the rest of this process."""
    Device.copier = lambda self: SlowCopier()
    offload._revive = poisoned_revive
    offload._release = poisoned_release
