"""Small agreements between ranks at start: rank 0 decides, everybody hears it, errors included."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl_plugin.startup import files


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
    return not _many() or dist.get_rank() == 0


def checkpoint_digest(folder: str) -> str:
    """SHA-256 over every file that a weights-only load of `folder` may read; the ranks share the reading.

    Raises ValueError on every rank when no rank sees a file there.
    """
    listings = _gather(files.weight_files(folder))
    if not any(listings):
        raise ValueError(f"{folder} holds no checkpoint files")
    mine = files.assign_files(listings)[dist.get_rank() if _many() else 0]
    hashes: dict[str, str] = {}
    for part in _gather(files.hash_files(folder, mine)):
        hashes.update(part)
    return files.combine_hashes(hashes)


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


def _many() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
