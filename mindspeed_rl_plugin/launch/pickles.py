"""Reading a file of torch.save without running what it names: tensors and plain values only, memory-mapped.

A Megatron checkpoint also pickles Megatron's own classes (enums among its arguments, states of random generators).
Exporting needs none of them, and Megatron need not be installed: every name outside a short list becomes an inert
object.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

_ALLOWED = {
    ("argparse", "Namespace"),
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch", "Size"),
    ("__builtin__", "set"),  # Megatron's arguments hold some, as protocol 2 names them
}


class Inert:
    """Stands for an object whose class is not read. It takes any arguments, state and items, and keeps none."""

    def __new__(cls, *args: Any, **named: Any) -> Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **named: Any) -> None:
        pass

    def __call__(self, *args: Any, **named: Any) -> Inert:
        return self

    __setstate__ = __setitem__ = append = extend = __call__  # what else a pickle may do to an object


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        return Inert


_MODULE = SimpleNamespace(Unpickler=_Unpickler, __name__=__name__)


def load(path: Path) -> dict[str, Any]:
    """What torch.save wrote, its tensors mapped from the file. Raises ValueError when it is no such file."""
    try:
        content = torch.load(str(path), map_location="cpu", pickle_module=_MODULE, weights_only=False, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{path} is no file of torch.save, or is cut short: {error}") from error
    if not isinstance(content, dict | OrderedDict):
        raise ValueError(f"{path} holds a {type(content).__name__}; a Megatron checkpoint holds a dict")
    return content
