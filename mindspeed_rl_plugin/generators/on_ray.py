"""Engines that Ray places: `generate --join` as tasks of a cluster; a failed task is started again.

    python -m mindspeed_rl_plugin.generators.on_ray --engines 2 --ranks 1 --device cuda --check
    python -m mindspeed_rl_plugin.generators.on_ray --engines 2 --ranks 1 --device cuda --join HOST:PORT --secret-file F

It runs in a separate process, since Ray takes over signals and threads of its driver. The first trainer starts this
process. When the trainer ends, this process ends, and with it Ray's tasks and their engines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.environment import environment_apart
from mindspeed_rl_plugin.generators.join import LEFT
from mindspeed_rl_plugin.processes import scratch
from mindspeed_rl_plugin.service.invitation import read_secret

RESOURCES = {"cpu": "CPU", "cuda": "GPU", "npu": "NPU"}  # kind of device -> name of Ray's resource
PAUSE = 1.0  # seconds before the first restart of an engine; doubled at each further failure in a row
MAX_FAILURES = 5  # in a row, after which the engine is not started again
GOOD_SECONDS = 600.0  # of work, after which earlier failures of an engine no longer count
SAY_SECONDS = 60.0  # between two lines about engines that wait for resources
ENGINE_LOOK_SECONDS = 1.0  # between two checks whether an engine has its resources
CLUSTER_SECONDS = 10.0  # for a connection to the cluster's address
FORWARDED = ("PYTHONPATH", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS")  # from the job's environment
PR_SET_PDEATHSIG = 1


async def keep(cluster: OnRay, number: int, say: Callable[[str], None], waiting: set[int]) -> bool:
    """Run an engine, and start it again each time it ends before the job. Returns True once the job has ended, False
    after MAX_FAILURES failures in a row.

    say: prints a line; waiting: contains `number` while the engine waits for resources.
    """
    clock, failures = asyncio.get_running_loop().time, 0
    while True:
        task = cluster.start()
        waiting.add(number)
        while not cluster.placed(task):
            await asyncio.sleep(ENGINE_LOOK_SECONDS)
        waiting.remove(number)
        begun = clock()
        status, words = await cluster.result(task)
        if status == 0 and LEFT not in words:  # the job has ended
            return True
        failures = 1 if clock() - begun > GOOD_SECONDS else failures + 1
        what = f"engine {number} on Ray ended with {status}: {words or 'no message'}"
        if failures >= MAX_FAILURES:
            say(f"{what}; not started again after {MAX_FAILURES} failures in a row")
            return False
        pause = PAUSE * 2 ** (failures - 1)
        say(f"{what}; started again in {pause:g} s")
        await asyncio.sleep(pause)


async def keep_all(cluster: OnRay, count: int, say: Callable[[str], None]) -> int:
    """Run all engines until the job ends. Returns the exit status: 1 as soon as an engine has failed too often."""
    waiting: set[int] = set()
    told = asyncio.ensure_future(tell(cluster, say, waiting))
    for ended in asyncio.as_completed([keep(cluster, number, say, waiting) for number in range(count)]):
        if not await ended:
            return 1
    told.cancel()
    return 0


async def tell(cluster: OnRay, say: Callable[[str], None], waiting: set[int]) -> None:
    """Every SAY_SECONDS print one line: which engines wait for resources."""
    while True:
        await asyncio.sleep(SAY_SECONDS)
        if waiting:
            say(f"no place on Ray yet for engine {', '.join(map(str, sorted(waiting)))}: {cluster.free()}")


def command(ranks: int, join: str, secret_file: str) -> list[str]:
    """The command of one engine."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    engine = ["-m", "mindspeed_rl_plugin", "generate", "--join", join, "--secret-file", secret_file]
    return [sys.executable, *launcher, *engine]


