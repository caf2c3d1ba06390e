"""Parts of the distributed dock alone: messages, memory, journal, batches, and the numbers of the paper."""

import itertools
import json
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.dock import ColumnSpec, StateSpec
from mindspeed_rl_plugin.dock.distributed import frames
from mindspeed_rl_plugin.dock.distributed.arena import LINE, Arena, Extent
from mindspeed_rl_plugin.dock.distributed.controller import Controller
from mindspeed_rl_plugin.dock.distributed.frames import FrameError, Message
from mindspeed_rl_plugin.dock.distributed.journal import HEADER, Journal
from mindspeed_rl_plugin.dock.distributed.picking import Ask
from mindspeed_rl_plugin.dock.distributed.records import Cells, EpochSet, Record, Shape
from mindspeed_rl_plugin.dock.distributed.views import balanced, even

# messages

ARRAYS = st.dictionaries(
    st.text("abc.", min_size=1, max_size=4),
    st.builds(
        lambda dtype, shape: (np.arange(np.prod(shape)) % 2).astype(dtype).reshape(shape),
        st.sampled_from(sorted(frames.DTYPES)),
        st.lists(st.integers(0, 3), min_size=1, max_size=3),
    ),
    max_size=4,
)


def joined(message: Message) -> tuple[bytes, bytearray]:
    """Head and payload as they arrive."""
    data = b"".join(bytes(part) for part in frames.encode(message))
    head, payload = frames.prefix(data[: frames.PREFIX.size])
    assert len(data) == frames.PREFIX.size + head + payload
    data = data[frames.PREFIX.size :]
    return data[:head], bytearray(data[head:])


@given(ARRAYS, st.dictionaries(st.text(max_size=3), st.integers() | st.none() | st.lists(st.text(max_size=3))))
@settings(max_examples=60, deadline=None)
def test_a_message_round_trips(arrays: dict, note: dict) -> None:
    found = frames.decode(*joined(Message("kind", note, arrays)))
    assert found.kind == "kind" and found.note == note and found.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found.arrays[name].dtype == array.dtype and found.arrays[name].shape == array.shape
        assert np.array_equal(found.arrays[name], array)


