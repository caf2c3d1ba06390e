"""Messages between the processes of a dock: typed structs as MessagePack, bulk bytes behind them, never pickle.

    magic "MSTD" | version | 3 zero bytes | head bytes (uint32) | bulk bytes (uint64) | head | bulk

The head is one of the structs below; what does not fit its types is no message. Arrays of a head are
`[dtype, shape, bytes]`; cells travel as bulk, which is neither copied when it is sent nor when it is received.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Union

import msgspec
import numpy as np

MAGIC, VERSION = b"MSTD", 4
PREFIX = struct.Struct("<4sB3xIQ")
MAX_HEAD = 256 << 20  # bytes
MAX_BULK = 2 << 30  # bytes; larger reads and writes are split by their caller
TYPES = {np.dtype(t).str: np.dtype(t) for t in (np.uint8, np.int32, np.int64)}
JOIN = 64 << 10  # bytes; what is smaller is copied together, because a system call costs more than the copy

# What garbage inside a well-formed message raises where it is served.
MALFORMED = (KeyError, IndexError, TypeError, AttributeError, OverflowError)


class FrameError(ValueError):
    """Bytes that are not a message of this protocol, or one above the limits."""


class Shape(NamedTuple):
    """Ids of one epoch: groups x members; row number = group * members + member."""

    groups: int
    members: int


class Extent(NamedTuple):
    """A range of one segment of a warehouse, in bytes."""

    segment: int
    offset: int
    nbytes: int


class Address(NamedTuple):
    """Where a server answers: an abstract Unix socket for processes of its `node`, TCP for the others (port 0: none).
    rank: of the job."""

    node: str
    unix: str
    host: str = ""
    port: int = 0
    rank: int = 0


class Message(msgspec.Struct, tag=True, array_like=True, gc=False):
    """One request, answer or note."""


class Part(msgspec.Struct, array_like=True, gc=False):
    """Columns that are written for the same rows. names: C columns; slots: `[n]` int32 row numbers (group numbers for
    group columns); length: `[C, n]` int32 entries of each cell."""

    names: tuple[str, ...]
    slots: np.ndarray
    length: np.ndarray


class Cells(msgspec.Struct, array_like=True, gc=False):
    """Where cells lie. names: C columns; slots: `[n]` int32; segment: `[C, n]` or `[1, 1]` int32, -1 for a cell that is
    not there; offset: `[C, n]` int64 bytes; length: `[C, n]` int32 entries."""

    names: tuple[str, ...]
    slots: np.ndarray
    segment: np.ndarray
    offset: np.ndarray
    length: np.ndarray


# Requests to a controller. epochs: (epoch, groups, members) that the asker knows open; after: warehouse -> number of
# its newest record that the asker has caused, which the controller must know before it answers.


class Ask(Message):
    """A lease. ids: `[B, 3]` exactly these, in this order; None: what is ready, by rising id, rows of warehouse `near`
    first. The bounds are those of `Dock.lease`; deadline: seconds to wait; seconds: life of the lease."""

    state: str
    columns: tuple[str, ...]
    ids: np.ndarray | None
    epochs: list[tuple[int, int, int]]
    after: dict[int, int]
    deadline: float
    seconds: float | None = None
    max_rows: int | None = None
    min_rows: int = 1
    max_tokens: int | None = None
    linger: float = 0.0
    near: int | None = None


class Release(Message):
    """Rows of a lease are handed back."""

    state: str
    token: int


class Remaining(Message):
    """How many rows are not acknowledged; ids: `[B, 3]`, which of these are not."""

    state: str
    epochs: list[tuple[int, int, int]]
    after: dict[int, int]
    ids: np.ndarray | None = None


class Retire(Message):
    """First half of clearing: give these groups out no more; answered when no live lease holds any."""

    state: str
    epoch: int
    shape: Shape
    groups: np.ndarray
    after: dict[int, int]
    deadline: float


# Requests to a warehouse.


class Reserve(Message):
    """Memory for a put; waits until a producer's groups may come in. nbytes: of what only producers write."""

    epoch: int
    shape: Shape
    parts: list[Part]
    producer: bool
    deadline: float


