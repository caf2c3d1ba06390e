"""Who takes part: which machine this is, how its ranks are reached, and how processes outside of the job join."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mindspeed_rl_plugin.dock.api import Declared
from mindspeed_rl_plugin.dock.calls import Calls
from mindspeed_rl_plugin.dock.gate import OUTSIDE
from mindspeed_rl_plugin.dock.messages import Address, Bye, Failed, Join, Message, Stopped
from mindspeed_rl_plugin.dock.rpc import Process, ask, connect, thread
from mindspeed_rl_plugin.dock.server import Server
from mindspeed_rl_plugin.dock.watch import Watch
from mindspeed_rl_plugin.environment import master_address
from mindspeed_rl_plugin.invitation import PRINTED, parse_address, read_secret


def machine() -> str:
    """Name of what shares memory through one /proc: containers of one machine may differ, agents do not."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    spaces = ":".join(str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("pid", "net"))
    return f"{socket.gethostname()} {boot[:8]} {spaces}"


def here(what: str) -> str:
    """This process, for people."""
    return f"{what}, process {os.getpid()} on {socket.gethostname()}"


def own_address() -> str:
    """This machine's address on the job's interface: the one from which it reaches the job's master."""
    host, port = master_address()
    if not host:
        return ""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # chooses the route, sends nothing
        return probe.getsockname()[0]


def reachable_address() -> str:
    """`own_address`, or MASTER_ADDR where that is one that others cannot use."""
    address = ipaddress.ip_address(own_address().partition("%")[0])
    return master_address()[0] if address.is_loopback or address.is_link_local else str(address)


def check_addresses(places: Sequence[tuple[str, str]]) -> None:
    """Raise ValueError where the ranks of several machines, by (machine, own address), cannot reach each other."""
    if len({name for name, _ in places}) == 1:
        return
    named = master_address()[0]
    for rank, (name, host) in enumerate(places):
        if not host:
            raise ValueError(
                f"rank {rank} on {name} has no MASTER_ADDR: the dock of several machines takes the interface of the "
                "job from it; give the network address of the first machine"
            )
        if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            raise ValueError(
                f"MASTER_ADDR {named} resolves to {host} on {name} (rank {rank}), where no other machine reaches it; "
                "give the network address of the first machine, or correct /etc/hosts there"
            )


def join(
    address: str, secret: str | os.PathLike[str] | bytes, lease_seconds: float, node: str = "", who: str = "a process"
) -> tuple[Declared, Calls]:
    """The declarations of a dock, and the calls of a process outside of its job. node: another name for this machine,
    in tests. See `Dock.join`."""
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
