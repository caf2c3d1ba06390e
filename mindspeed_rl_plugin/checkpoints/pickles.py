"""Reads only tensors and plain values from a file of torch.save, and runs no code that the file names.

A Megatron checkpoint also has objects of Megatron's own classes (enums among its arguments, states of random
generators). No caller needs these, and Megatron need not be installed: an inert object replaces each object whose
class is not in a short list.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch

_ALLOWED = {
    ("argparse", "Namespace"),
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch", "Size"),
    ("__builtin__", "set"),  # in Megatron's arguments; pickle's protocol 2 writes this name
}
_METADATA = "torch.distributed.checkpoint.metadata"
_INDEX_CLASSES = {
    *((_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata")),
    *((_METADATA, name) for name in ("TensorProperties", "MetadataIndex")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}


class Inert:
    """Replaces an object of a class that is not allowed. It accepts and ignores any arguments, state and items."""

    def __new__(cls, *args: Any, **named: Any) -> Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **named: Any) -> None:
        pass

    def __call__(self, *args: Any, **named: Any) -> Inert:
        return self

    __setstate__ = __setitem__ = append = extend = __call__  # other calls that a pickle may make


class IndexRecord:
    """Replaces a record in the index of torch's distributed checkpoints; it has the fields that were pickled."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        return IndexRecord if (module, name) in _INDEX_CLASSES else Inert


_MODULE = SimpleNamespace(Unpickler=_Unpickler, __name__=__name__)
_DAMAGED = (RuntimeError, pickle.UnpicklingError, EOFError)


def load(path: Path) -> dict[str, Any]:
    """Load a file of torch.save, with tensors mapped from the file. Raises ValueError for other files."""
    content = load_content(str(path), path, mmap=True)
    if not isinstance(content, dict | OrderedDict):
        raise ValueError(f"{path} holds a {type(content).__name__}; a Megatron checkpoint holds a dict")
    return content


def load_content(source: str | IO[bytes], path: Path, mmap: bool = False) -> Any:
    """Load what torch.save wrote. source: the path of the file, or a stream with a part of the file `path`; mmap: map
    tensors from the file. Raises ValueError for other contents."""
    try:
        return torch.load(source, map_location="cpu", pickle_module=_MODULE, weights_only=False, mmap=mmap)
    except _DAMAGED as error:
        raise ValueError(f"{path} is no file of torch.save, or is cut short: {error}") from error


def load_index(path: Path) -> IndexRecord:
    """The index of a distributed checkpoint: the Metadata of torch.distributed.checkpoint, made of `IndexRecord`s.
    Raises ValueError for other contents."""
    try:
        with open(path, "rb") as file:
            index = _Unpickler(file).load()
    except _DAMAGED as error:
        raise ValueError(f"{path} is no index of a distributed checkpoint, or is cut short: {error}") from error
    if not isinstance(index, IndexRecord) or not hasattr(index, "storage_data"):
        raise ValueError(f"{path} is no index of a distributed checkpoint, but a {type(index).__name__}")
    return index
