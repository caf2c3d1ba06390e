"""What every medium promises: readiness, leases, write-back, validation, threads, snapshot.

Where a distributed dock means something else by intent, the test says so."""

import asyncio
import copy
import io
import socket
import threading
import time

import pytest
import torch

from mindspeed_rl_plugin.dock import ColumnSpec, DistributedDock, LocalDock, StateSpec
from mindspeed_rl_plugin.dock.distributed.channel import MARGIN, Channel
from mindspeed_rl_plugin.dock.distributed.connections import Connections
from mindspeed_rl_plugin.dock.distributed.frames import Message
from mindspeed_rl_plugin.dock.distributed.service import Service
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId

COLUMNS = [
    ColumnSpec("prompt", torch.int32, "group", ragged=True),
    ColumnSpec("tokens", torch.int32, "token", ragged=True),
    ColumnSpec("logp", torch.float32, "token", ragged=True),
    ColumnSpec("reward", torch.float32, "sample", ragged=False),
    ColumnSpec("parts", torch.float32, "sample", ragged=False, trailing=(2,)),
]
STATES = [
    StateSpec("generate", ("prompt",), ("tokens",)),
    StateSpec("logp", ("tokens",), ("logp",)),
    StateSpec("reward", ("tokens", "prompt"), ("reward",)),
    StateSpec("update", ("tokens", "logp", "reward"), (), whole_groups=True),
]


@pytest.fixture
def make(maker):
    """A new dock of the medium at each call."""
    return lambda: maker(COLUMNS, STATES, deadline=0.3)


def sid(group: int, member: int, epoch: int = 0) -> SampleId:
    return SampleId(epoch, group, member)


def ragged(*lengths: int, dtype: torch.dtype = torch.int32, start: int = 0) -> Ragged:
    return Ragged.from_rows([torch.arange(start, start + n).to(dtype) for n in lengths], dtype=dtype)


def prompts(groups: int, epoch: int = 0) -> Rows:
    ids = tuple(sid(g, 0, epoch) for g in range(groups))
    return Rows(ids, {"prompt": ragged(*(g + 1 for g in range(groups)))})


def test_group_column_is_put_once_a_group_and_repeated_on_read(make) -> None:
    dock = make()
    dock.open(0, 2, 3)
    dock.put(prompts(2))
    lease = dock.lease("generate", deadline=0)
    assert lease.rows.ids == tuple(sid(g, m) for g in range(2) for m in range(3))
    assert [r.tolist() for r in lease.rows["prompt"].rows()] == [[0]] * 3 + [[0, 1]] * 3


def test_rows_are_delivered_once_and_remaining_counts_the_leased(make) -> None:
    dock = make()
    dock.open(0, 2, 2)
    dock.put(prompts(2))
    first = dock.lease("generate", max_rows=3, deadline=0)
    assert len(first) == 3 and dock.remaining("generate") == 4
    dock.commit(first, Rows(first.rows.ids, {"tokens": ragged(2, 3, 4)}))
    assert dock.remaining("generate") == 1
    second = dock.lease("generate", deadline=0)
    assert second.rows.ids == (sid(1, 1),)
    dock.commit(second, Rows(second.rows.ids, {"tokens": ragged(1)}))
    assert len(dock.lease("generate", deadline=0)) == 0
    assert dock.remaining("generate") == 0 and dock.remaining("logp") == 4
    assert dock.lost() == []


def test_first_commit_wins_and_a_repeat_changes_nothing(make) -> None:
    dock = make()
    dock.open(0, 1, 2)
    dock.put(prompts(1))
    lease = dock.lease("generate", deadline=0)
    dock.commit(lease, Rows(lease.rows.ids, {"tokens": ragged(2, 3)}))
    dock.commit(lease, Rows(lease.rows.ids, {"tokens": ragged(5, 5, start=9)}))
    dock.put(Rows(lease.rows.ids, {"tokens": ragged(7, 7, start=9)}))
    assert [r.tolist() for r in dock.read(lease.rows.ids, ["tokens"])["tokens"].rows()] == [[0, 1], [0, 1, 2]]


def test_cells_are_copies(make) -> None:
    dock = make()
    dock.open(0, 1, 1)
    column = ragged(3)
    dock.put(Rows((sid(0, 0),), {"tokens": column}))
    column.values.zero_()
    dock.read([sid(0, 0)], ["tokens"])["tokens"].values.fill_(7)
    assert dock.read([sid(0, 0)], ["tokens"])["tokens"].values.tolist() == [0, 1, 2]