class Put(Message):
    """Commit cells that lie in `extent`, or that come as bulk; acknowledge `rows` of `state`, which must have all
    columns that it writes then, where `checked`. want: bytes of memory that the writer would like for its next put;
    back: memory that it needs no more."""

    epoch: int
    shape: Shape
    parts: list[Part]
    producer: bool
    deadline: float
    extent: Extent | None = None
    want: int = 0
    back: Extent | None = None
    state: str | None = None
    rows: np.ndarray | None = None
    checked: bool = True


class Locate(Message):
    """Where the cells of rows `slots` lie."""

    epoch: int
    columns: tuple[str, ...]
    slots: np.ndarray


class Fetch(Message):
    """Bytes of `[n, 3]` (segment, offset, bytes), one after the other, as bulk."""

    spans: np.ndarray


class Map(Message):
    """How a process of this machine maps a segment."""

    segment: int


class Clear(Message):
    """Second half of clearing: free the cells of groups."""

    epoch: int
    shape: Shape
    groups: np.ndarray


class Manifest(Message):
    """All that a warehouse holds."""


# Between processes.


class Hello(Message):
    """First message of a connection. rank: of the job, -1 outside of it; watch: each side stops when the other ends."""

    name: str
    rank: int
    watch: bool = False


class Join(Message):
    """A process outside of the job asks what there is."""


class Record(Message):
    """One commit of a warehouse: new cells, rows that a state is done with, groups whose cells are gone. seq: its
    running number, from 1."""

    warehouse: int
    seq: int
    epoch: int
    shape: Shape
    cells: list[Cells] = []
    state: str | None = None
    rows: np.ndarray | None = None
    cleared: np.ndarray | None = None


class Ping(Message):
    """The sender lives."""


class Bye(Message):
    """The sender leaves in order."""


class Stopped(Message):
    """The sender stops because of a rank."""

    rank: int
    why: str


# Answers.


class Ok(Message):
    """Done."""


class Failed(Message):
    """kind: name of the exception to raise."""

    kind: str
    text: str


class Grant(Message):
    """Rows under a lease. ids: `[B, 3]`; owner: `[B]` int32 warehouse of each; segment, offset, length: `[C, B]` of
    their cells; shapes: of their epochs."""

    token: int
    ids: np.ndarray
    owner: np.ndarray
    segment: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    shapes: list[tuple[int, int, int]]


class Left(Message):
    """Rows that are not acknowledged: how many, or which of those that were asked for."""

    rows: int
    ids: np.ndarray | None = None


class Lent(Message):
    """Memory that only the asker may fill."""

    extent: Extent


class Committed(Message):
    """seq: running number of the record; extent: memory for the writer's next put."""

    seq: int
    extent: Extent | None = None


class Located(Message):
    """As in `Grant`."""

    segment: np.ndarray
    offset: np.ndarray
    length: np.ndarray


class Data(Message):
    """Bytes follow as bulk."""


class Mapped(Message):
    """A file of this machine, and its size."""

    path: str
    nbytes: int


class Held(Message):
    """records: one an epoch."""

    records: list[Record]


class Description(Message):
    """What a process outside of the job must know. columns: (name, dtype, level, ragged, trailing, longest); states:
    (name, reads, writes, whole groups); warehouses: addresses; controllers: state -> address."""

    columns: list[tuple[str, str, str, bool, tuple[int, ...], int | None]]
    states: list[tuple[str, tuple[str, ...], tuple[str, ...], bool]]
    warehouses: list[Address]
    controllers: dict[str, Address]


Any_ = Union[tuple(Message.__subclasses__())]  # noqa: UP007


def _encode_array(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} is no part of a message")
    return value.dtype.str, value.shape, np.ascontiguousarray(value).data


def _decode_array(kind: type, value: Any) -> np.ndarray:
    dtype, shape, data = value
    return np.frombuffer(data, TYPES[dtype]).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_DECODER = msgspec.msgpack.Decoder(Any_, dec_hook=_decode_array)


def pack(message: Message) -> bytes:
    """The head of a message."""
    return _ENCODER.encode(message)


