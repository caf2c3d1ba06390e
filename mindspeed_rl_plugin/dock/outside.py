"""Processes outside of the job that join its dock: what they are told, and how they begin."""

from __future__ import annotations

import os
import secrets

import torch

from mindspeed_rl_plugin.dock.api import ColumnSpec, Declared, StateSpec
from mindspeed_rl_plugin.dock.calls import Calls, Directory
from mindspeed_rl_plugin.dock.messages import Address, Description, Hello, Join
from mindspeed_rl_plugin.dock.rpc import Channel


def describe(declared: Declared, directory: Directory) -> Description:
    """What a process that joins must know."""
    columns = [
        (c.name, str(c.dtype).removeprefix("torch."), c.level, c.ragged, c.trailing, c.longest)
        for c in declared.columns.values()
    ]
    states = [(s.name, s.reads, s.writes, s.whole_groups) for s in declared.states.values()]
    return Description(columns, states, directory.warehouses, directory.controllers)


def join(address: str, secret: bytes, lease_seconds: float, node: str = "") -> tuple[Declared, Calls]:
    """The declarations of a dock, and the calls of a process outside of its job. node: another name for this machine,
    in tests."""
    from mindspeed_rl_plugin.dock.factory import machine

    node = node or machine()
    name = f"outside {os.getpid()} {secrets.token_hex(4)}"
    channel = Channel(_parsed(address, node), secret, node, Hello(name, -1), patience=60.0)
    found: Description = channel.ask(Join())
    channel.close()
    columns = [ColumnSpec(n, getattr(torch, dtype), *rest) for n, dtype, *rest in found.columns]
    states = [StateSpec(*state) for state in found.states]
    directory = Directory(found.warehouses, found.controllers)
    here = [i for i, place in enumerate(directory.warehouses) if place.node == node]
    how = {"name": name, "rank": -1, "node": node, "secret": secret, "lease_seconds": lease_seconds}
    return Declared(columns, states), Calls(directory, warehouse=here[0] if here else None, **how)


def write_secret(path: str | os.PathLike[str], secret: bytes) -> None:
    """A file that only this user can read."""
    draft = f"{os.fspath(path)}.{secrets.token_hex(4)}"
    with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(secret.hex())
    os.replace(draft, path)


def _parsed(address: str, node: str) -> Address:
    """Raises ValueError for what is neither "unix:NAME" nor "HOST:PORT"."""
    kind, _, name = address.partition(":")
    if kind == "unix":
        return Address(node, name)
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"address {address!r} of a dock is neither unix:NAME nor HOST:PORT")
    return Address("", "", host, int(port))