def test_whole_groups_only(make) -> None:
    dock = make()
    dock.open(0, 2, 2)
    ids = [sid(0, 0), sid(1, 0), sid(1, 1)]
    done = {"tokens": ragged(1, 1, 1), "logp": ragged(1, 1, 1, dtype=torch.float32), "reward": torch.ones(3)}
    dock.put(Rows(tuple(ids), done))
    lease = dock.lease("update", deadline=0)
    assert lease.rows.ids == (sid(1, 0), sid(1, 1))
    with pytest.raises(ValueError, match=r"whole groups: group 0 of epoch 0 is asked without members \[1\]"):
        dock.lease("update", ids=[sid(0, 0)], deadline=0)
    with pytest.raises(ValueError, match="max_rows 1 is less than one group of 2"):
        dock.lease("update", max_rows=1, deadline=0)


def test_max_rows_is_cut_to_whole_groups(make) -> None:
    dock = make()
    dock.open(0, 3, 2)
    ids = tuple(sid(g, m) for g in range(3) for m in range(2))
    dock.put(Rows(ids, {"tokens": ragged(*[1] * 6), "logp": ragged(*[1] * 6, dtype=torch.float32)}))
    dock.put(Rows(ids, {"reward": torch.ones(6)}))
    assert len(dock.lease("update", max_rows=5, min_rows=5, deadline=0)) == 4


def test_ids_come_in_the_order_asked_and_across_epochs(make) -> None:
    dock = make()
    dock.open(0, 2, 1)
    dock.open(3, 1, 1)
    dock.put(prompts(2))
    dock.put(prompts(1, epoch=3))
    asked = [sid(1, 0), sid(0, 0, 3), sid(0, 0)]
    lease = dock.lease("generate", ids=asked, deadline=0)
    assert list(lease.rows.ids) == asked
    assert lease.rows["prompt"].lengths.tolist() == [2, 1, 1]


def test_released_rows_come_again_and_their_old_lease_is_void(make, maker) -> None:
    dock = make()
    dock.open(0, 1, 2)
    dock.put(prompts(1))
    lease = dock.lease("generate", deadline=0)
    dock.release(lease)
    dock.release(lease)
    foul = Rows(lease.rows.ids, {"tokens": ragged(2, 2, start=7)})
    with pytest.raises(ValueError, match=rf"lease {lease.token} of state 'generate' is void.*\(0, 0, 0\), \(0, 0, 1\)"):
        dock.commit(lease, foul)
    assert dock.remaining("generate") == 2
    again = dock.lease("generate", deadline=0)
    with pytest.raises(ValueError, match="is void"):
        dock.commit(lease, foul)
    dock.release(lease)  # not that of who has them now
    with pytest.raises(TimeoutError):
        dock.lease("generate", deadline=0)
    dock.commit(again, Rows(again.rows.ids, {"tokens": ragged(1, 1)}))
    for done in (lease, again):
        dock.commit(done, foul)  # a repeat
    assert dock.remaining("generate") == 0
    assert dock.read(lease.rows.ids, ["tokens"])["tokens"].lengths.tolist() == [1, 1], "a void lease writes nothing"
    dock.clear(0)
    dock.commit(lease, foul)
    dock.commit(again)


def test_a_lease_from_before_a_restore_does_not_touch_the_rows_of_a_new_one(make, maker) -> None:
    dock = make()
    dock.open(0, 2, 1)
    dock.put(prompts(2))
    old = dock.lease("generate", ids=[sid(0, 0)], deadline=0)
    other = make()
    other.restore(dock.snapshot())
    new = other.lease("generate", ids=[sid(1, 0)], deadline=0)
    other.release(old)
    with pytest.raises(TimeoutError, match=rf"lease {new.token} holds \(0, 1, 0\)"):
        other.lease("generate", ids=[sid(1, 0)], deadline=0)
    assert maker.medium != "local" or new.token == old.token
    with pytest.raises(ValueError, match="is void"):
        other.commit(old, Rows(old.rows.ids, {"tokens": ragged(1)}))
    other.commit(new, Rows(new.rows.ids, {"tokens": ragged(1)}))
    assert other.remaining("generate") == 1


