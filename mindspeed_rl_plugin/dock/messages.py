"""What the processes of a dock say to each other: typed structs as MessagePack, never pickle. What does not fit their
types is no message; arrays are `[dtype, shape, bytes]`.

Another folder that has messages of its own says so by `add`, where it defines them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Union

import msgspec
import numpy as np
import torch

from mindspeed_rl_plugin.dock.api import ANY_VERSION, ColumnSpec, StateSpec, VersionBound

# What garbage inside a well-formed message raises where it is served.
MALFORMED = (KeyError, IndexError, TypeError, AttributeError, OverflowError)


class FrameError(ValueError):
    """What is no message of this protocol, or one above the limits."""


class Shape(NamedTuple):
    """Ids of one epoch: groups x members; row number = group * members + member. bound: of its rows."""

    groups: int
    members: int
    bound: VersionBound = ANY_VERSION


class Extent(NamedTuple):
    """A range of one segment of a warehouse, in bytes."""

    segment: int
    offset: int
    nbytes: int


class Address(NamedTuple):
    """Where the server of a rank answers: an abstract Unix socket for processes of its `node`, TCP for the others
    (port 0: none)."""

    node: str
    unix: str
    host: str = ""
    port: int = 0
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else f"unix:{self.unix}"


class Message(msgspec.Struct, tag=True, array_like=True, gc=False):
    """A request, an answer or a note."""


class Slots(msgspec.Struct, array_like=True, gc=False):
    """Columns that are written for the same rows. names: C columns; slots: `[n]` int32 row numbers (group numbers for
    group columns); length: `[C, n]` int32 entries of each cell."""

    names: tuple[str, ...]
    slots: np.ndarray
    length: np.ndarray


class Cells(Slots, array_like=True, gc=False):
    """And where they lie. segment: `[C, n]` or `[1, 1]` int32, -1 for a cell that is not there; offset: `[C, n]` int64
    bytes."""

    segment: np.ndarray
    offset: np.ndarray


def no_cells(columns: int, rows: int) -> list[np.ndarray]:
    """Segment, offset and length `[columns, rows]` of cells that are not there."""
    shape = (columns, rows)
    return [np.full(shape, -1, np.int32), np.zeros(shape, np.int64), np.zeros(shape, np.int32)]


class Query(Message):
    """To the controller of a state. epochs: those that the asker knows open; after: warehouse -> number of its newest
    record that the asker has caused, which the controller must know before it answers."""

    state: str
    epochs: list[tuple[int, Shape]]
    after: dict[int, int]


class Ask(Query):
    """A lease. ids: `[B, 3]` exactly these, in this order; None: what is ready, by rising id, rows of warehouse `near`
    first. max_rows, share, version: those of `Dock.lease`; deadline: seconds to wait; seconds: life of the lease, of a
    process outside of the job."""

    ids: np.ndarray | None
    deadline: float
    seconds: float | None = None
    max_rows: int | None = None
    near: int | None = None
    share: tuple[int, int] | None = None
    version: int | None = None


class Grant(Message):
    """Rows under a lease. ids: `[B, 3]`; owner: `[B]` int32 warehouse of each; segment, offset, length: `[C, B]` of
    their cells, of all columns that the state reads; shapes: of their epochs; needs: of `Lease`."""

    token: int
    ids: np.ndarray
    owner: np.ndarray
    segment: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    shapes: list[tuple[int, Shape]]
    needs: VersionBound | None = None

    @classmethod
    def empty(cls, columns: int, needs: VersionBound | None = None) -> Grant:
        """Nothing, for a state that reads so many columns."""
        return cls(0, np.empty((0, 3), np.int64), np.empty(0, np.int32), *no_cells(columns, 0), [], needs)


class Release(Query):
    """Rows of a lease are handed back."""

    token: int


class Reclaim(Query):
    """Rows that a process outside of the job has leased are given out again, though it is still there."""

    holder: str


class Retire(Query):
    """First half of clearing: give these groups out no more; answered when no live lease holds any."""

    epoch: int
    groups: np.ndarray
    deadline: float


class Look(Query):
    """Which rows are acknowledged (`done`), or are not, of `ids` `[B, 3]` or of all; answered by a `Grant` of no lease
    and no cells."""

    ids: np.ndarray | None
    done: bool


# To a warehouse.


class Put(Message):
    """Commit cells that lie in `extent`, or that come as bulk; acknowledge `rows` of `state`, which must have all
    columns that it writes then, where `checked`. reserve: only memory for it is asked for, in the answer's extent; a
    producer waits until its groups may come in."""

    epoch: int
    shape: Shape
    parts: list[Slots]
    producer: bool
    deadline: float
    extent: Extent | None = None
    reserve: bool = False
    state: str | None = None
    rows: np.ndarray | None = None
    checked: bool = True


class Clear(Message):
    """Second half of clearing: free the cells of groups."""

    epoch: int
    shape: Shape
    groups: np.ndarray


class Locate(Message):
    """Where the cells of rows lie."""

    epoch: int
    columns: tuple[str, ...]
    rows: np.ndarray


class Located(Message):
    """seq: number of the warehouse's newest record; segment (-1 for a cell that is not there), offset, length:
    `[C, n]`."""

    seq: int
    segment: np.ndarray
    offset: np.ndarray
    length: np.ndarray


class Fetch(Message):
    """Bytes of `[n, 3]` (segment, offset, bytes), one after the other, as bulk."""

    spans: np.ndarray


class Map(Message):
    """Which file a process of this machine maps for a segment."""

    segment: int


class Mapped(Message):
    """A file of this machine, its bytes, and the numbers of all segments of the warehouse."""

    path: str
    nbytes: int
    segments: list[int]


# Between processes.


class Hello(Message):
    """First message of a connection. rank: of the job, -1 outside of it; watch: each side stops when the other ends;
    node: the sender's machine."""

    name: str
    rank: int
    watch: bool = False
    node: str = ""


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
    """The sender stops because of a rank. node: that one's machine."""

    rank: int
    why: str
    node: str = ""


