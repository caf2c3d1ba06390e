"""`Core` serves the part of the dock that a process has: the warehouse of its machine, the controllers of some states,
or both. It has no sockets and no threads. Requests about rows run under one lock; `Core.serve` adds other requests.

A commit goes to the warehouse, which sends a record of the commit to every controller before it answers the writer.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mindspeed_rl_plugin.dock import messages as m
from mindspeed_rl_plugin.dock.controller import Controller
from mindspeed_rl_plugin.dock.gate import Gate
from mindspeed_rl_plugin.dock.storage import Warehouse

BEHIND_SECONDS = 60.0  # longest wait of a query until the controller has the newest records that its sender knows of
RECHECK_SECONDS = 1.0  # between two checks of a waiting request: its deadline, and whether the asker lives
OUTSIDE = "outside"  # names of processes outside of the job begin with it
AFTER, MEMORY = "(records)", "(memory)"  # keys of `Core.wake`, in addition to the names of states
ANY = " (any rows)"  # after the name of a state: key of the requests for any ready rows
BulkAnswer = tuple[m.Message, Sequence[Any]]  # an answer, and buffers of cells that are sent with it


def called(name: str) -> str:
    """A readable name, WHO, of a process. name: "outside WHO NUMBER" for one outside of the job."""
    return name.removeprefix(f"{OUTSIDE} ").rpartition(" ")[0] if name.startswith(OUTSIDE) else name


class Request(NamedTuple):
    """A request to a process."""

    peer: str  # name of the asker
    message: Any
    bulk: np.ndarray | None  # `[bytes]` uint8 that came with the message
    waited: float  # seconds, 0 when it is served for the first time
    ended: Callable[[], bool] | None  # whether the asker has ended; None: the asker is this process itself


# Returns the answer, with or without bulk, or a key of `Core.wake`: the request is served again when this key is woken.
Handler = Callable[[Request], m.Message | BulkAnswer | str]


class Core:
    """Serves `warehouse` and `controllers`, both optional."""

    def __init__(self, warehouse: Warehouse | None = None, controllers: Mapping[str, Controller] | None = None) -> None:
        self.warehouse, self.controllers = warehouse, dict(controllers or {})
        self.tell: Callable[[m.Record], None] = lambda record: None  # sends it to the controllers of other processes
        self.directory: m.Message = m.Ok()  # the answer to a process that joins
        self.gate: Gate | None = None  # for processes outside of the job; None: they may ask for all that a rank may
        self.clock = time.monotonic
        self.at_close: list[Callable[[], None]] = []
        self.at_gone: list[Callable[[str], object]] = []  # called with the name of an outside process that has ended
        self.served = {"messages": 0, "bytes": 0}  # by this process; they show how the work is spread over processes
        self.refused = {"stranger": 0, "malformed": 0}  # connections without the secret, and malformed messages
        self.lock = threading.RLock()  # of the rows
        self._changed = defaultdict(lambda: threading.Condition(self.lock))  # by key of `wake`
        self._handlers: dict[type[m.Message], tuple[Handler, bool]] = {}
        self._first: dict[str, tuple[list[int], float]] = {}  # state -> its first open group, and since when it is that
        self.serve(
            {
                m.Ask: self._on_ask,
                m.Release: self._on_release,
                m.Reclaim: lambda request: self._reclaim(request.message.state, request.message.holder),
                m.Look: lambda request: self._asked(request).look(request.message.ids, request.message.done),
                m.Retire: self._on_retire,
                m.Put: self._on_put,
                m.Clear: self._on_clear,
                m.Locate: self._on_locate,
                m.Fetch: self._on_fetch,
                m.Map: lambda request: m.Mapped(*self.warehouse.slabs.place(request.message.segment)),
                m.Join: lambda request: self.directory,
            }
        )

    def serve(self, handlers: Mapping[type[m.Message], Handler], *, locked: bool = True) -> None:
        """From now on these handlers answer requests of these types. locked: whether they run under the lock of the
        rows. Only a locked handler may return a key to wait for; other handlers do their waiting themselves."""
        self._handlers.update({kind: (handler, locked) for kind, handler in handlers.items()})

    def call(
        self, peer: str, message: m.Message, bulk: np.ndarray | None = None, ended: Callable[[], bool] | None = None
    ) -> BulkAnswer:
        """Wait for the answer to a request, with its bulk. ended: whether the asker has ended; None: the asker is this
        process itself. Then an error that would count as a malformed message is raised as it is."""
        request = Request(peer, message, bulk, 0.0, ended)
        handler, locked = self._handlers.get(type(message), (_no_request, True))
        if not locked:
            return self._serve(handler, request)
        begin, clock = self.clock(), self.clock
        with self.lock:
            while True:
                answer = self._serve(handler, request)
                if not isinstance(answer, str):
                    return answer
                left = getattr(message, "deadline", 0.0) - request.waited
                self._changed[answer].wait(min(RECHECK_SECONDS, left) if left > 0 else RECHECK_SECONDS)
                request = request._replace(waited=clock() - begin)
                if ended is not None and ended():
                    self._changed[answer].notify()  # pass the signal on: it may be meant for another request
                    raise EOFError("the asker has ended")

    def _serve(self, handler: Handler, request: Request) -> BulkAnswer | str:
        """The answer, or an error as an answer, or a key to wait for."""
        peer, message, bulk, waited, ended = request
        self.served["messages"] += not waited
        try:
            if self.gate is not None and ended is not None and not waited and peer.startswith(OUTSIDE):
                self.gate.check(message, bulk, self.warehouse)
            if isinstance(message, m.Query) and self._behind(message, waited):
                return AFTER
            answer = handler(request)
        except (m.FrameError, *m.MALFORMED) as error:
            if ended is None:
                raise
            self.refused["malformed"] += 1
            return m.Failed.of(m.FrameError(f"malformed {type(message).__name__}: {error!r}")), ()
        except (ValueError, OSError) as error:
            return m.Failed.of(error), ()
        if isinstance(answer, tuple):
            self.served["bytes"] += sum(len(part) for part in answer[1])
        return answer if isinstance(answer, (str, tuple)) else (answer, ())

    def open_groups(self, states: Sequence[str]) -> Iterator[tuple[str, float]]:
        """For the status of this process: of each of these states that it serves, a text about the groups at work, and
        for how many seconds the same group has been the first of them."""
        for state in (state for state in states if state in self.controllers):
            groups, rows = self.controllers[state].at_work()
            if len(groups):
                first = groups[0].tolist()
                if self._first.get(state, ([], 0.0))[0] != first:
                    self._first[state] = first, self.clock()
                whose = ", ".join(f"{count} {called(name)}" for name, count in rows.most_common(4))
                text = f"{state} {len(groups)} (rows: {whose}), the first, group {first[1]} of rollout {first[0]},"
                yield text, self.clock() - self._first[state][1]

    def close(self) -> None:
        """Free the memory that this process keeps for others. Idempotent."""
        if self.warehouse is not None:
            self.warehouse.slabs.close()
        for close in self.at_close:
            close()

    def gone(self, peer: str) -> None:
        """A process outside of the job has ended: its leased rows are given out again."""
        with self.lock:
            for forget in self.at_gone:
                forget(peer)
            for state in self.controllers:
                self._reclaim(state, peer)

    # controllers

    def _on_ask(self, request: Request) -> m.Message | str:
        ask: m.Ask = request.message
        controller, now = self._current(ask.state), self.clock()
        expires = float("inf") if ask.seconds is None else now + ask.seconds
        grant = controller.take(ask, request.peer, expires)
        any_rows = ask.ids is None and ask.share is None
        if grant is not None:
            if any_rows:
                self._wake_one(ask.state)  # there may be more rows
            return grant
        if request.waited < ask.deadline:
            return ask.state + ANY if any_rows else ask.state
        if not ask.deadline and ask.ids is None:  # the asker does not wait
            return m.Grant.empty(len(controller.spec.reads))
        raise TimeoutError(controller.explain(ask))

    def _current(self, state: str) -> Controller:
        """The controller of a state, after expired leases are ended."""
        now = self.clock()
        self.controllers[state].end(lambda held: held.expires <= now)
        return self.controllers[state]

    def _asked(self, request: Request) -> Controller:
        return self.controllers[request.message.state]

    def _on_release(self, request: Request) -> m.Message:
        message: m.Release = request.message
        self._asked(request).end(lambda held: held.token == message.token)
        self.wake(message.state)
        return m.Ok()

    def _reclaim(self, state: str, holder: str) -> m.Message:
        if self.controllers[state].end(lambda held: held.holder == holder):
            self.wake(state)
        return m.Ok()

    def _on_retire(self, request: Request) -> m.Message | str:
        message: m.Retire = request.message
        controller = self._current(message.state)
        holders = controller.retire(message.epoch, message.groups)
        if not holders:
            return m.Ok()
        if request.waited < message.deadline:
            return message.state
        raise TimeoutError(
            f"clear: state {message.state!r} still holds rows of epoch {message.epoch} after {message.deadline:g} s "
            f"(leases of {', '.join(holders)}); commit or release them first"
        )

    def apply(self, record: m.Record) -> None:
        """Let the controllers of this process learn the record of a commit."""
        with self.lock:
            for state, controller in self.controllers.items():
                if controller.apply(record):
                    self.wake(state)
            self.wake(AFTER)

    def wake(self, key: str) -> None:
        """Serve again the requests that wait for `key`. Of the requests for any rows of a state only one is woken, so
        that a commit does not wake all consumers; a request that gets rows wakes the next one."""
        with self.lock:
            if key in self._changed:
                self._changed[key].notify_all()
            self._wake_one(key)

    def _wake_one(self, state: str) -> None:
        if state + ANY in self._changed:
            self._changed[state + ANY].notify()

    def _behind(self, query: m.Query, waited: float) -> bool:
        """Whether the controller still lacks records that the asker knows of."""
        controller = self.controllers[query.state]
        for number, shape in query.epochs:
            controller.open(number, shape)
        late = {w: seq for w, seq in query.after.items() if controller.applied.get(w, 0) < seq}
        if late and waited >= BEHIND_SECONDS:
            raise TimeoutError(
                f"the controller of state {query.state!r} waited {waited:.0f} s for records (warehouse: number) {late}"
            )
        return bool(late)

    # the warehouse

    def _on_put(self, request: Request) -> m.Message | str:
        put, bulk, house = request.message, request.bulk, self.warehouse
        if put.producer and (put.reserve or bulk is not None):
            reason = house.admit(put)
            if reason is not None and request.waited >= put.deadline:
                raise TimeoutError(f"put waited {put.deadline:g} s for memory in the dock of this machine: {reason}")
            if reason is not None:
                return MEMORY
        if put.reserve:
            return m.Ok(house.seq, house.reserve(put.parts))
        self.served["bytes"] += 0 if bulk is None else len(bulk)
        self._tell(house.commit(put, bulk))
        return m.Ok(house.seq)

    def _on_clear(self, request: Request) -> m.Message:
        message: m.Clear = request.message
        self._tell(self.warehouse.clear(message.epoch, message.shape, message.groups))
        self.wake(MEMORY)
        return m.Ok(self.warehouse.seq)

    def _on_locate(self, request: Request) -> m.Message:
        message: m.Locate = request.message
        places = self.warehouse.locate(message.epoch, message.columns, message.rows)
        return m.Located(self.warehouse.seq, *places)

    def _on_fetch(self, request: Request) -> BulkAnswer:
        return m.Ok(), [self.warehouse.slabs.view(*span) for span in request.message.spans.tolist()]

    def _tell(self, record: m.Record | None) -> None:
        if record is not None:
            self.apply(record)
            self.tell(record)


def _no_request(request: Request) -> m.Message:
    raise m.FrameError(f"{type(request.message).__name__} is not a request that this process answers")
