"""Disk space of a run: checked at the start, estimated for a checkpoint, and named in the error if a disk is full."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from typing import Any

MIN_FREE_BYTES = 16 << 20  # bytes; a disk with less free space counts as full
_OPTIMIZER_BYTES = 12  # bytes per parameter: its fp32 copy and Adam's two moments


def places(args: Any) -> dict[str, str]:
    """Flag -> directory, for each of --save, --rl-run-dir and --rl-dump-dir that is given."""
    names = {"--save": "save", "--rl-run-dir": "rl_run_dir", "--rl-dump-dir": "rl_dump_dir"}
    return {flag: path for flag, name in names.items() if (path := getattr(args, name, None))}


def free_bytes(directory: str) -> int:
    """Free bytes on the disk of a directory, which need not exist yet."""
    return shutil.disk_usage(_existing(directory)).free


def writable(directory: str) -> bool:
    """Whether this process may write in a directory, which need not exist yet."""
    return os.access(_existing(directory), os.W_OK)


def problems(args: Any, config: Any) -> Iterator[str]:
    """One message for each directory that is not writable, or whose disk is full."""
    for flag, directory in places(args).items():
        if not writable(directory):
            yield f"{flag} {directory} is not writable: change its permissions, or give another directory"
        elif (free := free_bytes(directory)) < MIN_FREE_BYTES:
            yield f"{flag} {directory}: {free} bytes free; delete files, or give a directory on another disk"


def checkpoint_bytes(args: Any, parameters: int, itemsize: int) -> int:
    """Bytes of a checkpoint, by a rough estimate. parameters: number that it holds; itemsize: bytes of one."""
    copies = 1 + (getattr(args, "enable_mg2hf_convert", False) and not getattr(args, "hf_save_dir", None))
    optimizer = 0 if getattr(args, "no_save_optim", False) else _OPTIMIZER_BYTES
    return parameters * (copies * itemsize + optimizer)


def small_disk(args: Any, parameters: int) -> str | None:
    """A warning if the next checkpoint may not fit, by a rough estimate. parameters: as in `checkpoint_bytes`."""
    if not getattr(args, "save", None):
        return None
    need, free = checkpoint_bytes(args, parameters, args.params_dtype.itemsize), free_bytes(args.save)
    if free >= need:
        return None
    return (
        f"warning: --save {args.save} has {free / 1e9:.1f} GB free, and a checkpoint of {parameters / 1e6:.1f} M "
        f"parameters takes about {need / 1e9:.1f} GB"
    )


def full_disk(error: Exception, args: Any) -> str | None:
    """The message for an error that a full disk may have caused; None if no disk is full.

    torch reports a failed write as a RuntimeError, which names neither the disk nor the reason.
    """
    if not isinstance(error, OSError | RuntimeError) or not places(args):
        return None
    directory = min(places(args).values(), key=free_bytes)
    free = free_bytes(directory)
    certain = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if not certain and free >= MIN_FREE_BYTES:
        return None
    return f"cannot write to {directory}: {free} bytes free ({type(error).__name__}: {error})"


def _existing(directory: str) -> str:
    directory = os.path.abspath(directory)
    while not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    return directory
