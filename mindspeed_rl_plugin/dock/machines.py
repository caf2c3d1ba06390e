"""Which machine this is, and the address at which the processes of other machines reach it."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence

from mindspeed_rl_plugin.environment import master_address


def machine() -> str:
    """Name of this machine: equal in all processes that can share memory through one /proc. Containers of one machine
    may have different names; processes of one container have the same name."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    spaces = ":".join(str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("pid", "net"))
    return f"{socket.gethostname()} {boot[:8]} {spaces}"


def own_address() -> str:
    """The address from which this machine reaches the job's master; "" without torchrun."""
    host, port = master_address()
    if not host:
        return ""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # chooses the route, sends nothing
        return probe.getsockname()[0]


def reachable_address() -> str:
    """`own_address`, or MASTER_ADDR if other machines cannot use `own_address`."""
    address = ipaddress.ip_address(own_address().partition("%")[0])
    return master_address()[0] if address.is_loopback or address.is_link_local else str(address)


def check_addresses(places: Sequence[tuple[str, str]]) -> None:
    """With several machines, raise ValueError if an address is "" or loopback. places: (machine, address) by rank."""
    if len({name for name, _ in places}) == 1:
        return
    for rank, (name, host) in enumerate(places):
        if not host or ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            raise ValueError(
                f"MASTER_ADDR {master_address()[0]}: the address of {name} (rank {rank}) is {host or 'unknown'}, which"
                " other machines cannot reach; give the network address of the first machine, or correct /etc/hosts"
            )
