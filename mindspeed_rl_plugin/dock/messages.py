"""The messages between the processes of a dock: typed structs as MessagePack, never pickle. Data that does not fit the
types is refused. An array is sent as `[dtype, shape, bytes]`.

Other folders register further messages with `add`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Union

import msgspec
import numpy as np
import torch

from mindspeed_rl_plugin.dock.api import ANY_VERSION, ColumnSpec, StateSpec, VersionBound

# Errors that a well-formed message with wrong contents raises in its handler.
MALFORMED = (KeyError, IndexError, TypeError, AttributeError, OverflowError)


class FrameError(ValueError):
    """Data that is not a message of this protocol, or that exceeds the protocol's limits."""


class Shape(NamedTuple):
    """Size of an epoch. The row number of a sample is group * members + member."""

    groups: int
    members: int  # of each group
    bound: VersionBound = ANY_VERSION  # of its rows


class Extent(NamedTuple):
    """A range of one segment of a warehouse, in bytes."""

    segment: int
    offset: int
    nbytes: int


class Address(NamedTuple):
    """Where the server of a rank can be reached."""

    node: str  # its machine
    unix: str  # abstract Unix socket, for processes of its machine
    host: str = ""  # TCP address, for processes of other machines
    port: int = 0  # 0: no TCP
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else f"unix:{self.unix}"


class Message(msgspec.Struct, tag=True, array_like=True, gc=False):
    """A request, an answer or a note."""


class Slots(msgspec.Struct, array_like=True, gc=False):
    """C columns that are written for the same n rows."""

    names: tuple[str, ...]
    slots: np.ndarray  # `[n]` int32 row numbers; for group columns: group numbers
    length: np.ndarray  # `[C, n]` int32 entries of each cell


class Cells(Slots, array_like=True, gc=False):
    """`Slots` with the place of each cell in memory."""

    segment: np.ndarray  # `[C, n]`, or `[1, 1]` for all cells, int32; -1: the cell is missing
    offset: np.ndarray  # `[C, n]` int64 bytes


def no_cells(columns: int, rows: int) -> list[np.ndarray]:
    """Segment, offset and length `[columns, rows]` of cells that are missing."""
    shape = (columns, rows)
    return [np.full(shape, -1, np.int32), np.zeros(shape, np.int64), np.zeros(shape, np.int32)]


class Query(Message):
    """A request to the controller of a state."""

    state: str
    epochs: list[tuple[int, Shape]]  # open epochs that the asker knows
    # warehouse -> number of its newest record that the asker knows; the controller answers once it has this record
    after: dict[int, int]


class Ask(Query):
    """Asks for a lease. `max_rows`, `share` and `version` are those of `Dock.lease`."""

    ids: np.ndarray | None  # `[B, 3]`, exactly these in this order; None: rows that are ready, by rising id
    deadline: float  # seconds to wait
    seconds: float | None = None  # how long the lease lasts, for a process outside of the job
    max_rows: int | None = None
    near: int | None = None  # warehouse whose rows come first
    share: tuple[int, int] | None = None
    version: int | None = None


class Grant(Message):
    """B rows under a lease, with the places of their cells in the C columns that the state reads."""

    token: int  # of the lease
    ids: np.ndarray  # `[B, 3]`
    owner: np.ndarray  # `[B]` int32 warehouse
    segment: np.ndarray  # `[C, B]`, as in `Cells`
    offset: np.ndarray  # `[C, B]`
    length: np.ndarray  # `[C, B]`
    shapes: list[tuple[int, Shape]]  # (epoch, its shape)
    needs: VersionBound | None = None  # as in `Lease`

    @classmethod
    def empty(cls, columns: int, needs: VersionBound | None = None) -> Grant:
        """A grant without rows. columns: number of columns that the state reads."""
        return cls(0, np.empty((0, 3), np.int64), np.empty(0, np.int32), *no_cells(columns, 0), [], needs)


class Release(Query):
    """Gives the rows of a lease back."""

    token: int


class Reclaim(Query):
    """Ends the leases of a process outside of the job, although it still lives, so that others can get its rows."""

    holder: str


class Retire(Query):
    """First half of clearing: no lease gets these groups any more. The answer comes when no live lease holds them."""

    epoch: int
    groups: np.ndarray
    deadline: float


