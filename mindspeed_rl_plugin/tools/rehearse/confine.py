"""Runs a command that may only write in some folders: `python confine.py FOLDER... -- COMMAND...`.

Linux's Landlock (5.13 and later, no privileges needed) refuses to this process and its children every change of
files outside the folders; Linux 6.7 and later refuses TCP too, 6.12 and later also signals to all other processes.
Not restricted are changes of modes, owners and times of files, Unix sockets, and before 6.2 truncate(2). Constants:
linux/landlock.h. Standard library only: capture.py runs this file by `python -IS`.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same number on every architecture
_RULESET_VERSION, _PATH_BENEATH, _NO_NEW_PRIVS = 1, 1, 38
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # also creating and removing files of any kind
_TCP, _SIGNALS = 0b11, 0b10
_DEVICE_FILES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty")


def version() -> int:
    """Landlock's version in this kernel; 0: the kernel has no Landlock."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _RULESET_VERSION))


def confine(folders: list[str]) -> None:
    """Let this process and its later children change only _DEVICE_FILES and files in `folders`. Raises OSError."""
    known = version()
    changes = _CHANGES | (_REFER if known >= 2 else 0) | (_TRUNCATE if known >= 3 else 0)
    rules = [changes] + [_TCP] * (known >= 4) + [_SIGNALS] * (known >= 6)  # files, network, scope
    attributes = struct.pack(f"{len(rules)}Q", *rules)
    ruleset = _call("syscall", _CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    for path in (*folders, *filter(os.path.exists, _DEVICE_FILES)):
        allowed = changes if os.path.isdir(path) else changes & (_WRITE_FILE | _TRUNCATE)
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _call("syscall", _ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", allowed, opened), 0)
        os.close(opened)
    _call("prctl", _NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    _call("syscall", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _call(function: str, *arguments: object) -> int:
    result = getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result


if __name__ == "__main__":
    split = sys.argv.index("--")
    confine(sys.argv[1:split])
    os.execvp(sys.argv[split + 1], sys.argv[split + 1 :])
