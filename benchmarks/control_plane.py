"""What the control plane of an asynchronous job costs: processes that sleep in the place of computing.

    python benchmarks/control_plane.py [--json OUT.json] [--trainers 16] [--engines 16] [--rows 4096] [--seconds 60]

The dock, admission, weights' announcements and an engine's first rank (generators/scheduler.py) are the real ones,
with the stage table of GRPO; model, graders and the transfer of weights are sleeps. Measured is the wall time of their
calls, less what these wait for rows and weights: on trainers of what comes between two sleeps of the main thread, on
engines of what comes between two decode steps. All processes share this machine's cores. See README.md beside this
file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.config.algorithm_flags import AlgorithmConfig
from mindspeed_rl_plugin.dock import ColumnSpec, Dock, VersionBound, make_docks
from mindspeed_rl_plugin.generators.scheduler import Scheduler
from mindspeed_rl_plugin.loop.schedules.admission import Admission
from mindspeed_rl_plugin.ranks import Collectives
from mindspeed_rl_plugin.rows import Completion, Prompt, Ragged, Rows, SampleId, Sampling
from mindspeed_rl_plugin.service.guest_dock import GuestDock
from mindspeed_rl_plugin.service.job_service import JobService
from mindspeed_rl_plugin.stages.prompts import prompt_rows
from mindspeed_rl_plugin.stages.stage import StageSpec, columns_of, states_of
from mindspeed_rl_plugin.stages.table import stage_table
from mindspeed_rl_plugin.tools.plan.virtual import Costs, Decoder, lognormal

MEMBERS, PROMPT, MEAN, LIMIT = 8, 64, 400, 2048  # responses a prompt; tokens
SLEPT = {"logp_old": 0.12, "logp_ref": 0.12, "update": 0.74}  # share of an iteration that a pass computes
BATCHES = 16  # micro-batches of a rank and pass
LIMIT_SHARE = 0.02
WARM_UP = 1  # iterations that are not counted
DEADLINE = 600.0
POLL = 0.2  # seconds of decode steps between two looks, as generators/engine_loop.py
TABLE = stage_table(resolve(AlgorithmConfig(algorithm="grpo")), 1, by_group=False)


class Meter:
    """Seconds of the calls of one process, by name, and of its thread on a processor in all of them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu = 0.0

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Count a block."""
        begin, used = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.cpu += time.thread_time() - used
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def take(self) -> dict[str, float]:
        """What was counted since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken


def filled(spec: StageSpec, rows: Rows, lengths: Sequence[int]) -> Rows:
    """Zeros for each column that a stage writes. lengths: tokens of each row."""

    def column(c: ColumnSpec) -> Any:
        if not c.ragged:
            return torch.zeros((len(rows), *c.trailing), dtype=c.dtype)
        return Ragged.from_rows([torch.zeros((n, *c.trailing), dtype=c.dtype) for n in lengths], c.dtype)

    return Rows(rows.ids, {c.name: column(c) for c in spec.writes})


