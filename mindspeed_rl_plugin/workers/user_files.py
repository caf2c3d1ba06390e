"""Imports a user's files as submodules of this module: `NAME.f_HEX`. HEX is the file's path in hexadecimal.

So every process that has this package finds objects that a user's code pickles by reference. Processes that this code
starts (`multiprocessing` with spawn) import this module because of the name, and so the file through `UserFileFinder`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

__path__: list[str] = []  # makes this module a package for the import system


class UserFileFinder:
    """A finder for `sys.meta_path`."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of a user's file by its module's name; None for other modules."""
        package, _, file = name.rpartition(".f_")
        if package != __name__:
            return None
        return importlib.util.spec_from_file_location(name, bytes.fromhex(file).decode())


def load_function(file: str, function: str) -> Callable[..., Any]:
    """A function or class of a user's file. The file is executed as a module that can import files of its folder.

    Raises ValueError if the file has no such function or class. Errors of the file itself are not caught.
    """
    if str(Path(file).parent) not in sys.path:
        sys.path.insert(0, str(Path(file).parent))
    name = f"{__name__}.f_{file.encode().hex()}"
    __import__(name)  # not `import_module`, which would add a frame to errors of the file
    module = sys.modules[name]
    member = getattr(module, function, None)
    if member is not None and not callable(member):
        raise ValueError(
            f"{function!r} of {file} is {member!r:.40} of type {type(member).__name__}, no function or class"
        )
    if member is None:
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__]
        raise ValueError(f"{file} has no {function!r}; it has {', '.join(n for n in own if n[0] != '_') or 'nothing'}")
    return member


sys.meta_path.append(UserFileFinder)