class Look(Query):
    """Asks which rows are acknowledged, or which are not. The answer is a `Grant` without lease and cells."""

    ids: np.ndarray | None  # `[B, 3]`; None: all
    done: bool  # True: the acknowledged rows, False: the others


# To a warehouse.


class Put(Message):
    """Commits cells, and acknowledges rows of a state."""

    epoch: int
    shape: Shape
    parts: list[Slots]
    producer: bool  # a producer adds new groups, and waits until the limits admit them
    deadline: float  # seconds to wait
    extent: Extent | None = None  # memory that holds the cells; None: they follow as bulk
    reserve: bool = False  # only asks for memory, whose extent is in the answer
    state: str | None = None
    rows: np.ndarray | None = None  # numbers of the rows that `state` acknowledges
    checked: bool = True  # whether these rows must have all columns that the state writes


class Clear(Message):
    """Second half of clearing: free the cells of groups."""

    epoch: int
    shape: Shape
    groups: np.ndarray


class Locate(Message):
    """Asks where the cells of rows lie."""

    epoch: int
    columns: tuple[str, ...]
    rows: np.ndarray


class Located(Message):
    """The answer to `Locate`. The arrays are `[C, n]`, as in `Cells`."""

    seq: int  # number of the warehouse's newest record
    segment: np.ndarray
    offset: np.ndarray
    length: np.ndarray


class Fetch(Message):
    """Asks for the bytes of n spans, as bulk, one after the other."""

    spans: np.ndarray  # `[n, 3]`: segment, offset, bytes


class Map(Message):
    """Asks for the file of a segment, which a process of the same machine can map."""

    segment: int


class Mapped(Message):
    """The file of a segment."""

    path: str
    nbytes: int
    segments: list[int]  # numbers of all segments of the warehouse


# Between processes.


class Hello(Message):
    """First message of a connection."""

    name: str  # of the sender
    rank: int  # of the job, -1 outside of it
    watch: bool = False  # each side stops when the other is lost
    node: str = ""  # the sender's machine


class Record(Message):
    """One commit or one clearing in a warehouse."""

    warehouse: int
    seq: int  # running number, from 1
    epoch: int
    shape: Shape
    cells: list[Cells] = []  # that are new
    state: str | None = None
    rows: np.ndarray | None = None  # that `state` acknowledges
    cleared: np.ndarray | None = None  # groups whose cells were freed


class Ping(Message):
    """The sender lives."""


class Bye(Message):
    """The sender leaves without an error."""


class Stopped(Message):
    """The sender stops because a rank, maybe the sender itself, is lost."""

    rank: int
    why: str
    node: str = ""  # machine of that rank


class Join(Message):
    """A process outside of the job asks for the `Directory`."""


class Directory(Message):
    """What all processes of a dock know about the dock."""

    columns: list[ColumnSpec]
    states: list[StateSpec]
    warehouses: list[Address]  # by their number
    controllers: dict[str, Address]  # by state
    ranks: list[Address] = []  # all ranks of the job
    about: str = ""  # JSON: description of the job for processes that join


class Ok(Message):
    """The request is done; fetched cells follow as bulk. Only a warehouse sets the fields."""

    seq: int = 0  # number of the warehouse's newest record
    extent: Extent | None = None  # memory that only the asker may fill


class Failed(Message):
    """The error that the asker raises."""

    text: str
    late: bool  # True: a TimeoutError, False: a ValueError

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """The message for an error."""
        return cls(str(error), isinstance(error, TimeoutError))

    def raised(self) -> Exception:
        return (TimeoutError if self.late else ValueError)(self.text)


DTYPES = {str(t).removeprefix("torch."): t for t in vars(torch).values() if isinstance(t, torch.dtype)}
NUMPY_TYPES = {np.dtype(t).str: np.dtype(t) for t in (np.uint8, np.int32, np.int64)}


def _encode(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a message cannot contain a {type(value).__name__}")
    return value.dtype.str, value.shape, np.ascontiguousarray(value).data


def _decode(kind: type, value: Any) -> Any:
    if kind is torch.dtype:
        return DTYPES[value]
    dtype, shape, data = value
    return np.frombuffer(data, NUMPY_TYPES[dtype]).reshape(shape)


pack = msgspec.msgpack.Encoder(enc_hook=_encode).encode
_types: list[type[Message]] = []  # all types that `unpack` understands
_decoder = msgspec.msgpack.Decoder()


def add(*types: type[Message]) -> None:
    """Let `unpack` understand messages of these types, too."""
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
