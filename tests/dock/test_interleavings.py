"""Random interleavings of one process against a naive model, and threads of several ranks: each row once per state,
whole groups, first commit wins, also where a consumer from outside of the job is slow or dies."""

from __future__ import annotations

import random
import threading

import dock_help
import torch
from dock_help import COLUMNS, SampleId, ids, plain, sid, together
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mindspeed_rl_plugin.dock import Dock, DockLimits, Lease, Ragged, Rows, StateSpec
from mindspeed_rl_plugin.dock.calls import Calls
from mindspeed_rl_plugin.dock.factory import Member
from mindspeed_rl_plugin.dock.rpc import Process
from mindspeed_rl_plugin.service.guest_dock import GuestDock
from mindspeed_rl_plugin.service.job_service import JobService

STATES = [dock_help.STATES[0], dock_help.STATES[2], StateSpec("train", ("tokens", "reward"), (), whole_groups=True)]
READS = {s.name: s.reads for s in STATES}
NAMES = list(READS)
LEASE_SECONDS = 10.0


class Model:
    """The same promises with dicts and sets: cells[(column, id)] is a list or a number; leases: the live ones."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}
        self.alive: set[SampleId] = set()
        self.cells: dict[tuple[str, SampleId], object] = {}
        self.done: dict[str, set[SampleId]] = {name: set() for name in NAMES}
        self.leases: list[Lease] = []

    def write(self, column: str, sample: SampleId, value: object) -> None:
        if sample in self.alive:
            self.cells.setdefault((column, sample), value)

    def group(self, sample: SampleId) -> list[SampleId]:
        return [sample._replace(member=m) for m in range(self.shapes[sample.epoch][1])]

    def ready(self, state: str) -> list[SampleId]:
        taken = self.done[state].union(*(lease.rows.ids for lease in self.leases if lease.state == state))
        ok = {i for i in self.alive if i not in taken and all((c, i) in self.cells for c in READS[state])}
        if state == "train":
            ok = {i for i in ok if all(j in ok for j in self.group(i))}
        return sorted(ok)


class DockMachine(RuleBasedStateMachine):
    """The rank of a job of one process, and a process outside of it; `slow`: leases that ran out under their holder."""

    @initialize()
    def start(self) -> None:
        self.model, self.random, self.now, self.epoch = Model(), random.Random(0), 0.0, 0
        self.closed: list[Lease] = []
        self.slow: list[tuple[Dock, Lease]] = []
        self.holder: dict[int, Dock] = {}
        self.outsiders = 0
        self.make()

    def make(self) -> None:
        self.member = Member(COLUMNS, STATES, node="here", limits=DockLimits(segment_bytes=1 << 14))
        self.member.core.clock = lambda: self.now
        self.dock = self.member.dock(deadline=5)
        self.enter()

    def enter(self) -> None:
        """A new process outside joins."""
        self.outsiders += 1
        me = Process(f"outside {self.outsiders}", 0, "here", b"")
        calls = Calls(self.member.directory, me, core=self.member.core, lease_seconds=LEASE_SECONDS, warehouse=0)
        self.outside = GuestDock(self.member.declared, calls)

    def teardown(self) -> None:
        self.member.close()

    @rule(groups=st.integers(1, 3), members=st.integers(1, 3))
    def open(self, groups: int, members: int) -> None:
        self.dock.open(self.epoch, groups, members)
        self.model.shapes[self.epoch] = (groups, members)
        self.model.alive |= set(ids(groups, members, self.epoch))
        self.epoch += 1

    @precondition(lambda self: self.model.alive)
    @rule(data=st.data())
    def put_prompts(self, data: st.DataObject) -> None:
        alive = sorted(self.model.alive)
        rows = data.draw(st.just(alive) | st.lists(st.sampled_from(alive), unique=True, min_size=1, max_size=4))
        values = [[self.random.randrange(99)] * self.random.randrange(3) for _ in rows]
        self.dock.put(Rows(tuple(rows), {"prompt": pack(values)}))
        for sample, value in zip(rows, values, strict=True):
            for member in self.model.group(sample):
                self.model.write("prompt", member, value)

    @precondition(lambda self: self.model.alive)
    @rule(data=st.data())
    def put_reward(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.model.alive)), unique=True, min_size=1, max_size=4))
        self.dock.put(self.rows("reward", rows))

    @rule(state=st.sampled_from(NAMES), max_rows=st.integers(3, 8), outside=st.booleans())
    def lease(self, state: str, max_rows: int, outside: bool) -> None:
        ready = self.model.ready(state)
        dock = self.outside if outside else self.dock
        lease = dock.lease(state, max_rows=max_rows, deadline=0)
        got = list(lease.rows.ids)
        assert got == ready[: len(got)] and bool(got) == bool(ready) and len(got) <= max_rows
        if state == "train":
            assert all(set(self.model.group(i)) <= set(got) for i in got)
        else:
            assert got == ready[:max_rows]
        self.took(dock, lease)

    @rule(state=st.sampled_from(["generate", "reward"]), data=st.data())
    def lease_ids(self, state: str, data: st.DataObject) -> None:
        if ready := self.model.ready(state):
            rows = data.draw(st.lists(st.sampled_from(ready), unique=True, min_size=1, max_size=4))
            lease = self.dock.lease(state, ids=rows, deadline=0)
            assert list(lease.rows.ids) == rows
            self.took(self.dock, lease)

    def took(self, dock: Dock, lease: Lease) -> None:
        for column in READS[lease.state]:
            assert unpack(lease.rows[column]) == [self.model.cells[column, i] for i in lease.rows.ids]
        if lease:
            self.model.leases.append(lease)
            self.holder[lease.token] = dock

    def rows(self, state: str, rows) -> Rows | None:
        """A write-back of `state` with fresh random values, written into the model too."""
        if state == "train":
            return None
        if state == "generate":
            values = [[self.random.randrange(99)] * self.random.randrange(4) for _ in rows]
            column, packed = "tokens", pack(values)
        else:
            values = [float(self.random.randrange(99)) for _ in rows]
            column, packed = "reward", torch.tensor(values)
        for sample, value in zip(rows, values, strict=True):
            self.model.write(column, sample, value)
        return Rows(tuple(rows), {column: packed})

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        lease = self.model.leases.pop(data.draw(st.integers(0, len(self.model.leases) - 1)))
        self.acknowledge(self.holder[lease.token], lease)

    @precondition(lambda self: self.slow)
    @rule(data=st.data())
    def commit_late(self, data: st.DataObject) -> None:
        """The rows may be somebody else's by now, or done: what was written first stays."""
        dock, lease = self.slow.pop(data.draw(st.integers(0, len(self.slow) - 1)))
        self.acknowledge(dock, lease)

    def acknowledge(self, dock: Dock, lease: Lease) -> None:
        dock.commit(lease, self.rows(lease.state, lease.rows.ids))
        self.model.done[lease.state] |= set(lease.rows.ids)
        self.closed.append(lease)

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def commit_again(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.closed))
        column = {"generate": ("tokens", pack([[-1] * 5] * len(lease))), "reward": ("reward", -torch.ones(len(lease)))}
        foul = [column[lease.state]] if lease.state in column else []
        self.dock.commit(lease, Rows(lease.rows.ids, dict(foul)) if foul else None)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = self.model.leases.pop(data.draw(st.integers(0, len(self.model.leases) - 1)))
        self.holder[lease.token].release(lease)

    @rule()
    def leases_run_out(self) -> None:
        """Those of the process outside: it does not know."""
        self.now += LEASE_SECONDS + 1
        for controller in self.member.core.controllers.values():
            controller.end(lambda held: held.expires <= self.now)
        self.outsider_is_late()

    @rule()
    def leases_are_reclaimed(self) -> None:
        """The process outside is there, and does not know."""
        name = self.outside.calls.me.name
        for state, controller in self.member.core.controllers.items():
            JobService(self.dock).reclaim(state, name)
            assert not controller.end(lambda held: held.holder == name), "nothing is left to be ended"
        self.outsider_is_late()

    def outsider_is_late(self) -> None:
        late = [lease for lease in self.model.leases if self.holder[lease.token] is not self.dock]
        self.slow += [(self.holder[lease.token], lease) for lease in late]
        self.model.leases = [lease for lease in self.model.leases if lease not in late]

    @rule()
    def outsider_dies(self) -> None:
        self.member.core.gone(self.outside.calls.me.name)
        self.model.leases = [x for x in self.model.leases if self.holder[x.token] is not self.outside]
        self.slow = [(dock, lease) for dock, lease in self.slow if dock is not self.outside]
        self.enter()

    @precondition(lambda self: self.model.shapes)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        epoch = data.draw(st.sampled_from(sorted(self.model.shapes)))
        some = st.lists(st.integers(0, self.model.shapes[epoch][0] - 1), min_size=1, max_size=2)
        groups = data.draw(some | some | st.none())
        gone = {i for i in self.model.alive if i.epoch == epoch and (groups is None or i.group in groups)}
        for lease in [x for x in self.model.leases if gone & set(x.rows.ids)]:  # clearing waits for them
            self.holder[lease.token].release(lease)
            self.model.leases.remove(lease)
        for _ in range(data.draw(st.integers(1, 2))):  # a repeat changes nothing
            self.dock.clear(epoch, groups)
        self.model.alive -= gone
        self.model.cells = {k: v for k, v in self.model.cells.items() if k[1] not in gone}

    @rule()
    def crash_and_restore(self) -> None:
        saved = self.dock.snapshot()
        self.member.close()
        self.make()
        self.dock.restore(saved)
        assert plain(self.dock.snapshot()) == plain(saved)
        self.model.leases, self.slow = [], []

    @invariant()
    def same_as_model(self) -> None:
        for state in NAMES:
            assert self.dock.remaining(state) == len(self.model.alive - self.model.done[state])
            views = self.member.core.controllers[state]._epochs
            rows = [(n, row) for n, view in sorted(views.items()) for row in view.available().nonzero()[0].tolist()]
            assert [SampleId(n, *divmod(row, self.model.shapes[n][1])) for n, row in rows] == self.model.ready(state)
        for column in ("prompt", "tokens", "reward"):
            rows = sorted(i for c, i in self.model.cells if c == column)
            assert unpack(self.dock.read(rows, [column])[column]) == [self.model.cells[column, i] for i in rows]
        if not self.model.alive:
            assert self.member.core.warehouse.slabs.used == 0


