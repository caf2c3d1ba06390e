"""Versions that a rank publishes: where readers find them, what is refused, and that none is ever taken half."""

import threading
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from dock_help import COLUMNS, STATES, make_members, together

from mindspeed_rl_plugin.dock import Gone
from mindspeed_rl_plugin.service.guest_dock import GuestDock
from mindspeed_rl_plugin.service.job_service import JobService
from mindspeed_rl_plugin.weights import published_memory
from mindspeed_rl_plugin.weights.published_memory import PublishedMemory, Take, publish_memory, sources_of

NBYTES = 1000
SPANS = [(0, 1, 10, 10), (100, 4, 8, 32), (992, 1, 8, 8)]


def publish(store: PublishedMemory, version: int) -> None:
    store.begin(version)[:] = version
    store.commit(version, b"%d" % version)


def read(source, version: int, seconds: float = 5.0) -> list[np.ndarray]:
    into = [np.empty((rows, size), np.uint8) for _, rows, size, _ in SPANS]
    source.read(version, SPANS, into, seconds)
    return into


@pytest.fixture(params=["a", "elsewhere"])
def readers(tmp_path: Path, request: pytest.FixtureRequest):
    """Members on two machines that publish, and what a process outside, on one of them or on another, sees."""
    ranks = make_members(COLUMNS, STATES, ["a", "b"])
    address = together(2, lambda rank: JobService(ranks[rank].dock()).invite(tmp_path / "secret"))[0]
    stores = [publish_memory(rank.dock(), NBYTES, 2) for rank in ranks]
    outside = GuestDock.join(address, tmp_path / "secret", node=request.param)
    yield ranks, stores, sources_of(outside)
    outside.close()
    for rank in ranks:
        rank.close()


def test_a_version_is_read_as_it_was_published(readers) -> None:
    ranks, stores, sources = readers
    for rank, (store, source) in enumerate(zip(stores, sources, strict=True)):
        publish(store, 3 + rank)
        assert source.seek(None, 5) == source.seek(3 + rank, 5) == (3 + rank, b"%d" % (3 + rank))
        assert all((part == 3 + rank).all() for part in read(source, 3 + rank))
        source.check(3 + rank, 5)
    pattern = np.arange(NBYTES).astype(np.uint8)
    stores[1].begin(9)[:] = pattern
    stores[1].commit(9, b"")
    sources[1].seek(9, 5)
    for (offset, rows, size, stride), part in zip(SPANS, read(sources[1], 9), strict=True):
        assert part.tolist() == [pattern[offset + i * stride :][:size].tolist() for i in range(rows)]


def test_a_version_that_is_not_there_yet_is_waited_for(readers) -> None:
    _, stores, sources = readers
    threading.Timer(0.2, publish, (stores[0], 1)).start()
    assert sources[0].seek(1, 10)[0] == 1
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="rank 0 has not published version 2 .* newest is 1"):
        sources[0].seek(2, 0.3)
    threading.Timer(0.2, sources[0]._calls.close).start()
    with pytest.raises(ConnectionError, match="has left the dock"):
        sources[0].seek(2, 30)
    assert time.monotonic() - begin < 20


def test_what_was_overwritten_is_gone(readers) -> None:
    _, stores, sources = readers
    source, store = sources[0], stores[0]
    for version in (0, 1):
        publish(store, version)
    source.seek(0, 5)
    read(source, 0)
    store.begin(2)  # from now on, not only once it is whole
    with pytest.raises(Gone) as caught:
        source.check(0, 5)
    assert (caught.value.version, caught.value.newest) == (0, 1)
    store.commit(2, b"")
    for call in (lambda: source.seek(0, 5), lambda: source.check(0, 5)):
        with pytest.raises(Gone):
            call()
    with pytest.raises(ValueError, match="version 2 .* cannot follow version 2"):
        store.begin(2)


def test_serving_weights_holds_up_no_rows(readers) -> None:
    """A question for a version that does not come, and a big answer, while the lock of the rows is taken."""
    ranks, stores, sources = readers
    publish(stores[0], 0)
    with ranks[0].core.lock:
        assert sources[0].seek(0, 5)[0] == 0
        assert len(read(sources[0], 0)) == len(SPANS)
    with patch.object(published_memory, "TAKE_BYTES", 40), pytest.raises(ValueError, match="more than 40 bytes"):
        sources[0]._ask(Take(0, np.array(SPANS, np.int64)), 5)


@pytest.mark.parametrize(
    "spans",
    [[(0, 1, 1001, 1001)], [(-8, 1, 8, 8)], [(996, 1, 8, 8)], [(0, 126, 8, 8)], [(0, 2, 8, 4)], [(0, 1 << 62, 8, 8)]],
)
def test_spans_that_are_none_are_refused(spans) -> None:
    store = PublishedMemory(NBYTES, 2)
    publish(store, 0)
    with pytest.raises(ValueError, match="not inside the 1000 bytes"):
        store.take(Take(0, np.array(spans, np.int64)))
    store.close()
    with pytest.raises(MemoryError, match="3 versions of"):
        PublishedMemory(1 << 60, 3)


def test_a_rank_that_publishes_nothing_says_so(tmp_path: Path) -> None:
    (rank,) = make_members(COLUMNS, STATES, ["a"])
    address = JobService(rank.dock()).invite(tmp_path / "secret")
    outside = GuestDock.join(address, tmp_path / "secret", node="a")
    with pytest.raises(ValueError, match="Seek is not a request that this process answers"):
        sources_of(outside)[0].seek(0, 5)
    with pytest.raises(ValueError, match="only a rank of the job"):
        publish_memory(outside, 1, 2)
    outside.close()
    rank.close()
