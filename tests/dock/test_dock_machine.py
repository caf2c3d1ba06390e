"""Warehouses and controllers without sockets, under random interleavings, losses and restarts, against a naive model.

What must hold at every step: no row in two live leases, nothing given out again once its acknowledgement is known,
whole groups only, cells of a live lease readable and unchanged, bytes within the cap. What must hold once all records
have arrived, in whatever order and however often: every controller knows exactly what the model knows.
"""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mindspeed_rl_plugin.dock import ColumnSpec, StateSpec
from mindspeed_rl_plugin.dock.distributed import frames
from mindspeed_rl_plugin.dock.distributed.arena import Arena, Segments
from mindspeed_rl_plugin.dock.distributed.controller import Controller
from mindspeed_rl_plugin.dock.distributed.picking import Ask
from mindspeed_rl_plugin.dock.distributed.records import Record, Shape
from mindspeed_rl_plugin.dock.distributed.warehouse import Block, Warehouse

COLUMNS = {
    c.name: c
    for c in (
        ColumnSpec("prompt", torch.int32, "group", ragged=True),
        ColumnSpec("tokens", torch.int32, "token", ragged=True),
        ColumnSpec("logp", torch.float32, "token", ragged=True),
        ColumnSpec("score", torch.float32, "sample", ragged=False),
    )
}
STATES = {
    s.name: s
    for s in (
        StateSpec("generate", ("prompt",), ("tokens",)),
        StateSpec("logp", ("tokens",), ("logp",)),
        StateSpec("grade", ("tokens", "prompt"), ("score",)),
        StateSpec("train", ("tokens", "logp", "score"), (), whole_groups=True),
    )
}
WRITE_BACKS = {"tokens": 400, "logp": 400, "score": 4}
CAPACITY = 10 << 10  # bytes: 9 rows with all that is written back
MAX_ROWS = 9
SECONDS = 10.0
HOUSES = 2
Id = tuple[int, int, int]


class DockMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32 - 1))
    def start(self, seed: int) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.random = np.random.default_rng(seed)
        for w in range(HOUSES):
            (self.root / str(w)).mkdir()
        self.houses = [self.house(w) for w in range(HOUSES)]
        self.readers = [Segments(self.root / str(w)) for w in range(HOUSES)]
        self.controllers = {name: self.controller(name) for name in STATES}
        self.flying: dict[str, list[Record]] = {name: [] for name in STATES}  # records on their way
        self.now, self.epoch, self.owners = 0.0, 0, 0
        self.shapes: dict[int, Shape] = {}
        self.dead: set[tuple[int, int]] = set()  # groups that a warehouse has cleared
        self.closing: set[tuple[int, int]] = set()  # groups whose clearing has begun
        self.cells: dict[tuple[str, int, int], bytes] = {}  # (column, epoch, row or group)
        self.lengths: dict[tuple[int, int], int] = {}
        self.acked: dict[str, set[tuple[int, int]]] = {name: set() for name in STATES}
        self.known: dict[str, set[tuple[int, int]]] = {name: set() for name in STATES}  # acks that its controller heard
        self.leases: list[dict] = []
        self.hanging: list[np.ndarray] = []  # memory of writers that never come to their commit

    def house(self, w: int) -> Warehouse:
        arena = Arena(self.root / str(w), 4096)
        return Warehouse(w, COLUMNS, arena, capacity=CAPACITY, max_rows=MAX_ROWS, write_backs=WRITE_BACKS)

    def controller(self, name: str) -> Controller:
        return Controller(STATES[name], COLUMNS, STATES)

    def teardown(self) -> None:
        if hasattr(self, "houses"):
            self.end_everything()
            shutil.rmtree(self.root)

    def end_everything(self) -> None:
        """Clearing all of it frees every byte."""
        self.deliver_all()
        for lease in self.leases:
            self.controllers[lease["state"]].drop_holder(lease["holder"])
        for number, shape in list(self.shapes.items()):
            for controller in self.controllers.values():
                controller.open(number, shape)
                assert not controller.close(number, None)
            for w in range(HOUSES):
                self.tell(self.houses[w].clear(number, shape, np.arange(shape.groups)))
        self.deliver_all()
        for house in self.houses:
            for owner in {o for o in house.reservations._owner.values()}:
                house.reservations.forget(owner)
            assert house.used == house.outstanding == house.rows == 0 and not house._epochs and not house._live
            assert all(len(free) == 1 for free in house.arena._free.values())
        for controller in self.controllers.values():
            assert not controller._epochs and not controller._leases and controller.remaining() == 0

    # writing

    def write(self, w: int, number: int, cells: dict[str, dict[int, bytes]], *, state=None, ack=None, dies=""):
        """A writer's reserve, copy, commit; it may die before the last, or hang. Returns whether it was admitted."""
        self.owners += 1
        owner, shape, house = f"writer {self.owners}", self.shapes[number], self.houses[w]
        sizes = [sum(map(len, c.values())) for c in cells.values()]
        slots = [np.array(list(c), np.int32) for c in cells.values()]
        if state is None:
            blocks = list(zip(cells, slots, sizes, strict=True))
            if house.admit(number, shape, blocks) is not None:
                return False
        extents = house.reservations.make(owner, sizes)
        for extent, column in zip(extents, cells.values(), strict=True):
            data = np.frombuffer(b"".join(column.values()), np.uint8)
            self.readers[w].view(extent.segment, extent.offset, len(data))[:] = data
        assert house.used <= CAPACITY + sum(s + 64 for s in sizes) and house.rows <= MAX_ROWS
        if dies == "hangs":
            self.hanging += [self.readers[w].view(*extent) for extent in extents]
            return True
        if dies:
            house.reservations.forget(owner)
            return True
        blocks = [
            Block(name, slots[i], np.array([len(v) // 4 for v in column.values()], np.int32), extents[i])
            for i, (name, column) in enumerate(cells.items())
        ]
        needs = () if state is None else STATES[state].writes
        self.tell(house.commit(owner, number, shape, blocks, ack=ack, needs=needs))
        for name, column in cells.items():
            for slot, value in column.items():
                group = slot if name == "prompt" else slot // shape.members
                if (number, group) not in self.dead:
                    self.cells.setdefault((name, number, slot), value)
        if ack is not None:
            self.acked[state] |= {(number, r) for r in ack[1].tolist()}
        return True

    def tell(self, record: Record | None) -> None:
        if record is not None:
            for flying in self.flying.values():
                flying.append(record)

    def value(self, column: str, number: int, slot: int) -> bytes:
        if column == "score":
            return self.random.random(1, np.float32).tobytes()
        if column == "prompt":
            return self.random.integers(0, 99, self.random.integers(0, 4), np.int32).tobytes()
        length = self.lengths.setdefault((number, slot), int(self.random.choice([0, 1, 7, 100])))
        return self.random.integers(0, 99, length, np.int32).tobytes()

    def home(self, number: int, group: int) -> int:
        return (number + group) % HOUSES

    @rule(groups=st.integers(1, 3), members=st.integers(1, 3))
    def open(self, groups: int, members: int) -> None:
        if len(self.shapes) < 6:
            self.shapes[self.epoch] = Shape(groups, members)
            self.epoch += 1

    @precondition(lambda self: self.shapes)
    @rule(data=st.data(), dies=st.sampled_from(["", "", "", "dies", "hangs"]))
    def put_prompts(self, data: st.DataObject, dies: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.shapes)))
        groups = data.draw(st.lists(st.integers(0, self.shapes[number].groups - 1), min_size=1, unique=True))
        for w in range(HOUSES):
            mine = [g for g in groups if self.home(number, g) == w]
            if not mine:
                continue
            before, rows = self.houses[w].used + self.houses[w].outstanding, self.houses[w].rows
            admitted = self.write(w, number, {"prompt": {g: self.value("prompt", number, g) for g in mine}}, dies=dies)
            # Refused only where the promise would break; then clearing what is there makes room.
            room = self.houses[w].row_reserve * len(mine) * self.shapes[number].members + 64 * len(mine)
            full = rows + len(mine) * self.shapes[number].members > MAX_ROWS
            assert admitted or full or (before + room > CAPACITY and before > 0)

    @rule()
    def hanging_writers_write(self) -> None:
        """They do not know whether their warehouse was started again meanwhile; nobody's cells may be theirs."""
        for memory in self.hanging:
            memory[:] = 0xA5

    @rule(groups=st.integers(1, 3), members=st.integers(1, 3), steps=st.integers(1, 4))
    def rollout(self, groups: int, members: int, steps: int) -> None:
        """A rollout that gets so far without a hitch."""
        if len(self.shapes) >= 4:
            return
        number = self.epoch
        self.open(groups, members)
        for group in range(groups):
            rows = range(group * members, (group + 1) * members)
            for column in ("prompt", "tokens", "logp", "score")[:steps]:
                slots = [group] if column == "prompt" else rows
                cells = {column: {s: self.value(column, number, s) for s in slots}}
                self.write(self.home(number, group), number, cells)

    @precondition(lambda self: self.shapes)
    @rule(data=st.data())
    def put_rows(self, data: st.DataObject) -> None:
        """A producer that brings what a state would write."""
        number, group, _ = data.draw(st.sampled_from(self.ids()))
        shape = self.shapes[number]
        rows = range(group * shape.members, (group + 1) * shape.members)
        names = data.draw(st.sampled_from([("tokens",), ("tokens", "score")]))
        self.write(self.home(number, group), number, {n: {r: self.value(n, number, r) for r in rows} for n in names})

    def ids(self) -> list[Id]:
        return [(n, g, m) for n, s in self.shapes.items() for g in range(s.groups) for m in range(s.members)]

    # working

    @rule(
        state=st.sampled_from(list(STATES)),
        holder=st.sampled_from(["a", "b", "c"]),
        max_rows=st.integers(3, 9),
        heard=st.sampled_from([True, True, False]),
    )
    def take(self, state: str, holder: str, max_rows: int, heard: bool) -> None:
        controller = self.controllers[state]
        if heard:
            self.deliver_all(state)
        for number, shape in self.shapes.items():
            controller.open(number, shape)
        grant = controller.take(Ask(max_rows=max_rows), holder, self.now, SECONDS)
        if grant is None:
            return
        if not len(grant):
            assert controller.remaining() == 0
            return
        ids = [tuple(i) for i in controller.ids(grant.rows).tolist()]
        rows = [(n, g * self.shapes[n].members + m) for n, g, m in ids]
        assert len(set(rows)) == len(rows) <= max_rows
        live = {r for lease in self.leases if lease["state"] == state for r in lease["rows"]}
        assert not live & set(rows), "in two hands"
        assert not self.known[state] & set(rows), "given out again although it was acknowledged"
        assert not {(n, g) for n, g, _ in ids} & (self.dead | self.closing), "given out while it is cleared"
        if STATES[state].whole_groups:
            assert {(n, g, m) for n, g, _ in ids for m in range(self.shapes[n].members)} == set(ids)
        homes, places = controller.homes(grant).tolist(), []
        assert homes == [self.home(n, g) for n, g, _ in ids]
        for name in STATES[state].reads:
            segment, offset, length = (x[0].tolist() for x in controller.locations(grant, [name]))
            for i, (n, g, m) in enumerate(ids):
                slot = g if name == "prompt" else g * self.shapes[n].members + m
                places.append((homes[i], segment[i], offset[i], 4 * length[i], self.cells[name, n, slot]))
        lease = {"state": state, "holder": holder, "token": grant.token, "rows": rows, "places": places}
        self.leases.append({**lease, "expires": self.now + SECONDS, "live": True})
        self.check_lease(self.leases[-1])

    def check_lease(self, lease: dict) -> None:
        for w, segment, offset, nbytes, expected in lease["places"]:
            assert self.readers[w].view(segment, offset, nbytes).tobytes() == expected, "read after free"

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), dies=st.booleans())
    def commit(self, data: st.DataObject, dies: bool) -> None:
        """Write back and acknowledge at each home; a holder may die between two of them, and does it again then."""
        lease = data.draw(st.sampled_from(self.leases))
        state = lease["state"]
        todo = sorted({(n, self.home(n, r // self.shapes[n].members)) for n, r in lease["rows"] if n in self.shapes})
        for number, w in todo[: 1 if dies else None]:
            shape = self.shapes[number]
            rows = [r for n, r in lease["rows"] if n == number and self.home(n, r // shape.members) == w]
            cells = {c: {r: self.value(c, number, r) for r in rows} for c in STATES[state].writes}
            before = self.houses[w].outstanding
            assert self.write(w, number, cells, state=state, ack=(state, np.array(rows, np.int32)))
            assert self.houses[w].outstanding <= before, "a write-back used more than it was promised"
        if not dies:
            self.leases.remove(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.deliver_all(lease["state"])  # a controller first hears what the holder wrote
        self.controllers[lease["state"]].finish(lease["token"], lease["holder"])
        self.leases.remove(lease)

    @precondition(lambda self: self.leases)
    @rule(seconds=st.sampled_from([4.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for controller in self.controllers.values():
            controller.expire(self.now)
        self.leases = [lease for lease in self.leases if lease["expires"] > self.now]

    @precondition(lambda self: self.leases)
    @rule(holder=st.sampled_from(["a", "b", "c"]))
    def holder_dies(self, holder: str) -> None:
        for controller in self.controllers.values():
            controller.drop_holder(holder)
        for house in self.houses:
            house.reservations.forget(holder)
        self.leases = [lease for lease in self.leases if lease["holder"] != holder]

    # records

    @rule(state=st.sampled_from(list(STATES)), data=st.data(), again=st.booleans())
    def deliver(self, state: str, data: st.DataObject, again: bool) -> None:
        flying = self.flying[state]
        if flying:
            at = data.draw(st.integers(0, len(flying) - 1))
            self.hear(state, flying[at] if again else flying.pop(at))

    def hear(self, state: str, record: Record) -> None:
        head, *rest = frames.encode(record.to_message())
        data = b"".join([head, *rest])[frames.PREFIX.size :]
        size, _ = frames.prefix(bytes(head[: frames.PREFIX.size]))
        message = frames.decode(data[:size], bytearray(data[size:]))
        self.controllers[state].apply(Record.from_message(message))
        if state in record.acks:
            self.known[state] |= {(record.epoch, r) for r in record.acks[state].tolist()}

    def deliver_all(self, *states: str) -> None:
        for state in states or STATES:
            flying = self.flying[state]
            while flying:
                self.hear(state, flying.pop(int(self.random.integers(len(flying)))))

    @rule(state=st.sampled_from(list(STATES)), w=st.integers(0, HOUSES - 1))
    def catch_up(self, state: str, w: int) -> None:
        house = self.houses[w]
        self.controllers[state].rebuild(w, house.seq, house.gone, house.manifest())
        here = {(n, r) for n, r in self.acked[state] if n in house._epochs}
        self.known[state] |= {(n, r) for n, r in here if self.home(n, r // self.shapes[n].members) == w}

    @rule(state=st.sampled_from(list(STATES)))
    def controller_dies(self, state: str) -> None:
        """Its successor knows nothing but the manifests; who held a lease does not hold it any more."""
        self.controllers[state] = self.controller(state)
        self.known[state] = set()
        for lease in [x for x in self.leases if x["state"] == state]:
            self.leases.remove(lease)
        for w in range(HOUSES):
            self.catch_up(state, w)
        for number, group in self.closing - self.dead:  # whoever clears begins again
            self.controllers[state].open(number, self.shapes[number])
            self.controllers[state].close(number, np.array([group]))

    @rule(w=st.integers(0, HOUSES - 1), torn=st.binary(max_size=40))
    def warehouse_dies(self, w: int, torn: bytes) -> None:
        """Its successor takes over the segments and the journal, whose last record may be half written."""
        old = self.houses[w]
        with open(self.root / str(w) / "journal", "r+b") as file:
            file.seek(old._journal.nbytes)
            file.write(torn)
        old._journal.close()
        self.houses[w] = new = self.house(w)
        assert (new.seq, new.gone.to_list()) == (old.seq, old.gone.to_list())
        assert new.incarnation == old.incarnation + 1 and new.used <= old.used
        told = [[x for x in h.manifest() if x.columns or x.acks or x.cleared is not None] for h in (old, new)]
        for a, b in zip(*told, strict=True):
            assert (a.epoch, a.shape) == (b.epoch, b.shape) and a.acks.keys() == b.acks.keys()
            assert all(np.array_equal(a.acks[s], b.acks[s]) for s in a.acks)
            assert a.columns.keys() == b.columns.keys()
            for name in a.columns:
                assert all(np.array_equal(x, y) for x, y in zip(a.columns[name], b.columns[name], strict=True))

    # clearing

    @precondition(lambda self: self.shapes)
    @rule(data=st.data(), half=st.booleans())
    def clear(self, data: st.DataObject, half: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.shapes)))
        shape = self.shapes[number]
        groups = data.draw(st.none() | st.lists(st.integers(0, shape.groups - 1), min_size=1, unique=True))
        chosen = np.arange(shape.groups) if groups is None else np.array(groups)
        self.closing |= {(number, g) for g in chosen.tolist()}
        for controller in self.controllers.values():
            controller.open(number, shape)
        closed = [not controller.close(number, chosen) for controller in self.controllers.values()]
        held = {(n, self.group(n, r)) for x in self.leases for n, r in x["rows"]}
        if held & {(number, g) for g in chosen.tolist()}:
            assert not all(closed) or self.all_acknowledged(number, chosen)
        if not all(closed):
            return
        gone = {(number, g) for g in chosen.tolist()}
        # A lease that still holds them is wholly acknowledged: nobody reads any more.
        self.leases = [x for x in self.leases if not gone & {(n, self.group(n, r)) for n, r in x["rows"]}]
        for w in range(HOUSES)[: 1 if half else None]:
            self.tell(self.houses[w].clear(number, shape, chosen))
        self.dead |= {(number, g) for g in chosen.tolist()}
        for key in [k for k in self.cells if k[1] == number and (number, self.group_of(k)) in self.dead]:
            del self.cells[key]
        if not half and all(number in h.gone for h in self.houses):
            del self.shapes[number]

    def all_acknowledged(self, number: int, groups: np.ndarray) -> bool:
        """Whether every row of every lease on these groups is acknowledged: such leases end by themselves."""
        mine = [x for x in self.leases if any(n == number and self.group(n, r) in groups for n, r in x["rows"])]
        return all(set(x["rows"]) <= self.acked[x["state"]] for x in mine)

    def group(self, number: int, row: int) -> int:
        return row // self.shapes[number].members if number in self.shapes else -1

    def group_of(self, key: tuple[str, int, int]) -> int:
        column, number, slot = key
        return slot if column == "prompt" else slot // self.shapes[number].members

    # what must hold

    @invariant()
    def leases_are_readable_and_bytes_within_the_cap(self) -> None:
        for lease in getattr(self, "leases", []):
            self.check_lease(lease)
        for house in getattr(self, "houses", []):
            assert 0 <= house.used + house.outstanding <= CAPACITY

    @rule()
    def everything_arrives(self) -> None:
        self.deliver_all()
        for name, controller in self.controllers.items():
            for w in range(HOUSES):
                assert not controller.has_gap(w) and controller.applied.get(w, 0) == self.houses[w].seq
            alive = {
                (n, g * s.members + m)
                for n, s in self.shapes.items()
                for g in range(s.groups)
                for m in range(s.members)
                if (n, g) not in self.dead | self.closing
            }
            for number, shape in self.shapes.items():
                controller.open(number, shape)
            assert controller.remaining() == len(alive - self.acked[name])
            held = {r for x in self.leases if x["state"] == name for r in x["rows"]}
            ready = {r for r in alive - self.acked[name] - held if all(self.has(c, *r) for c in STATES[name].reads)}
            if STATES[name].whole_groups:
                ready = {(n, r) for n, r in ready if all((n, x) in ready for x in self.group_rows(n, r))}
            views = controller._epochs.items()
            assert {(n, r) for n, v in views for r in v.available().nonzero()[0].tolist()} == ready

    def has(self, column: str, number: int, row: int) -> bool:
        return (column, number, row // self.shapes[number].members if column == "prompt" else row) in self.cells

    def group_rows(self, number: int, row: int) -> range:
        members = self.shapes[number].members
        return range(row // members * members, (row // members + 1) * members)


@pytest.mark.timeout(250)
class TestMachine(DockMachine.TestCase):
    settings = settings(max_examples=50, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