def test_timeout_names_state_columns_ids_and_writer(make) -> None:
    dock = make()
    dock.open(0, 3, 2)
    begin = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        dock.lease("reward", deadline=0.2)
    assert 0.15 < time.monotonic() - begin < 2
    text = str(caught.value)
    assert "state 'reward' waited 0.2 s" in text
    assert "column 'tokens' (written by state 'generate') is missing for (0, 0, 0), (0, 0, 1)" in text
    assert "(6 in all)" in text
    assert "column 'prompt' (written by a producer's put)" in text


def test_timeout_names_the_lease_that_holds_the_rows(make) -> None:
    dock = make()
    dock.open(0, 1, 2)
    dock.put(prompts(1))
    dock.lease("generate", deadline=0)
    with pytest.raises(TimeoutError, match=r"lease \d+ holds \(0, 0, 0\), \(0, 0, 1\)"):
        dock.lease("generate", deadline=0.05)


def test_a_blocked_lease_wakes_when_another_thread_writes(make) -> None:
    dock = make()
    dock.open(0, 2, 2)
    timer = threading.Timer(0.1, lambda: dock.put(prompts(2)))
    timer.start()
    begin = time.monotonic()
    assert len(dock.lease("generate", min_rows=4, deadline=20)) == 4
    assert time.monotonic() - begin < 5
    timer.join()


def test_min_rows_waits_but_not_for_rows_that_are_not_left(make) -> None:
    dock = make()
    dock.open(0, 2, 2)
    dock.put(Rows((sid(0, 0),), {"prompt": ragged(1)}))
    with pytest.raises(TimeoutError, match="at least 3 rows"):
        dock.lease("generate", min_rows=3, deadline=0.05)
    dock.put(Rows((sid(1, 1),), {"prompt": ragged(1)}))
    first = dock.lease("generate", min_rows=3, max_rows=3, deadline=0)
    assert len(dock.lease("generate", min_rows=3, deadline=0)) == 1
    dock.commit(first, Rows(first.rows.ids, {"tokens": ragged(1, 1, 1)}))


def test_threads_share_the_work_exactly_once(make) -> None:
    dock, groups, members = make(), 24, 4
    dock.open(0, groups, members)
    seen: list[SampleId] = []
    lock = threading.Lock()

    def work() -> None:
        while True:
            lease = dock.lease("generate", max_rows=5, deadline=20)
            if not len(lease):
                return
            with lock:
                seen.extend(lease.rows.ids)
            dock.commit(lease, Rows(lease.rows.ids, {"tokens": ragged(*[2] * len(lease))}))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for g in range(groups):
        dock.put(Rows((sid(g, 1),), {"prompt": ragged(1)}))
    for thread in threads:
        thread.join(30)
    assert sorted(seen) == [sid(g, m) for g in range(groups) for m in range(members)]


def test_clear_frees_groups_and_a_late_write_is_harmless(make, maker) -> None:
    dock = make()
    dock.open(0, 2, 2)
    dock.put(prompts(2))
    lease = dock.lease("generate", deadline=0)
    if maker.medium != "local":  # others may be reading those cells in shared memory: clearing waits for their leases
        with pytest.raises(TimeoutError, match="state 'generate' still holds rows of epoch 0 after 0.3 s"):
            dock.clear(0, [0])
        dock.release(lease)
    dock.clear(0, [0])
    dock.clear(0, [0])
    late = Rows(lease.rows.ids, {"tokens": ragged(1, 2, 3, 4)})
    if maker.medium == "local":
        dock.commit(lease, late)
    else:
        dock.put(late)
    assert dock.remaining("logp") == 2
    assert dock.read([sid(1, 0)], ["tokens"])["tokens"].lengths.tolist() == [3]
    with pytest.raises(ValueError, match=r"read: cleared, their cells are gone: \(0, 0, 0\)"):
        dock.read([sid(0, 0)], ["tokens"])
    dock.clear(0, [1])
    dock.clear(0)
    dock.put(prompts(2))
    assert dock.remaining("logp") == 0 and maker.bytes_held(dock) == 0
    assert not any(m.host.warehouse._epochs for m in maker.members), "no warehouse keeps an epoch that is over"


def test_clearing_groups_frees_their_bytes(make, maker) -> None:
    dock = make()
    dock.open(0, 4, 1)
    dock.put(Rows(tuple(sid(g, 0) for g in range(4)), {"tokens": ragged(1000, 1000, 1000, 1000)}))
    before = maker.bytes_held(dock)
    dock.clear(0, [0, 1, 2])
    assert maker.bytes_held(dock) < before / 3


