"""Messages as MessagePack. What does not fit their types is no message; arrays are `[dtype, shape, bytes]`.

Another folder that has messages of its own says so by `add`, where it defines them.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec
import numpy as np
import torch

from mindspeed_rl_plugin.dock.messages import Message, Query

DTYPES = {str(t).removeprefix("torch."): t for t in vars(torch).values() if isinstance(t, torch.dtype)}
TYPES = {np.dtype(t).str: np.dtype(t) for t in (np.uint8, np.int32, np.int64)}

# What garbage inside a well-formed message raises where it is served.
MALFORMED = (KeyError, IndexError, TypeError, AttributeError, OverflowError)


class FrameError(ValueError):
    """What is no message of this protocol, or one above the limits."""


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
    return np.frombuffer(data, TYPES[dtype]).reshape(shape)


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
