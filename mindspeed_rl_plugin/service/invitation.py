"""Invitation of a job to other processes: an address, and a file with its secret. Imports nothing that is slow."""

from __future__ import annotations

import os
import secrets
import stat

SECRET_BYTES = 32  # as in `dock.factory`
PRINTED = "that the job printed at its start"


def write_secret(path: str | os.PathLike[str], secret: bytes) -> None:
    """Write a file that only this user can read. If a job is killed, or stops because a rank is lost or a grader
    failed, the file remains, but nobody can join with it."""
    draft = f"{os.fspath(path)}.{secrets.token_hex(4)}"
    with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(secret.hex())
    os.replace(draft, path)


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """The secret that `write_secret` wrote. Raises FileNotFoundError for a missing file, PermissionError if others can
    read the file or this user cannot, and ValueError if its content is not a secret."""
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
        with open(path, "rb") as file:
            text = file.read(4 * SECRET_BYTES).strip()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise FileNotFoundError(
            f"secret file {path}: there is no such file. A job writes it (SAVE/rl/secret) if engines may join, and "
            f"removes it when the job ends in order; give the file {PRINTED}, or a copy on this machine (chmod 600)"
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
            f"secret file {path} holds no secret: it has {len(text)} characters, but a secret is {2 * SECRET_BYTES} "
            f"hexadecimal digits; give the file {PRINTED}, or copy that file again"
        )
    return secret


def parse_address(address: str) -> tuple[str, str, int]:
    """Name of a Unix socket of this machine ("" for HOST:PORT), host and port. Raises ValueError for an
    address that is neither "unix:NAME" nor "HOST:PORT"."""
    kind, _, name = address.partition(":")
    if kind == "unix":
        return name, "", 0
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(
            f"address {address!r} of a job is neither HOST:PORT (port 1 to 65535) nor unix:NAME; give the one {PRINTED}"
        )
    return "", host, int(port)
