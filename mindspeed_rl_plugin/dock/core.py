"""What one process serves of the dock, without sockets, threads or a clock of its own: its machine's warehouse, the
controllers of some states, or both.

A request is answered at once or later: one that must wait is kept, and tried again whenever what it waits for has
changed, until its deadline. A commit goes to the warehouse, which describes it to every controller before it answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_rl_plugin.dock.controller import Controller
from mindspeed_rl_plugin.dock.pick import Wish
from mindspeed_rl_plugin.dock.storage import Warehouse
from mindspeed_rl_plugin.dock.wire import (
    MALFORMED,
    Ask,
    Clear,
    Committed,
    Data,
    Failed,
    Fetch,
    FrameError,
    Held,
    Join,
    Left,
    Lent,
    Locate,
    Located,
    Manifest,
    Map,
    Mapped,
    Message,
    Ok,
    Put,
    Record,
    Release,
    Remaining,
    Reserve,
    Retire,
    Shape,
)

BEHIND_SECONDS = 60.0  # that a controller may take to hear of a commit that its asker has made
AFTER, MEMORY = "(records)", "(memory)"  # what a request waits for, where that is no state
Answer = tuple[Message, Sequence[Any]]  # and its bulk
Later = Callable[[Answer], None]


@dataclass(eq=False)
class Waiting:
    """A request that is not answered yet. key: what it waits for; bulk: came with it."""

    key: str
    peer: str
    message: Message
    bulk: np.ndarray | None
    begin: float
    later: Later


class Core:
    """Serves `warehouse` and `controllers` (both optional), one call at a time.

    tell: sends a record to the controllers of other processes; describe: answers a process that joins from outside the
    job; clock: seconds. served: messages, and bytes of cells that went through this process, to show that none sees
    them all; refused: what was turned away, by reason.
    """

    def __init__(
        self,
        warehouse: Warehouse | None = None,
        controllers: Mapping[str, Controller] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.warehouse, self.controllers = warehouse, dict(controllers or {})
        self.tell: Callable[[Record], None] = lambda record: None
        self.describe: Callable[[], Message] = Ok
        self.served = {"messages": 0, "bytes": 0}
        self.refused = {"stranger": 0, "malformed": 0}
        self._clock = clock
        self._waiting: dict[str, list[Waiting]] = {}
        self._serve: dict[type, Callable[..., Answer | Message | str]] = {
            Ask: self._ask,
            Release: self._release,
            Remaining: self._remaining,
            Retire: self._retire,
            Record: self._record,
            Reserve: self._reserve,
            Put: self._put,
            Locate: self._locate,
            Fetch: self._fetch,
            Map: self._map,
            Clear: self._clear,
            Manifest: self._manifest,
            Join: lambda peer, message, bulk, waited: self.describe(),
        }

    def handle(self, peer: str, message: Message, bulk: np.ndarray | None, later: Later) -> Answer | None:
        """Serve one message: its answer, or None where `later` will be called with it."""
        self.served["messages"] += 1
        return self._try(Waiting("", peer, message, bulk, self._clock(), later))

    def gone(self, peer: str) -> None:
        """A process outside of the job has ended: what was lent to it returns, its leases are given out again."""
        if self.warehouse is not None:
            self.warehouse.forget(peer)
        for state, controller in self.controllers.items():
            if controller.forget(peer):
                self._wake(state)

    def cancel(self, later: Later) -> None:
        """Nobody waits for this answer any more."""
        for waiting in self._waiting.values():
            waiting[:] = [w for w in waiting if w.later != later]

    def pause(self) -> float:
        """Seconds until `tick` has something to do, one at most."""
        now, times = self._clock(), [1.0]
        for request in (w for waiting in self._waiting.values() for w in waiting):
            ends = (getattr(request.message, name, None) for name in ("deadline", "linger"))
            times += [left for end in ends if end and (left := request.begin + end - now) > 0]
        return min(times)

    def tick(self) -> None:
        """Look at deadlines: of leases, of those who wait. To be called after each `pause`."""
        now = self._clock()
        for controller in self.controllers.values():
            controller.expire(now)
        for key in list(self._waiting):
            self._wake(key)

    # controllers

    def _ask(self, peer: str, ask: Ask, bulk: object, waited: float) -> Message | str:
        controller = self._controller(ask.state, ask.epochs)
        if foreign := set(ask.columns) - set(controller.spec.reads):
            raise FrameError(f"state {ask.state!r} does not read {sorted(foreign)}")
        if late := self._behind(controller, ask.after, waited):
            return late
        wish = Wish(ask.ids, ask.max_rows, ask.min_rows, ask.max_tokens, ask.linger, ask.near)
        over = waited >= ask.deadline  # which ends a linger, too
        expires = float("inf") if ask.seconds is None else self._clock() + ask.seconds
        found = controller.take(wish, peer, expires, float("inf") if over else waited)
        if found is not None:
            return controller.grant(*found, ask.columns)
        if not over:
            return ask.state
        if not ask.deadline and ask.ids is None:  # it only tried
            return controller.grant(0, [], ask.columns)
        raise TimeoutError(controller.explain(wish, ask.deadline))

    def _release(self, peer: str, message: Release, bulk: object, waited: float) -> Message:
        self._controller(message.state).release(message.token)
        self._wake(message.state)
        return Ok()

    def _remaining(self, peer: str, message: Remaining, bulk: object, waited: float) -> Message | str:
        controller = self._controller(message.state, message.epochs)
        if late := self._behind(controller, message.after, waited):
            return late
        if message.ids is None:
            return Left(controller.remaining())
        left = controller.undone(message.ids)
        return Left(len(left), left)

    def _retire(self, peer: str, message: Retire, bulk: object, waited: float) -> Message | str:
        controller = self._controller(message.state, [(message.epoch, *message.shape)])
        if late := self._behind(controller, message.after, waited):
            return late
        holders = controller.retire(message.epoch, message.shape, message.groups)
        if not holders:
            return Ok()
        if waited < message.deadline:
            return message.state
        raise TimeoutError(
            f"clear: state {message.state!r} still holds rows of epoch {message.epoch} after {message.deadline:g} s "
            f"(leases of {', '.join(holders)}); commit or release them first"
        )

    def _record(self, peer: str, record: Record, bulk: object, waited: float) -> Message:
        self._apply(record)
        return Ok()

    def _controller(self, state: str, epochs: Iterable[tuple[int, int, int]] = ()) -> Controller:
        """The controller of a state, which then knows the epochs of its asker."""
        if state not in self.controllers:
            raise FrameError(f"state {state!r} is not controlled here")
        for number, *shape in epochs:
            self.controllers[state].open(number, Shape(*shape))
        return self.controllers[state]

    def _behind(self, controller: Controller, after: Mapping[int, int], waited: float) -> str:
        """What to wait for while records that the asker has caused are on their way."""
        late = {w: seq for w, seq in after.items() if controller.applied.get(w, 0) < seq}
        if late and waited >= BEHIND_SECONDS:
            raise TimeoutError(
                f"state {controller.spec.name!r} did not hear of commits {late} of its warehouses for {waited:.0f} s"
            )
        return AFTER if late else ""

    # the warehouse

    def _reserve(self, peer: str, message: Reserve, bulk: object, waited: float) -> Message | str:
        if message.producer and (late := self._full(message, waited)):
            return late
        return Lent(self._house().reserve(peer, message.parts))

    def _put(self, peer: str, message: Put, bulk: np.ndarray | None, waited: float) -> Message | str:
        house, extent = self._house(), message.extent
        if bulk is not None:
            if message.producer and (late := self._full(message, waited)):
                return late
            extent = house.store(peer, message.parts, bulk)
            self.served["bytes"] += len(bulk)
        record, left = house.commit(peer, message, extent)
        if record is not None:
            self._apply(record)
            self.tell(record)
        house.forget(peer, message.back)
        return Committed(house.seq, house.lend(peer, left, message.want))

    def _full(self, put: Reserve | Put, waited: float) -> str:
        """What a producer waits for while its groups may not come in."""
        reason = self._house().admit(put)
        if reason is not None and waited >= put.deadline:
            raise TimeoutError(f"put waited {put.deadline:g} s for memory in the dock of this machine: {reason}")
        return "" if reason is None else MEMORY

    def _locate(self, peer: str, message: Locate, bulk: object, waited: float) -> Message:
        return Located(*self._house().locate(message.epoch, message.columns, message.slots))

    def _fetch(self, peer: str, message: Fetch, bulk: object, waited: float) -> Answer:
        parts = [self._house().slabs.view(*span) for span in message.spans.tolist()]
        self.served["bytes"] += sum(len(part) for part in parts)
        return Data(), parts

    def _map(self, peer: str, message: Map, bulk: object, waited: float) -> Message:
        return Mapped(*self._house().slabs.place(message.segment))

    def _clear(self, peer: str, message: Clear, bulk: object, waited: float) -> Message:
        house = self._house()
        record = house.clear(message.epoch, message.shape, message.groups)
        if record is not None:
            self._apply(record)
            self.tell(record)
            self._wake(MEMORY)
        return Committed(house.seq)

    def _manifest(self, peer: str, message: Manifest, bulk: object, waited: float) -> Message:
        return Held(self._house().manifest())

    def _house(self) -> Warehouse:
        if self.warehouse is None:
            raise FrameError("no warehouse is here")
        return self.warehouse

    # inside

    def _apply(self, record: Record) -> None:
        for state, controller in self.controllers.items():
            if controller.apply(record):
                self._wake(state)
        self._wake(AFTER)

    def _try(self, request: Waiting) -> Answer | None:
        """The answer of a request, an error too; None where it waits."""
        waited = self._clock() - request.begin
        serve = self._serve.get(type(request.message))
        try:
            if serve is None:
                raise FrameError(f"{type(request.message).__name__} is no request")
            answer = serve(request.peer, request.message, request.bulk, waited)
        except FrameError as error:
            return self._malformed(error)
        except (ValueError, OSError) as error:
            return Failed("TimeoutError" if isinstance(error, TimeoutError) else "ValueError", str(error)), ()
        except MALFORMED as error:
            return self._malformed(FrameError(f"malformed {type(request.message).__name__}: {error!r}"))
        if isinstance(answer, str):
            request.key = answer
            self._waiting.setdefault(answer, []).append(request)
            return None
        return answer if isinstance(answer, tuple) else (answer, ())

    def _malformed(self, error: FrameError) -> Answer:
        self.refused["malformed"] += 1
        return Failed("ValueError", str(error)), ()

    def _wake(self, key: str) -> None:
        for request in self._waiting.pop(key, []):
            answer = self._try(request)
            if answer is not None:
                request.later(answer)
