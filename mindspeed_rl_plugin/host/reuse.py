"""MindSpeed's `reuse_data_ptr` on a host: a storage points into another one, without owning it.

No operator of torch does this: `Tensor.set_` changes the storage of a tensor, but not that of its views. So a function
of a few lines is compiled (this takes seconds), and stored in torch's folder of extensions.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
from pathlib import Path

import torch
from torch import Tensor

_SOURCE = """
#include <c10/core/StorageImpl.h>
extern "C" void point_into(c10::StorageImpl* alias, c10::StorageImpl* source, int64_t bytes) {
  alias->set_data_ptr_noswap(c10::DataPtr(static_cast<char*>(source->mutable_data()) + bytes, alias->device()));
}
"""
_LIMIT = 120  # seconds that the compiler may take


def reuse_data_ptr(alias: Tensor, source: Tensor, offset: int) -> None:
    """Let alias's storage begin `offset` elements (of alias's dtype) after the start of source's storage.

    Raises ValueError if alias would end after source, as the operator does.
    """
    size = alias.element_size()
    have = source.numel() * source.element_size()
    if offset < 0 or (offset + alias.numel()) * size > have:
        raise ValueError(
            f"reuse_data_ptr: {alias.numel()} elements of {size} bytes from element {offset} on exceed {have} bytes"
        )
    _point_into()(alias.untyped_storage()._cdata, source.untyped_storage()._cdata, offset * size)


@functools.cache
def _point_into() -> ctypes._CFuncPtr:
    function = ctypes.CDLL(str(_library())).point_into
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), None
    return function


def _library() -> Path:
    """The compiled function for this torch. If several processes compile it at the same time, the last file is kept."""
    from torch.utils import cpp_extension  # slow to import, and rarely needed

    digest = hashlib.blake2b(f"{torch.__version__} {_SOURCE}".encode(), digest_size=8).hexdigest()
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    library = folder / f"mindspeed_rl_plugin_{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        _compile(made)
        made.replace(library)
    return library


def _compile(made: Path) -> None:
    from torch.utils import cpp_extension

    flags = [*(f"-I{path}" for path in cpp_extension.include_paths()), f"-L{cpp_extension.TORCH_LIB_PATH}", "-lc10"]
    command = [cpp_extension.get_cxx_compiler(), "-shared", "-fPIC", "-O1", "-std=c++20", "-x", "c++", "-", *flags]
    try:
        done = subprocess.run([*command, "-o", made], input=_SOURCE, capture_output=True, text=True, timeout=_LIMIT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"--reuse-fp32-param on a host needs a C++ compiler (variable CXX): {error}") from error
    if done.returncode:
        raise RuntimeError(f"--reuse-fp32-param on a host: {' '.join(command)} fails: {done.stderr[-2000:]}")
