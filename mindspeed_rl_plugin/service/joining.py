"""How processes outside of the job join it, and how those of its launcher end with it."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mindspeed_rl_plugin.dock.api import Declared
from mindspeed_rl_plugin.dock.calls import Calls
from mindspeed_rl_plugin.dock.core import OUTSIDE
from mindspeed_rl_plugin.dock.machines import machine
from mindspeed_rl_plugin.dock.messages import Address, Bye, Failed, Join, Message, Stopped
from mindspeed_rl_plugin.dock.rpc import Process, ask, connect, thread
from mindspeed_rl_plugin.dock.server import Server
from mindspeed_rl_plugin.dock.watch import Watch
from mindspeed_rl_plugin.service.invitation import PRINTED, parse_address, read_secret


def here(what: str) -> str:
    """This process, for people."""
    return f"{what}, process {os.getpid()} on {socket.gethostname()}"


def join(
    address: str, secret: str | os.PathLike[str] | bytes, lease_seconds: float, node: str = "", who: str = "a process"
) -> tuple[Declared, Calls]:
    """The declarations of a dock, and the calls of a process outside of its job. node: another name for this machine,
    in tests. See `GuestDock.join`."""
    name = f"{OUTSIDE} {who} {secrets.token_hex(4)}"
    me = Process(name, -1, node or machine(), secret if isinstance(secret, bytes) else read_secret(secret))
    unix, host, port = parse_address(address)
    place = Address(me.node, unix) if unix else Address("", "", host, port)
    try:
        stream = connect(place, me)
    except PermissionError as error:
        given = "" if isinstance(secret, bytes) else f", not the one in {os.fspath(secret)}"
        raise PermissionError(f"{error}{given}; {PRINTED}, and the secret file that is printed with it") from error
    except ConnectionError as error:
        raise ConnectionError(f"{error}; {PRINTED}, while it runs: each start has another address") from error
    directory, _ = ask(stream, place, Join())
    stream.close()
    if isinstance(directory, Failed):
        raise directory.raised()
    here = [i for i, place in enumerate(directory.warehouses) if place.node == me.node]
    calls = Calls(directory, me, warehouse=here[0] if here else None, lease_seconds=lease_seconds)
    return Declared(directory.columns, directory.states), calls


@contextmanager
def linked(
    address: str, secret: bytes, rank: int, heartbeat: float, end: Callable[[int], object] = os._exit
) -> Iterator[None]:
    """Meanwhile this process, which is outside of the dock and a rank of the job's launcher, ends when another rank is
    gone, and the others when this one is. rank: behind those of the dock; heartbeat, end: as of `Watch`."""
    _, calls = join(address, secret, lease_seconds=heartbeat)
    server = Server(None, calls.me._replace(name=f"rank {rank}", rank=rank), Watch(rank, heartbeat, end))
    server.link(calls.directory.ranks[0])
    thread(server.tick)
    last: Message = Bye()
    try:
        yield
    except Exception:
        last = Stopped(rank, "ended by an error", server.me.node)
        raise
    finally:
        server.close(last)
