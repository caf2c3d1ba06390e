"""What every layout promises: readiness, leases, write-back, validation, clearing, snapshots."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import pytest
import torch
from dock_help import COLUMNS, SMALL, STATES, ids, prompts, ragged, sid, threads, together, tokens

from mindspeed_rl_plugin.dock import (
    Dock,
    Ragged,
    Rows,
    StateSpec,
    VersionBound,
    cells,
    core,
    messages,
)
from mindspeed_rl_plugin.dock.controller import Controller
from mindspeed_rl_plugin.processes import machine
from mindspeed_rl_plugin.service.guest_dock import GuestDock
from mindspeed_rl_plugin.service.job_service import JobService

pytestmark = pytest.mark.quick


def test_a_rollout_is_delivered_once_as_it_was_written(make) -> None:
    """Prompts are put once a group and read for every row; of two writes the first stays."""
    dock = make.filled(2, 2)
    first = dock.lease("generate", max_rows=3, deadline=5)
    assert len(first) == 3 and dock.remaining("generate") == 4
    written = tokens(first.rows.ids, 2, 3, 4)
    dock.commit(first, written)
    written["tokens"].values.zero_()
    assert dock.remaining("generate") == 1
    second = dock.lease("generate", deadline=5)
    assert {*first.rows.ids, *second.rows.ids} == set(ids(2, 2)) and len(second) == 1
    for lease in (first, second):
        assert [r.tolist() for r in lease.rows["prompt"].rows()] == [[*range(i.group + 1)] for i in lease.rows.ids]
    assert not dock.lease("generate", deadline=0), "nothing to be had now"
    dock.commit(second, tokens(second.rows.ids, 1))
    assert not dock.lease("generate", deadline=5), "every row is acknowledged"
    assert dock.remaining("generate") == 0 and dock.remaining("logp") == 4
    dock.commit(first, tokens(first.rows.ids, 5, 5, 5, start=9))
    dock.put(tokens(first.rows.ids, 7, 7, 7, start=9))
    for _ in range(2):
        tokens_read = dock.read(first.rows.ids, ["tokens"])["tokens"]
        assert [row.tolist() for row in tokens_read.rows()] == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
        tokens_read.values.fill_(7)  # a copy


def test_a_share_of_an_epoch_is_given_whole(make) -> None:
    dock = make()
    for epoch in (0, 1):
        dock.open(epoch, 3, 2)
    dock.put(prompts(3).take([0, 1]))
    assert dock.lease("generate", share=(0, 2), deadline=0).rows.ids == (*ids(3, 2)[:3],)
    assert not dock.lease("generate", share=(1, 2), deadline=0), "its last group is not there"
    dock.put(prompts(3).take([2]))
    dock.put(prompts(3, epoch=1))
    for epoch in (0, 1):
        assert sorted(dock.lease("generate", share=(1, 2), deadline=5).rows.ids) == [*ids(3, 2, epoch)[3:]]
    assert not dock.lease("generate", share=(1, 2), deadline=0)


def test_rows_are_given_to_who_has_a_version_that_may_sample_them(make) -> None:
    """In their order, up to the first that this version may not sample; which is said where nothing comes before."""
    dock = make()
    bounds = {-1: VersionBound(4, 4), 0: VersionBound(2), 1: VersionBound(3)}
    for epoch, bound in bounds.items():
        dock.open(epoch, 1, 2, bound)
        dock.put(prompts(1, epoch=epoch))
    steps = [(2, None, bounds[-1]), (4, -1, None), (2, 0, None), (2, None, bounds[1]), (9, 1, None), (9, None, None)]
    for version, epoch, needs in steps:
        lease = dock.lease("generate", version=version, max_rows=2, deadline=0)
        assert lease.rows.ids == (() if epoch is None else (*ids(1, 2, epoch),)) and lease.needs == needs
    assert [dock.version_bound(epoch) for epoch in bounds] == [*bounds.values()]


def test_released_rows_come_again_and_their_old_lease_is_void(make) -> None:
    dock = make.filled(1, 2)
    lease = dock.lease("generate", deadline=5)
    dock.release(lease)
    dock.release(lease)
    foul = tokens(lease.rows.ids, 2, 2, start=7)
    with pytest.raises(ValueError, match=rf"lease {lease.token} .* void"):
        dock.commit(lease, foul)
    again = dock.lease("generate", deadline=5)
    dock.release(lease)  # not that of who has them now
    assert not dock.lease("generate", deadline=0)
    dock.commit(again, tokens(again.rows.ids, 1, 1))
    for done in (lease, again):
        dock.commit(done, foul)  # a repeat
    assert dock.read(lease.rows.ids, ["tokens"])["tokens"].lengths.tolist() == [1, 1], "a void lease writes nothing"
    dock.clear(0)
    dock.commit(lease, foul)


def test_rows_of_a_lease_are_committed_as_they_are_finished(make) -> None:
    """Each is there at once, is delivered to nobody again, and the rest is handed back with the lease."""
    dock = make.filled(2, 2)
    lease = dock.lease("generate", deadline=5)
    one, two, *others = lease.rows.ids
    dock.commit_part(lease, tokens([two], 5))
    assert dock.lease("logp", deadline=5).rows.ids == (two,) and dock.remaining("generate") == 3
    dock.commit_part(lease, tokens([one], 4))
    dock.commit_part(lease, tokens([one], 9, start=9))  # a repeat
    dock.release(lease)
    again = dock.lease("generate", deadline=5)
    assert list(again.rows.ids) == others, "what is acknowledged is not given out again"
    with pytest.raises(ValueError, match="void"):
        dock.commit_part(lease, tokens(others, 1, 1))
    with pytest.raises(ValueError, match="does not hold"):
        dock.commit_part(again, tokens([one], 1))
    for row in others:
        assert ("generate", again.token) in dock.calls.held
        dock.commit_part(again, tokens([row], 1))
    assert ("generate", again.token) not in dock.calls.held, "the lease ends with the last of them"
    dock.commit(again, tokens(others, 9, 9))  # a repeat
    assert dock.remaining("generate") == 0 and not dock.lease("generate", deadline=0)
    assert dock.read((one, two, *others), ["tokens"])["tokens"].lengths.tolist() == [4, 5, 1, 1]


def test_a_dock_for_another_thread_has_leases_of_its_own_and_the_same_epochs(make) -> None:
    dock = make()
    beside = dock.for_thread()
    dock.open(0, 8, 2)
    dock.put(prompts(8))

    def work(row: int) -> None:
        lease = beside.lease("generate", max_rows=1, deadline=5)
        beside.commit(lease, tokens(lease.rows.ids, 3))

    with ThreadPoolExecutor(1) as pool:
        pool.map(work, range(8))
        while len(lease := dock.lease("generate", max_rows=1, deadline=5)):
            dock.commit(lease, tokens(lease.rows.ids, 3))
    assert dock.remaining("generate") == beside.remaining("generate") == 0
    written = [m for m in dock.traffic.take() if m.way == "written" and m.state == "generate"]
    assert sum(m.nbytes for m in written) == 16 * 3 * 4, "the bytes of both count"
    dock.clear(0)
    with pytest.raises(ValueError, match="cleared"):
        beside.read(ids(1, 1), ["tokens"])


def test_a_wait_that_ends_names_state_columns_ids_writer_and_lease(make) -> None:
    dock = make()
    dock.open(0, 3, 2)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="'reward' waited 0.2 s") as caught:
        dock.lease("reward", deadline=0.2)
    assert 0.15 < time.monotonic() - begin < 20
    said = ("'tokens' (written by state 'generate') is missing for (0, 0, 0)", "6 in all", "by a producer's put")
    assert all(part in str(caught.value) for part in said)
    dock.put(prompts(3))
    dock.lease("generate", ids=[sid(0, 1)], deadline=5)
    with pytest.raises(TimeoutError, match=r"lease \d+ holds \(0, 0, 1\)"):
        dock.lease("generate", ids=[sid(0, 1)], deadline=0)


def test_who_waits_is_woken_by_what_is_ready_and_nothing_else(make_one, monkeypatch) -> None:
    """With many consumers that wait, waking them for each commit of every state would cost more than the commits."""
    dock, looks, take = make_one(), [], Controller.take
    monkeypatch.setattr(core, "RECHECK_SECONDS", 20.0)
    monkeypatch.setattr(Controller, "take", lambda self, *given: looks.append(self.spec.name) or take(self, *given))
    dock.open(0, 2, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(dock.for_thread().lease, "update", deadline=20)
        dock.put(prompts(2))
        dock.commit(dock.lease("generate", deadline=5), tokens(ids(2, 2)))
        dock.commit(dock.lease("logp", deadline=5), Rows(ids(2, 2), {"logp": ragged(*[2] * 4, dtype=torch.float32)}))
        lease = dock.lease("reward", deadline=5)
        for row in (ids(2, 2)[0], ids(2, 2)[2]):
            dock.commit_part(lease, Rows((row,), {"reward": torch.ones(1)}))
        time.sleep(0.1)
        assert looks.count("update") <= 2 and not waiting.done(), "no group is whole yet"
        dock.commit_part(lease, Rows((ids(2, 2)[3],), {"reward": torch.ones(1)}))
        assert waiting.result(5).rows.ids == ids(2, 2)[2:]


def test_of_many_who_wait_for_any_rows_one_is_woken_for_each(make_one, monkeypatch) -> None:
    """And all at the end, when every row is acknowledged."""
    dock, looks, take = make_one(), [], Controller.take
    monkeypatch.setattr(core, "RECHECK_SECONDS", 20.0)
    dock.open(0, 4, 2)

    def consume(beside: Dock) -> int:
        rows = 0
        while len(lease := beside.lease("generate", max_rows=1, deadline=20)):
            beside.commit(lease, tokens(lease.rows.ids, 3))
            rows += 1
        return rows

    with ThreadPoolExecutor(12) as pool:
        consumers = [pool.submit(consume, dock.for_thread()) for _ in range(12)]
        time.sleep(0.3)
        monkeypatch.setattr(Controller, "take", lambda self, *given: looks.append(self.spec.name) or take(self, *given))
        for group in range(4):
            dock.put(Rows((sid(group, 0),), {"prompt": ragged(1)}))
            time.sleep(0.1)
        assert sum(consumer.result(5) for consumer in consumers) == 8
    assert len(looks) <= 4 * 2 * 4 + 12, "of each row who gets it, whom it wakes, and who is woken by its commit"


def test_who_is_gone_when_it_is_woken_wakes_the_next(make_one, monkeypatch) -> None:
    dock = make_one()
    monkeypatch.setattr(core, "RECHECK_SECONDS", 20.0)
    dock.open(0, 1, 1)
    ask = messages.Ask("generate", [(0, messages.Shape(1, 1))], {}, None, 20.0, max_rows=1)
    with ThreadPoolExecutor(2) as pool:
        gone = pool.submit(dock.calls.core.call, "gone", ask, None, lambda: True)
        time.sleep(0.1)
        waiting = pool.submit(dock.for_thread().lease, "generate", max_rows=1, deadline=20)
        time.sleep(0.1)
        dock.put(prompts(1))
        assert len(waiting.result(5)) == 1 and isinstance(gone.exception(5), EOFError)


def test_rows_of_this_machine_come_first(members) -> None:
    made = members(COLUMNS, STATES, ["left", "right"])
    docks = [member.dock(deadline=5) for member in made]
    for dock in docks:
        dock.open(0, 4, 1)
    docks[0].put(prompts(4))
    assert docks[1].lease("generate", max_rows=2, deadline=5).rows.ids == ids(4, 1)[2:]
    moved = {(m.where, m.nbytes) for m in docks[1].traffic.take() if m.way == "read"}
    assert moved == {("local", 7 * 4)}
    assert docks[1].lease("generate", deadline=5).rows.ids == ids(4, 1)[:2]
    assert {m.where for m in docks[1].traffic.take()} == {"remote"}


def test_a_cell_behind_an_empty_one_comes_whole_from_another_machine(members) -> None:
    """Both begin at the same byte."""
    near, far = (member.dock(deadline=5) for member in members(COLUMNS, STATES, ["a", "b"]))
    for dock in (near, far):
        dock.open(0, 2, 2)
    near.put(tokens(ids(1, 2), 0, 3))
    assert far.read(ids(1, 2), ["tokens"])["tokens"].values.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("ranks", "node"), [(1, ""), (2, ""), (1, "elsewhere")])
def test_an_empty_dock_is_no_end_to_a_consumer_outside_but_the_jobs_leaving_is(
    members, tmp_path: Path, ranks: int, node: str
) -> None:
    """It joins before the first row, waits between rollouts, and its loop ends with the job, also where it only comes
    back then; what a slow one holds runs out and is given to another; a job that dies is an error."""
    made, secret, seen = members(COLUMNS, STATES, [machine()] * ranks), tmp_path / "secret", []
    docks = [m.dock(deadline=5) for m in made]
    address = together(ranks, lambda r: JobService(docks[r]).invite(secret, "127.0.0.1" if node else ""))[0]
    waits, slow, orphan = (GuestDock.join(address, secret, lease_seconds=s, node=node) for s in (60.0, 0.5, 60.0))
    for dock in (waits, slow, orphan):
        assert not dock.lease("generate", deadline=0) and not dock.ended, "it only tries"
        with pytest.raises(TimeoutError, match="'generate' waited 0.05 s"):
            dock.lease("generate", deadline=0.05)

    def consume() -> None:
        while lease := waits.lease("generate", deadline=20):
            seen.extend(lease.rows.ids)
            waits.commit(lease, tokens(lease.rows.ids))

    with ThreadPoolExecutor(1) as pool:
        for epoch in range(2):
            for dock in docks:
                dock.open(epoch, 2, 2)
            docks[0].put(prompts(2, epoch))
            if epoch == 0:
                held = slow.lease("generate", deadline=20)
                loop = pool.submit(consume)
            docks[0].release(docks[0].lease("logp", ids=ids(2, 2, epoch), deadline=20))
            if epoch == 0:
                slow.commit(held, tokens(held.rows.ids, start=7))
                assert docks[0].read([sid(1, 1)], ["tokens"])["tokens"].values.tolist() == [0, 1], "the first stays"
            for dock in docks:
                dock.clear(epoch)
        for member in made:
            for stream in [s for s, name in member.server._streams.items() if name == orphan.calls.me.name]:
                stream.close()
        for member in made:
            member.close()
        loop.result(10)
    assert seen == [*ids(2, 2, 0), *ids(2, 2, 1)] and waits.ended
    for dock in (waits, slow):
        ended = dock.lease("generate", deadline=5)
        assert not ended and dock.ended and ended.rows["prompt"].lengths.tolist() == []
        with pytest.raises(ConnectionError):
            dock.remaining("generate")
    with pytest.raises(ConnectionError):
        orphan.lease("generate", deadline=5)
    os.chmod(secret, 0o644)
    with pytest.raises(PermissionError, match="others can read it"):
        GuestDock.join(address, secret)


def test_clearing_waits_for_leases_and_a_late_write_is_harmless(make) -> None:
    dock = make.filled(2, 2)
    lease = dock.lease("generate", ids=ids(2, 2), deadline=5)
    with pytest.raises(TimeoutError, match="'generate' still holds rows of epoch 0"):
        dock.clear(0, [0])
    dock.release(lease)
    dock.clear(0, [0])
    dock.clear(0, [0])
    dock.put(tokens(ids(2, 2), 1, 2, 3, 4))
    assert dock.remaining("logp") == 2
    assert dock.read([sid(1, 0)], ["tokens"])["tokens"].lengths.tolist() == [3]
    for call in (lambda: dock.read([sid(0, 0)], ["tokens"]), lambda: dock.lease("logp", ids=[sid(0, 0)], deadline=0)):
        with pytest.raises(ValueError, match=r"cleared"):
            call()
    dock.clear(0)
    dock.put(prompts(2))
    assert dock.remaining("logp") == 0 and all(house.slabs.used == 0 and not house._epochs for house in make.houses)


def test_a_status_tells_the_open_groups_and_who_has_their_rows(make_one) -> None:
    dock, (core,), now = make_one.filled(3, 2), [m.core for m in make_one.members], [7.0]
    core.clock = lambda: now[0]

    def told() -> list[tuple[str, float]]:
        now[0] += 5.0
        return list(core.open_groups(("generate", "reward", "elsewhere")))

    dock.commit(dock.lease("generate", max_rows=1, deadline=5), tokens([sid(0, 0)]))
    lease = dock.lease("generate", max_rows=2, deadline=5)
    whose = "generate 3 (rows: 3 nobody, 2 rank 0), the first, group 0 of rollout 0,"
    reward = "reward 1 (rows: 1 nobody), the first, group 0 of rollout 0,"
    assert told() == [(whose, 0.0), (reward, 0.0)] and told()[0] == (whose, 5.0)
    dock.commit_part(lease, tokens([sid(0, 1)]))
    whose = "generate 2 (rows: 3 nobody, 1 rank 0), the first, group 1 of rollout 0,"
    assert told()[0] == (whose, 0.0), "another is the first"
    dock.release(lease)
    dock.clear(0)
    assert told() == []


@pytest.mark.parametrize("nodes", [["a", "a"], ["a", "b"]], ids=["one machine", "two machines"])
@pytest.mark.parametrize("part", [False, True], ids=["commit", "commit_part"])
def test_what_another_rank_holds_when_it_has_cleared_all_of_an_epoch_is_acknowledged(members, nodes, part) -> None:
    """A grader's thread holds rows of both epochs; its rank's main thread has gone on, the leader clears for all."""
    leader, other = (m.dock(deadline=20.0) for m in members(COLUMNS, STATES, nodes, limits=SMALL))
    for epoch in (0, 1):
        leader.open(epoch, 2, 1), other.open(epoch, 2, 1)
        leader.put(prompts(2, epoch=epoch))
    grader = other.for_thread()
    lease = grader.lease("generate", ids=[*ids(2, 1), *ids(2, 1, 1)], deadline=5)
    other.clear(0)
    with ThreadPoolExecutor(1) as pool:
        cleared = pool.submit(leader.clear, 0)
        with pytest.raises(FutureTimeout):
            cleared.result(0.3)
        gone = [i for i in lease.rows.ids if i.epoch == 0] if part else lease.rows.ids
        (grader.commit_part if part else grader.commit)(lease, tokens(gone))
        cleared.result(5)
    assert leader.remaining("generate") == (2 if part else 0)
    if part:
        assert len(leader.lease("logp", deadline=0.0, max_rows=4)) == 0
    else:  # waits: nobody tells the leader, which asks another rank's controller, that the grader has written
        assert len(leader.lease("logp", ids=ids(2, 1, 1), deadline=5)) == 2


def test_clearing_waits_for_no_row_that_is_done_whatever_else_its_lease_holds(make) -> None:
    """An engine takes rows of two rollouts at once; the first is trained while it works on the second."""
    dock = make()
    for epoch in (0, 1):
        dock.open(epoch, 1, 2)
        dock.put(prompts(1, epoch=epoch))
    lease = dock.lease("generate", ids=[*ids(1, 2), *ids(1, 2, 1)], deadline=5)
    first, second = (tuple(i for i in lease.rows.ids if i.epoch == epoch) for epoch in (0, 1))
    dock.commit_part(lease, tokens(first, 1, 1))
    dock.clear(0)
    with pytest.raises(TimeoutError, match="'generate' still holds rows of epoch 1"):
        dock.clear(1)
    dock.commit_part(lease, tokens(second, 2, 2))
    assert dock.remaining("logp") == 2
    dock.clear(1)


def test_bad_calls_are_refused(make) -> None:
    """Of a put nothing is written then."""
    dock = make()
    dock.open(0, 1, 2)
    one = {"reward": torch.ones(1)}
    dock.put(tokens([sid(0, 1)], 3))
    bad = [
        ({"nope": torch.ones(1)}, r"\['nope'\]"),
        ({"reward": torch.ones(1, dtype=torch.float64)}, "'reward' .* torch.float64"),
        ({"reward": torch.ones(1, 2)}, r"\[2\]"),
        ({"parts": torch.ones(1, 3)}, r"\[2\], got \[3\]"),
        ({"reward": ragged(1, dtype=torch.float32)}, "not Ragged"),
        ({"tokens": torch.ones(1, dtype=torch.int32)}, "pass Ragged"),
        ({"tokens": Ragged(torch.ones(3, dtype=torch.int32), torch.tensor([0, 2]))}, "rise from 0 to the 3"),
        ({"tokens": ragged(3), "logp": ragged(2, dtype=torch.float32)}, "'logp' has 2 entries .* have 3"),
    ]
    for columns, message in bad:
        with pytest.raises(ValueError, match=message):
            dock.put(Rows((sid(0, 0),), {"prompt": ragged(1), **columns}))
    assert [house.slabs.used for house in make.houses if house.slabs.used] == [64], "what was put before"
    cases = [
        (lambda: dock.put(Rows((sid(1, 0),), one)), r"\(0, 1, 0\) was not opened"),
        (lambda: dock.put(Rows((sid(0, 0, 5),), one)), "epoch 5 was not opened; open: 0"),
        (lambda: dock.put(Rows((sid(0, 0), sid(0, 0)), {"reward": torch.ones(2)})), "twice"),
        (lambda: dock.put(Rows(ids(1, 2), {"logp": ragged(1, 4, dtype=torch.float32)})), r"4 entries .* \(0, 0, 1\)"),
        (lambda: dock.open(0, 2, 2), "epoch 0"),
        (lambda: dock.open(1, 0, 2), "groups=0"),
        (lambda: dock.clear(0, [3]), r"\[3\]"),
        (lambda: dock.lease("nope", deadline=0), "declared: generate"),
        (lambda: dock.lease("generate", ids=[sid(0, 0)] * 2, deadline=0), "twice"),
        (lambda: dock.lease("logp", columns=["prompt"], deadline=0), r"\['prompt'\]"),
        (lambda: dock.read([sid(0, 0)], ["prompt"]), r"'prompt' of \(0, 0, 0\)"),
        (lambda: dock.lease("update", ids=[sid(0, 0)], deadline=0), r"without members \[1\]"),
        (lambda: dock.lease("update", max_rows=1, deadline=0), "max_rows 1"),
        (lambda: make(COLUMNS, [StateSpec("s", ("zzz",), ())]), "zzz"),
        (lambda: make([*COLUMNS, COLUMNS[0]], []), "twice"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_a_commit_writes_what_its_state_writes_or_nothing(make) -> None:
    dock = make.filled(1, 2)
    lease = dock.lease("generate", ids=ids(1, 2), deadline=5)
    for rows, message in [
        (None, "must write column 'tokens'"),
        (tokens([sid(0, 0)]), r"missing for \(0, 0, 1\)"),
        (Rows(lease.rows.ids, {"reward": torch.ones(2)}), r"does not write \['reward'\]; declared: tokens"),
        (tokens([sid(0, 0), sid(0, 1), sid(0, 2)]), r"does not hold \(0, 0, 2\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            dock.commit(lease, rows)
    with pytest.raises(ValueError, match="not committed"):
        dock.read([sid(0, 0)], ["tokens"])
    dock.put(tokens([sid(0, 0)]))
    dock.commit(lease, tokens([sid(0, 1)], 3))
    with pytest.raises(ValueError, match="already acknowledged"):
        dock.lease("generate", ids=[sid(0, 1)], deadline=5)


@pytest.mark.parametrize("nodes", [["a", "a", "a"], ["a", "b", "b"]], ids=["one machine", "two machines"])
def test_peers_share_one_lease_and_its_end(members, nodes: list[str]) -> None:
    """Each reads the cells itself; the first acknowledges when all have written, and all hear what went wrong."""
    made, peers = members(COLUMNS, STATES, nodes), threads(3)
    docks = [m.dock(peers=peers[rank], deadline=5) for rank, m in enumerate(made)]
    for dock in docks:
        dock.open(0, 2, 2)
    docks[1].put(prompts(2))
    (first, *others) = together(3, lambda r: docks[r].lease("generate", ids=ids(2, 2), deadline=5))
    assert all(o.token == first.token and o.rows.ids == first.rows.ids for o in others)
    assert all(o.rows["prompt"].values.equal(first.rows["prompt"].values) for o in others)
    together(3, lambda r: docks[r].release(first))
    again = together(3, lambda r: docks[r].lease("generate", ids=ids(2, 2), deadline=5))
    error = together(3, lambda r: caught(lambda: docks[r].commit(again[r])))
    assert len(set(error)) == 1 and "must write column 'tokens'" in error[0], "all hear it"
    error = together(3, lambda r: caught(lambda: docks[r].commit(again[r], tokens([sid(5, 5)]) if r == 1 else None)))
    assert len(set(error)) == 1 and "does not hold (0, 5, 5)" in error[0]
    last = tokens(again[2].rows.ids, 1, 2, 3, 4)
    together(3, lambda r: docks[r].commit(again[r], last if r == 2 else None))
    assert together(3, lambda r: docks[r].remaining("generate")) == [0] * 3
    wanted = [[], ["tokens"], ["prompt", "tokens"]]
    mixed = together(3, lambda r: docks[r].lease("reward", columns=wanted[r], ids=ids(2, 2), deadline=5))
    assert [list(lease.rows.columns) for lease in mixed] == wanted, "each reads what it asks for, as pipeline stages do"
    assert mixed[1].rows["tokens"].values.equal(last["tokens"].values)
    assert [len(row) for row in mixed[2].rows["prompt"].rows()] == [1, 1, 2, 2]
    asked = [[sid(0, 0)], [sid(0, 0)], [sid(0, 1)]]
    error = together(3, lambda r: caught(lambda: docks[r].lease("logp", ids=asked[r], deadline=5)))
    assert error[:2] == ["", ""] and "must ask for the same ids" in error[2]
    error = together(3, lambda r: caught(lambda: docks[r].lease("update", ids=[(0, 0, 0), (0, 0, 1)], deadline=0.1)))
    assert len(set(error)) == 1 and "'logp'" in error[0]


def caught(call) -> str:
    try:
        call()
    except (ValueError, TimeoutError) as error:
        return str(error)
    return ""


def test_a_grant_that_cannot_be_read_is_handed_back(make_one, monkeypatch: pytest.MonkeyPatch) -> None:
    dock = make_one.filled(1, 2)

    def full(column: str, nbytes: int) -> None:
        raise MemoryError(column)

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(cells, "fresh", full)
        dock.lease("generate", deadline=5)
    assert len(dock.lease("generate", deadline=0)) == 2


def test_a_mistake_of_the_code_in_this_process_surfaces_as_itself(make_one, monkeypatch: pytest.MonkeyPatch) -> None:
    dock = make_one()
    monkeypatch.setattr(make_one.members[0].core, "controllers", {})
    with pytest.raises(KeyError, match="generate"):
        dock.remaining("generate")
    assert dock.served["refused"]["malformed"] == 0
