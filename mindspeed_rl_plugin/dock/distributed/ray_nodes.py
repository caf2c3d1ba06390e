"""Warehouses that Ray places: one actor a machine, named and restarted by Ray. No cell goes through Ray.

No rank becomes a part of Ray: the lowest rank of a machine starts a *keeper* (`ray_keeper.py`), a process that starts
or joins Ray and owns the machine's actor. All that the keeper started ends when the rank lets go of its pipe, so also
when the rank is killed; an actor ends with its keeper. The memory belongs to the rank, and a restarted actor adopts it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import math
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl_plugin.dock.api import ColumnSpec
from mindspeed_rl_plugin.dock.distributed.arena import Arena
from mindspeed_rl_plugin.dock.distributed.channel import Channel
from mindspeed_rl_plugin.dock.distributed.frames import Message
from mindspeed_rl_plugin.dock.distributed.hosting import Host
from mindspeed_rl_plugin.dock.distributed.memory import PrivateDirectory, machine
from mindspeed_rl_plugin.dock.distributed.service import Address, Directory, Service
from mindspeed_rl_plugin.dock.distributed.succession import load
from mindspeed_rl_plugin.dock.distributed.warehouse import Warehouse
from mindspeed_rl_plugin.environment import child_environment, ray_address

ROOT = Path(__file__).resolve().parents[3]  # of the package, where the actors import it from
SOCKET_ROOM = 18  # letters; Ray's Unix sockets lie deep below the temporary directory and must stay below 107
ATTEMPTS = 3  # to start Ray: it gives a busy machine 30 s, whatever is asked for
START_SECONDS = 300.0  # until Ray runs and the warehouse answers
MARGIN = 10.0  # seconds that a rank waits longer than its keeper, whose error knows more
LOCK_SECONDS = 30.0
RETRY_SECONDS = 0.5


class RayNodes:
    """What one rank has of Ray. exchange: all-gather over the job; leads: whether this rank is its machine's lowest;
    node, host: name and address of the machine; patience: seconds to find a warehouse that was restarted.

    Collective. RAY_ADDRESS of rank 0 names a cluster to join; without it rank 0 starts one and the other machines join.
    Raises ValueError, on every rank, for what a machine lacks: Ray itself, its node of the cluster, the same user.
    """

    def __init__(
        self,
        exchange: Callable[[Any], list[Any]],
        *,
        rank: int,
        leads: bool,
        secret: bytes,
        node: str,
        host: str,
        patience: float,
    ) -> None:
        self._exchange, self._node, self._patience = exchange, node, patience
        self._keeper: Keeper | None = None
        self._places: dict[int, Address] = {}
        lacking = importlib.util.find_spec("ray") is None
        known = exchange({"address": ray_address(), "error": MISSING if lacking else ""})
        self._agree(known)
        given = known[0]["address"]
        if given.startswith("ray://"):
            raise ValueError(f"RAY_ADDRESS={given}: the dock needs a node on each machine; give host:port")
        derive = {what: hashlib.sha256(what.encode() + secret).hexdigest() for what in ("namespace", "token")}
        self._order = {
            "address": given,
            "namespace": f"mindspeed-rl-dock-{derive['namespace'][:16]}",
            "host": "" if given else host,
            "own": not given,
        }
        self._environment = {} if given else {**OWN_CLUSTER, "RAY_AUTH_TOKEN": derive["token"]}
        self._leads = leads
        found = {"error": "", "address": given}
        if rank == 0 and not given:
            found = self._try(self._start)
        self._order["address"] = self._agree(exchange(found))[0]["address"]

    def place(self, specs: Mapping[int, dict[str, Any]]) -> dict[int, Address]:
        """Have the warehouse of this machine started (specs: its number -> `warehouse_spec`, {} on a rank that does
        not lead); where the warehouses of all machines answer."""

        def start() -> dict[str, Any]:
            if self._keeper is None and (joined := self._start())["error"]:
                return joined
            index, spec = next(iter(specs.items()))
            request = {"place": {"index": index, "spec": spec}, "seconds": START_SECONDS}
            return {"index": index, **self._keeper.ask(request, f"warehouse {index} of {self._node}")}

        found = self._agree(self._exchange(self._try(start) if self._leads else {"error": ""}))
        self._places = {value["index"]: Address(**value["address"]) for value in found if "index" in value}
        return dict(self._places)

    def resolve(self, index: int) -> Address:
        """Where a warehouse answers now; waits while Ray starts it again. Raises TimeoutError past the patience and
        ConnectionError when Ray has given it up."""
        request = {"where": {"index": index}, "seconds": self._patience}
        what = f"the address of warehouse {index}"
        if self._keeper is not None:
            answer = self._keeper.ask(request, what)
        elif self._places[index].node == self._node:
            return self._places[index]  # its Unix socket keeps the path
        else:
            keeper = Keeper({**self._order, "own": False}, self._environment)
            try:
                answer = keeper.ask(request, what)
            finally:
                keeper.close()
        if answer["error"]:
            raise (TimeoutError if answer.get("late") else ConnectionError)(answer["error"])
        return Address(**answer["address"])

    def close(self) -> None:
        """End the warehouse, and Ray where it was started here. Idempotent."""
        if self._keeper is not None:
            self._keeper.close()

    def _start(self) -> dict[str, Any]:
        for attempt in range(ATTEMPTS):
            self._keeper = Keeper(self._order, self._environment)
            try:
                return self._keeper.ask({"join": {}, "seconds": START_SECONDS}, f"Ray on {self._node}")
            except ConnectionError:
                if attempt == ATTEMPTS - 1:
                    raise
                self._keeper.close()
        raise AssertionError  # the last attempt returns or raises

    def _try(self, step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return step()
        except (ValueError, OSError) as error:  # told to all ranks, which would wait for this one
            return {"error": str(error)}

    def _agree(self, values: list[dict[str, Any]]) -> list[dict[str, Any]]:
        errors = list(dict.fromkeys(value["error"] for value in values if value["error"]))
        if errors:
            self.close()
            raise ValueError("; ".join(errors))
        return values


MISSING = "--rl-dock ray needs Ray on every machine: pip install ray, or take --rl-dock shm"
# Of a cluster of our own: peers show a token; Ray kills no warehouse because the training fills the memory.
OWN_CLUSTER = {
    "RAY_AUTH_MODE": "token",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ADDRESS": "",
}


class Keeper:
    """A rank's end of its keeper. order: what the process is told first; environment: added to this process's."""

    def __init__(self, order: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        place = tempfile.gettempdir()
        self._directory = PrivateDirectory(place if len(place) <= SOCKET_ROOM else "/tmp")
        self._log = Path(self._directory.path) / "keeper.log"
        self._lock, self._unread = threading.Lock(), b""
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mindspeed_rl_plugin.dock.distributed.ray_keeper"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,  # a driver's workers search its directory for modules
                env=child_environment(environment),
                start_new_session=True,
            )
        self._tell({**order, "directory": self._directory.path})

    def ask(self, request: Mapping[str, Any], what: str) -> dict[str, Any]:
        """One request and its answer; what: waited for, for the error. Raises TimeoutError, ConnectionError."""
        with self._lock:
            self._tell(request)
            line = self._line(time.monotonic() + request["seconds"] + MARGIN)
        if line is None:
            raise TimeoutError(f"waited {request['seconds'] + MARGIN:g} s for {what}; Ray says: {self._tail()}")
        if not line:
            raise ConnectionError(f"the keeper of Ray ended before {what} came; Ray says: {self._tail()}")
        return json.loads(line)

    def close(self) -> None:
        """End the keeper and what it started. Idempotent."""
        if not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # it has ended already
                self._process.stdin.close()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
        self._directory.close()

    def _tell(self, value: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the answer that does not come says more
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()

    def _line(self, end: float) -> bytes | None:
        """A line; empty: the keeper has ended; None: too late."""
        handle, poll = self._process.stdout.fileno(), select.poll()  # `select.select` takes no descriptor from 1024 on
        poll.register(handle, select.POLLIN)
        while b"\n" not in self._unread:
            if not poll.poll(math.ceil(max(0.0, end - time.monotonic()) * 1000)):
                return None
            got = os.read(handle, 1 << 16)
            if not got:
                return b""
            self._unread += got
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:].strip() or "nothing"


def warehouse_spec(
    columns: Sequence[ColumnSpec],
    *,
    directory: str,
    node: str,
    host: str,
    secret: bytes,
    controllers: Mapping[str, Address],
    hosts: Sequence[Address],
    **limits: Any,
) -> dict[str, Any]:
    """What an actor must know, as JSON. directory: of the machine's lowest rank; limits: as `Warehouse` takes them,
    and segment_bytes."""
    return {
        "columns": [{**asdict(c), "dtype": str(c.dtype).removeprefix("torch.")} for c in columns],
        "directory": directory,
        "node": node,
        "host": host,
        "secret": secret.hex(),
        "controllers": {state: asdict(address) for state, address in controllers.items()},
        "hosts": [asdict(address) for address in hosts],
        "machine": machine(),
        "user": os.getuid(),
        "limits": limits,
    }


class WarehouseActor:
    """A warehouse in a process of Ray's. Ray calls this again, with the same arguments, when the process has died."""

    def __init__(self, index: int, text: str) -> None:
        spec = json.loads(text)
        _check_place(spec)
        self._lock = _locked(Path(spec["directory"]) / "lock")
        limits = dict(spec["limits"])
        columns = [
            ColumnSpec(**{**c, "dtype": getattr(torch, c["dtype"]), "trailing": tuple(c["trailing"])})
            for c in spec["columns"]
        ]
        house = Warehouse(
            index,
            {c.name: c for c in columns},
            Arena(spec["directory"], limits.pop("segment_bytes")),
            **limits,
        )
        secret, controllers = bytes.fromhex(spec["secret"]), spec["controllers"]
        hosts = [Address(**a) for a in spec["hosts"]]
        directory = Directory(controllers={state: Address(**a) for state, a in controllers.items()}, hosts=hosts)
        load(directory, spec["directory"])
        self._host = Host(f"warehouse {index}", spec["node"], secret, directory, warehouse=house)
        path = Path(spec["directory"]) / "warehouse.sock"
        path.unlink(missing_ok=True)  # a predecessor's
        where = {"node": spec["node"], "unix": str(path), "host": spec["host"]}
        self._service = Service(self._host, secret, **where, on_end=self._host.end)
        self._host.refused = self._service.refused
        self._address = self._service.start()
        if house.incarnation > 1:
            self._announce(house, secret)

    def address(self) -> dict[str, Any]:
        """Where it answers."""
        return asdict(self._address)

    def pid(self) -> int:
        """Of its process."""
        return os.getpid()

    def _announce(self, house: Warehouse, secret: bytes) -> None:
        """Tell the controllers, and who may take one over, where to find this one and what number it has come to."""
        message = Message("moved", {"warehouse": house.index, "address": asdict(self._address), "seq": house.seq})

        def tell(target: Address) -> None:
            while True:
                try:
                    channel = Channel(target, secret, self._host.node, f"{self._host.name}.moved", START_SECONDS)
                    channel.ask(message)
                    return channel.close()
                except OSError:
                    time.sleep(RETRY_SECONDS)  # as long as the job lives: its end is the end of this process

        for target in {*self._host.directory.controllers.values(), *self._host.directory.hosts}:
            threading.Thread(target=tell, args=(target,), daemon=True).start()


def _check_place(spec: Mapping[str, Any]) -> None:
    if os.getuid() != spec["user"]:
        raise ValueError(
            f"Ray runs as user {os.getuid()}, the ranks as {spec['user']}: they share no memory; start Ray as them"
        )
    if machine() != spec["machine"]:
        raise ValueError(
            f"Ray's node is {machine()}, the ranks are on {spec['machine']}: they share no /dev/shm; start Ray "
            "beside them"
        )


def _locked(path: Path) -> int:
    """Hold the directory's lock while this process lives: Ray may start an actor again before the old one is gone."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError as error:
            if time.monotonic() >= end:
                raise TimeoutError(f"another warehouse holds {path} for {LOCK_SECONDS:g} s") from error
            time.sleep(0.1)
