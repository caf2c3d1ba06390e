"""Processes outside of the job that join its dock: the secret that they must know, and how they begin."""

from __future__ import annotations

import os
import secrets
import stat

from mindspeed_rl_plugin.dock.addresses import machine
from mindspeed_rl_plugin.dock.api import Declared
from mindspeed_rl_plugin.dock.calls import Calls
from mindspeed_rl_plugin.dock.messages import Address, Hello, Join
from mindspeed_rl_plugin.dock.rpc import Channel


def join(
    address: str, secret_file: str | os.PathLike[str], lease_seconds: float, node: str = ""
) -> tuple[Declared, Calls]:
    """The declarations of a dock, and the calls of a process outside of its job. node: another name for this machine,
    in tests. See `Dock.join`."""
    node, secret = node or machine(), read_secret(secret_file)
    name = f"outside {os.getpid()} {secrets.token_hex(4)}"
    channel = Channel(_parsed(address, node), secret, node, Hello(name, -1), patience=60.0)
    directory = channel.ask(Join())
    channel.close()
    here = [i for i, place in enumerate(directory.warehouses) if place.node == node]
    how = {"name": name, "rank": -1, "node": node, "secret": secret, "lease_seconds": lease_seconds}
    return Declared(directory.columns, directory.states), Calls(directory, warehouse=here[0] if here else None, **how)


def write_secret(path: str | os.PathLike[str], secret: bytes) -> None:
    """A file that only this user can read."""
    draft = f"{os.fspath(path)}.{secrets.token_hex(4)}"
    with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(secret.hex())
    os.replace(draft, path)


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """What `write_secret` wrote. Raises PermissionError for a file that others can read."""
    mode = os.stat(path).st_mode
    if stat.S_IMODE(mode) & 0o077:
        raise PermissionError(f"{path} has mode {stat.filemode(mode)}: others can read it; chmod 600")
    with open(path, encoding="ascii") as file:
        return bytes.fromhex(file.read())


def _parsed(address: str, node: str) -> Address:
    """Raises ValueError for what is neither "unix:NAME" nor "HOST:PORT"."""
    kind, _, name = address.partition(":")
    if kind == "unix":
        return Address(node, name)
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"address {address!r} of a dock is neither unix:NAME nor HOST:PORT")
    return Address("", "", host, int(port))
