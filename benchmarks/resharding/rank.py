"""One rank of benchmarks/reshard.py: real weights, real messages between processes, no Megatron and no vLLM.

The parameters are those that the layout tables say both sides store. Arms run in turn; each measured pass follows one
that is not counted. Every arm must leave the engine with the same bytes. Rank 0 writes the rows. In the arm `publish`
each rank is a trainer, and a process that pulls from all of them through their dock.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from naive import naive  # noqa: E402

from mindspeed_rl_plugin.device import get_device  # noqa: E402
from mindspeed_rl_plugin.dock import make_docks  # noqa: E402
from mindspeed_rl_plugin.dock.peers import GroupPeers  # noqa: E402
from mindspeed_rl_plugin.layout.layout import (
    ModelShape,
    canonical_tensors,
    engine_layout,
    megatron_layout,
)
from mindspeed_rl_plugin.layout.transfer_plan import make_plan  # noqa: E402
from mindspeed_rl_plugin.service.guest_dock import GuestDock  # noqa: E402
from mindspeed_rl_plugin.service.job_service import JobService  # noqa: E402
from mindspeed_rl_plugin.tools.layout_args import engine_layout_of, train_layout  # noqa: E402
from mindspeed_rl_plugin.tools.plan.flow import FlowCells  # noqa: E402
from mindspeed_rl_plugin.weights.allgather import allgather, make_allgather_plan  # noqa: E402
from mindspeed_rl_plugin.weights.host_memory import HostMemoryBudget  # noqa: E402
from mindspeed_rl_plugin.weights.machine_staging import Shared  # noqa: E402
from mindspeed_rl_plugin.weights.offload import TrainState  # noqa: E402
from mindspeed_rl_plugin.weights.p2p import P2PChannel  # noqa: E402
from mindspeed_rl_plugin.weights.publish import Publisher, TrainerWeights  # noqa: E402
from mindspeed_rl_plugin.weights.published_memory import publish_memory, sources_of  # noqa: E402
from mindspeed_rl_plugin.weights.pull import Puller  # noqa: E402
from mindspeed_rl_plugin.weights.transfer import stream  # noqa: E402

DTYPE = torch.bfloat16
DEADLINE = 600.0
ARMS = {"naive": naive, "allgather": allgather, "stream": stream, "publish": None}


class Weights(torch.nn.Module):
    """Parameters under names that a module could not give them."""

    def __init__(self, shapes, fill) -> None:
        super().__init__()
        self.named = {name: torch.nn.Parameter(fill(shape), requires_grad=False) for name, shape in shapes.items()}

    def named_parameters(self, *args, **named):
        return iter(self.named.items())

    def parameters(self, recurse=True):
        return iter(self.named.values())

    def tensors(self):
        return {name: p.data for name, p in self.named.items()}


class Rank:
    """Both sides of a reshard on this rank, and its plans."""

    def __init__(self, model: dict, train: str, generate: str, bucket_bytes: int) -> None:
        self.rank, world = dist.get_rank(), dist.get_world_size()
        parallel = train_layout(train, world)
        shape = ModelShape.from_hf_config(model, -(-model["vocab_size"] // parallel.tp) * parallel.tp)
        engine, _ = engine_layout_of(generate, world)
        ranks, self.tensors = range(world), canonical_tensors(shape)
        sources = {r: megatron_layout(shape, parallel, r) for r in ranks}
        wanted = {r: engine_layout(shape, engine, r % engine.ranks) for r in ranks}
        self.source = Weights(sources[self.rank].shapes, lambda size: torch.empty(size, dtype=DTYPE).fill_(0.5))
        self._number(sources[self.rank])
        self.engine = {name: torch.zeros(size, dtype=DTYPE) for name, size in wanted[self.rank].shapes.items()}
        plan = dict(itemsize=DTYPE.itemsize, rank=self.rank, bucket_bytes=bucket_bytes)
        self.stream = make_plan(sources, wanted, self.tensors, **plan)
        self.shards = make_allgather_plan(sources, wanted, self.tensors, **plan)
        cells = FlowCells(sources, wanted, self.tensors, itemsize=DTYPE.itemsize, node_size=world)
        self.least = cells.flow().received
        self.everything = cells.flow(everything=True).received
        self.temporary = get_device().temporary()
        self.state = TrainState([self.source], budget=HostMemoryBudget.of_machine(world, DEADLINE))
        self._pair(shape, parallel, engine)

    def _number(self, layout) -> None:
        """Values that depend on the place in the canonical model only, so that a wrong copy shows."""
        for name, segments in layout.items():
            for s in segments:
                inside = s.view(self.source.named[name].data, s.start, s.size)
                across = torch.arange(s.start, s.stop).remainder(251).to(DTYPE)
                salt = sum(map(ord, s.name)) % 97
                inside.copy_((across + salt).view([-1 if a == s.axis else 1 for a in range(inside.dim())]))

    def _pair(self, shape, parallel, engine) -> None:
        """What publishes this rank's weights, and what pulls into its engine."""
        self.version, peers = 0, GroupPeers(dist.group.WORLD)
        (self.dock,) = make_docks([], [], [None], group=dist.group.WORLD, deadline=DEADLINE)
        with tempfile.TemporaryDirectory() as folder:
            secret = peers.share(f"{folder}/secret")
            self.outside = GuestDock.join(JobService(self.dock).invite(secret), secret)
            dist.barrier()
        weights = TrainerWeights.of(shape, parallel, self.rank, [self.source], DTYPE, peers.gather)
        self.publisher = Publisher(weights, self.rank, partial(publish_memory, self.dock), gather=peers.gather)
        self.puller = Puller(
            weights,
            engine,
            self.engine,
            sources_of(self.outside),
            rank=self.rank % engine.ranks,
            ranks=range(engine.ranks),
            deadline=DEADLINE,
            sharing=partial(Shared, self.outside.calls.me),
        )

    def publish(self) -> dict[str, float]:
        """Weights through host memory, without any collective but the check of the weights."""
        for tensor in self.engine.values():
            tensor.zero_()
        dist.barrier()
        published = self.publisher.publish([self.source], self.version)
        dist.barrier()
        pulled = self.puller.pull(self.version)
        dist.barrier()
        applied = self.puller.apply(self.engine)
        self.version += 1
        seconds = dict(publish=published.seconds, pull=pulled.seconds, apply=applied.seconds)
        measured = {f"{name}_seconds": value for name, value in seconds.items()}
        return measured | dict(seconds=sum(seconds.values()), received_bytes=pulled.nbytes)

    def run(self, mode: str) -> dict[str, float]:
        """One reshard with the offload of the training weights around it."""
        for tensor in self.engine.values():
            tensor.zero_()
        channel = P2PChannel(self.rank, deadline=DEADLINE)
        source, options = self.source.tensors(), dict(channel=channel, dtype=DTYPE, device=torch.device("cpu"))
        dist.barrier()
        begin = time.perf_counter()
        with self.temporary.measured(*source.values(), *self.engine.values()):
            plan = self.stream if mode == "stream" else self.shards
            ARMS[mode](plan, source, self.engine, **options)
        transferred = time.perf_counter() - begin
        dist.barrier()
        done = time.perf_counter() - begin
        held = sum(t.nbytes for t in source.values()), sum(t.nbytes for t in self.engine.values())
        measured = {
            "seconds": done,
            "own_seconds": transferred,
            "received_bytes": channel.received,
            "temporary_bytes": self.temporary.peak,
            "peak_bytes": sum(held) + self.temporary.peak,
            "generate_bytes": held[1] + (held[0] if mode == "naive" else 0),
        }
        if mode != "naive":
            begin = time.perf_counter()
            self.state.offload(["params"])
            measured["offload_seconds"] = time.perf_counter() - begin
            begin = time.perf_counter()
            self.state.onload()
            measured["onload_seconds"] = time.perf_counter() - begin
        return measured

    def fingerprint(self) -> int:
        """A sum over the engine's bytes."""
        sums = (int(t.view(torch.int16).sum(dtype=torch.int64)) for t in self.engine.values())
        return sum(value * (i + 1) for i, value in enumerate(sums))


