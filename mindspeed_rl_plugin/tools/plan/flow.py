"""Bytes per rank and link of a reshard, without its plan: the model cut into cells, who has which, who wants which.

A cell is a range of a canonical tensor that no rank's layout cuts further. Arrays over cells replace the plan's
lists of pieces, so that hundreds of ranks and a model of 671 B parameters take seconds. Bytes received, and how many
of them cross nodes, are those of `make_plan` exactly; bytes sent are those of sources that share every cell evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_rl_plugin.reshard.layout import Canonical, Layout


@dataclass(frozen=True)
class Flow:
    """Bytes of a reshard, `[ranks]` each, int or float64, and of its nodes `[nodes]`.

    received, sent: between ranks; received_far: what of `received` comes from another node; sent_far likewise;
    node_in, node_out: over a node's link.
    """

    received: np.ndarray
    received_far: np.ndarray
    sent: np.ndarray
    sent_far: np.ndarray
    node_in: np.ndarray
    node_out: np.ndarray

    def in_flight(self, ranks: Sequence[int], bucket_bytes: int) -> int:
        """Most bytes of buffers that `transfer.stream` takes on any of `ranks`: two for what the rank sends and two for
        what it receives, each at most half a bucket and no larger than what passes through it."""
        boxes = (np.minimum(moved[ranks], bucket_bytes) for moved in (self.sent, self.received))
        return int(np.ceil(sum(boxes)).max())


class Cells:
    """Both sides of a reshard as booleans `[ranks, cells]`. Every slice that a destination wants must have a source.

    sources, destinations: rank -> layout; itemsize: bytes of an element; node_size: consecutive ranks on one node.
    Raises ValueError naming tensor and range of what no source holds.
    """

    def __init__(
        self,
        sources: Mapping[int, Layout],
        destinations: Mapping[int, Layout],
        tensors: Mapping[str, Canonical],
        *,
        itemsize: int,
        node_size: int,
    ) -> None:
        self.ranks = 1 + max(*sources, *destinations)
        self.node_size = node_size
        self._names = list(tensors)
        number = {name: i for i, name in enumerate(self._names)}
        slices = np.array([t.slices for t in tensors.values()], np.int64)
        self._base = np.concatenate(([0], np.cumsum(slices)))
        spans = {id(x): _spans(x, number, self._base) for x in (*sources.values(), *destinations.values())}
        self._edges = np.unique(np.concatenate([self._base, *(s.ravel() for s in spans.values())]))
        self._tensor = np.searchsorted(self._base, self._edges[:-1], side="right") - 1
        slice_bytes = np.array([t.slice_bytes(itemsize) for t in tensors.values()], np.int64)
        self.nbytes = np.diff(self._edges) * slice_bytes[self._tensor]
        held = {key: self._mark(span) for key, span in spans.items()}
        self.has = self._table(sources, held)
        self.wants = self._table(destinations, held)
        self._check()

    def _mark(self, spans: np.ndarray) -> np.ndarray:
        """`[cells]` whether a layout's spans `[n, 2]` hold a cell."""
        steps = np.zeros(len(self._edges), np.int32)
        np.add.at(steps, np.searchsorted(self._edges, spans[:, 0]), 1)
        np.add.at(steps, np.searchsorted(self._edges, spans[:, 1]), -1)
        return np.cumsum(steps)[:-1] > 0

    def _table(self, layouts: Mapping[int, Layout], held: Mapping[int, np.ndarray]) -> np.ndarray:
        table = np.zeros((self.ranks, len(self.nbytes)), bool)
        for rank, layout in layouts.items():
            table[rank] = held[id(layout)]
        return table

    def _check(self) -> None:
        missing = np.flatnonzero(self.wants.any(0) & ~self.has.any(0))
        if len(missing):
            cell = missing[0]
            tensor = self._tensor[cell]
            low, high = self._edges[cell : cell + 2] - self._base[tensor]
            raise ValueError(f"{self._names[tensor]}: no trainer rank holds slices [{low}, {high})")

    def flow(self, everything: bool = False) -> Flow:
        """Bytes when every destination gets what it wants and lacks; everything: the whole model instead.

        A cell comes from a rank of the same node where one holds it, all such ranks sending equally much.
        """
        wanting = self.wants.any(1)
        nodes = -(-self.ranks // self.node_size)
        near_holders = np.stack([self.has[self._on(n)].sum(0) for n in range(nodes)])
        holders = near_holders.sum(0)
        far_demand = np.zeros(len(self.nbytes), np.int64)
        received, received_far = np.zeros(self.ranks, np.int64), np.zeros(self.ranks, np.int64)
        sent, node_in = np.zeros(self.ranks), np.zeros(nodes, np.int64)
        for node in range(nodes):
            here = self._on(node)
            lacks = ~self.has[here] & (wanting[here, None] if everything else self.wants[here])
            far = lacks & (near_holders[node] == 0)
            received[here], received_far[here] = lacks @ self.nbytes, far @ self.nbytes
            node_in[node] = received_far[here].sum()
            count = lacks.sum(0)
            far_demand += np.where(near_holders[node] == 0, count, 0)
            share = np.where(near_holders[node] > 0, count / np.maximum(near_holders[node], 1), 0) * self.nbytes
            sent[here] = self.has[here] @ share
        sent_far = self.has @ (far_demand * self.nbytes / np.maximum(holders, 1))
        node_out = np.array([sent_far[self._on(n)].sum() for n in range(nodes)])
        return Flow(received, received_far, sent + sent_far, sent_far, node_in, node_out)

    def _on(self, node: int) -> slice:
        return slice(node * self.node_size, min((node + 1) * self.node_size, self.ranks))


def _spans(layout: Layout, number: Mapping[str, int], base: Sequence[int]) -> np.ndarray:
    """`[n, 2]` first and last slice, counted through the model, of every segment."""
    flat = [(base[number[s.name]] + s.start, s.size) for segments in layout.values() for s in segments]
    first, size = np.array(flat, np.int64).reshape(-1, 2).T
    return np.stack([first, first + size], 1)
