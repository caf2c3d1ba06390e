"""Docks of every medium against a naive model under random interleavings: once per state, whole groups, first commit
wins."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mindspeed_rl_plugin.dock import ColumnSpec, DistributedDock, LocalDock, StateSpec
from mindspeed_rl_plugin.dock.distributed.fleet import Member
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId

COLUMNS = [
    ColumnSpec("prompt", torch.int32, "group", ragged=True),
    ColumnSpec("tokens", torch.int32, "token", ragged=True),
    ColumnSpec("score", torch.float32, "sample", ragged=False),
]
STATES = [
    StateSpec("generate", ("prompt",), ("tokens",)),
    StateSpec("grade", ("tokens", "prompt"), ("score",)),
    StateSpec("train", ("tokens", "score"), (), whole_groups=True),
]
READS = {s.name: s.reads for s in STATES}
WRITES = {s.name: s.writes for s in STATES}
NAMES = list(READS)
HERE = "127.0.0.1"


class Model:
    """The same promises with dicts and sets: cells[(column, id)] is a list or a number."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}
        self.alive: set[SampleId] = set()
        self.cells: dict[tuple[str, SampleId], object] = {}
        self.done: dict[str, set[SampleId]] = {name: set() for name in NAMES}
        self.leased: dict[str, set[SampleId]] = {name: set() for name in NAMES}

    def write(self, column: str, sample: SampleId, value: object) -> None:
        if sample in self.alive:
            self.cells.setdefault((column, sample), value)

    def group(self, sample: SampleId) -> list[SampleId]:
        return [sample._replace(member=m) for m in range(self.shapes[sample.epoch][1])]

    def ready(self, state: str) -> list[SampleId]:
        taken = self.done[state] | self.leased[state]
        ok = {i for i in self.alive if i not in taken and all((c, i) in self.cells for c in READS[state])}
        if state == "train":
            ok = {i for i in ok if all(j in ok for j in self.group(i))}
        return sorted(ok)


class DockMachine(RuleBasedStateMachine):
    def make(self):
        return LocalDock(COLUMNS, STATES)

    @initialize()
    def start(self) -> None:
        self.dock, self.model, self.leases, self.closed = self.make(), Model(), [], []
        self.random = random.Random(0)
        self.epoch = 0

    @rule(groups=st.integers(1, 3), members=st.integers(1, 3))
    def open(self, groups: int, members: int) -> None:
        self.dock.open(self.epoch, groups, members)
        self.model.shapes[self.epoch] = (groups, members)
        self.model.alive |= {SampleId(self.epoch, g, m) for g in range(groups) for m in range(members)}
        self.epoch += 1

    @precondition(lambda self: self.model.alive)
    @rule(data=st.data())
    def put_prompts(self, data: st.DataObject) -> None:
        alive = sorted(self.model.alive)
        ids = data.draw(st.just(alive) | st.lists(st.sampled_from(alive), unique=True, min_size=1, max_size=4))
        values = [[self.random.randrange(99)] * self.random.randrange(3) for _ in ids]
        self.dock.put(Rows(tuple(ids), {"prompt": pack(values)}))
        for sample, value in zip(ids, values, strict=True):
            for member in self.model.group(sample):
                self.model.write("prompt", member, value)

    @precondition(lambda self: self.model.alive)
    @rule(data=st.data())
    def put_score(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.model.alive)), unique=True, min_size=1, max_size=4))
        self.dock.put(self.rows("grade", ids))

    @rule(state=st.sampled_from(NAMES), max_rows=st.integers(3, 8))
    def lease(self, state: str, max_rows: int) -> None:
        ready = self.model.ready(state)
        if not ready and self.dock.remaining(state):
            return
        lease = self.dock.lease(state, max_rows=max_rows, deadline=0)
        if state == "train":
            taken = set(lease.rows.ids)
            assert taken <= set(ready) and all(set(self.model.group(i)) <= taken for i in taken)
            assert bool(lease.rows.ids) == bool(ready)
        else:
            assert list(lease.rows.ids) == ready[:max_rows]
        self.took(lease)

    @rule(state=st.sampled_from(["generate", "grade"]), data=st.data())
    def lease_ids(self, state: str, data: st.DataObject) -> None:
        ready = self.model.ready(state)
        if ready:
            ids = data.draw(st.lists(st.sampled_from(ready), unique=True, min_size=1, max_size=4))
            lease = self.dock.lease(state, ids=ids, deadline=0)
            assert list(lease.rows.ids) == ids
            self.took(lease)

    def took(self, lease) -> None:
        for column in READS[lease.state]:
            assert unpack(lease.rows[column]) == [self.model.cells[column, i] for i in lease.rows.ids]
        if len(lease):
            self.model.leased[lease.state] |= set(lease.rows.ids)
            self.leases.append(lease)

    def rows(self, state: str, ids) -> Rows | None:
        """A write-back of `state` with fresh random values, written into the model too."""
        if state == "generate":
            values = [[self.random.randrange(99)] * self.random.randrange(4) for _ in ids]
            column, packed = "tokens", pack(values)
        elif state == "grade":
            values = [float(self.random.randrange(99)) for _ in ids]
            column, packed = "score", torch.tensor(values)
        else:
            return None
        for sample, value in zip(ids, values, strict=True):
            self.model.write(column, sample, value)
        return Rows(tuple(ids), {column: packed})

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), keep=st.booleans())
    def commit(self, data: st.DataObject, keep: bool) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.dock.commit(lease, self.rows(lease.state, lease.rows.ids))
        self.model.leased[lease.state] -= set(lease.rows.ids)
        self.model.done[lease.state] |= set(lease.rows.ids)
        self.closed.append(lease)

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def commit_again(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.closed))
        live = [i for i in lease.rows.ids if i in self.model.alive]
        if set(live) <= self.model.done[lease.state]:
            self.dock.commit(lease, garbage(lease))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.dock.release(lease)
        self.model.leased[lease.state] -= set(lease.rows.ids)

    @precondition(lambda self: self.model.shapes)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        epoch = data.draw(st.sampled_from(sorted(self.model.shapes)))
        some = st.lists(st.integers(0, self.model.shapes[epoch][0] - 1), min_size=1, max_size=2)
        groups = data.draw(some | some | st.none())
        self.before_clear(epoch, groups)
        for _ in range(data.draw(st.integers(1, 2))):  # a repeat changes nothing
            self.dock.clear(epoch, groups)
        gone = {i for i in self.model.alive if i.epoch == epoch and (groups is None or i.group in groups)}
        self.model.alive -= gone
        self.model.cells = {k: v for k, v in self.model.cells.items() if k[1] not in gone}

    @rule()
    def crash_and_restore(self) -> None:
        saved = self.dock.snapshot()
        self.dock = self.make()
        self.dock.restore(saved)
        again = self.dock.snapshot()
        assert str(again) == str(saved)
        self.leases = []
        self.model.leased = {name: set() for name in NAMES}

    def available(self, state: str, number: int) -> list[SampleId]:
        epoch = self.dock._epochs[number]
        return epoch.ids(epoch.available(state).nonzero().flatten().tolist())

    def before_clear(self, epoch: int, groups: list[int] | None) -> None:
        """Leases do not hinder clearing."""

    @invariant()
    def same_as_model(self) -> None:
        for state in NAMES:
            assert self.dock.remaining(state) == len(self.model.alive - self.model.done[state])
            for number in {i.epoch for i in self.model.alive}:
                mine = [i for i in self.model.ready(state) if i.epoch == number]
                assert self.available(state, number) == mine
        for column in ("prompt", "tokens", "score"):
            ids = sorted(i for c, i in self.model.cells if c == column)
            assert unpack(self.dock.read(ids, [column])[column]) == [self.model.cells[column, i] for i in ids]