def unpack(head: bytes | bytearray | memoryview) -> Message:
    """Inverse of `pack`. Raises FrameError for anything malformed."""
    try:
        return _DECODER.decode(head)
    except (msgspec.DecodeError, ValueError, *MALFORMED) as error:
        raise FrameError(f"malformed message: {error}") from error


def frame(message: Message, bulk: Sequence[Any] = ()) -> list[Any]:
    """Buffers to send in order; large ones of `bulk` are not copied. Raises FrameError above the limits."""
    head = _ENCODER.encode(message)
    total = sum(len(piece) for piece in bulk)
    if len(head) > MAX_HEAD or total > MAX_BULK:
        raise FrameError(
            f"{type(message).__name__} has a head of {len(head)} bytes (limit {MAX_HEAD}) and {total} bytes of cells "
            f"(limit {MAX_BULK}); send fewer rows at a time"
        )
    start = PREFIX.pack(MAGIC, VERSION, len(head), total)
    if total < JOIN:
        return [b"".join((start, head, *bulk))]
    return [start + head, *(memoryview(piece) for piece in bulk if len(piece))]


class Reader:
    """Messages out of the bytes of a connection: fill `space`, say how much came, take the `message` when it is whole.

    scatter: uint8 arrays that bulk of just so many bytes goes to; else it gets memory of its own.
    """

    def __init__(self) -> None:
        self._buffer = bytearray(JOIN)
        self._have = 0  # bytes in the buffer
        self._message: Message | None = None  # whose bulk is being read
        self._bulk: np.ndarray | None = None
        self._spaces: deque[memoryview] = deque()  # what is to be filled of the bulk
        self.scatter: Sequence[np.ndarray] = ()

    def space(self) -> memoryview:
        """Where the next bytes of the connection go; empty while a whole message waits to be taken."""
        if self._spaces:
            return self._spaces[0]
        return memoryview(b"") if self._message is not None else memoryview(self._buffer)[self._have :]

    def got(self, nbytes: int) -> None:
        """So many bytes came."""
        if not self._spaces:
            self._have += nbytes
        elif nbytes == len(self._spaces[0]):
            self._spaces.popleft()
        else:
            self._spaces[0] = self._spaces[0][nbytes:]

    @property
    def pending(self) -> bool:
        """Whether something came that nobody has taken."""
        return bool(self._have) or self._message is not None

    def message(self) -> tuple[Message, np.ndarray | None] | None:
        """The next message and its bulk (None where that was scattered), None while it is not whole. Raises FrameError
        for what is none."""
        if (self._message is None and not self._begin()) or self._spaces:
            return None
        found, self._message = (self._message, self._bulk), None
        return found

    def _begin(self) -> bool:
        """Read a head once it is there, and what there is of its bulk."""
        if self._have < PREFIX.size:
            return False
        head, bulk = prefix(self._buffer)
        end = PREFIX.size + head
        if end > len(self._buffer):
            self._buffer = self._buffer + bytes(end - len(self._buffer))
        if self._have < end:
            return False
        self._message, self._bulk = unpack(memoryview(self._buffer)[PREFIX.size : end]), None
        pieces = self.scatter
        if bulk and sum(len(piece) for piece in pieces) != bulk:
            self._bulk = np.empty(bulk, np.uint8)
            pieces = [self._bulk]
        if bulk:
            self._spaces = deque(memoryview(piece) for piece in pieces if len(piece))
        while self._spaces and end < self._have:
            size = min(len(self._spaces[0]), self._have - end)
            self._spaces[0][:size] = memoryview(self._buffer)[end : end + size]
            self.got(size)
            end += size
        self._buffer[: self._have - end] = self._buffer[end : self._have]
        self._have -= end
        return True


def prefix(data: bytes | bytearray) -> tuple[int, int]:
    """Bytes of head and bulk that follow. Raises FrameError for foreign or oversized messages."""
    magic, version, head, bulk = PREFIX.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise FrameError(f"a message begins with {magic!r} version {version}, expected {MAGIC!r} version {VERSION}")
    if head > MAX_HEAD or bulk > MAX_BULK:
        raise FrameError(f"a message announces {head} + {bulk} bytes, above {MAX_HEAD} + {MAX_BULK}")
    return head, bulk
