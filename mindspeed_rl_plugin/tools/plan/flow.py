"""Computes the bytes of a reshard per rank and node from the cells that ranks have and need.

A cell is a range of a complete tensor that no rank's layout cuts. With arrays over cells, a model of 671 B parameters
on hundreds of ranks takes seconds. Received bytes, also those between nodes, are exactly those by `make_plan` (in
`layout.transfer_plan`), which a run uses. For sent bytes all sources of a cell are assumed to send equal parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_rl_plugin.layout.layout import Canonical, Layout


@dataclass(frozen=True)
class Flow:
    """Bytes of a reshard per rank, `[ranks]` int or float64; 0 for missing ranks of the last node."""

    received: np.ndarray  # from other ranks
    received_far: np.ndarray  # part of `received`, from other nodes
    sent: np.ndarray  # to other ranks
    sent_far: np.ndarray  # part of `sent`, to other nodes
    node_in: np.ndarray  # `[nodes]`, from other nodes
    node_out: np.ndarray  # `[nodes]`, to other nodes

    def in_flight(self, ranks: Sequence[int], bucket_bytes: int) -> int:
        """Most bytes of the buffers of `transfer.stream` on any of `ranks`: two for sending and two for receiving. A
        buffer has at most half a bucket; two together have at most the bytes that the rank sends or receives."""
        boxes = (np.minimum(moved[ranks], bucket_bytes) for moved in (self.sent, self.received))
        return int(np.ceil(sum(boxes)).max())


class FlowCells:
    """Both sides of a reshard, `has` and `wants`: booleans `[nodes, ranks per node, cells]`. sources: rank -> layout of
    all trainer ranks, so that every cell has a source; destinations: the same of engine ranks; itemsize: bytes of an
    element; node_size: number of consecutive ranks on a node."""

    def __init__(
        self,
        sources: Mapping[int, Layout],
        destinations: Mapping[int, Layout],
        tensors: Mapping[str, Canonical],
        *,
        itemsize: int,
        node_size: int,
    ) -> None:
        self._grid = (1 + max(*sources, *destinations) // node_size, node_size)
        base = np.cumsum([0, *(t.slices for t in tensors.values())])
        begins = dict(zip(tensors, base.tolist(), strict=False))
        spans = {id(x): _spans(x, begins) for x in (*sources.values(), *destinations.values())}
        self._edges = np.unique(np.concatenate([base, *(s.ravel() for s in spans.values())]))
        tensor = np.searchsorted(base, self._edges[:-1], side="right") - 1
        slice_bytes = np.array([t.slice_bytes(itemsize) for t in tensors.values()], np.int64)
        self.nbytes = np.diff(self._edges) * slice_bytes[tensor]
        held = {key: self._mark(span) for key, span in spans.items()}
        self.has, self.wants = self._table(sources, held), self._table(destinations, held)

    def _mark(self, spans: np.ndarray) -> np.ndarray:
        """`[cells]` whether a layout's spans `[n, 2]` contain a cell."""
        steps = np.zeros(len(self._edges), np.int32)
        np.add.at(steps, np.searchsorted(self._edges, spans[:, 0]), 1)
        np.add.at(steps, np.searchsorted(self._edges, spans[:, 1]), -1)
        return np.cumsum(steps)[:-1] > 0

    def _table(self, layouts: Mapping[int, Layout], held: Mapping[int, np.ndarray]) -> np.ndarray:
        table = np.zeros((np.prod(self._grid), len(self.nbytes)), bool)
        for rank, layout in layouts.items():
            table[rank] = held[id(layout)]
        return table.reshape(*self._grid, -1)

    def flow(self, everything: bool = False) -> Flow:
        """Bytes if every destination gets the cells that it needs and lacks; everything: all cells that it lacks. A
        cell comes from ranks of the same node if any of them has it; all ranks that can send it send equal parts."""
        lacks = ~self.has & (self.wants.any(2, keepdims=True) if everything else self.wants)
        holders = self.has.sum(1)  # [nodes, cells], as the next arrays: number of the node's ranks that have it
        far = holders == 0
        asked = lacks.sum(1) * self.nbytes
        received, received_far = lacks @ self.nbytes, (lacks & far[:, None]) @ self.nbytes
        each = np.where(far, 0, asked / np.maximum(holders, 1))
        sent = np.stack([here @ share for here, share in zip(self.has, each, strict=True)])
        sent_far = self.has @ (np.where(far, asked, 0).sum(0) / np.maximum(holders.sum(0), 1))
        of_ranks = (x.ravel() for x in (received, received_far, sent + sent_far, sent_far))
        return Flow(*of_ranks, received_far.sum(1), sent_far.sum(1))


def _spans(layout: Layout, begins: Mapping[str, int]) -> np.ndarray:
    """`[n, 2]` begin and end of every segment, in slices counted over the complete model."""
    flat = [(begins[s.name] + s.start, s.size) for segments in layout.values() for s in segments]
    first, size = np.array(flat, np.int64).reshape(-1, 2).T
    return np.stack([first, first + size], 1)
