"""Messages between the processes of a dock: a small JSON head and raw arrays, never pickle.

    magic "MSTD" | version | 3 zero bytes | head bytes (uint32) | payload bytes (uint64) | head | payload

The head is `{"kind": ..., "note": {...}, "arrays": [[name, dtype, shape], ...]}`; the payload holds the arrays
one after the other, each padded to 8 bytes; one that is there already is `[name, name of that]`. Connections begin
with a handshake by which both sides prove that they know the job's secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAGIC, VERSION = b"MSTD", 3
PREFIX = struct.Struct("<4sB3xIQ")
ALIGN = 8
MAX_HEAD = 16 << 20  # bytes
MAX_PAYLOAD = 2 << 30  # bytes; larger reads and writes are split by their caller
NONCE = 32  # bytes
REFUSED = bytes(NONCE)  # in the place of a server's proof: the client has not shown the secret
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float32", "float64", "bool")
NAMES = {np.dtype(name): name for name in DTYPES}  # `dtype.name` takes longer than the rest of an array's encoding
TYPES = {name: dtype for dtype, name in NAMES.items()}
MALFORMED = (KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError)  # what garbage raises
JOIN = 64 << 10  # bytes; what is smaller is copied together, because a system call costs more than the copy


class FrameError(ValueError):
    """Bytes that are not a message of this protocol, or one above the limits."""


@dataclass(frozen=True)
class Message:
    """One request or answer. note: JSON values; arrays: C-contiguous, host memory; a list of uint8 arrays goes out as
    one, without a copy."""

    kind: str
    note: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Any] = field(default_factory=dict)


def encode(message: Message) -> list[memoryview | bytes]:
    """Buffers to send in order; large arrays are not copied."""
    described, parts, total = [], [], 0
    names: dict[int, str] = {}
    for name, array in message.arrays.items():
        if (same := names.setdefault(id(array), name)) != name:
            described.append([name, same])
            continue
        if isinstance(array, list):
            nbytes = sum(len(piece) for piece in array)
            described.append([name, "uint8", [nbytes]])
            parts += [memoryview(piece) for piece in array] + [bytes(-nbytes % ALIGN)]
            total += nbytes + -nbytes % ALIGN
            continue
        array = np.ascontiguousarray(array)
        described.append([name, NAMES.get(array.dtype) or array.dtype.name, array.shape])
        nbytes = array.nbytes
        if nbytes:
            parts.append(memoryview(array).cast("B"))
        short = -nbytes % ALIGN
        if short:
            parts.append(bytes(short))
        total += nbytes + short
    head = json.dumps({"kind": message.kind, "note": message.note, "arrays": described}).encode()
    if len(head) > MAX_HEAD or total > MAX_PAYLOAD:
        raise FrameError(
            f"message {message.kind!r} has a head of {len(head)} bytes (limit {MAX_HEAD}) and a payload of {total} "
            f"(limit {MAX_PAYLOAD}); send fewer rows at a time"
        )
    return _joined([PREFIX.pack(MAGIC, VERSION, len(head), total), head, *parts])


def _joined(parts: Sequence[memoryview | bytes]) -> list[memoryview | bytes]:
    """Neighbours that are small become one buffer."""
    out: list[memoryview | bytes] = []
    small: list[memoryview | bytes] = []
    for part in parts:
        if len(part) < JOIN:
            small.append(part)
            continue
        if small:
            out.append(b"".join(small))
            small = []
        out.append(part)
    return [*out, b"".join(small)] if small else out


class Reader:
    """Messages out of the bytes of a connection: fill `room`, say how much came, take the `message` when it is whole.

    Small messages need one read each; a large payload is read to where its arrays will lie.
    """

    def __init__(self) -> None:
        self._buffer = bytearray(JOIN)
        self._have = 0  # bytes in the buffer
        self._head: bytes | None = None  # of the message whose payload is being read
        self._payload = np.empty(0, np.uint8)
        self._rooms: deque[memoryview] = deque()  # what is to be filled of the payload
        self._scattered = False
        self.recycle = False  # read payloads into memory that is used again: fresh pages cost more than the bytes
        self.scatter: Sequence[np.ndarray] | None = None  # where the next payload of just that many bytes goes
        self._kept = np.empty(0, np.uint8)

    @property
    def idle(self) -> bool:
        """Whether nothing of a next message has come."""
        return self._head is None and not self._have

    def room(self) -> memoryview:
        """Where the next bytes of the connection go."""
        if self._head is not None:
            return self._rooms[0] if self._rooms else memoryview(b"")
        return memoryview(self._buffer)[self._have :]

    def got(self, nbytes: int) -> None:
        """So many bytes came."""
        if self._head is None:
            self._have += nbytes
        elif nbytes == len(self._rooms[0]):
            self._rooms.popleft()
        else:
            self._rooms[0] = self._rooms[0][nbytes:]

    def message(self) -> Message | None:
        """The next message, None while it is not whole. Raises FrameError for what is none."""
        if (self._head is None and not self._begin()) or self._rooms:
            return None
        head, self._head = self._head, None
        return decode(head, None if self._scattered else self._payload)

    def _space(self, nbytes: int) -> list[np.ndarray]:
        """Memory for a payload, in pieces."""
        total = 0 if self.scatter is None else sum(len(piece) for piece in self.scatter)
        self._scattered = self.scatter is not None and nbytes == total + -total % ALIGN
        if self._scattered:
            return [*self.scatter, np.empty(-total % ALIGN, np.uint8)]
        if not self.recycle:
            self._payload = np.empty(nbytes, np.uint8)
        else:
            if len(self._kept) < nbytes:
                self._kept = np.empty(nbytes + nbytes // 4, np.uint8)
            self._payload = self._kept[:nbytes]
        return [self._payload]

    def _begin(self) -> bool:
        """Read a head once it is there, and what there is of its payload."""
        if self._have < PREFIX.size:
            return False
        head, payload = prefix(bytes(self._buffer[: PREFIX.size]))
        end = PREFIX.size + head
        if end > len(self._buffer):
            self._buffer = self._buffer + bytes(end - len(self._buffer))
        if self._have < end:
            return False
        self._head = bytes(self._buffer[PREFIX.size : end])
        if self._have == end + payload and self.scatter is None:  # nothing but this one, and whole
            self._payload, self._scattered, self._have = self._buffer[end : self._have], False, 0
            return True
        self._rooms = deque(memoryview(piece) for piece in self._space(payload) if len(piece))
        while self._rooms and end < self._have:
            size = min(len(self._rooms[0]), self._have - end)
            self._rooms[0][:size] = memoryview(self._buffer)[end : end + size]
            self.got(size)
            end += size
        self._buffer[: self._have - end] = self._buffer[end : self._have]
        self._have -= end
        return True


def prefix(data: bytes) -> tuple[int, int]:
    """Bytes of head and payload that follow. Raises FrameError for foreign or oversized messages."""
    magic, version, head, payload = PREFIX.unpack(data)
    if magic != MAGIC or version != VERSION:
        raise FrameError(f"a message begins with {magic!r} version {version}, expected {MAGIC!r} version {VERSION}")
    if head > MAX_HEAD or payload > MAX_PAYLOAD:
        raise FrameError(f"a message announces {head} + {payload} bytes, above {MAX_HEAD} + {MAX_PAYLOAD}")
    return head, payload


def decode(head: bytes, payload: bytearray | np.ndarray | None) -> Message:
    """Inverse of `encode`; arrays are views of `payload`, left out where it is None because it went elsewhere.

    Raises FrameError for anything malformed.
    """
    try:
        found = json.loads(head)
        kind, note, described = found["kind"], found["note"], found["arrays"]
        arrays, at = {}, 0
        for name, *form in described if payload is not None else ():
            if len(form) == 1:
                arrays[name] = arrays[form[0]]
                continue
            (dtype, shape), count = form, 1
            if dtype not in TYPES or min(shape, default=0) < 0:
                raise FrameError(f"message {kind!r}: array {name!r} is {dtype} {shape}")
            for size in shape:
                count *= size
            arrays[name] = np.frombuffer(payload, TYPES[dtype], count, at).reshape(shape)
            nbytes = count * TYPES[dtype].itemsize
            at += nbytes + -nbytes % ALIGN
    except (ValueError, *MALFORMED) as error:
        raise FrameError(f"malformed message: {error}") from error
    if (payload is not None and at != len(payload)) or not isinstance(kind, str) or not isinstance(note, dict):
        raise FrameError(f"malformed message: its arrays take {at} bytes, not the payload's")
    return Message(kind, note, arrays)


def proof(secret: bytes, side: str, nonces: Sequence[bytes]) -> bytes:
    """What `side` ("client" or "server") shows to prove that it knows the secret, without showing it."""
    return hmac.new(secret, side.encode() + b"".join(nonces), hashlib.sha256).digest()