def pack(values: list[list[int]]) -> Ragged:
    return Ragged.from_rows([torch.tensor(v, dtype=torch.int32) for v in values], dtype=torch.int32)


def unpack(column) -> list:
    return [r.tolist() for r in column.rows()] if isinstance(column, Ragged) else column.tolist()


TestDockModel = DockMachine.TestCase
TestDockModel.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_threads_of_all_ranks_share_the_work_exactly_once(make) -> None:
    """Two consumers per rank and state, while producers put and groups that are done are cleared."""
    make(COLUMNS, STATES)
    groups, size, ranks = 24, 3, len(make.members)
    docks = [m.dock(deadline=20) for m in make.members]
    for dock in docks:
        dock.open(0, groups, size)
    seen: dict[str, list[SampleId]] = {name: [] for name in NAMES}
    lock = threading.Lock()

    def consume(dock: Dock, state: str) -> None:
        while lease := dock.lease(state, max_rows=5, deadline=20):
            count = len(lease)
            if state == "generate":
                rows = Rows(lease.rows.ids, {"tokens": pack([[i.group] * (i.group * 3000) for i in lease.rows.ids])})
            else:
                assert all(row.tolist() == [i.group] * (i.group * 3000) for i, row in rows_of(lease))
                rows = Rows(lease.rows.ids, {"reward": torch.ones(count)}) if state == "reward" else None
            with lock:
                seen[state] += lease.rows.ids
            dock.commit(lease, rows)

    def produce(rank: int) -> None:
        for g in range(rank, groups, ranks):
            docks[rank].put(Rows((sid(g, 1),), {"prompt": pack([[g]])}))

    jobs = [(consume, dock, name) for dock in docks for name in NAMES for _ in range(2)]
    jobs += [(produce, rank) for rank in range(ranks)]
    together(len(jobs), lambda i: jobs[i][0](*jobs[i][1:]))
    assert all(sorted(rows) == list(ids(groups, size)) for rows in seen.values())
    docks[0].clear(0)
    assert all(house.slabs.used == 0 for house in make.houses)


def rows_of(lease: Lease) -> list:
    return list(zip(lease.rows.ids, lease.rows["tokens"].rows(), strict=True))
