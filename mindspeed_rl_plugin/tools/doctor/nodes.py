"""The machines of one call of `doctor`: how ranks start on each of them, and how their results come together."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from torch.distributed import Store, TCPStore

from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.dock.machines import reachable_address
from mindspeed_rl_plugin.environment import environment_apart
from mindspeed_rl_plugin.tools.doctor.result import FAIL, Check, Result, merge, table
from mindspeed_rl_plugin.tools.rehearse.capture import torchrun

_at_once = "start doctor on all machines at once; look at the output of this one"
ANSWERS = Check("machine", "results of all machines", fix=_at_once, explains="machine links trainer")
JOIN_SECONDS = 60.0  # from the start of the first machine to that of the last one
GONE_SECONDS = 30.0  # a machine that does not count for so long is gone


@dataclass(frozen=True)
class Nodes:
    """The machines of this call; `doctor` runs once on each of them."""

    ranks: int  # on each machine
    count: int = 1  # number of machines
    index: int = 0  # of this machine
    address: str = "localhost"  # of the first machine
    port: int = 0  # a free port of the first machine; one machine alone needs none
    store: Store | None = None  # which all machines reach; one machine alone has none
    own: str = "localhost"  # address of this machine

    @classmethod
    def of_torchrun(cls) -> Nodes | None:
        """The machines on which torchrun has started this command, or this machine alone; None in ranks that torchrun
        started beside the first one of a machine. Afterwards this process counts as no rank."""
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK")
        given = {name: int(os.environ.get(name, 0)) for name in names}
        if not (ranks := given["LOCAL_WORLD_SIZE"]):  # other launchers may set WORLD_SIZE
            device = get_device()
            if not (count := 2 if device.is_cpu else device.api.device_count()):
                raise ValueError(
                    f"no {device.kind} device is visible: look at MINDSPEED_RL_DEVICE and *_VISIBLE_DEVICES"
                )
            return cls(count)
        if given["LOCAL_RANK"]:
            return None
        address, limit, index = os.environ["MASTER_ADDR"], timedelta(seconds=JOIN_SECONDS), given["GROUP_RANK"]
        connect = partial(TCPStore, address, int(os.environ["MASTER_PORT"]), is_master=False, timeout=limit)
        store, own = connect(), reachable_address()
        threading.Thread(target=_count, args=(connect(), index), daemon=True).start()
        if index == 0:  # MASTER_ADDR may lead to MASTER_PORT alone
            with socket.create_server(("", 0)) as listener:
                store.set("doctor/address", json.dumps([own, listener.getsockname()[1]]))
        for name in os.environ.keys() - environment_apart().keys():
            del os.environ[name]
        address, port = json.loads(store.get("doctor/address"))
        return cls(ranks, given["WORLD_SIZE"] // ranks, index, address, port, store, own)

    def torchrun(self, *arguments: str) -> list[str]:
        """The command line that starts this machine's ranks with these arguments."""
        first = [f"--node-rank={self.index}", f"--master-addr={self.address}", f"--master-port={self.port}"]
        where = [f"--nnodes={self.count}", *first] if self.count > 1 else ["--standalone"]
        return [sys.executable, *torchrun(self.ranks, *arguments, where=where)]

    def gather(self, mine: Sequence[Result]) -> tuple[list[Result], set[str]]:
        """The results of all machines and their private names, on the first one; on others their own. A failure that
        names no rank names its machine, if it is not equal on all machines. Raises ConnectionError, with the results of
        this machine, if the first one is gone."""
        user = (os.environ.get("USER", ""), os.environ.get("LOGNAME", ""), Path(os.environ.get("HOME", "")).name)
        hosts = {socket.gethostname(), socket.getfqdn()}
        short = {name for host in hosts if not (name := host.partition(".")[0]).isdigit()}
        names = {*hosts, *short, *user, self.own} - {"", "root", "localhost"}
        if self.count == 1:
            return list(mine), names
        told = {"names": [*names], "results": [asdict(r) for r in mine]}
        self.store.set(f"doctor/{self.index}", json.dumps(told))
        if self.index:
            with contextlib.suppress(RuntimeError):  # the store is gone with the first machine
                if self._comes("doctor/done", 0):
                    return list(mine), names
            own = table(mine)
            raise ConnectionError(f"the first machine is gone, and with it all results but those of this one:\n{own}")
        came = [index for index in range(self.count) if self._comes(f"doctor/{index}", index)]
        every = {i: json.loads(self.store.get(f"doctor/{i}")) for i in came}
        rows = [(i, Result.of(row)) for i, told in every.items() for row in told["results"]]
        lost = sorted({*range(self.count)} - {*came})
        rows.append((0, ANSWERS.result(not lost, f"machines without results: {lost or 'none'}")))
        self.store.set("doctor/done", "")
        equal = Counter((r.part, r.check, r.where, r.figure) for _, r in rows if r.verdict == FAIL and not r.ranks)
        merged = merge(
            replace(r, where=f"{r.where}, machine {i}".removeprefix(", "))
            if r.verdict == FAIL
            and r.check != ANSWERS.name
            and 0 < equal[r.part, r.check, r.where, r.figure] < self.count
            else r
            for i, r in rows
        )
        return merged, names.union(*(told["names"] for told in every.values()))

    def _comes(self, key: str, index: int) -> bool:
        """Wait for a key of the store. Returns False if the machine that sets it is gone."""
        counted, since = -1, 0.0
        while not self.store.check([key]):
            if (now := self.store.add(f"doctor/count {index}", 0)) != counted:
                counted, since = now, time.monotonic()
            elif time.monotonic() > since + GONE_SECONDS:
                return False
            time.sleep(0.2)
        return True


def _count(store: Store, index: int) -> None:
    """Count in the store, so that other machines know that this one goes on."""
    with contextlib.suppress(RuntimeError):  # the store has ended
        while store.add(f"doctor/count {index}", 1):
            time.sleep(1)