@given(st.lists(ARRAYS, max_size=4), st.lists(st.integers(1, 300), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_stream_that_comes_in_pieces_gives_the_same_messages(many: list[dict], sizes: list[int]) -> None:
    data = b"".join(bytes(p) for i, arrays in enumerate(many) for p in frames.encode(Message(f"m{i}", {}, arrays)))
    reader, found, size = frames.Reader(), [], itertools.cycle(sizes)
    while data:
        room = reader.room()
        got = min(len(room), next(size), len(data))
        room[:got], data = data[:got], data[got:]
        reader.got(got)
        while (message := reader.message()) is not None:
            found.append(message)
    assert [message.kind for message in found] == [f"m{i}" for i in range(len(many))] and reader.idle
    for message, arrays in zip(found, many, strict=True):
        assert message.arrays.keys() == arrays.keys()
        assert all(np.array_equal(message.arrays[name], array) for name, array in arrays.items())


def test_messages_out_of_bounds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    head, payload = joined(Message("k", {}, {"a": np.arange(3)}))
    huge, deep = b"[%d]" % 2**70, b'{"kind": ' + b"[" * 200_000
    replaced = (head.replace(b"[3]", with_) for with_ in (b"[4]", huge, b"[0, %d]" % 2**70, b"[2.5]", b"{}", b'["3"]'))
    for bad in (head[:-1], b"[]", b"\xff", deep, head.replace(b"int64", b"object"), *replaced):
        with pytest.raises(FrameError):
            frames.decode(bad, payload)
    for short in (payload[:-8], payload + bytes(8)):
        with pytest.raises(FrameError):
            frames.decode(head, short)
    with pytest.raises(FrameError, match="begins with"):
        frames.prefix(frames.PREFIX.pack(b"PICK", frames.VERSION, 1, 1))
    with pytest.raises(FrameError, match="begins with"):
        frames.prefix(frames.PREFIX.pack(frames.MAGIC, frames.VERSION + 1, 1, 1))
    for sizes in ((frames.MAX_HEAD + 1, 0), (0, frames.MAX_PAYLOAD + 1)):
        with pytest.raises(FrameError, match="announces"):
            frames.prefix(frames.PREFIX.pack(frames.MAGIC, frames.VERSION, *sizes))
    monkeypatch.setattr(frames, "MAX_PAYLOAD", 16)
    with pytest.raises(FrameError, match="send fewer rows"):
        frames.encode(Message("k", {}, {"a": np.arange(3)}))


LEAF = st.none() | st.booleans() | st.integers() | st.integers(2**60, 2**80) | st.floats() | st.text(max_size=3)
WORDS = st.sampled_from(["kind", "note", "arrays", "a", "b"])
JSON = st.recursive(
    LEAF | WORDS, lambda x: st.lists(x, max_size=3) | st.dictionaries(WORDS, x, max_size=3), max_leaves=8
)
SIZES = st.lists(st.integers(-2, 4) | st.integers(2**30, 2**80), max_size=3)
DESCRIBED = st.tuples(WORDS, st.sampled_from(sorted(frames.DTYPES)), SIZES) | st.tuples(WORDS, WORDS) | JSON
HEAD = {"kind": JSON | WORDS, "note": JSON | st.just({}), "arrays": JSON | st.lists(DESCRIBED, max_size=3)}


@given(st.fixed_dictionaries(HEAD) | JSON, st.integers(0, 6).map(lambda n: bytes(8 * n)))
@settings(max_examples=300, deadline=None)
def test_garbage_is_a_frame_error_and_nothing_else(head: object, payload: bytes) -> None:
    """Or a message, where it happens to be one."""
    try:
        found = frames.decode(json.dumps(head).encode(), bytearray(payload))
    except FrameError:
        return
    assert isinstance(found.kind, str) and isinstance(found.note, dict)
    assert all(isinstance(array, np.ndarray) and array.nbytes <= len(payload) for array in found.arrays.values())


@given(st.binary(max_size=60), st.binary(max_size=40))
@settings(max_examples=50, deadline=None)
def test_bytes_that_are_no_json_are_a_frame_error(head: bytes, payload: bytes) -> None:
    with pytest.raises(FrameError):
        frames.decode(head, bytearray(payload))


def test_a_proof_needs_secret_side_and_both_nonces() -> None:
    shown = {frames.proof(s, w, n) for s in (b"a", b"b") for w in ("client", "server") for n in ((b"1", b"2"), (b"2",))}
    assert len(shown) == 8


# memory


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 900)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_extents_never_overlap_and_all_comes_back(tmp_path_factory: pytest.TempPathFactory, steps: list) -> None:
    arena = Arena(tmp_path_factory.mktemp("arena"), 1024)
    held: list[Extent] = []
    for kind, number in steps:
        if kind < 4 or not held:
            extent = arena.allocate(number)
            assert extent.nbytes >= number and extent.offset % LINE == extent.nbytes % LINE == 0
            for other in held:
                apart = extent.offset >= other.offset + other.nbytes or other.offset >= extent.offset + extent.nbytes
                assert other.segment != extent.segment or apart
            arena.view(*extent)
            held.append(extent)
        else:
            arena.free(held.pop(number % len(held)))
        assert arena.used == sum(e.nbytes for e in held)
    heir = Arena(arena.directory, 1024)  # takes over what was handed out, in any order
    heir.adopt(100)
    for extent in reversed(held):
        heir.claim(extent)
    assert heir.used == arena.used and heir.reserved == arena.reserved and heir._free == arena._free
    for extent in held:
        with pytest.raises(ValueError, match="are not free"):
            heir.claim(extent)
    new = heir.allocate(1)
    assert new.segment == 100, "nothing of a former owner's memory is handed out: somebody may still write into it"
    heir.free(new)
    for extent in held:
        heir.free(extent)
    assert heir.used == 0 and all(len(free) == 1 for free in heir._free.values())
    heir.drop_former()
    assert list(heir._free) == [100] and [p.name for p in heir.directory.iterdir()] == ["segment-00100"]
    assert heir.allocate(1) == new


def test_a_large_extent_has_its_own_segment_and_files_are_private(tmp_path) -> None:
    arena = Arena(tmp_path, 1024)
    extent = arena.allocate(5000)
    assert extent.nbytes == 5056 and arena.path(extent.segment).stat().st_size == 8192
    assert arena.path(extent.segment).stat().st_mode & 0o777 == 0o600
    with pytest.raises(ValueError, match="asked for 100 at 8100"):
        arena.view(extent.segment, 8100, 100)
    with pytest.raises(OSError, match="--rl-dock-gb"):
        arena.allocate(1 << 60)


# journal


def record(seq: int, epoch: int = 0, slots: tuple[int, ...] = (0, 1)) -> Record:
    n = len(slots)
    at = np.array(slots, np.int32)
    cells = Cells(at, np.zeros(n, np.int32), np.arange(n) * 8, np.full(n, seq, np.int32))
    return Record(0, 1, seq, epoch, Shape(2, 2), {"tokens": cells}, {"logp": at}, np.array([1], np.int32))


def test_a_journal_forgets_only_what_was_not_finished(tmp_path) -> None:
    journal = Journal(tmp_path)
    sizes = []
    for seq in (1, 2, 3):
        journal.append(record(seq))
        sizes.append(journal.nbytes)
    journal.close()
    data = journal.path.read_bytes()
    # Killed between the bytes of the third and the number that makes them count, and in the middle of them.
    for cut in (len(data), sizes[1] + 40, sizes[1]):
        journal.path.write_bytes(sizes[1].to_bytes(8, "little") + data[HEADER:cut])
        again = Journal(tmp_path)
        assert [r.seq for r in again.records()] == [1, 2]
        again.append(record(7))
        found = list(again.records())
        assert [r.seq for r in found] == [1, 2, 7]
        assert found[2].columns["tokens"].length.tolist() == [7, 7] and found[2].acks["logp"].tolist() == [0, 1]
        again.close()
    for torn in (b"", b"\x08\0\0"):  # killed while it was made
        journal.path.write_bytes(torn)
        again = Journal(tmp_path)
        assert list(again.records()) == []
        again.append(record(1))
        assert [r.seq for r in again.records()] == [1]
        again.close()


def test_a_journal_is_rewritten_at_once(tmp_path) -> None:
    journal = Journal(tmp_path)
    for seq in range(1, 9):
        journal.append(record(seq))
    before = journal.nbytes
    journal.rewrite([record(8)])
    journal.append(record(9))
    assert journal.nbytes < before and sorted(os.listdir(tmp_path)) == ["journal"]
    assert [r.seq for r in Journal(tmp_path).records()] == [8, 9]


@given(st.sets(st.integers(0, 12)), st.sets(st.integers(0, 12)))
def test_a_set_of_epochs_is_a_set(a: set[int], b: set[int]) -> None:
    first, second = EpochSet(sorted(a, reverse=True)), EpochSet(b)
    first.update(EpochSet.from_list(second.to_list()))
    assert {n for n in range(15) if n in first} == a | b
    assert first.to_list() == EpochSet(a | b).to_list()


# batches

COLUMNS = {
    c.name: c
    for c in (
        ColumnSpec("tokens", torch.int32, "token", ragged=True),
        ColumnSpec("score", torch.float32, "sample", ragged=False),
    )
}
STATES = {
    "work": StateSpec("work", ("tokens",), ("score",)),
    "train": StateSpec("train", ("tokens",), (), whole_groups=True),
}


def told(seq: int, rows: list[int], lengths: list[int], shape: Shape, *, house: int = 0, epoch: int = 0, versions=None):
    n = len(rows)
    at = np.array(rows, np.int32)
    cells = Cells(at, np.zeros(n, np.int32), np.zeros(n, np.int64), np.array(lengths, np.int32))
    versions = None if versions is None else (at, np.array(versions, np.int64))
    return Record(house, 1, seq, epoch, shape, {"tokens": cells}, versions=versions)


def controller_with(lengths: list[int], members: int = 1, state: str = "work", **more) -> Controller:
    found = Controller(STATES[state], COLUMNS, STATES)
    found.apply(told(1, list(range(len(lengths))), lengths, Shape(len(lengths) // members, members), **more))
    return found


def rows_of(grant) -> list[int] | None:
    return None if grant is None else [r for _, rows in grant.rows for r in rows.tolist()]


@given(st.lists(st.integers(1, 50), min_size=6, max_size=6), st.permutations(range(6)), st.booleans())
@settings(max_examples=60, deadline=None)
def test_shares_do_not_depend_on_what_came_first(lengths: list[int], order: list[int], balance: bool) -> None:
    shape = Shape(6, 1)
    whole, piecemeal = (Controller(STATES["work"], COLUMNS, STATES) for _ in range(2))
    whole.apply(told(1, list(range(6)), lengths, shape))
    asks = [Ask(share=(c, 3), balance=balance, max_rows=2) for c in range(3)]
    expected = [rows_of(whole.take(ask, c, 0, 9)) for c, ask in enumerate(asks)]
    got: dict[int, list[int]] = {}
    for seq, row in enumerate(order, 1):
        piecemeal.apply(told(seq, [row], [lengths[row]], shape))
        for consumer in (2, 0, 1):
            if consumer not in got and (grant := piecemeal.take(asks[consumer], consumer, 0, 9)) is not None:
                got[consumer] = rows_of(grant)
    assert [got[c] for c in range(3)] == expected and sorted(sum(expected, [])) == list(range(6))


@given(st.lists(st.integers(0, 100), min_size=1, max_size=40), st.integers(1, 5))
def test_balanced_shares_are_even_in_count_and_close_in_tokens(lengths: list[int], bins: int) -> None:
    parts = balanced(np.array(lengths), bins)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    assert [len(p) for p in parts] == [len(even(np.arange(len(lengths)), b, bins)) for b in range(bins)]
    assert all((np.diff(p) > 0).all() for p in parts)
    if len(lengths) % bins == 0:
        sums = [sum(lengths[i] for i in p) for p in parts]
        assert max(sums) - min(sums) <= max(lengths)


def test_a_batch_under_max_tokens_is_filled_from_the_window() -> None:
    lengths = [10, 60, 30, 5, 90, 35]
    assert rows_of(controller_with(lengths).take(Ask(max_tokens=100), "a", 0, 9)) == [0, 1, 2]
    assert rows_of(controller_with(lengths).take(Ask(max_tokens=100, window=4), "a", 0, 9)) == [0, 1, 2]
    assert rows_of(controller_with(lengths).take(Ask(max_tokens=100, window=6), "a", 0, 9)) == [0, 4]
    assert rows_of(controller_with(lengths).take(Ask(max_tokens=4), "a", 0, 9)) == [0], "one row at least"
    groups = controller_with(lengths, members=2, state="train")
    assert rows_of(groups.take(Ask(max_tokens=110), "a", 0, 9)) == [0, 1, 2, 3]
    assert rows_of(groups.take(Ask(max_tokens=110), "a", 0, 9)) == [4, 5], "a group is larger than the bound"


def test_a_window_goes_on_over_the_border_of_an_epoch() -> None:
    """At the end of an epoch min_rows and linger hold as anywhere."""
    work = controller_with([10])
    work.apply(told(2, [0], [60], Shape(4, 1), epoch=1))
    ask = {"max_tokens": 100, "window": 8}
    assert work.take(Ask(min_rows=3, **ask), "a", 0, 9) is None
    assert work.take(Ask(linger=0.5, **ask), "a", 0, 9, waited=0.4) is None
    work.apply(told(3, [1, 2, 3], [30, 5, 20], Shape(4, 1), epoch=1))
    grant = work.take(Ask(min_rows=3, **ask), "a", 0, 9)
    assert [(n, rows.tolist()) for n, rows in grant.rows] == [(0, [0]), (1, [0, 1])], "longest first: 60, 30, 10"
    assert rows_of(work.take(Ask(min_rows=2, max_tokens=100, window=1), "a", 0, 9)) == [2, 3], "min_rows of them"


def test_the_end_of_an_epoch_does_not_wait_for_lengths_of_the_next() -> None:
    """Nor does it matter for what is given out whether they are known."""
    late, early = controller_with([3, 1, 2, 5]), controller_with([3, 1, 2, 5])
    late.open(1, Shape(2, 1))
    early.apply(told(2, [0, 1], [4, 4], Shape(2, 1), epoch=1))
    ask = Ask(share=(0, 2), balance=True)
    first = [work.take(ask, "a", 0, 9) for work in (late, early)]
    assert [[n for n, _ in grant.rows] for grant in first] == [[0], [0]] and rows_of(first[0]) == rows_of(first[1])
    done = np.array(rows_of(first[0]), np.int32)
    late.apply(Record(0, 1, 2, 0, Shape(4, 1), acks={"work": done}))
    assert late.take(ask, "a", 0, 9) is None
    said = late.explain(ask, 7)
    assert "waited 7 s for at least 1 rows dealt by their lengths" in said
    assert "column 'tokens' (written by a producer's put) is missing for (1, 0, 0), (1, 1, 0)" in said
    late.apply(told(3, [0, 1], [4, 4], Shape(2, 1), epoch=1))
    assert [(n, rows.tolist()) for n, rows in late.take(ask, "a", 0, 9).rows] == [(1, [0])]


def test_linger_waits_for_a_fuller_batch_but_not_for_ever() -> None:
    shape = Shape(4, 1)
    work = Controller(STATES["work"], COLUMNS, STATES)
    work.apply(told(1, [0, 1], [1, 1], shape))
    ask = Ask(min_rows=2, max_rows=3, linger=0.5)
    assert work.take(ask, "a", 0, 9, waited=0.4) is None
    assert rows_of(work.take(ask, "a", 0, 9, waited=0.5)) == [0, 1]
    work.expire(10)
    work.apply(told(2, [2], [1], shape))
    assert rows_of(work.take(ask, "a", 0, 9, waited=0.0)) == [0, 1, 2], "a full batch need not linger"
    work.apply(told(3, [3], [1], shape))
    assert rows_of(work.take(ask, "b", 0, 9, waited=0.0)) == [3], "no more will come"
    assert work.take(Ask(), "c", 0, 9) is None, "all in other hands: not the end"


def test_near_rows_come_first() -> None:
    shape = Shape(4, 1)
    work = Controller(STATES["work"], COLUMNS, STATES)
    work.apply(told(1, [0, 2], [1, 1], shape, house=0))
    work.apply(told(1, [1, 3], [1, 1], shape, house=1))
    assert rows_of(work.take(Ask(near=1, max_rows=3), "a", 0, 9)) == [1, 3, 0]
    work.expire(10)
    assert rows_of(work.take(Ask(max_rows=3), "a", 0, 9)) == [0, 1, 2]


@pytest.mark.parametrize(("state", "expected"), [("work", [0, 2, 3, 5]), ("train", [2, 3])])
def test_stale_rows_are_never_given_out(state: str, expected: list[int]) -> None:
    """Versions more than max_staleness older than `newest`; of a whole group one such row is enough."""
    work = controller_with([1] * 6, members=2, state=state, versions=[3, 2, 3, 5, 1, 4])
    ask = Ask(newest=5, max_staleness=2)
    assert rows_of(work.take(ask, "a", 0, 9)) == expected
    assert work.remaining() == len(expected)
    ack = Record(0, 1, 2, 0, Shape(3, 2), acks={state: np.array(expected, np.int32)})
    work.apply(ack)
    assert rows_of(work.take(ask, "a", 0, 9)) == [] and work.remaining() == 0, "the end: nobody waits for stale rows"


def test_records_in_any_order_and_number_lead_to_the_same_view() -> None:
    shape = Shape(2, 2)
    records = [
        told(1, [0, 1], [3, 4], shape),
        Record(0, 1, 2, 0, shape, acks={"work": np.array([1], np.int32)}),
        Record(0, 1, 3, 0, shape, cleared=np.array([0], np.int32)),
        told(4, [2, 3], [5, 6], shape),
    ]
    for order in itertools.permutations(records):
        work = Controller(STATES["work"], COLUMNS, STATES)
        for r in (*order, *order[::-1]):
            work.apply(r)
        assert (work.remaining(), work.applied, work.duplicates, work.has_gap(0)) == (2, {0: 4}, 4, False)
        assert rows_of(work.take(Ask(), "a", 0, 9)) == [2, 3]


def test_an_acknowledgement_is_news_to_its_own_state_alone() -> None:
    columns = {"a": ColumnSpec("a", torch.float32, "sample", False)}
    states = {name: StateSpec(name, ("a",), ()) for name in ("mine", "other")}
    cells = Cells(np.arange(2, dtype=np.int32), np.zeros(2, np.int32), np.arange(2) * 4, np.ones(2, np.int32))
    records = [Record(0, 1, 1, 0, Shape(2, 1), {"a": cells})]
    records += [Record(0, 1, 2 + i, 0, Shape(2, 1), acks={s: np.array([i])}) for i, s in enumerate(("other", "mine"))]
    views = {name: Controller(spec, columns, states) for name, spec in states.items()}
    for record in records:
        assert all(view.apply(record) for view in views.values())
    assert {view.applied[0] for view in views.values()} == {3}
    left = {name: view.ids(view.take(Ask(), "me", 0.0, 60.0).rows)[:, 1].tolist() for name, view in views.items()}
    assert left == {"mine": [0], "other": [1]}


def test_a_manifest_closes_a_gap_and_what_came_meanwhile_counts() -> None:
    shape = Shape(4, 1)
    work = Controller(STATES["work"], COLUMNS, STATES)
    for seq in (1, 4, 5):
        work.apply(told(seq, [seq % 4], [1], shape))
    assert work.has_gap(0) and work.applied == {0: 1}
    manifest = told(3, [1, 2, 3], [1, 1, 1], shape)
    work.rebuild(0, 3, EpochSet(), [manifest])
    assert not work.has_gap(0) and work.applied == {0: 5} and rows_of(work.take(Ask(), "a", 0, 9)) == [0, 1, 2, 3]
    fresh = Controller(STATES["work"], COLUMNS, STATES)
    fresh.rebuild(0, 9, EpochSet([0]), [])
    fresh.open(0, shape)  # someone who has not heard yet that it is over
    assert fresh.remaining() == 0 and rows_of(fresh.take(Ask(), "a", 0, 9)) == []


def test_a_lost_home_makes_its_rows_not_ready_and_its_work_undone() -> None:
    work = controller_with([1, 1, 1, 1])
    grant = work.take(Ask(max_rows=3), "a", 0, 9)
    work.apply(Record(0, 1, 2, 0, Shape(4, 1), acks={"work": np.array([0], np.int32)}))
    work.lose(0, np.array([0, 1]))
    assert work.remaining() == 4 and rows_of(work.take(Ask(), "b", 0, 9)) == [2, 3]
    work.finish(grant.token, "a")
    work.apply(told(3, [0, 1], [1, 1], Shape(4, 1), house=1))
    assert rows_of(work.take(Ask(), "b", 0, 9)) == [0, 1]


def test_peers_are_told_apart_by_what_they_ask() -> None:
    """A rank that is one call ahead would be handed the rows of another ask."""
    work = controller_with([1, 1, 1])
    ask = Ask(ids=np.array([[0, 0, 0], [0, 2, 0]]), join=(0, 0, 4), peers=2)
    grant = work.take(ask, "a", 0, 9)
    for ids in (np.array([[0, 0, 0], [0, 1, 0]]), np.array([[0, 0, 0]]), None):
        with pytest.raises(ValueError, match="call 4 of this rank asks .* a peer asked for .*must lease alike"):
            work.take(Ask(ids=ids, join=(0, 0, 4), peers=2), "b", 0, 9)
    assert work.take(ask, "b", 0, 9) is grant and work.take(ask, "b", 0, 9) is grant, "also when it asks again"
    assert not work.finish(grant.token, "a", done=True) and work.finish(grant.token, "b", done=True)
    work.finish(grant.token, "b")
    assert not work._joined and not work._leases
    empty = [work.take(Ask(ids=np.empty((0, 3), np.int64), join=(0, 0, 5), peers=2), h, 0, 9) for h in "ab"]
    assert empty[0] is empty[1] and not work._joined


def test_a_lease_broken_under_one_peer_goes_on_for_the_other() -> None:
    """The first had copied everything before the machine was lost, and asks no more; it says when it is through."""
    for before in (True, False):
        work = controller_with([1, 1])
        ask = Ask(ids=np.array([[0, 0, 0], [0, 1, 0]]), join=(0, 0, 0), peers=2)
        first = work.take(ask, "a", 0, 9)
        assert work.take(ask, "b", 0, 9) is first
        work.lose(0, np.array([0]))
        assert work.take(ask, "b", 0, 9) is None
        if before:
            work.finish(first.token, "a", done=True)
        work.apply(told(2, [0], [1], Shape(2, 1), house=1))
        again = work.take(ask, "b", 0, 9)
        assert again is not first and again.token == first.token and rows_of(again) == [0, 1]
        if not before:
            assert not work.finish(first.token, "a", done=True)
        assert work.finish(again.token, "b", done=True), "the last acknowledges"
        for house, row in ((0, 1), (1, 0)):
            work.apply(Record(house, 1, 3, 0, Shape(2, 1), acks={"work": np.array([row], np.int32)}))
        work.finish(again.token, "b")
        assert work.remaining() == 0 and not work._leases and not work._joined and not work._broken


def test_a_lease_over_two_epochs_ends_when_both_are_acknowledged() -> None:
    shape = Shape(1, 1)
    work = controller_with([1])
    work.apply(told(2, [0], [1], shape, epoch=1))
    assert [n for n, _ in work.take(Ask(), "a", 0, 9).rows] == [0, 1]
    for seq, epoch in ((3, 0), (4, 1)):
        assert work.close(epoch, None) == ["a"]
        work.apply(Record(0, 1, seq, epoch, shape, acks={"work": np.array([0], np.int32)}))
    assert work.close(0, None) == work.close(1, None) == []
