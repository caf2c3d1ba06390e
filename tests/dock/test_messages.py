"""Messages: what goes in comes out, in whatever pieces; garbage is refused and nothing else happens."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading

import msgspec
import numpy as np
import pytest
from dock_help import COLUMNS, STATES
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.dock import VersionBound, rpc
from mindspeed_rl_plugin.dock import messages as m
from mindspeed_rl_plugin.weights.published_memory import Found, Take

SAMPLES = [
    m.Ask("generate", [(0, m.Shape(2, 1, VersionBound(3, 4)))], {0: 5}, np.arange(6).reshape(2, 3), 1.5, max_rows=3),
    m.Ask("generate", [], {}, None, 0.0),
    m.Put(3, m.Shape(2, 2), [m.Slots(("a", "b"), np.arange(2, dtype=np.int32), np.ones((2, 2), np.int32))], True, 9.0),
    m.Record(1, 7, 3, m.Shape(2, 2), cleared=np.empty(0, np.int32)),
    m.Directory(COLUMNS, STATES, [m.Address("n", "u")], {"generate": m.Address("n", "v")}),
    Found(3, b"digests", "/proc/1/fd/4", 1 << 40),
    Take(3, np.arange(8).reshape(2, 4)),
    m.Failed("no", late=True),
    m.Ping(),
]


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield tuple(rpc.Stream(end) for end in ends)
    for end in ends:
        end.close()


@pytest.mark.parametrize("bulk", [0, 5, 3_000_000])
def test_messages_come_as_they_go(pair, bulk: int) -> None:
    """Several in a row, large and small, with bulk."""
    data = np.arange(bulk, dtype=np.uint8) if bulk else np.empty(0, np.uint8)
    sender = threading.Thread(target=lambda: [pair[0].send(x, (data[:2], data[2:])) for x in SAMPLES])
    sender.start()
    for sample in SAMPLES:
        message, got = pair[1].receive()
        assert str(message) == str(sample)
        assert np.array_equal(got, data) if bulk else got is None
    sender.join()
    pair[0].close()
    with pytest.raises(EOFError):
        pair[1].receive()


@given(st.binary(max_size=60))
@settings(max_examples=200)
def test_garbage_is_a_frame_error_and_nothing_else(data: bytes) -> None:
    with contextlib.suppress(m.FrameError):
        assert isinstance(m.unpack(data), m.Message)


@pytest.mark.parametrize("array", [["<O", [1], b"12345678"], ["<i4", [3], b"1234"], ["<i4", [-1, -1], b""], [], 3])
def test_arrays_that_are_none_are_refused(array: object) -> None:
    head = m.pack(m.Fetch(np.zeros((1, 3), np.int64)))
    assert isinstance(m.unpack(head), m.Fetch)
    with pytest.raises(m.FrameError):
        m.unpack(msgspec.msgpack.encode(["Fetch", array]))


def test_what_announces_too_much_is_refused(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for head, bulk in ((rpc.MAX_HEAD + 1, 0), (1, rpc.MAX_BULK + 1)):
        pair[0].socket.sendall(rpc.FRAME_PREFIX.pack(rpc.MAGIC, rpc.FRAME_VERSION, head, bulk))
        with pytest.raises(m.FrameError, match=str(head)):
            pair[1].receive()
    monkeypatch.setattr(rpc, "MAX_HEAD", 10)
    with pytest.raises(m.FrameError, match="limit 10"):
        pair[0].send(SAMPLES[0])


def test_a_proof_needs_secret_side_and_nonces() -> None:
    every = itertools.product((b"1", b"2"), (b"client", b"server"), (b"a", b"b"))
    assert len({rpc.proof(*one) for one in every}) == 8
