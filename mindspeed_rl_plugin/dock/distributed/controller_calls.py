"""What a process serves of the controllers that it holds: one method for each kind of message."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from mindspeed_rl_plugin.dock.distributed.asks import ask_from, grant_message
from mindspeed_rl_plugin.dock.distributed.controller import Controller
from mindspeed_rl_plugin.dock.distributed.conversation import Answer
from mindspeed_rl_plugin.dock.distributed.frames import FrameError, Message
from mindspeed_rl_plugin.dock.distributed.picking import Ask
from mindspeed_rl_plugin.dock.distributed.records import Record, Shape
from mindspeed_rl_plugin.dock.distributed.service import Address
from mindspeed_rl_plugin.dock.distributed.succession import Elsewhere

OK = Message("ok")
WAITING = Message("waiting")  # not yet: ask again


class ControllerCalls:
    """A part of `hosting.Host`, which has `controllers`, `directory`, `dead` and the waiting."""

    controllers: dict[str, Controller]

    def _on_lease(self, peer: str, message: Message) -> Answer:
        """Rows under a lease, once they are ready; its error names what is missing."""
        controller, ask = self._controller(message), ask_from(message)
        if not self._late(controller, message.note["after"]):
            grant = self._grant(peer, message, controller, ask, 0.0)
            if grant is not None:
                return grant
        return self._lease_later(peer, message, controller, ask)

    async def _lease_later(self, peer: str, message: Message, controller: Controller, ask: Ask) -> Message:
        seconds = message.note["deadline"]
        await self._applied(controller, message.note["after"])
        begin, before = self._clock(), message.note["waited"]
        while True:
            waited = self._clock() - begin
            self._controller(message)  # it may have been taken over
            if (grant := self._grant(peer, message, controller, ask, waited)) is not None:
                return grant
            if waited >= seconds:
                if message.note["more"]:
                    return WAITING
                raise TimeoutError(controller.explain(ask, before + seconds) + self._silent())
            # A second at most: another lease may run out, or the time to linger be over.
            await self._wait(controller.spec.name, min(seconds - waited, ask.linger or 1.0, 1.0))

    def _grant(self, peer: str, message: Message, controller: Controller, ask: Ask, waited: float) -> Message | None:
        note, now = message.note, self._clock()
        controller.expire(now)
        over = waited >= note["deadline"] and not note["more"]  # the deadline ends a linger, not the request
        lingered = float("inf") if over else note["waited"] + waited
        grant = controller.take(ask, peer, now, note["lease_seconds"], lingered)
        if grant is None:
            return None
        try:
            answer = grant_message(controller, grant, note["columns"])
        except BaseException:
            controller.finish(grant.token, peer)
            raise
        if controller.strayed or self.given_up:
            answer.arrays["moved"] = controller.moved()
        return answer

    def _on_release(self, peer: str, message: Message) -> Answer:
        """One holder of a lease is through with it; rows that nobody acknowledged are given out again."""
        controller = self._controller(message)

        def release() -> Message:
            last = controller.finish(message.note["token"], peer, message.note.get("done", False))
            self._wake(controller.spec.name)
            return Message("released", {"last": last})

        return self._once_applied(controller, message, release)

    def _on_remaining(self, peer: str, message: Message) -> Answer:
        """Rows that are not acknowledged."""
        controller = self._controller(message)
        return self._once_applied(controller, message, lambda: Message("remaining", {"rows": controller.remaining()}))

    def _on_undone(self, peer: str, message: Message) -> Answer:
        """Those of some rows that are not acknowledged."""
        controller, ids = self._controller(message), message.arrays["ids"]
        return self._once_applied(controller, message, lambda: Message("undone", {}, {"ids": controller.undone(ids)}))

    async def _on_close(self, peer: str, message: Message) -> Message:
        """Phase one of clearing: no new leases, and wait for the live ones."""
        controller = self._controller(message)
        groups, seconds = message.arrays.get("groups"), message.note["deadline"]
        end = self._clock() + seconds
        # Known from now on, also where its first record is still on the way.
        controller.open(message.note["epoch"], Shape(*message.note["shape"]))
        await self._applied(controller, message.note["after"])
        while holders := controller.close(message.note["epoch"], groups):
            if self._clock() >= end:
                raise TimeoutError(
                    f"clear: state {controller.spec.name!r} still holds rows of epoch {message.note['epoch']} "
                    f"after {seconds:g} s (leases of {', '.join(holders)}); commit or release them first"
                )
            await self._wait(controller.spec.name, min(end - self._clock(), 1.0))
            controller.expire(self._clock())
        return Message("closed", {"term": self.directory.terms.get(controller.spec.name, 0)})

    def _on_record(self, peer: str, message: Message) -> None:
        """A warehouse tells of a commit."""
        self._apply(Record.from_message(message))

    async def _on_moved(self, peer: str, message: Message) -> Message:
        """A warehouse was started again: where it answers now, and the number of its last record."""
        index, note = message.note["warehouse"], message.note
        self.directory.warehouses[index] = Address(**note["address"])
        await self._readmit(index)
        for state, controller in self.controllers.items():
            if controller.applied.get(index, 0) < note["seq"]:
                controller.rebuild(index, *await self._manifest_of(index))
            self._wake(state)
        return OK

    def _on_mark(self, peer: str, message: Message) -> None:
        """A warehouse has made a new connection for its records, and says how many there are."""
        self._ask_if_behind(message.note["warehouse"], message.note["seq"])

    def _on_ping(self, peer: str, message: Message) -> Message:
        """This process lives. seq: number of its warehouse's last record."""
        return Message("alive", {} if self.warehouse is None else {"seq": self.warehouse.seq})

    def _on_health(self, peer: str, message: Message) -> Message:
        """Warehouses that this process has given up, the groups of a state that nobody has put anew, and where those
        are that somebody has."""
        controller = self._controller(message)
        lost = controller.lost(self.dead, self._homes) if self.given_up else np.empty((0, 2), np.int64)
        return Message("health", {"dead": sorted(self.dead)}, {"lost": lost, "moved": controller.moved()})

    def _controller(self, message: Message) -> Controller:
        """The controller that a message is for, told of the epochs that its sender knows."""
        found = self.controllers.get(message.note["state"])
        if found is None:
            if message.note["state"] in self.directory.controllers:
                raise Elsewhere
            raise FrameError(f"{self.name} does not control state {message.note['state']!r}")
        for number, groups, members in message.note.get("epochs", ()):
            found.open(number, Shape(groups, members))
        return found

    def _late(self, controller: Controller, after: Mapping[str, int]) -> dict[str, int]:
        """Records by living warehouse that the asker has caused and the controller has not heard of yet."""
        late = {w: n for w, n in after.items() if controller.applied.get(int(w), 0) < n}
        return {w: n for w, n in late.items() if int(w) not in self.dead} if late else late

    def _once_applied(self, controller: Controller, message: Message, then: Callable[[], Message]) -> Answer:
        after = message.note["after"]
        return self._after(controller, after, then) if self._late(controller, after) else then()

    async def _after(self, controller: Controller, after: Mapping[str, int], then: Callable[[], Message]) -> Message:
        await self._applied(controller, after)
        return then()

    async def _applied(self, controller: Controller, after: Mapping[str, int]) -> None:
        """Wait until the controller knows what the asker knows: its own commits come before its next request."""
        begin, seconds = self._clock(), max(30.0, 1.5 * self.heartbeat)  # a machine is given up within one
        while late := self._late(controller, after):
            if self._clock() >= begin + seconds:
                raise TimeoutError(
                    f"state {controller.spec.name!r} did not hear of commits {late} of its warehouses for {seconds:g} s"
                )
            await self._wait(controller.spec.name, 0.05)
            for warehouse, seq in late.items():
                if self._clock() > begin + 1.0:  # a second late: lost with a connection
                    self._ask_manifest(controller.spec.name, int(warehouse), seq)