class DistributedMachine(DockMachine):
    """The same against warehouses and controllers behind sockets."""

    nodes = ("one node",)

    def make(self):
        self.close()
        self.members = members(COLUMNS, STATES, self.nodes)
        net = self.members[-1].connections
        net.meet = lambda: None
        net.settings.warehouse, net.segments = self.place(net)
        return DistributedDock(COLUMNS, STATES, net, deadline=5)

    def place(self, net):
        return net.settings.warehouse, net.segments

    def teardown(self) -> None:
        self.close()

    def close(self) -> None:
        for member in getattr(self, "members", []):
            member.connections.close()

    def available(self, state: str, number: int) -> list[SampleId]:
        self.dock.remaining(state)  # its controller knows then what was committed here
        controller = next(m.host.controllers[state] for m in self.members if state in m.host.controllers)
        view = controller._epochs.get(number)
        rows = [] if view is None else view.available().nonzero()[0].tolist()
        return [SampleId(number, *divmod(r, self.model.shapes[number][1])) for r in rows]

    def before_clear(self, epoch: int, groups: list[int] | None) -> None:
        """By intent not what LocalDock does: clearing waits for the leases of what is cleared."""
        for lease in list(self.leases):
            if any(i.epoch == epoch and (groups is None or i.group in groups) for i in lease.rows.ids):
                self.dock.release(lease)
                self.model.leased[lease.state] -= set(lease.rows.ids)
                self.leases.remove(lease)


class TwoWarehouses(DistributedMachine):
    nodes = ("first", "second")

    def place(self, net):
        return None, None  # rows come over sockets in id order, as nothing is near


def members(columns, states, nodes):
    """One a node, in threads."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        barrier, values = threading.Barrier(len(nodes)), [None] * len(nodes)

        def join(rank: int) -> Member:
            def exchange(value):
                values[rank] = value
                barrier.wait(20)
                found = list(values)
                barrier.wait(20)
                return found

            return Member(columns, states, rank=rank, world=len(nodes), exchange=exchange, node=nodes[rank], host=HERE)

        return list(pool.map(join, range(len(nodes))))


def pack(values: list[list[int]]) -> Ragged:
    return Ragged.from_rows([torch.tensor(v, dtype=torch.int32) for v in values], dtype=torch.int32)


def unpack(column) -> list:
    return [r.tolist() for r in column.rows()] if isinstance(column, Ragged) else column.tolist()


def garbage(lease) -> Rows | None:
    if lease.state == "generate":
        return Rows(lease.rows.ids, {"tokens": pack([[-1] * 5] * len(lease))})
    return Rows(lease.rows.ids, {"score": torch.full((len(lease),), -1.0)}) if lease.state == "grade" else None


TestDockModel = DockMachine.TestCase
TestDockModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)

TestDistributedModel = DistributedMachine.TestCase
TestDistributedModel.settings = settings(TestDockModel.settings, max_examples=8)
TestTwoWarehousesModel = TwoWarehouses.TestCase
TestTwoWarehousesModel.settings = settings(TestDockModel.settings, max_examples=6)
