"""What a process serves of the warehouse that it holds: one method for each kind of message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mindspeed_rl_plugin.dock.distributed import cells
from mindspeed_rl_plugin.dock.distributed.arena import Extent
from mindspeed_rl_plugin.dock.distributed.conversation import Answer
from mindspeed_rl_plugin.dock.distributed.frames import FrameError, Message
from mindspeed_rl_plugin.dock.distributed.manifests import packed
from mindspeed_rl_plugin.dock.distributed.records import Shape
from mindspeed_rl_plugin.dock.distributed.tables import Block
from mindspeed_rl_plugin.dock.distributed.warehouse import Warehouse

AGAIN = Message("again")  # what the asker builds on is gone: memory that it has filled, a controller's first phase


class WarehouseCalls:
    """A part of `hosting.Host`, which has `warehouse`, `controllers`, `traffic`, `node` and the waiting."""

    warehouse: Warehouse | None
    refused: dict[str, int]

    def _on_reserve(self, peer: str, message: Message) -> Answer:
        """Extents for a writer of this node, once there are credits for what it puts."""
        house = self._house()

        def reserve() -> Message:
            extents = house.reservations.make(peer, message.note["sizes"])
            return Message("extents", {"extents": extents, "incarnation": house.incarnation})

        return self._credited(message, reserve)

    def _on_put(self, peer: str, message: Message) -> Answer:
        """Commit cells that lie in reserved extents, or that come with the message; acknowledge rows."""
        note, house = message.note, self._house()
        if note.get("incarnation", house.incarnation) != house.incarnation:
            return AGAIN
        if "extents" not in note:
            return self._credited(message, lambda: self._commit(peer, message, self._taken_in(peer, message)))
        extents = [Extent(*e) for e in note["extents"]]
        spare = Extent(*note["spare"]) if note.get("spare") else None
        if spare is not None and extents and spare.holds(extents[0]):
            if not house.reservations.lent(peer, spare):
                return AGAIN
            spare = house.reservations.carve(peer, spare, extents)
        elif not house.reservations.holds(peer, extents):
            return AGAIN
        return self._commit(peer, message, extents, spare)

    def _taken_in(self, peer: str, message: Message) -> list[Extent]:
        """Bytes that came with a message, in extents of their own."""
        house, sizes, data = self._house(), message.note["sizes"], message.arrays["data"]
        if sum(sizes) != len(data) or min(sizes, default=0) < 0:
            raise FrameError(f"cells of {sizes} bytes in {len(data)}")
        extents, at = house.reservations.make(peer, sizes), 0
        for extent, size in zip(extents, sizes, strict=True):
            house.arena.view(extent.segment, extent.offset, size)[:] = data[at : at + size]
            at += size
        return extents

    def _commit(self, peer: str, message: Message, extents: Sequence[Extent], spare: Extent | None = None) -> Message:
        note, arrays, house = message.note, message.arrays, self._house()
        try:
            blocks = [
                Block(column, arrays[f"slots.{form}"], arrays[f"lengths.{form}"], extent)
                for column, form, extent in zip(note["columns"], note["forms"], extents, strict=True)
            ]
            ack = (note["ack"], arrays["ack"]) if "ack" in note else None
            shape, needs = Shape(*note["shape"]), note.get("needs", ())
            record = house.commit(peer, note["epoch"], shape, blocks, ack=ack, needs=needs)
        except (ValueError, KeyError, TypeError):
            house.reservations.forget(peer, [*extents, *([spare] if spare else [])])
            raise
        self._broadcast(record)
        more = house.reservations.renew(peer, spare, note["want"]) if note.get("want") else None
        kept = {} if more is None else {"spare": more, "incarnation": house.incarnation}
        return Message("committed", {"seq": record.seq, **kept})

    def _on_fetch(self, peer: str, message: Message) -> Message:
        """Bytes of memory by their place, one after the other: `[sum of nbytes]`. spans: `[n, 3]`."""
        house = self._house()
        out = [house.arena.view(*span) for span in message.arrays["spans"].tolist()]
        self.traffic["bytes"] += sum(len(piece) for piece in out)
        return Message("cells", {}, {"data": out})

    def _on_read(self, peer: str, message: Message) -> Message:
        """Cells by their ids, without a lease; length -1 marks one that is not there. Where they are more than one
        answer takes: `[n, 2]` bounds of the rows to ask for instead."""
        house, note = self._house(), message.note
        out, found = {}, []
        for i, column in enumerate(note["columns"]):
            cells_of = house.locate(note["epoch"], column, message.arrays[f"slots.{i}"].astype(np.int64))
            sizes = np.where(cells_of.segment >= 0, cells_of.length.astype(np.int64) * house.itemsize(column), 0)
            found.append((cells_of, sizes))
        bounds = cells.portions(sum(sizes for _, sizes in found)) if found else []
        if len(bounds) > 1:
            return Message("portions", {}, {"bounds": np.array(bounds, np.int64)})
        for i, (cells_of, sizes) in enumerate(found):
            places = zip(cells_of.segment.tolist(), cells_of.offset.tolist(), sizes.tolist(), strict=True)
            out[f"data.{i}"] = cells.gather([house.arena.view(s, o, n) for s, o, n in places if s >= 0])
            out[f"lengths.{i}"] = np.where(cells_of.segment >= 0, cells_of.length, -1).astype(np.int32)
            self.traffic["bytes"] += out[f"data.{i}"].nbytes
        return Message("cells", {}, out)

    def _on_clear(self, peer: str, message: Message) -> Message:
        """Phase two of clearing: free the cells."""
        house, note = self._house(), message.note
        if any(self.directory.terms.get(state, 0) > term for state, term in note["terms"].items()):
            return AGAIN  # a controller has moved since it closed the groups, and may have given them out
        record = house.clear(note["epoch"], Shape(*note["shape"]), message.arrays["groups"].astype(np.int64))
        if record is not None:
            self._broadcast(record)
            self._wake("credits")
        return Message("cleared", {"seq": house.seq})

    def _on_manifest(self, peer: str, message: Message) -> Message:
        """Everything that lies here, for a controller that missed something, or for a snapshot."""
        return Message("manifest", *packed(self._house()))

    def _on_stats(self, peer: str, message: Message) -> Message:
        """Figures of this process."""
        house = self.warehouse
        used, seq = (house.used, house.seq) if house else (0, 0)
        served = {"traffic": self.traffic, "states": sorted(self.controllers), "successions": self.successions}
        return Message("stats", {**served, "refused": self.refused, "used": used, "seq": seq})

    def _house(self) -> Warehouse:
        if self.warehouse is None:
            raise FrameError(f"{self.name} holds no warehouse")
        return self.warehouse

    def _credited(self, message: Message, then: Callable[[], Message]) -> Answer:
        """`then()`, for a producer once there is room for its put."""
        note = message.note
        if not note["producer"]:
            return then()
        shape = Shape(*note["shape"])
        named = zip(note["columns"], note["forms"], note["sizes"], strict=True)
        blocks = [(column, message.arrays[f"slots.{form}"], size) for column, form, size in named]
        reason = self._house().admit(note["epoch"], shape, blocks)
        return then() if reason is None else self._credits(note["epoch"], shape, blocks, note["deadline"], then)

    async def _credits(
        self,
        epoch: int,
        shape: Shape,
        blocks: Sequence[tuple[str, np.ndarray, int]],
        seconds: float,
        then: Callable[[], Any],
    ) -> Message:
        end = self._clock() + seconds
        while (reason := self._house().admit(epoch, shape, blocks)) is not None:
            if self._clock() >= end:
                raise TimeoutError(f"put waited {seconds:g} s for room in the dock of {self.node}: {reason}")
            await self._wait("credits", min(end - self._clock(), 1.0))
        return then()
