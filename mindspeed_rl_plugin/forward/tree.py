"""Packed rows as a tree: tokens with which several rows begin are there once. Only tokens and positions, no model.

In sorted order each row shares its longest common prefix with the row before it, and adds the tokens after this prefix:
a branch. Queries of a branch attend to the row's path from its first token, and are its end, so causal attention that
is aligned at the bottom right is exact, for trees of any depth. Rows without common prefixes are a tree, too.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_rl_plugin.forward.batching import padded
from mindspeed_rl_plugin.forward.fragments import common_tokens
from mindspeed_rl_plugin.rows import Ragged

NOWHERE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Branches:
    """What the layers must know of a tree, or of packed rows without common prefixes."""

    queries: Tensor  # `[n]` int64 on the host, end of each branch among the T tokens of the tree
    keys: Tensor  # `[n]` int64 on the host, end of its path among the K gathered keys
    kv_index: Tensor = NOWHERE  # `[K]` int64, position in the tree of each gathered key; empty: K = T, the same order
    at: Tensor = NOWHERE  # `[S]` int64, position in the tree of each packed position; empty: S = T, the same order

    def to(self, device: torch.device) -> Branches:
        """The same with the positions on a device."""
        return dataclasses.replace(self, kv_index=self.kv_index.to(device), at=self.at.to(device))

    @cached_property
    def query_lengths(self) -> list[int]:
        """`[n]` queries of each branch."""
        return self.queries.diff(prepend=self.queries.new_zeros(1)).tolist()

    @cached_property
    def key_lengths(self) -> list[int]:
        """`[n]` keys of each path."""
        return self.keys.diff(prepend=self.keys.new_zeros(1)).tolist()

    @cached_property
    def cu_seqlens(self) -> tuple[Tensor, Tensor]:
        """`[n + 1]` int32 each, `queries` and `keys` with a leading 0, on the device of the positions, once for all
        layers."""
        cu_q, cu_kv = (F.pad(ends, (1, 0)).to(self.at.device, torch.int32) for ends in (self.queries, self.keys))
        return cu_q, cu_kv

    @cached_property
    def positions(self) -> Tensor:
        """`[T]` int64, depth of each token: its position in its row."""
        paths = zip(self.query_lengths, self.key_lengths, strict=True)
        return torch.cat([torch.arange(keys - queries, keys) for queries, keys in paths]).to(self.kv_index.device)

    @cached_property
    def first(self) -> Tensor:
        """`[T]` int64, first packed position of each token of the tree; 0 for padding that is in no row."""
        at = self.at.cpu().numpy()
        first = np.zeros(int(self.queries[-1]), np.int64)
        first[at[::-1]] = np.arange(len(at))[::-1]
        return torch.from_numpy(first).to(self.at.device)


@dataclass(frozen=True)
class PrefixTree:
    """The tokens that the model runs for the rows of a micro-batch, T in number."""

    tokens: Tensor  # `[1, T]` int64
    position_ids: Tensor  # `[1, T]` int64
    at: Tensor  # `[S]` int64, position in the tree of each packed position
    branches: Branches  # on the host

    def to(self, device: torch.device | str) -> PrefixTree:
        """The same tree on a device; `branches` stay on the host."""
        moved = {name: getattr(self, name).to(device) for name in ("tokens", "position_ids", "at")}
        return dataclasses.replace(self, **moved)


def plan_tree(tokens: Ragged, length: int, multiple: int) -> PrefixTree | None:
    """The tree of packed rows, or None if no two rows begin with the same token.

    length: packed length S with padding. The tree has at least as much padding, as a branch at the end, so that T
    is a multiple of `multiple`. Time: that of sorting the rows and comparing neighbours.
    """
    rows = [row.numpy() for row in tokens.rows()]
    at, parts, paths, queries = [NOWHERE.numpy()] * len(rows), [], [], []
    total, before = 0, None
    for r, shared in common_tokens(rows):
        row, path = rows[r], NOWHERE.numpy() if before is None else at[before][:shared]
        at[r] = np.concatenate([path, np.arange(total, total + len(row) - len(path))])
        if len(row) > len(path):  # else the row before begins with this row
            parts.append(row[len(path) :])
            paths.append(at[r])
            total += len(row) - len(path)
            queries.append(total)
        before = r
    spare = length - len(tokens.values)
    if total == len(tokens.values):
        return None
    whole = padded(total + spare, multiple)
    if whole > total:
        parts.append(np.zeros(whole - total, np.int32))
        paths.append(np.arange(total, whole))
        queries.append(whole)
    keys = np.cumsum([len(path) for path in paths])
    packed = torch.from_numpy(np.concatenate([*at, np.arange(total, total + spare)]))
    branches = Branches(torch.tensor(queries), torch.from_numpy(keys), torch.from_numpy(np.concatenate(paths)), packed)
    values = torch.from_numpy(np.concatenate(parts)).long()
    return PrefixTree(values[None], branches.positions[None], packed, branches)
