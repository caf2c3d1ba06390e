"""What one process serves of the dock: its node's warehouse, the controllers of some states, or both.

A commit goes to the warehouse, which writes it down, tells every controller, and only then answers the writer.
Records that a controller misses (a gap in their numbers, a lost connection) it fetches with the warehouse's manifest.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from mindspeed_rl_plugin.dock.distributed import frames, service
from mindspeed_rl_plugin.dock.distributed.controller import Controller
from mindspeed_rl_plugin.dock.distributed.controller_calls import ControllerCalls
from mindspeed_rl_plugin.dock.distributed.conversation import Answer
from mindspeed_rl_plugin.dock.distributed.frames import MALFORMED, FrameError, Message
from mindspeed_rl_plugin.dock.distributed.manifests import unpacked
from mindspeed_rl_plugin.dock.distributed.outbox import Outbox
from mindspeed_rl_plugin.dock.distributed.records import EpochSet, Record
from mindspeed_rl_plugin.dock.distributed.service import Address, Directory
from mindspeed_rl_plugin.dock.distributed.settling import Settling
from mindspeed_rl_plugin.dock.distributed.succession import Elsewhere, Succession
from mindspeed_rl_plugin.dock.distributed.warehouse import Warehouse
from mindspeed_rl_plugin.dock.distributed.warehouse_calls import WarehouseCalls

GAP_SECONDS = 0.2  # a record that others have overtaken for so long is asked for


class Host(WarehouseCalls, ControllerCalls, Succession, Settling):
    """Serves `warehouse` and `controllers` (both optional). directory: filled in before the first request; name, node:
    of this process; homes: (epoch, groups) -> `[groups]` warehouse of each group; build: makes a controller that is
    taken over; heartbeat: seconds after which a machine without a sign of life is given up; clock:
    seconds, for leases.

    traffic: messages and bytes of cells that went through this process, to show that none sees them all; refused: what
    its `service.Service` turned away, by reason.
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
        heartbeat: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.node, self.secret, self.directory = name, node, secret, directory
        self.warehouse, self.controllers = warehouse, dict(controllers or {})
        self.traffic = {"messages": 0, "bytes": 0}
        self.refused = {"stranger": 0, "malformed": 0}
        self.dead: set[int] = set()  # warehouses that give no sign of life
        self.given_up = False  # whether there ever was one
        self.lapsed: dict[int, dict[str, Any]] = {}
        self.build, self.address, self.heartbeat = build, None, heartbeat
        self.taking: dict[str, Controller] = {}
        self.successions = 0  # controllers that were taken over here
        self._successions: dict[str, asyncio.Lock] = {}
        self._watched: set[int] | None = None  # warehouses, None: it is not asked for
        self._homes = homes or (lambda epoch, groups: np.zeros(groups, np.int64))
        for controller in self.controllers.values():
            controller.assigned = self._homes
        self._clock = clock
        self._changed: dict[object, list[asyncio.Future[None]]] = {}
        self._outbox: dict[Address, Outbox] = {}
        self._gaps: dict[tuple[str, int], int] = {}  # (state, warehouse) whose manifest is asked for -> record it needs
        self._tasks: set[asyncio.Task[None]] = set()

    # service.Handler

    def handle(self, peer: str, message: Message) -> Answer:
        """Serve one message; its kind is the name of a method."""
        self.traffic["messages"] += 1
        serve = getattr(self, f"_on_{message.kind}", None)
        if serve is None:
            raise FrameError(f"no such message: {message.kind!r}")
        try:
            answer = serve(peer, message)
        except Elsewhere:
            return self._where(message.note["state"])
        except MALFORMED as error:
            raise _malformed(message, error) from error
        return answer if answer is None or isinstance(answer, Message) else self._later(message, answer)

    async def _later(self, message: Message, answer: Awaitable[Message]) -> Message:
        try:
            return await answer
        except Elsewhere:
            return self._where(message.note["state"])
        except MALFORMED as error:
            raise _malformed(message, error) from error

    def gone(self, peer: str) -> None:
        """A process ended: its reservations return, its leases are given out again."""
        if self.warehouse is not None:
            self.warehouse.reservations.forget(peer)
        for state, controller in self.controllers.items():
            if controller.drop_holder(peer):
                self._wake(state)

    def served(self) -> dict[str, Any]:
        """What this process does for all ranks, and what it refused to do."""
        return {"states": sorted(self.controllers), **self.traffic, "refused": dict(self.refused)}

    def end(self) -> None:
        """The service ends: nothing is told any more. In its thread."""
        for outbox in self._outbox.values():
            outbox.close()

    # inside

    def _broadcast(self, record: Record) -> None:
        """Tell all controllers; those of this process at once."""
        self._apply(record)
        for address in {a for s, a in self.directory.controllers.items() if s not in self.controllers}:
            if address not in self._outbox:
                connect = functools.partial(service.connect, address, self.secret, self.node, self.name)
                wanted = functools.partial(self._controls, address)
                self._outbox[address] = Outbox(connect, self._mark, wanted, self._spawn)
            self._outbox[address].put(record)

    def _mark(self) -> bytes:
        note = {"warehouse": self.warehouse.index, "seq": self.warehouse.seq}
        return b"".join(frames.encode(Message("mark", note)))

    def _controls(self, address: Address) -> bool:
        """Whether the process at an address holds a controller; one that was taken over knows all without records."""
        return address in self.directory.controllers.values()

    def _apply(self, record: Record) -> None:
        if record.warehouse in self.dead:
            return  # its manifest will say it
        for controller in self.taking.values():
            controller.apply(record)
        for state, controller in self.controllers.items():
            if not controller.apply(record):
                self._ask_manifest(state, record.warehouse)
            self._wake(state)

    def _ask_manifest(self, state: str, warehouse: int, seq: int = 0) -> None:
        begun = (state, warehouse) in self._gaps
        self._gaps[state, warehouse] = max(seq, self._gaps.get((state, warehouse), 0))
        if not begun:
            self._spawn(self._catch_up(state, warehouse))

    def _ask_if_behind(self, warehouse: int, seq: int) -> None:
        """Records of a warehouse up to `seq` are on their way, or lost."""
        for state, controller in self.controllers.items():
            if controller.applied.get(warehouse, 0) < seq:
                self._ask_manifest(state, warehouse, seq)

    async def _catch_up(self, state: str, warehouse: int) -> None:
        """Fetch the manifest where a gap in the records, or the one before a record, does not close by itself."""
        try:
            while True:
                await asyncio.sleep(GAP_SECONDS)
                controller = self.controllers.get(state)
                if controller is None or warehouse in self.dead:
                    return
                behind = controller.applied.get(warehouse, 0) < self._gaps[state, warehouse]
                if not behind and not controller.has_gap(warehouse):
                    return
                try:
                    controller.rebuild(warehouse, *await self._manifest_of(warehouse))
                    return self._wake(state)
                except (OSError, EOFError):
                    self.traffic["gaps"] = self.traffic.get("gaps", 0) + 1
        finally:
            del self._gaps[state, warehouse]

    async def _manifest_of(self, warehouse: int) -> tuple[int, EpochSet, list[Record]]:
        if self.warehouse is not None and self.warehouse.index == warehouse:
            return self.warehouse.seq, self.warehouse.gone, self.warehouse.manifest()
        return unpacked(await self._request(self.directory.warehouses[warehouse], "manifest", {}))

    async def _wait(self, what: object, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        waiting = self._changed.setdefault(what, [])
        waiting.append(future)
        try:
            await asyncio.wait({future}, timeout=max(seconds, 0.001))
        finally:
            if not future.done():  # nobody woke it, and its list is still the one that is waited in
                waiting.remove(future)

    def _wake(self, what: object) -> None:
        for future in self._changed.pop(what, []):
            if not future.done():
                future.set_result(None)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _malformed(message: Message, error: Exception) -> FrameError:
    return FrameError(f"malformed {message.kind!r}: {error!r}")