BAD_PUTS = [
    ({"nope": torch.ones(1)}, r"columns \['nope'\] are not declared"),
    ({"reward": torch.ones(1, dtype=torch.float64)}, "column 'reward' is declared torch.float32, got torch.float64"),
    ({"reward": torch.ones(1, 2)}, r"trailing shape \[\], got \[2\]"),
    ({"parts": torch.ones(1, 3)}, r"trailing shape \[2\], got \[3\]"),
    ({"reward": ragged(1, dtype=torch.float32)}, "pass a tensor, not Ragged"),
    ({"tokens": torch.ones(1, dtype=torch.int32)}, "pass Ragged, not a tensor"),
    ({"tokens": Ragged(torch.ones(3, dtype=torch.int32), torch.tensor([0, 2]))}, "offsets must rise from 0 to the 3"),
    ({"tokens": ragged(3), "logp": ragged(2, dtype=torch.float32)}, "'logp' has 2 entries .* have 3"),
]


@pytest.mark.parametrize(("columns", "message"), BAD_PUTS)
def test_bad_cells_are_refused_whole(make, columns: dict, message: str) -> None:
    dock = make()
    dock.open(0, 1, 1)
    with pytest.raises(ValueError, match=message):
        dock.put(Rows((sid(0, 0),), {"prompt": ragged(1), **columns}))
    with pytest.raises(ValueError, match="not committed"):
        dock.read([sid(0, 0)], ["prompt"])


def test_token_length_is_fixed_by_the_first_token_column(make) -> None:
    dock = make()
    dock.open(0, 1, 2)
    dock.put(Rows((sid(0, 1),), {"tokens": ragged(3)}))
    with pytest.raises(ValueError, match=r"'logp' has 4 entries for id \(0, 0, 1\)"):
        dock.put(Rows((sid(0, 0), sid(0, 1)), {"logp": ragged(1, 4, dtype=torch.float32)}))
    dock.put(Rows((sid(0, 0), sid(0, 1)), {"logp": ragged(1, 3, dtype=torch.float32)}))


def test_bad_ids_and_calls(make, maker) -> None:
    dock = make()
    dock.open(0, 1, 2)
    dock.open(0, 1, 2)
    one = {"reward": torch.ones(1)}
    with pytest.raises(ValueError, match=r"id \(0, 1, 0\) was not opened: epoch 0 has groups 0..0 of members 0..1"):
        dock.put(Rows((sid(1, 0),), one))
    with pytest.raises(ValueError, match="epoch 5 was not opened; open: 0"):
        dock.put(Rows((sid(0, 0, 5),), one))
    with pytest.raises(ValueError, match="an id occurs twice"):
        dock.put(Rows((sid(0, 0), sid(0, 0)), {"reward": torch.ones(2)}))
    with pytest.raises(ValueError, match="epoch 0 cannot be opened after epoch 0"):
        dock.open(0, 2, 2)
    with pytest.raises(ValueError, match="state 'nope' is not declared; declared: generate"):
        dock.lease("nope", deadline=0)
    with pytest.raises(ValueError, match="1 <= min_rows <= max_rows"):
        dock.lease("generate", min_rows=3, max_rows=2, deadline=0)
    with pytest.raises(ValueError, match="uses undeclared columns"):
        maker(COLUMNS, [StateSpec("s", ("zzz",), ())])
    with pytest.raises(ValueError, match="declared twice"):
        maker([*COLUMNS, COLUMNS[0]], [])


def test_commit_must_write_what_the_state_writes(make) -> None:
    dock = make()
    dock.open(0, 1, 2)
    dock.put(prompts(1))
    lease = dock.lease("generate", deadline=0)
    with pytest.raises(ValueError, match="state 'generate' must write column 'tokens'; it is missing for"):
        dock.commit(lease)
    with pytest.raises(ValueError, match=r"writes \['tokens'\], not \['reward'\]"):
        dock.commit(lease, Rows(lease.rows.ids, {"reward": torch.ones(2)}))
    dock.put(Rows((sid(0, 0),), {"tokens": ragged(2)}))
    dock.commit(lease, Rows((sid(0, 1),), {"tokens": ragged(3)}))
    with pytest.raises(ValueError, match="already acknowledged"):
        dock.lease("generate", ids=[sid(0, 1)], deadline=0)


