"""The address at which processes of other machines reach this machine."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from mindspeed_rl_plugin.environment import master_address


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
