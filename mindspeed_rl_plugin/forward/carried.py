"""What travels with a micro-batch through Megatron's layers, in the place of the mask, and into recomputation."""

from __future__ import annotations

import dataclasses
import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl_plugin.forward.router_replay import Routes
from mindspeed_rl_plugin.forward.tree import Branches


@dataclass(frozen=True)
class Carried:
    """What layers must know of a micro-batch. As a mask it is one tensor of one dimension, on the host."""

    branches: Branches | None = None  # of packed rows; None: rows are padded
    causal: int = 0  # padded rows: their length if attention gets a causal mask, else 0
    routes: Routes | None = None  # experts of the tokens; None: routers choose

    def encoded(self) -> Tensor:
        """`[bytes]` uint8: bytes, since recomputation may pass on a copy of a tensor, but no other object."""
        _AsNumpy(written := io.BytesIO(), protocol=5).dump(self)
        return torch.frombuffer(written.getbuffer(), dtype=torch.uint8)

    @classmethod
    def decoded(cls, mask: Tensor) -> Carried:
        """Inverse of `encoded`."""
        return pickle.loads(mask.numpy())

    def to(self, device: torch.device) -> Carried:
        """The same with positions and routes on a device."""
        branches, routes = (None if part is None else part.to(device) for part in (self.branches, self.routes))
        return dataclasses.replace(self, branches=branches, routes=routes)


class _AsNumpy(pickle.Pickler):
    """Writes tensors as arrays, several times as fast."""

    def reducer_override(self, value: Any) -> Any:
        return (torch.from_numpy, (value.numpy(),)) if isinstance(value, Tensor) else NotImplemented
