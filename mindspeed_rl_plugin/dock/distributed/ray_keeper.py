"""The process that keeps Ray for a rank: starts or joins it, owns the machine's warehouse, ends it all with the rank.

Reads one JSON object a line from its standard input and answers each with one. The first says how to start; a closed
input, or a parent that is gone, ends it, and with it every process below it. See `ray_nodes.Keeper` for the other end.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mindspeed_rl_plugin.dock.distributed.ray_nodes import ATTEMPTS, WarehouseActor

LIBC = ctypes.CDLL(None)
SET_PARENT_DEATH_SIGNAL = 1  # prctl
SET_CHILD_SUBREAPER = 36  # prctl: what loses its parent below this process becomes its child
OBJECT_STORE = 80 << 20  # bytes; Ray takes no less than 75 MiB
SWEEP_SECONDS = 20.0


class Ray:
    """Ray as this process sees it. order: address to join ("" to start a head), own: whether to start a node here,
    host: its address, namespace: of the job, directory: for Ray's files."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._order = order
        self._name = ""
        self._actor: Any = None

    def join(self, end: float) -> dict[str, Any]:
        """Become a driver; returns the cluster's address."""
        order = self._order
        common = {"namespace": order["namespace"], "log_to_driver": False, "configure_logging": False}
        if ray.is_initialized():
            return {"address": order["address"]}
        if not order["address"]:
            own = {"num_cpus": 0, "object_store_memory": OBJECT_STORE, "include_dashboard": False}
            private = {"_temp_dir": order["directory"], "_node_ip_address": order["host"] or None}
            ray.init(address="local", **own, **private, **common)
            return {"address": ray.get_runtime_context().gcs_address}
        node, spare = self._start_node() if order["own"] else None, ATTEMPTS
        while True:
            try:
                ray.init(address=order["address"], **common)
                if node is None or self._node_id() is not None:
                    return {"address": order["address"]}
                ray.shutdown()
            except (ConnectionError, RuntimeError) as error:
                if node is None or not spare or time.monotonic() > end:
                    raise ConnectionError(
                        f"cannot join Ray at {order['address']}: {error}; each machine of the job needs a node of that "
                        "cluster (ray start --address=...)"
                    ) from error
            if time.monotonic() > end:
                raise TimeoutError(f"the node of Ray that was started here did not join {order['address']}")
            if node is not None and node.poll() is not None and spare:
                node, spare = self._start_node(), spare - 1
            time.sleep(0.5)

    def place(self, index: int, spec: Mapping[str, Any], end: float) -> dict[str, Any]:
        """Start warehouse `index` on this machine."""
        self.join(end)
        where = self._node_id() or ray.get_runtime_context().get_node_id()
        options = {
            "name": f"warehouse-{index}",
            "num_cpus": 0,
            "max_restarts": -1,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(where, soft=False),
        }
        self._actor = ray.remote(WarehouseActor).options(**options).remote(index, json.dumps(spec))
        return self.where(index, end)

    def where(self, index: int, end: float) -> dict[str, Any]:
        """Address of a warehouse, found by its name; waits while it is started again."""
        self.join(end)
        said = "it was not started"
        while True:
            try:
                actor = ray.get_actor(f"warehouse-{index}")
                return {"address": ray.get(actor.address.remote(), timeout=max(0.1, end - time.monotonic()))}
            except ActorDiedError as error:
                raise ConnectionError(f"Ray gave warehouse {index} up: {error}") from error
            except (RayActorError, GetTimeoutError, ValueError) as error:
                said = str(error).strip() or type(error).__name__
            if time.monotonic() > end:
                raise TimeoutError(f"no answer from warehouse {index} in {self._order['namespace']}: {said}")
            time.sleep(0.2)

    def leave(self) -> None:
        """End the warehouse in a cluster that lives on. Our own is not told: nobody is left to be polite to."""
        if self._actor is not None and not self._order["own"]:
            with contextlib.suppress(RayError):
                ray.kill(self._actor)

    def _start_node(self) -> subprocess.Popen[bytes]:
        order = self._order
        self._name = f"{order['namespace']}-{os.getpid()}"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--address", order["address"]]
        command += ["--num-cpus", "0", "--object-store-memory", str(OBJECT_STORE), "--node-name", self._name]
        command += ["--temp-dir", order["directory"], "--include-log-monitor", "false"]
        if order["host"]:
            command += ["--node-ip-address", order["host"]]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            stderr=sys.stderr,
            preexec_fn=lambda: LIBC.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0),
        )

    def _node_id(self) -> str | None:
        """Of the node that was started here; None where there is none (yet)."""
        named = [n["NodeID"] for n in ray.nodes() if n["Alive"] and self._name and n["NodeName"] == self._name]
        return named[0] if named else None


def answer(keeper: Ray, request: Mapping[str, Any]) -> dict[str, Any]:
    """Serve one request; an error is an answer too."""
    end = time.monotonic() + request["seconds"]
    try:
        for verb in ("join", "place", "where"):
            if verb in request:
                return {"error": "", **getattr(keeper, verb)(**request[verb], end=end)}
        raise ValueError(f"no such request: {sorted(request)}")
    except TimeoutError as error:
        return {"error": str(error), "late": True}
    except (ValueError, OSError, RuntimeError, RayError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def lines(parent: int) -> Iterator[bytes]:
    """Lines of the standard input until it ends or `parent` is gone: a fork of the parent may hold its pipe open."""
    unread = b""
    while os.getppid() == parent:
        if select.select([0], [], [], 1.0)[0]:
            got = os.read(0, 1 << 16)
            if not got:
                return
            *whole, unread = (unread + got).split(b"\n")
            yield from whole


def sweep() -> None:
    """Kill every process below this one, and wait for their end."""
    end = time.monotonic() + SWEEP_SECONDS
    while (below := descendants(os.getpid())) and time.monotonic() < end:
        for pid in below:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # none is left
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def descendants(root: int) -> list[int]:
    """Processes below `root`."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    found, last = set(), {root}
    while last:
        last = {pid for pid, parent in parents.items() if parent in last} - found
        found |= last
    return sorted(found)


def main() -> None:
    parent = os.getppid()
    LIBC.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints belongs to the log
    told = lines(parent)
    order = json.loads(next(told))
    keeper, requests = Ray(order), queue.SimpleQueue()

    def listen() -> None:
        """Not in the main thread: a request may take long, the end of the rank must not wait for it."""
        for line in told:
            requests.put(json.loads(line))
        keeper.leave()
        sweep()
        shutil.rmtree(order["directory"], ignore_errors=True)
        os._exit(0)  # Ray's own way out waits for processes that are gone

    threading.Thread(target=listen, daemon=True).start()
    while True:
        print(json.dumps(answer(keeper, requests.get())), file=said, flush=True)


if __name__ == "__main__":
    main()
