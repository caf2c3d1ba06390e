"""Invitation of a job to other processes: an address, and a file with its secret. It is read before slow imports."""

from __future__ import annotations

import os
import secrets
import stat

SECRET_BYTES = 32  # as in the dock
PRINTED = "give the one that the job printed at its start"


def write_secret(path: str | os.PathLike[str], secret: bytes) -> None:
    """Write a file that only this user can read. If a job is killed, or stops because a rank is lost or a grader
    failed, the file remains, but nobody can join by it."""
    draft = f"{os.fspath(path)}.{secrets.token_hex(4)}"
    with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(secret.hex())
    os.replace(draft, path)


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """The secret that `write_secret` wrote. Raises FileNotFoundError for a missing file, PermissionError for one that
    others can read or this user cannot, and ValueError for other contents."""
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
        with open(path, "rb") as file:
            text = file.read(4 * SECRET_BYTES).strip()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise FileNotFoundError(
            f"secret file {path}: there is no such file. A job writes it (SAVE/rl/secret) when engines may join, and "
            f"removes it when it ends in order; {PRINTED}, or a copy of it on another machine (chmod 600)"
        ) from error
    except PermissionError as error:
        raise PermissionError(f"secret file {path}: this user may not read it; run as the user of the job") from error
    if mode & 0o077:
        raise PermissionError(f"secret file {path} has mode {mode:o}: others can read it; chmod 600 {path}")
    try:
        secret = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ValueError(
            f"secret file {path} holds no secret: {len(text)} characters, where a job writes {2 * SECRET_BYTES} "
            f"hexadecimal digits; {PRINTED}, or copy that file again"
        )
    return secret


def parse_address(address: str) -> tuple[str, str, int]:
    """Name of a Unix socket of this machine, or else host and port. Raises ValueError for an address that is neither
    "unix:NAME" nor "HOST:PORT"."""
    kind, _, name = address.partition(":")
    if kind == "unix":
        return name, "", 0
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(
            f"address {address!r} of a job is neither HOST:PORT, with a port from 1 to 65535, nor unix:NAME; {PRINTED}"
        )
    return "", host, int(port)