class Trainer:
    """One rank that trains."""

    def __init__(self, rank: int, args: argparse.Namespace, folder: Path) -> None:
        self.rank, self.args, self.meter = rank, args, Meter()
        store = dist.FileStore(str(folder / "store"), args.trainers)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=args.trainers, timeout=timedelta(seconds=DEADLINE)
        )
        self.ranks = Collectives(DEADLINE)
        self.specs = {spec.name: spec for spec in TABLE}
        division = [(rank, args.trainers)]
        (self.dock,) = make_docks(
            columns_of(TABLE), states_of(TABLE), division, group=dist.group.WORLD, deadline=DEADLINE
        )
        self.service = JobService(self.dock)
        address = self.service.invite(folder / "secret", "", "{}")
        if rank == 0:
            (folder / "address.tmp").write_text(address)
            (folder / "address.tmp").rename(folder / "address")
        self.groups = args.rows // MEMBERS
        self.admission = Admission(self.groups, 1, args.iterations + WARM_UP)
        self.epochs, self.ended = 0, threading.Event()
        self.grading = threading.Thread(target=self.grade, args=(self.dock.for_thread(),), daemon=True)

    def run(self) -> dict[str, Any]:
        """Seconds of each iteration, and of the calls in it."""
        self.grading.start()
        self.publish(0)
        iterations = []
        for epoch in range(self.args.iterations + WARM_UP):
            began = time.perf_counter()
            self.meter.take()
            ids = [SampleId(epoch, g, m) for g in range(self.groups) for m in range(MEMBERS)]
            waited = self.wait(ids)
            self.train(epoch, ids)
            if epoch + 1 < self.args.iterations + WARM_UP:
                self.publish(epoch + 1)
            iterations.append({"seconds": time.perf_counter() - began, "waited": waited, "calls": self.meter.take()})
        self.ended.set()
        self.grading.join()
        self.ranks.barrier("end")
        self.dock.close()
        seconds = sum(each["seconds"] for each in iterations)
        return {"iterations": iterations[WARM_UP:], "on_processor": self.meter.cpu / seconds}

    def publish(self, number: int) -> None:
        time.sleep(0.005 * self.args.seconds)  # the copy to the host
        with self.meter.of("admit and announce"):
            self.admission.publish(number, number)
            while groups := self.admission.next_epoch:
                self.admission.admitted += groups
                prompts = [Prompt((7,) * PROMPT, "a question", "an answer", g) for g in range(groups)]
                self.dock.open(self.epochs, groups, MEMBERS, VersionBound(number))
                self.dock.put(prompt_rows(self.epochs, prompts) if self.rank == 0 else None)
                self.epochs += 1
            self.service.announce(number)

    def wait(self, ids: Sequence[SampleId]) -> float:
        """Until all is graded; the leader asks, as in loop/schedules/apart.py."""
        began = time.perf_counter()
        ids = torch.tensor(ids)
        while self.ranks.broadcast(self.left(ids) if self.rank == 0 else None):
            pass
        return time.perf_counter() - began

    def left(self, ids: torch.Tensor) -> int:
        end, pause = time.monotonic() + 1.0, 0.005
        while (left := self.dock.remaining("reward", ids)) and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return left

    def train(self, epoch: int, ids: Sequence[SampleId]) -> None:
        share = len(ids) // self.args.trainers
        mine = ids[self.rank * share : (self.rank + 1) * share]
        size = max(share // BATCHES, 1)
        batches = [mine[i : i + size] for i in range(0, share, size)]
        for state in (spec.name for spec in TABLE[3:] if spec.leases):
            if state == "select":
                with self.meter.of(state):
                    self.ranks.barrier("log-probs")
            part = SLEPT.get(state, 0.0)
            if state == "measure":
                if self.rank == 0:
                    with self.meter.of(state):
                        self.stage(state, ids)
                continue
            for batch in batches if part else [mine]:
                with self.meter.of(state):
                    self.stage(state, batch)
                time.sleep(part * self.args.seconds / len(batches))
        with self.meter.of("clear"):
            self.ranks.barrier("clear")
            self.dock.clear(epoch)

    def stage(self, state: str, ids: Sequence[SampleId]) -> None:
        lease = self.dock.lease(state, ids=ids, deadline=DEADLINE)
        lengths = lease.rows["tokens"].lengths.tolist() if "tokens" in lease.rows.columns else [1] * len(ids)
        spec = self.specs[state]
        self.dock.commit(lease, filled(spec, lease.rows, lengths) if spec.writes else None)

    def grade(self, dock: Dock) -> None:
        """The thread that grades."""
        while not self.ended.is_set():
            try:
                lease = dock.lease("reward", max_rows=64, deadline=0.5)
            except TimeoutError:
                continue
            if not len(lease):
                self.ended.wait(0.05)
                continue
            time.sleep(0.05)
            dock.commit(lease, filled(self.specs["reward"], lease.rows, [1] * len(lease)))


def engine(number: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One engine apart: its first rank is the real one, its steps are sleeps."""
    while not (folder / "address").exists():
        time.sleep(0.1)
    time.sleep(0.5)
    meter, random, length = Meter(), Random(number), lognormal(MEAN, 0.6, LIMIT)
    dock = GuestDock.join((folder / "address").read_text(), folder / "secret")
    job = SimpleNamespace(sampling=Sampling(LIMIT), seed=0, inflight="keep", strict=False, deadline=DEADLINE)
    scheduler = Scheduler(dock, job, args.slots, 1, None, threading.Event())
    # Half of a response's mean of steps is added by its tail; all slots full, a rollout takes 0.8 of an iteration.
    steps = args.rows / args.engines / args.slots * MEAN
    decoder, tokens = Decoder(Costs(step=0.8 * args.seconds / steps), args.slots, time.monotonic()), {}
    began = time.perf_counter()
    while True:
        with meter.of("next"):
            action = scheduler.next()
        if action.end:
            break
        if action.pull >= 0:
            threading.Timer(0.02 * args.seconds, scheduler.pull_ended, (action.pull,)).start()
        if action.apply >= 0:
            time.sleep(0.005 * args.seconds)
            scheduler.state.applied(action.apply)
        with meter.of("requests"):
            decoder.advance(time.monotonic()) if not len(decoder) else None
            drawn = [(request, length(0, 0, random)) for _, request in action.requests]
            tokens.update({request.id: (request, n, scheduler.state.version) for request, n in drawn})
            decoder.add((request.id, n) for request, n in drawn)
        if not len(decoder):
            continue
        until = min(decoder.next_end, decoder.boundary(decoder.at + POLL))
        time.sleep(max(until - time.monotonic(), 0.0))
        ended = decoder.advance(until)
        with meter.of("done"):
            parts = [tokens.pop(i) for i in ended]
            scheduler.done([completion(request, n, version) for request, n, version in parts], None)
    seconds = time.perf_counter() - began
    calls, idle = meter.take(), {cause: scheduler.counts.get(cause, 0.0) for cause in ("back-pressure", "version")}
    dock.close()
    return {
        "seconds": seconds,
        "calls": calls,
        "idle": idle,
        "on_processor": meter.cpu / seconds,
        "responses": scheduler.counts.get("responses", 0.0),
    }


def completion(request: Any, tokens: int, version: int) -> Completion:
    """A response of so many tokens."""
    return Completion(request.id, (7,) * tokens, (-1.0,) * tokens, "stop", ((0, version),))


def process(kind: str, number: int, args: argparse.Namespace, folder: Path) -> None:
    """One process; its figures go into a file."""
    torch.set_num_threads(1)
    figures = Trainer(number, args, folder).run() if kind == "trainer" else engine(number, args, folder)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    figures["cpu"] = usage.ru_utime + usage.ru_stime
    (folder / f"{kind}-{number}.json").write_text(json.dumps(figures))


def main() -> None:
    """Run all processes, print the shares, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--trainers", type=int, default=16, help="processes that train, default %(default)s")
    parser.add_argument("--engines", type=int, default=16, help="processes that generate, default %(default)s")
    parser.add_argument("--rows", type=int, default=4096, help="responses of a rollout, default %(default)s")
    parser.add_argument("--seconds", type=float, default=60.0, help="of an iteration, default %(default)s")
    parser.add_argument("--iterations", type=int, default=2, help="that are counted, default %(default)s")
    parser.add_argument("--slots", type=int, default=64, help="of an engine, default %(default)s")
    args = parser.parse_args()
    if args.rows % (MEMBERS * args.trainers):
        parser.error(f"--rows {args.rows} must be a multiple of {MEMBERS} x {args.trainers} trainers")
    context, before = multiprocessing.get_context("fork"), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="control-plane-") as directory:
        folder, names = Path(directory), [("trainer", n) for n in range(args.trainers)]
        names += [("engine", n) for n in range(args.engines)]
        processes = [context.Process(target=process, args=(kind, n, args, folder)) for kind, n in names]
        for each in processes:
            each.start()
        limit = time.monotonic() + 4 * args.seconds * (args.iterations + WARM_UP) + 120
        for each in processes:
            each.join(max(limit - time.monotonic(), 1.0))
        late = [each for each in processes if each.exitcode != 0]
        for each in late:
            each.kill()
        if late:
            raise SystemExit(f"{len(late)} of {len(processes)} processes failed or did not end; see above")
        figures = {f"{kind}-{n}": json.loads((folder / f"{kind}-{n}.json").read_text()) for kind, n in names}
    result = summary(figures, args)
    for line in result.pop("lines"):
        print(line)
    print(f"load {before:.1f} before and {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def summary(figures: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Shares of the iteration, and the lines that say them."""
    trainers = [f for name, f in figures.items() if name.startswith("trainer")]
    engines = [f for name, f in figures.items() if name.startswith("engine")]
    iterations = [each for f in trainers for each in f["iterations"]]
    seconds = sum(each["seconds"] for each in iterations) / len(iterations)
    calls: dict[str, list[float]] = {}
    for each in iterations:
        for name, value in each["calls"].items():
            calls.setdefault(name, []).append(value)
    of_trainers = [sum(each["calls"].values()) / each["seconds"] for each in iterations]
    of_engines = [(sum(f["calls"].values()) - sum(f["idle"].values())) / f["seconds"] for f in engines]
    cpu, wall = sum(f["cpu"] for f in figures.values()), max(f["seconds"] for f in engines)
    waited = sum(each["waited"] for each in iterations) / len(iterations)
    result = {
        "seconds": seconds,
        "trainers": {"mean": sum(of_trainers) / len(of_trainers), "most": max(of_trainers)},
        "engines": {"mean": sum(of_engines) / len(of_engines), "most": max(of_engines)},
        "calls": {name: max(values) for name, values in calls.items()},
        "calls_of_engines": {name: max(f["calls"][name] for f in engines) for name in engines[0]["calls"]},
        "idle_of_engines": {name: max(f["idle"][name] for f in engines) for name in engines[0]["idle"]},
        "on_processor": max(f["on_processor"] for f in figures.values()),
        "cpu_ms_a_row": 1e3 * cpu / sum(f["responses"] for f in engines),
    }
    worst = max(result["trainers"]["most"], result["engines"]["most"])
    verdict = "reached" if worst <= LIMIT_SHARE else "NOT reached"
    result["lines"] = [
        f"{args.trainers} trainers and {args.engines} engines that sleep, {args.rows} rows; counted: {args.iterations} "
        f"iterations of {seconds:.1f} s (asked {args.seconds:g}), {waited:.1f} s of it waiting for responses",
        *(f"{who}: share of the control plane {result[who]['mean']:.2%} in the mean, {result[who]['most']:.2%} at most"
          for who in ("trainers", "engines")),
        "most seconds of an iteration: " + ", ".join(f"{n} {v:.3f}" for n, v in result["calls"].items()),
        f"most seconds of an engine in {wall:.0f} s: "
        + ", ".join(f"{n} {v:.2f}" for n, v in {**result["calls_of_engines"], **result["idle_of_engines"]}.items())
        + " (waiting, in next)",
        f"of these calls on a processor, in their own thread: {result['on_processor']:.2%} of the time at most",
        f"all processes together: {cpu:.0f} s of processor time in {wall:.0f} s, {result['cpu_ms_a_row']:.2f} ms a row",
        f"at most {LIMIT_SHARE:.0%} asked: {verdict}",
    ]  # fmt: skip
    return result


if __name__ == "__main__":
    main()