def test_snapshot_goes_through_torch_save_and_leased_rows_count_as_undone(make, maker) -> None:
    dock = make()
    dock.open(0, 2, 2)
    dock.put(prompts(2))
    lease = dock.lease("generate", max_rows=2, deadline=0)
    dock.commit(lease, Rows(lease.rows.ids, {"tokens": ragged(2, 3)}))
    dock.put(Rows((sid(1, 1),), {"parts": torch.tensor([[1.0, 2.0]])}))
    dock.lease("generate", deadline=0)
    file = io.BytesIO()
    torch.save(dock.snapshot(), file)
    file.seek(0)
    other = make()
    if maker.medium == "local":  # a distributed dock is only restored when it is new
        other.open(0, 1, 1)
    other.restore(torch.load(file, weights_only=True))
    assert other.remaining("generate") == 2 and dock.remaining("generate") == 2
    assert len(other.lease("generate", deadline=0)) == 2
    assert [r.tolist() for r in other.read([sid(0, 1), sid(0, 0)], ["tokens"])["tokens"].rows()] == [[0, 1, 2], [0, 1]]
    assert other.read([sid(1, 1)], ["parts"])["parts"].tolist() == [[1.0, 2.0]]
    with pytest.raises(ValueError, match=r"'logp' has 9 entries .* have 2"):
        other.put(Rows((sid(0, 0),), {"logp": ragged(9, dtype=torch.float32)}))
    with pytest.raises(ValueError, match="never reused"):
        other.open(0, 1, 1)


def test_snapshot_of_another_algorithm_is_refused(make, maker) -> None:
    dock = make()
    dock.open(0, 1, 1)
    changed = [ColumnSpec("reward", torch.float64, "sample", ragged=False), *(c for c in COLUMNS if c.name != "reward")]
    with pytest.raises(ValueError, match=r"column 'reward' \(sample dense float32 \[\], here sample dense float64"):
        maker(changed, STATES).restore(dock.snapshot())
    fewer = maker(COLUMNS, STATES[:-1])
    fewer.restore(dock.snapshot())
    assert fewer.remaining(STATES[0].name) == 1
    dock.clear(0)
    maker(changed, STATES).restore(dock.snapshot())  # without rows any declaration will do
    more = maker([*COLUMNS, ColumnSpec("new", torch.int8, "sample", ragged=False)], STATES)
    more.restore(dock.snapshot())


def test_a_snapshot_moves_between_media(maker) -> None:
    """Taken here and restored in process and back, it is the same snapshot, bit for bit."""
    dock = maker(COLUMNS, STATES)
    dock.open(0, 3, 2)
    dock.put(prompts(3))
    lease = dock.lease("generate", ids=[sid(g, m) for g in range(3) for m in range(2)], deadline=0)
    dock.commit(lease, Rows(lease.rows.ids, {"tokens": ragged(2, 3, 0, 5, 6, 7)}))
    lease = dock.lease("logp", ids=[sid(1, 1), sid(0, 0)], deadline=0)
    dock.commit(lease, Rows(lease.rows.ids, {"logp": ragged(5, 2, dtype=torch.float32)}))
    dock.put(Rows((sid(2, 1), sid(0, 1)), {"parts": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}))
    dock.clear(0, [2])
    dock.open(4, 1, 1)
    dock.put(prompts(1, epoch=4))
    saved = dock.snapshot()
    local = LocalDock(COLUMNS, STATES)
    local.restore(saved)
    assert_equal(local.snapshot(), saved)
    back = maker(COLUMNS, STATES)
    back.restore(local.snapshot())
    assert_equal(back.snapshot(), saved)
    assert [back.remaining(s.name) for s in STATES] == [dock.remaining(s.name) for s in STATES] == [1, 3, 5, 5]
    with pytest.raises(ValueError, match="cannot be opened after epoch 4"):
        back.open(3, 1, 1)


def assert_equal(a: object, b: object) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    else:
        assert a == b