SUMS = ("received_bytes",)


def measure(job: dict, rank: Rank) -> list[dict]:
    """Rows of all arms: the slowest or fullest rank, medians over the repeats."""
    runs: dict[str, list[dict]] = {mode: [] for mode in ARMS}
    prints = set()
    for repeat in range(1 + job["repeats"]):
        for mode in ARMS:
            measured = rank.publish() if mode == "publish" else rank.run(mode)
            prints.add(rank.fingerprint())
            everyone: list = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, measured)
            if repeat:
                worst = {k: max(each[k] for each in everyone) for k in measured}
                worst |= {f"{k}_all_ranks": sum(each[k] for each in everyone) for k in SUMS}
                runs[mode].append(worst)
    assert len(prints) == 1, "the arms gave the engine different weights"
    rows = []
    for mode, passes in runs.items():
        for metric in passes[0]:
            value = statistics.median(each[metric] for each in passes)
            rows.append({"arm": mode, "metric": metric, "value": value, "unit": "s" if "seconds" in metric else "B"})
    ratios = [s["seconds"] / a["seconds"] for s, a in zip(runs["stream"], runs["allgather"], strict=True)]
    rows.append({"arm": "stream/allgather", "metric": "seconds", "value": statistics.median(ratios), "unit": "ratio"})
    least, whole = int(rank.least.sum()), int(rank.everything.sum())
    rows.append({"arm": "analytic", "metric": "least_bytes_all_ranks", "value": least, "unit": "B"})
    rows.append({"arm": "analytic", "metric": "allgather_bytes_all_ranks", "value": whole, "unit": "B"})
    model = sum(t.slices * t.slice_bytes(DTYPE.itemsize) for t in rank.tensors.values())
    rows.append({"arm": "analytic", "metric": "model_bytes", "value": model, "unit": "B"})
    return rows


def main() -> None:
    job = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    rank = Rank(job["model"], job["train"], job["generate"], job["bucket_mb"] << 20)
    rows = measure(job, rank)
    if dist.get_rank() == 0:
        Path(job["out"]).write_text(json.dumps([{**row, "case": job["case"]} for row in rows]))
    dist.barrier()
    rank.puller.close()
    rank.outside.close()
    dist.barrier()
    rank.dock.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
