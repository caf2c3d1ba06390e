"""What travels with a micro-batch through Megatron's layers, in the place of the mask, and into recomputation."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_rl_plugin.forward.router_replay import Routes
from mindspeed_rl_plugin.forward.tree import Branches

_CARRIED_DTYPES = (torch.int64, torch.uint8, torch.int16, torch.bool)


@dataclass(frozen=True)
class Carried:
    """What layers must know of a micro-batch. As a mask it is one tensor of one dimension, on the host."""

    branches: Branches | None = None  # of packed rows; None: rows are padded
    causal: int = 0  # padded rows: their length if attention gets a causal mask, else 0
    routes: Routes | None = None  # experts of the tokens; None: routers choose

    def encoded(self) -> Tensor:
        """`[bytes]` uint8."""
        branches = [] if self.branches is None else [getattr(self.branches, f.name) for f in _FIELDS]
        routes = [] if self.routes is None else [self.routes.ids, self.routes.part]
        rows = 0 if self.routes is None else self.routes.rows
        parts = [torch.tensor([self.causal, len(branches), rows]), *branches, *routes]
        head = [(_CARRIED_DTYPES.index(part.dtype), part.dim(), *part.shape) for part in parts]
        flat = torch.tensor([len(parts), *(n for each in head for n in each)])
        return torch.cat([_padded(part) for part in (torch.tensor([len(flat)]), flat, *parts)])

    @classmethod
    def decoded(cls, mask: Tensor) -> Carried:
        """Inverse of `encoded`; the tensors are views of the mask."""
        size = int(mask[:8].view(torch.int64))
        head, at = mask[8 : 8 * (size + 1)].view(torch.int64).tolist(), 8 * (size + 1)
        parts, numbers = [], iter(head[1:])
        for _ in range(head[0]):
            dtype, shape = _CARRIED_DTYPES[next(numbers)], [next(numbers) for _ in range(next(numbers))]
            used = math.prod(shape) * dtype.itemsize
            parts.append(mask[at : at + used].view(dtype).reshape(shape))
            at += used + -used % 8
        (causal, branches, rows), *rest = parts[0].tolist(), *parts[1:]
        own, routes = rest[:branches], rest[branches:]
        return cls(Branches(*own) if own else None, causal, Routes(*routes, rows) if routes else None)

    def to(self, device: torch.device) -> Carried:
        """The same with positions and routes on a device."""
        branches = None if self.branches is None else self.branches.to(device)
        routes = self.routes
        if routes is not None:
            routes = dataclasses.replace(routes, ids=routes.ids.to(device), part=routes.part.to(device))
        return dataclasses.replace(self, branches=branches, routes=routes)


_FIELDS = dataclasses.fields(Branches)


def _padded(part: Tensor) -> Tensor:
    """Its bytes, and zeros up to a multiple of 8, so that a view of each part is aligned."""
    used = part.contiguous().reshape(-1).view(torch.uint8)
    return torch.cat([used, used.new_zeros(-len(used) % 8)])