def test_peers_share_a_lease_and_the_last_one_acknowledges(members) -> None:
    """Ranks of one consumer get the same rows; they are done when all have written, and not before."""
    net = members(COLUMNS, STATES, ["one node"])[0].connections
    views = []
    for peer in range(2):
        other = copy.copy(net.settings)
        other.name = f"rank {peer} client"
        mine = Connections(net.directory, other)
        views.append(DistributedDock(COLUMNS, STATES, mine, consumer=0, peer=peer, peers=2, deadline=5))
    for view in views:
        view.open(0, 1, 2)
    views[0].put(prompts(1))
    leases = [view.lease("generate", deadline=5) for view in views]
    assert leases[0].token == leases[1].token and leases[0].rows.ids == leases[1].rows.ids
    views[0].commit(leases[0])  # the first stage has nothing to write
    assert views[0].remaining("generate") == 2
    views[1].commit(leases[1], Rows(leases[1].rows.ids, {"tokens": ragged(1, 2)}))
    assert views[1].remaining("generate") == 0
    leases = [view.lease("logp", deadline=5) for view in views]
    views[1].commit(leases[1], Rows(leases[1].rows.ids, {"logp": ragged(1, 2, dtype=torch.float32)}))
    views[0].close()  # the second dies before it is through
    assert views[1].lease("reward", ids=[], deadline=0).token == 0
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            alone = DistributedDock(COLUMNS, STATES, views[1]._net, division=1)
            assert alone.lease("logp", deadline=1).rows.ids == leases[0].rows.ids
            break
        except TimeoutError:
            continue
    else:
        raise AssertionError("the rows of the lease did not come again")
    views[1].close()


def test_a_share_waits_for_its_whole_composition(members) -> None:
    """By intent not what LocalDock does: its batches depend on ids and lengths, never on what came first."""
    member = members(COLUMNS, STATES, ["one node"])[0]
    docks = [DistributedDock(COLUMNS, STATES, member.connections, consumer=c, consumers=2) for c in range(2)]
    docks[0].open(0, 4, 1)
    docks[0].put(Rows((sid(0, 0), sid(2, 0), sid(3, 0)), {"tokens": ragged(5, 1, 4)}))
    assert docks[1].lease("logp", deadline=0).rows.ids == (sid(2, 0), sid(3, 0))
    with pytest.raises(TimeoutError, match=r"missing for \(0, 1, 0\)"):
        docks[0].lease("logp", deadline=0.05)
    docks[0].put(Rows((sid(1, 0),), {"tokens": ragged(3)}))
    first = docks[0].lease("logp", max_rows=1, deadline=0)
    assert first.rows.ids == (sid(0, 0),) and docks[0].lease("logp", deadline=0).rows.ids == (sid(1, 0),)
    docks[0].open(1, 4, 1)
    docks[0].put(Rows(tuple(sid(g, 0, 1) for g in range(4)), {"tokens": ragged(9, 1, 2, 8)}))
    docks[0].commit(first, Rows(first.rows.ids, {"logp": ragged(5, dtype=torch.float32)}))
    for g, dock in ((1, 0), (2, 1), (3, 1)):
        docks[dock].put(Rows((sid(g, 0),), {"logp": ragged((5, 3, 1, 4)[g], dtype=torch.float32)}))
    got = [dock.lease("logp", balance=True, deadline=0).rows.ids for dock in docks]
    assert got == [(sid(0, 0, 1), sid(1, 0, 1)), (sid(2, 0, 1), sid(3, 0, 1))]  # 10 tokens each


def test_lost_connections_are_made_anew(members) -> None:
    """Several states share one; whoever finds it broken first must not be handed it again."""
    net = members(COLUMNS, STATES, ["one node"])[0].connections
    dock = DistributedDock(COLUMNS, STATES, net)
    dock.open(0, 1, 1)
    dock.put(prompts(1))
    assert [dock.remaining(s.name) for s in STATES] == [1] * 4
    (channel,) = net._every
    channel._socket.shutdown(socket.SHUT_RDWR)
    begin = time.monotonic()
    assert [dock.remaining(s.name) for s in STATES] == [1] * 4
    dock.put(Rows((sid(0, 0),), {"tokens": ragged(3)}))
    assert time.monotonic() - begin < 4 and sum(not c.closed for c in net._every) == 1


def test_an_answer_that_comes_too_late_is_not_that_of_the_next_request(tmp_path) -> None:
    class Slow:
        async def handle(self, peer: str, message: Message) -> Message:
            await asyncio.sleep(message.note["seconds"])
            return Message("answer", message.note)

        def gone(self, peer: str) -> None:
            """Nothing to give back."""

    service = Service(Slow(), b"secret", node="here", unix=str(tmp_path / "socket"))
    channel = Channel(service.start(), b"secret", "here", "me", 0.1)
    with pytest.raises(TimeoutError, match="no answer to 'late'"):
        channel.ask(Message("late", {"seconds": 0.3}), seconds=0.1 - MARGIN)
    time.sleep(0.4)
    with pytest.raises(ConnectionError):
        channel.ask(Message("next", {"seconds": 0}))
    channel.close()
    service.close()