class Join(Message):
    """A process outside of the job asks what there is."""


class Directory(Message):
    """What a dock's processes know of it: its columns and states, and where warehouses, by number, and controllers, by
    state, answer. ranks: where every rank of the job answers; about: JSON, what the job says of itself to who joins."""

    columns: list[ColumnSpec]
    states: list[StateSpec]
    warehouses: list[Address]
    controllers: dict[str, Address]
    ranks: list[Address] = []
    about: str = ""


class Ok(Message):
    """Done; what was fetched follows as bulk. Of a warehouse, seq: number of its newest record; extent: memory that
    only the asker may fill."""

    seq: int = 0
    extent: Extent | None = None


class Failed(Message):
    """What the asker raises: a TimeoutError, else a ValueError."""

    text: str
    late: bool

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """What it says of an error."""
        return cls(str(error), isinstance(error, TimeoutError))

    def raised(self) -> Exception:
        return (TimeoutError if self.late else ValueError)(self.text)


DTYPES = {str(t).removeprefix("torch."): t for t in vars(torch).values() if isinstance(t, torch.dtype)}
NUMPY_TYPES = {np.dtype(t).str: np.dtype(t) for t in (np.uint8, np.int32, np.int64)}


def _encode(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} is no part of a message")
    return value.dtype.str, value.shape, np.ascontiguousarray(value).data


def _decode(kind: type, value: Any) -> Any:
    if kind is torch.dtype:
        return DTYPES[value]
    dtype, shape, data = value
    return np.frombuffer(data, NUMPY_TYPES[dtype]).reshape(shape)


pack = msgspec.msgpack.Encoder(enc_hook=_encode).encode
_types: list[type[Message]] = []  # of messages that are understood
_decoder = msgspec.msgpack.Decoder()


def add(*types: type[Message]) -> None:
    """From now on `unpack` understands messages of these types, too."""
    global _decoder
    _types.extend(types)
    _decoder = msgspec.msgpack.Decoder(Union[tuple(_types)], dec_hook=_decode)  # noqa: UP007


add(*Message.__subclasses__(), *Query.__subclasses__())


def unpack(data: bytes | bytearray) -> Message:
    """Inverse of `pack`. Raises FrameError for anything malformed."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, *MALFORMED) as error:
        raise FrameError(f"malformed message: {error}") from error