def end_with_parent() -> None:
    """Let the kernel send SIGTERM to this process when its parent ends for any reason."""
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def work(ranks: int, join: str, secret: bytes, environment: Mapping[str, str]) -> tuple[int, str]:
    """Run one engine on this machine to its end, in a worker of Ray. Returns its exit status and last message."""
    with scratch("rl-engine") as folder:
        secret_file = Path(folder) / "secret"  # mode 600, without which `read_secret` would refuse it
        with os.fdopen(os.open(secret_file, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            file.write(secret.hex())
        with subprocess.Popen(
            command(ranks, join, str(secret_file)),
            env={**environment_apart(), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=end_with_parent,  # Ray ends a worker by a signal
        ) as engine:
            last = ""
            for line in engine.stdout:
                print(line, end="", flush=True)  # Ray forwards it to the log of the job
                last = line.strip() if line.startswith(("[rl]", "Traceback")) or "Error" in line else last
            return engine.wait(), last


def connect(ray: Any, options: argparse.Namespace) -> None:
    """Connect to the cluster. Raises SystemExit if no cluster runs, or if it has too few resources."""
    address = os.environ.get("RAY_ADDRESS", "auto")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdecimal():  # tried here first, since Ray itself would try for minutes
            socket.create_connection((host, int(port)), CLUSTER_SECONDS).close()
        ray.init(address=address, log_to_driver=True, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        where = os.environ.get("RAY_ADDRESS", "this machine")
        sys.exit(
            f"--rl-generators ray:{options.engines}: no Ray cluster answers at {where} ({str(error).splitlines()[0]}); "
            "start one with `ray start --head` here and `ray start --address HOST:6379` on the others, or set "
            "RAY_ADDRESS"
        )
    kind = RESOURCES[options.device]
    nodes = [node["Resources"].get(kind, 0.0) for node in ray.nodes() if node["Alive"]]
    fit = sum(int(has // options.ranks) for has in nodes)
    if fit < options.engines:
        sys.exit(
            f"--rl-generators ray:{options.engines},tp={options.ranks} needs {options.engines} times {options.ranks} "
            f"{kind} of one node each; the nodes of this cluster have {', '.join(f'{has:g}' for has in nodes)}, enough "
            f"for {fit} engines; ask for fewer engines, or add nodes"
        )


class OnRay:
    """The cluster that this process is connected to. Each task has its own placement group, whose state tells whether
    Ray has resources for the task. environment: variables of the job that engines get."""

    def __init__(self, ray: Any, options: argparse.Namespace, environment: Mapping[str, str]) -> None:
        self._ray, self._kind, self._ranks = ray, RESOURCES[options.device], options.ranks
        needs = {"CPU": {"num_cpus": self._ranks}, "GPU": {"num_cpus": 0, "num_gpus": self._ranks}}
        needs["NPU"] = {"num_cpus": 0, "resources": {"NPU": self._ranks}}
        runtime = {"env_vars": dict(environment)}
        self._work = ray.remote(**needs[self._kind], max_retries=0, runtime_env=runtime)(work)
        self._given = self._ranks, options.join, read_secret(options.secret_file), environment
        self._places: dict[Any, Any] = {}

    def start(self) -> Any:
        """Submit the task of an engine; it runs as soon as there are resources for it."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = self._ray.util.placement_group([{self._kind: self._ranks}])  # of one node
        task = self._work.options(scheduling_strategy=PlacementGroupSchedulingStrategy(place)).remote(*self._given)
        self._places[task] = place
        return task

    def placed(self, task: Any) -> bool:
        """Whether the task runs or has ended."""
        place = self._ray.util.placement_group_table(self._places[task])
        return place.get("state") == "CREATED" or bool(self._ray.wait([task], timeout=0)[0])

    async def result(self, task: Any) -> tuple[int, str]:
        """Exit status and last message of an engine, once it has ended."""
        try:
            return await asyncio.wrap_future(task.future())
        except self._ray.exceptions.RayError as error:
            return -1, str(error).strip().splitlines()[0]
        finally:
            self._ray.util.remove_placement_group(self._places.pop(task))

    def free(self) -> str:
        """A text with the resources that an engine needs, and those that are free in the cluster."""
        free, whole = self._ray.available_resources(), self._ray.cluster_resources()  # 0 of a resource is left out
        return (
            f"each needs {self._ranks} {self._kind} of one node, and {free.get(self._kind, 0):g} of the cluster's "
            f"{whole.get(self._kind, 0):g} are free; end the programs that use the others, or add nodes"
        )


def main(argv: Sequence[str]) -> int:
    """Check the cluster, or run engines until the job ends. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mindspeed_rl_plugin.generators.on_ray")
    parser.add_argument("--engines", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks of an engine")
    parser.add_argument("--device", choices=RESOURCES, required=True)
    parser.add_argument("--join", metavar="HOST:PORT")
    parser.add_argument("--secret-file")
    parser.add_argument("--check", action="store_true", help="only check whether the cluster has the resources")
    options = parser.parse_args(argv)
    end_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    import ray

    connect(ray, options)
    if options.check:
        return 0
    cluster = OnRay(ray, options, {name: os.environ[name] for name in FORWARDED if name in os.environ})
    try:
        return asyncio.run(keep_all(cluster, options.engines, lambda line: print(f"[rl] {line}", flush=True)))
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
