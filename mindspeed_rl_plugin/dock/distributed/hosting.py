"""What one process serves of the dock: its node's warehouse, the controllers of some states, or both.

A commit goes to the warehouse, which writes it down, tells every controller, and only then answers the writer.
Records that a controller misses (a gap in their numbers, a lost connection) it fetches with the warehouse's manifest.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_rl_plugin.dock.distributed import cells, service
from mindspeed_rl_plugin.dock.distributed.asks import ask_from, grant_message
from mindspeed_rl_plugin.dock.distributed.controller import Controller
from mindspeed_rl_plugin.dock.distributed.frames import FrameError, Message
from mindspeed_rl_plugin.dock.distributed.manifests import packed, unpacked
from mindspeed_rl_plugin.dock.distributed.records import EpochSet, Record, Shape
from mindspeed_rl_plugin.dock.distributed.service import Address, Directory
from mindspeed_rl_plugin.dock.distributed.succession import Elsewhere, Succession
from mindspeed_rl_plugin.dock.distributed.warehouse import Block, Extent, Warehouse

GAP_SECONDS = 0.2  # a record that others have overtaken for so long is asked for
RETRY_SECONDS = 0.2
OK = Message("ok")


class Host(Succession):
    """Serves `warehouse` and `controllers` (both optional). directory: filled in before the first request; name, node:
    of this process; homes: (epoch, groups) -> `[groups]` warehouse of each group; build: makes a controller that is
    taken over; heartbeat: seconds between signs of life; clock: seconds, for leases.

    traffic: messages and bytes of cells that went through this process, to show that none sees them all.
    """

    def __init__(
        self,
        name: str,
        node: str,
        secret: bytes,
        directory: Directory,
        *,
        warehouse: Warehouse | None = None,
        controllers: Mapping[str, Controller] | None = None,
        homes: Callable[[int, int], np.ndarray] | None = None,
        build: Callable[[str], Controller] | None = None,
        heartbeat: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.node, self.secret, self.directory = name, node, secret, directory
        self.warehouse, self.controllers = warehouse, dict(controllers or {})
        self.traffic = {"messages": 0, "bytes": 0}
        self.dead: set[int] = set()  # warehouses that gave no sign of life
        self.build, self.address, self.heartbeat = build, None, heartbeat
        self.taking: dict[str, Controller] = {}
        self.successions = 0  # controllers that were taken over here
        self._successions: dict[str, asyncio.Lock] = {}
        self._watched: set[int] | None = None  # warehouses, None: it is not asked for
        self._homes = homes or (lambda epoch, groups: np.zeros(groups, np.int64))
        self._clock = clock
        self._changed: dict[object, list[asyncio.Future[None]]] = {}
        self._outbox: dict[Address, asyncio.Queue[Record]] = {}
        self._gaps: set[tuple[str, int]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    # service.Handler

    async def handle(self, peer: str, message: Message) -> Message | None:
        """Serve one message; its kind is the name of a method here."""
        self.traffic["messages"] += 1
        serve = getattr(self, f"_on_{message.kind}", None)
        if serve is None:
            raise FrameError(f"no such message: {message.kind!r}")
        try:
            answer = serve(peer, message)
            return await answer if inspect.isawaitable(answer) else answer
        except Elsewhere:
            return self._where(message.note["state"])
        except (KeyError, TypeError, IndexError) as error:
            raise FrameError(f"malformed {message.kind!r}: {error!r}") from error

    def gone(self, peer: str) -> None:
        """A process ended: its reservations return, its leases are given out again."""
        if self.warehouse is not None:
            self.warehouse.forget_owner(peer)
        for state, controller in self.controllers.items():
            if controller.drop_holder(peer):
                self._wake(state)

    # warehouse

    async def _on_reserve(self, peer: str, message: Message) -> Message:
        """Extents for a writer of this node, once there are credits for what it puts."""
        note, house = message.note, self._house()
        shape = Shape(*note["shape"])
        sizes = note["sizes"]
        if note["producer"]:
            blocks = [(c, message.arrays[f"slots.{i}"], sizes[i]) for i, c in enumerate(note["columns"])]
            await self._credits(note["epoch"], shape, blocks, note["deadline"])
        extents = house.reserve(peer, sizes)
        return Message("extents", {"extents": [list(e) for e in extents], "incarnation": house.incarnation})

    async def _on_put(self, peer: str, message: Message) -> Message:
        """Commit cells that lie in reserved extents, or that come with the message; acknowledge rows."""
        note, house, arrays = message.note, self._house(), message.arrays
        shape = Shape(*note["shape"])
        if note.get("incarnation", house.incarnation) != house.incarnation:
            return Message("again")  # restarted since it reserved the extents
        inline = "extents" not in note
        if inline and note["producer"]:
            blocks = [(c, arrays[f"slots.{i}"], arrays[f"data.{i}"].nbytes) for i, c in enumerate(note["columns"])]
            await self._credits(note["epoch"], shape, blocks, note["deadline"])
        if inline:
            extents = house.reserve(peer, [arrays[f"data.{i}"].nbytes for i in range(len(note["columns"]))])
            for i, extent in enumerate(extents):
                data = arrays[f"data.{i}"]
                house.arena.view(extent.segment, extent.offset, data.nbytes)[:] = data
        else:
            extents = [Extent(*e) for e in note["extents"]]
        blocks = [
            Block(column, arrays[f"slots.{i}"], arrays[f"lengths.{i}"], extents[i])
            for i, column in enumerate(note["columns"])
        ]
        ack = (note["ack"], arrays["ack"]) if "ack" in note else None
        try:
            record = house.commit(peer, note["epoch"], shape, blocks, ack=ack, needs=note.get("needs", ()))
        except ValueError:
            house.forget_owner(peer, extents)
            raise
        self._broadcast(record)
        return Message("committed", {"seq": record.seq})

    async def _on_fetch(self, peer: str, message: Message) -> Message:
        """Bytes of memory by their place, one after the other: `[sum of nbytes]`. spans: `[n, 3]`."""
        house = self._house()
        out = [house.arena.view(*span) for span in message.arrays["spans"].tolist()]
        self.traffic["bytes"] += sum(len(piece) for piece in out)
        return Message("cells", {}, {"data": out})

    async def _on_read(self, peer: str, message: Message) -> Message:
        """Cells by their ids, without a lease; segment -1 in `present` marks one that is not there."""
        house, note = self._house(), message.note
        out = {}
        for i, column in enumerate(note["columns"]):
            found = house.locate(note["epoch"], column, message.arrays[f"slots.{i}"].astype(np.int64))
            sizes = (found.length.astype(np.int64) * house.itemsize(column)).tolist()
            places = zip(found.segment.tolist(), found.offset.tolist(), sizes, strict=True)
            out[f"data.{i}"] = cells.gather([house.arena.view(s, o, n) for s, o, n in places if s >= 0])
            out[f"lengths.{i}"] = np.where(found.segment >= 0, found.length, -1).astype(np.int32)
            self.traffic["bytes"] += out[f"data.{i}"].nbytes
        return Message("cells", {}, out)

    async def _on_clear(self, peer: str, message: Message) -> Message:
        """Phase two of clearing: free the cells."""
        house, note = self._house(), message.note
        if any(self.directory.terms.get(state, 0) > term for state, term in note["terms"].items()):
            return Message("again")  # a controller has moved since it closed the groups, and may have given them out
        record = house.clear(note["epoch"], Shape(*note["shape"]), message.arrays["groups"].astype(np.int64))
        if record is not None:
            self._broadcast(record)
            self._wake("credits")
        return Message("cleared", {"seq": house.seq})

    async def _on_manifest(self, peer: str, message: Message) -> Message:
        """Everything that lies here, for a controller that missed something, or for a snapshot."""
        return Message("manifest", *packed(self._house()))

    async def _on_stats(self, peer: str, message: Message) -> Message:
        """Figures of this process."""
        house = self.warehouse
        return Message(
            "stats",
            {
                "traffic": self.traffic,
                "used": house.used if house else 0,
                "seq": house.seq if house else 0,
                "states": sorted(self.controllers),
                "successions": self.successions,
            },
        )

    # controllers

    async def _on_lease(self, peer: str, message: Message) -> Message:
        """Rows under a lease, once they are ready; its error names what is missing."""
        controller = self._controller(message)
        for number, groups, members in message.note["epochs"]:
            controller.open(number, Shape(groups, members))
        await self._applied(controller, message.note["after"])
        ask, seconds = ask_from(message), message.note["deadline"]
        begin = self._clock()
        while True:
            waited = self._clock() - begin
            self._controller(message)  # it may have been taken over
            controller.expire(self._clock())
            lingered = waited if waited < seconds else float("inf")  # the deadline ends a linger, not the request
            grant = controller.take(ask, peer, self._clock(), message.note["lease_seconds"], lingered)
            if grant is not None:
                return grant_message(controller, grant, message.note["columns"])
            if waited >= seconds:
                raise TimeoutError(controller.explain(ask, seconds))
            # A second at most: another lease may run out, or the time to linger be over.
            await self._wait(controller.spec.name, min(seconds - waited, ask.linger or 1.0, 1.0))

    async def _on_release(self, peer: str, message: Message) -> Message:
        """One holder of a lease is through with it; rows that nobody acknowledged are given out again."""
        controller = self._controller(message)
        await self._applied(controller, message.note["after"])
        last = controller.finish(message.note["token"], peer, message.note.get("done", False))
        self._wake(controller.spec.name)
        return Message("released", {"last": last})

    async def _on_remaining(self, peer: str, message: Message) -> Message:
        """Rows that are not acknowledged."""
        controller = self._controller(message)
        for number, groups, members in message.note["epochs"]:
            controller.open(number, Shape(groups, members))
        await self._applied(controller, message.note["after"])
        return Message("remaining", {"rows": controller.remaining()})

    async def _on_close(self, peer: str, message: Message) -> Message:
        """Phase one of clearing: no new leases, and wait for the live ones."""
        controller = self._controller(message)
        groups, seconds = message.arrays.get("groups"), message.note["deadline"]
        end = self._clock() + seconds
        # Known from now on, also where its first record is still on the way.
        controller.open(message.note["epoch"], Shape(*message.note["shape"]))
        await self._applied(controller, message.note["after"])
        while not controller.close(message.note["epoch"], groups):
            if self._clock() >= end:
                raise TimeoutError(
                    f"clear: state {controller.spec.name!r} still holds rows of epoch {message.note['epoch']} "
                    f"after {seconds:g} s; commit or release its leases first"
                )
            await self._wait(controller.spec.name, min(end - self._clock(), 1.0))
            controller.expire(self._clock())
        return Message("closed", {"term": self.directory.terms.get(controller.spec.name, 0)})

    async def _on_record(self, peer: str, message: Message) -> None:
        """A warehouse tells of a commit."""
        self._apply(Record.from_message(message))

    async def _on_moved(self, peer: str, message: Message) -> Message:
        """A warehouse was started again: where it answers now, and the number of its last record."""
        index, note = message.note["warehouse"], message.note
        self.directory.warehouses[index] = Address(**note["address"])
        for state, controller in self.controllers.items():
            if controller.applied.get(index, 0) < note["seq"]:
                controller.rebuild(index, *await self._manifest_of(index))
            self._wake(state)
        return OK

    async def _on_ping(self, peer: str, message: Message) -> Message:
        """This process lives."""
        return OK

    async def _on_health(self, peer: str, message: Message) -> Message:
        """Warehouses that this process has given up, and the groups of a state that nobody has written anew."""
        controller = self._controller(message)
        for number, groups, members in message.note["epochs"]:
            controller.open(number, Shape(groups, members))
        lost = controller.lost(self.dead, self._homes) if self.dead else np.empty((0, 2), np.int64)
        return Message("health", {"dead": sorted(self.dead)}, {"lost": lost})

    # inside

    def _house(self) -> Warehouse:
        if self.warehouse is None:
            raise FrameError(f"{self.name} holds no warehouse")
        return self.warehouse

    def _controller(self, message: Message) -> Controller:
        found = self.controllers.get(message.note["state"])
        if found is None:
            if message.note["state"] in self.directory.controllers:
                raise Elsewhere
            raise FrameError(f"{self.name} does not control state {message.note['state']!r}")
        return found

    def _broadcast(self, record: Record) -> None:
        """Tell all controllers; those of this process at once."""
        self._apply(record)
        for address in {a for s, a in self.directory.controllers.items() if s not in self.controllers}:
            if address not in self._outbox:
                self._outbox[address] = asyncio.Queue()
                self._spawn(self._deliver(address, self._outbox[address]))
            self._outbox[address].put_nowait(record)

    async def _deliver(self, address: Address, queue: asyncio.Queue[Record]) -> None:
        """Send records to one process in order; what is lost with a connection, the other side asks for."""
        connection = None
        while True:
            record = await queue.get()
            try:
                if connection is None:
                    connection = await service.connect(address, self.secret, self.node, self.name)
                await asyncio.get_running_loop().sock_sendall(connection, record.encoded)
            except (OSError, EOFError):
                if connection is not None:
                    connection.close()
                connection = None
                if address not in self.directory.controllers.values():  # taken over: its successor knows all of it
                    del self._outbox[address]
                    return
                await asyncio.sleep(RETRY_SECONDS)

    def _apply(self, record: Record) -> None:
        for controller in self.taking.values():
            controller.apply(record)
        for state, controller in self.controllers.items():
            if not controller.apply(record):
                self._ask_manifest(state, record.warehouse)
            self._wake(state)

    def _ask_manifest(self, state: str, warehouse: int, seq: int = 0) -> None:
        if (state, warehouse) not in self._gaps:
            self._gaps.add((state, warehouse))
            self._spawn(self._catch_up(state, warehouse, seq))

    async def _catch_up(self, state: str, warehouse: int, seq: int) -> None:
        """Fetch the manifest where a gap in the records, or the one before record `seq`, does not close by itself."""
        await asyncio.sleep(GAP_SECONDS)
        controller = self.controllers.get(state)
        try:
            if controller is not None and (
                controller.has_gap(warehouse) or controller.applied.get(warehouse, 0) < seq
            ):
                controller.rebuild(warehouse, *await self._manifest_of(warehouse))
                self._wake(state)
        except (OSError, EOFError):
            self.traffic["gaps"] = self.traffic.get("gaps", 0) + 1  # its next record asks again
        finally:
            self._gaps.discard((state, warehouse))

    async def _manifest_of(self, warehouse: int) -> tuple[int, EpochSet, list[Record]]:
        if self.warehouse is not None and self.warehouse.index == warehouse:
            return self.warehouse.seq, self.warehouse.gone, self.warehouse.manifest()
        return unpacked(await self._request(self.directory.warehouses[warehouse], "manifest", {}))

    async def _credits(
        self, epoch: int, shape: Shape, blocks: Sequence[tuple[str, np.ndarray, int]], seconds: float
    ) -> None:
        end = self._clock() + seconds
        while (reason := self._house().admit(epoch, shape, blocks)) is not None:
            if self._clock() >= end:
                raise TimeoutError(f"put waited {seconds:g} s for room in the dock of {self.node}: {reason}")
            await self._wait("credits", min(end - self._clock(), 1.0))

    async def _applied(self, controller: Controller, after: Mapping[str, int]) -> None:
        """Wait until the controller knows what the asker knows: its own commits come before its next request."""
        begin, seconds = self._clock(), max(30.0, 4 * self.heartbeat)  # a machine is given up after three
        while late := self._late(controller, after):
            if self._clock() >= begin + seconds:
                raise TimeoutError(
                    f"state {controller.spec.name!r} did not hear of commits {late} of its warehouses for {seconds:g} s"
                )
            await self._wait(controller.spec.name, 0.05)
            for warehouse, seq in late.items():
                if self._clock() > begin + 1.0:  # a second late: lost with a connection
                    self._ask_manifest(controller.spec.name, int(warehouse), seq)

    def _late(self, controller: Controller, after: Mapping[str, int]) -> dict[str, int]:
        """Records by living warehouse that the asker has caused and the controller has not heard of yet."""
        late = {w: n for w, n in after.items() if controller.applied.get(int(w), 0) < n}
        return {w: n for w, n in late.items() if int(w) not in self.dead} if late else late

    async def _wait(self, what: object, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self._changed.setdefault(what, []).append(future)
        await asyncio.wait({future}, timeout=max(seconds, 0.001))

    def _wake(self, what: object) -> None:
        for future in self._changed.pop(what, []):
            if not future.done():
                future.set_result(None)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
