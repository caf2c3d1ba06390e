"""Small agreements between ranks at start: rank 0 decides, everybody hears it, errors included."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl_plugin.launch import checkpoint_files as files


def on_rank_0(function: Callable[[], Any]) -> Any:
    """Result of `function`, run by rank 0 alone. Its ValueError or OSError is raised on every rank."""
    if not _many():
        return function()
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = function()
        except (ValueError, OSError) as error:
            box[1] = str(error)
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise ValueError(box[1])
    return box[0]


def is_rank_0() -> bool:
    """Whether this process is the first of the job."""
    return _rank() == 0


class CheckpointDigest:
    """SHA-256 over every file that a weights-only load of `folder` may read, read in the background.

    The ranks share the reading, each in a thread of its own, for a large checkpoint takes minutes. Building it and
    `result` are collective. Raises ValueError on every rank when no rank sees a file there.
    """

    def __init__(self, folder: str) -> None:
        listings = _gather(files.weight_files(folder))
        if not any(listings):
            raise ValueError(f"{folder} holds no checkpoint files")
        self._folder = folder
        self._mine = files.assign_files(listings)[_rank()]
        self._found: dict[str, str] | str = "was not read"
        self._thread = threading.Thread(target=self._read, name="rl-reference-digest", daemon=True)
        self._thread.start()

    def result(self, deadline: float) -> str:
        """The digest, waited for; `deadline`: seconds. Raises ValueError on every rank for a file that went missing."""
        self._thread.join(deadline)
        late = f"rank {_rank()} has not read its share of {self._folder} within {deadline:g} s (--rl-wait-timeout)"
        parts = _gather(late if self._thread.is_alive() else self._found)
        problems = [part for part in parts if isinstance(part, str)]
        if problems:
            raise ValueError(problems[0])
        return files.combine_hashes({path: digest for part in parts for path, digest in part.items()})

    def _read(self) -> None:
        try:
            self._found = files.hash_files(self._folder, self._mine)
        except OSError as error:
            self._found = f"{self._folder}: {error}"


def weights_digest(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over the parameters of all ranks, in rank order: names, shapes, dtypes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in parameters:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        # A copy, for .numpy() makes a storage unresizable for good, and the swap resizes the parameters'.
        copy = tensor.detach().to("cpu", copy=True).contiguous()
        digest.update(copy.view(-1).view(torch.uint8).numpy())
    return files.combine_hashes({f"{rank:06d}": h for rank, h in enumerate(_gather(digest.hexdigest()))})


def _gather(value: Any) -> list[Any]:
    if not _many():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _rank() -> int:
    return dist.get_rank() if _many() else 0


def _many() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
