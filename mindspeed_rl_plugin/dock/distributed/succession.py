"""A controller whose process is gone is built again on another one, from the warehouses' manifests.

Whoever cannot reach a state's controller asks the processes that follow its own in the job's order, one after the
other, to take it over. The first that answers makes sure that the controller is gone, and tells every warehouse, under
a *term* of its own above the last, where records go from now on; each warehouse answers with its manifest, so that
nothing falls between the two. Warehouses obey the highest term they have heard of: of two successors one stands. What
is lost with a controller are its leases: their rows are acknowledged at the warehouses as ever, or given out again.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.dock.distributed import service
from mindspeed_rl_plugin.dock.distributed.controller import Controller
from mindspeed_rl_plugin.dock.distributed.frames import FrameError, Message, Reader
from mindspeed_rl_plugin.dock.distributed.manifests import packed, unpacked
from mindspeed_rl_plugin.dock.distributed.service import Address, Directory
from mindspeed_rl_plugin.dock.distributed.warehouse import Warehouse

FILE = "controllers"  # in a warehouse's directory: those that have moved, for its successor
MISSED = 3  # signs of life in a row, until a warehouse is given up, within one heartbeat
TRIES = 3  # to reach a controller before it counts as gone
QUESTION = 90.0  # seconds for all of them at most: whoever asks for a successor waits `fleet.ANSWER`, not a heartbeat
PAUSE = 0.2  # seconds between them


class Elsewhere(Exception):
    """A message for the controller of a state that another process holds."""


class Succession:
    """A part of `hosting.Host`, which has `controllers`, `directory`, `warehouse` and the waiting.

    build: makes the controller of a state, None where none can be taken over; address: of this process; taking:
    controllers that do not know everything yet.
    """

    controllers: dict[str, Controller]
    taking: dict[str, Controller]
    directory: Directory
    warehouse: Warehouse | None
    build: Callable[[str], Controller] | None
    address: Address | None

    async def _on_succeed(self, peer: str, message: Message) -> Message:
        """Where a state's controller is; if it is gone it is here now. term: the newest that the asker knows of."""
        state, known = message.note["state"], message.note["term"]
        async with self._successions.setdefault(state, asyncio.Lock()):
            if state not in self.controllers and self.directory.terms.get(state, 0) <= known:
                if self.build is None or self.address is None:
                    raise FrameError(f"{self.name} can take no controller over")
                if not await self._lives(self.directory.controllers[state]):
                    await self._take_over(state)
        return self._where(state)

    def _on_control(self, peer: str, message: Message) -> Message:
        """A controller was taken over: a warehouse sends its records there, and answers with all that it holds."""
        note = message.note
        if not self._learn(note["state"], Address(**note["address"]), note["term"]):
            return self._where(note["state"])
        return Message("ok") if self.warehouse is None else Message("manifest", *packed(self.warehouse))

    def _where(self, state: str) -> Message:
        address, term = self.directory.controllers[state], self.directory.terms.get(state, 0)
        return Message("elsewhere", {"address": asdict(address), "term": term})

    def _learn(self, state: str, address: Address, term: int) -> bool:
        """Note a newer place of a controller; False for an older one."""
        if not self.directory.move(state, address, term):
            return False
        if address != self.address and self.controllers.pop(state, None) is not None:
            self._wake(state)
        if self.warehouse is not None:
            save(self.directory, self.warehouse.arena.directory)
        return True

    async def _take_over(self, state: str) -> None:
        hosts = self.directory.hosts
        number = self.directory.terms.get(state, 0) // len(hosts) + 1
        term = number * len(hosts) + hosts.index(self.address)  # no other process has the same
        self.taking[state] = controller = self.build(state)  # hears records from the first warehouse's answer on
        controller.assigned = self._homes
        note = {"state": state, "address": asdict(self.address), "term": term}
        try:
            asked = [w for w in self.directory.warehouses if w not in self.dead]
            answered = await asyncio.gather(*(self._register(w, controller, note) for w in asked))
        finally:
            del self.taking[state]
        if self.directory.terms.get(state, 0) > term:  # another one was faster
            return
        for warehouse in self.dead:
            controller.lose_home(warehouse)
        self.controllers[state] = controller
        self._learn(state, self.address, term)
        self.successions += 1
        for warehouse in (w for w, reached in zip(asked, answered, strict=True) if not reached):
            self._spawn(self._register_later(warehouse, controller, note))
        for address in hosts:
            if address != self.address:
                self._spawn(self._tell_host(address, note))
        self._watch_all()

    async def _register(self, warehouse: int, controller: Controller, note: dict[str, Any]) -> bool:
        """Have a warehouse tell this process, and learn what lies there; False where it does not answer."""
        try:
            if self.warehouse is not None and self.warehouse.index == warehouse:
                house = self.warehouse
                controller.rebuild(warehouse, house.seq, house.gone, house.manifest())
                return True
            answer = await asyncio.wait_for(self._request(self.directory.warehouses[warehouse], "control", note), 10.0)
        except (OSError, EOFError, asyncio.TimeoutError):
            return False
        if answer.kind == "elsewhere":
            self._learn(note["state"], Address(**answer.note["address"]), answer.note["term"])
        else:
            controller.rebuild(warehouse, *unpacked(answer))
            self._wake(note["state"])
        return True

    async def _register_later(self, warehouse: int, controller: Controller, note: dict[str, Any]) -> None:
        """Again, until it answers or its machine is given up."""
        state = note["state"]
        while warehouse not in self.dead and self.controllers.get(state) is controller:
            await asyncio.sleep(PAUSE)
            if await self._register(warehouse, controller, note):
                return

    async def _tell_host(self, address: Address, note: dict[str, Any]) -> None:
        """Whoever held the controller, if it lives after all, hears that it does not any more."""
        try:
            await asyncio.wait_for(self._request(address, "control", note), 10.0)
        except (OSError, EOFError, asyncio.TimeoutError):
            return  # it asks, or is gone

    def watch(self) -> None:
        """Ask every warehouse elsewhere for signs of life; after a heartbeat without any it is given up until it
        answers again. Only where there are controllers, now or later. Call it in the service's thread."""
        self._watched = set()
        self._watch_all()

    def _watch_all(self) -> None:
        if self._watched is None or not self.controllers:
            return
        for warehouse in set(self.directory.warehouses) - self._watched:
            if self.warehouse is None or self.warehouse.index != warehouse:
                self._spawn(self._watch(warehouse))
        self._watched |= set(self.directory.warehouses)

    async def _watch(self, warehouse: int) -> None:
        missed, beat = 0, self.heartbeat / (MISSED + 1)  # the last answer may be almost one beat old
        while True:
            begin = self._clock()
            try:
                ping = self._request(self.directory.warehouses[warehouse], "ping", {})
                alive = await asyncio.wait_for(ping, beat)
                missed = 0
                await self._readmit(warehouse)
                self._ask_if_behind(warehouse, alive.note.get("seq", 0))
                await self._settle(warehouse)
            except (OSError, EOFError, asyncio.TimeoutError):
                missed += 1
            await asyncio.sleep(max(beat - (self._clock() - begin), 0))
            if missed >= MISSED and warehouse not in self.dead:
                self._give_up(warehouse)

    def _give_up(self, warehouse: int) -> None:
        """Its rows are not ready any more, and are put anew elsewhere, unless it answers before that."""
        self.dead.add(warehouse)
        self.given_up = True
        self.lapsed[warehouse] = {}
        said = f"gave {self.name} no sign of life for {self.heartbeat:g} s: given up"
        print(f"[rl] {self._named(warehouse)} {said}", flush=True)
        for state, controller in self.controllers.items():
            controller.lose_home(warehouse)
            self._wake(state)

    async def _readmit(self, warehouse: int) -> None:
        """It was given up and answers: what still lies there and nobody has put anew is ready again."""
        if warehouse not in self.dead:
            return
        self.dead.discard(warehouse)  # its records count from now on; its manifest stands for those before
        try:
            found = await asyncio.wait_for(self._manifest_of(warehouse), self.heartbeat)
        except BaseException:
            self.dead.add(warehouse)
            raise
        print(f"[rl] {self._named(warehouse)} answers {self.name} again: its rows are back", flush=True)
        for state, controller in self.controllers.items():
            controller.rebuild(warehouse, *found)
            self._wake(state)

    def _named(self, warehouse: int) -> str:
        address = self.directory.warehouses[warehouse]
        return f"warehouse {warehouse} on {address.node.partition(' ')[0]}" + (
            f" ({address.host})" * bool(address.host)
        )

    def _silent(self) -> str:
        """What an explanation must add: rows may be missing because nobody hears from where they lie."""
        named = ", ".join(self._named(w) for w in sorted(self.dead))
        return f"; {named} gives no sign of life, its rows are lost until it does or they are put anew" if named else ""

    async def _lives(self, address: Address) -> bool:
        """Whether a process answers within a heartbeat, or QUESTION where that is less."""
        seconds = min(self.heartbeat, QUESTION) / TRIES
        for attempt in range(TRIES):
            try:
                await asyncio.wait_for(self._request(address, "ping", {}), seconds)
                return True
            except (OSError, EOFError, asyncio.TimeoutError):
                await asyncio.sleep(PAUSE if attempt + 1 < TRIES else 0)
        return False

    async def _request(self, address: Address, kind: str, note: dict[str, Any]) -> Message:
        connection = await service.connect(address, self.secret, self.node, f"{self.name}.{kind}")
        try:
            await service.send(connection, Message(kind, note))
            return await service.receive(connection, Reader())
        finally:
            connection.close()


def save(directory: Directory, folder: str | os.PathLike[str]) -> None:
    """Keep where moved controllers are beside a warehouse's cells."""
    moved = {s: {"address": asdict(directory.controllers[s]), "term": t} for s, t in directory.terms.items()}
    new = Path(folder) / f"{FILE}.new"
    handle = os.open(new, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    with os.fdopen(handle, "w") as file:
        json.dump(moved, file)
    os.rename(new, Path(folder) / FILE)


def load(directory: Directory, folder: str | os.PathLike[str]) -> None:
    """Inverse of `save`, where a former warehouse has kept something."""
    path = Path(folder) / FILE
    if path.exists():
        for state, place in json.loads(path.read_text()).items():
            directory.move(state, Address(**place["address"]), place["term"])
