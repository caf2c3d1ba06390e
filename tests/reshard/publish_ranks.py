"""Run by test_publish_processes.py under torchrun: real Megatron models that publish while they train.

Argument: JSON {"folder", "cases", "versions"}. For each case a model is trained twice, without publishing and with it:
rank 0 leaves `CASE.json` (the dock's address, the description), and for each version `CASE-V.pt`, the canonical model
that it publishes then; training goes on when the reader has left `CASE-V.ok`.
"""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from pairs_ranks import PairJob, initialize, shape_of, start_weights
from reshard_ranks import same

from mindspeed_rl_plugin.dock import make_docks
from mindspeed_rl_plugin.dock.peers import GroupPeers
from mindspeed_rl_plugin.reshard.offload import gathered
from mindspeed_rl_plugin.reshard.publish import Publisher
from mindspeed_rl_plugin.reshard.shares import TrainerWeights

WAIT = 120  # seconds for the reader


def leave(path: Path, write) -> None:
    """A file that is there whole or not at all."""
    draft = path.with_suffix(".draft")
    write(draft)
    draft.rename(path)


def await_file(path: Path) -> None:
    until = time.monotonic() + WAIT
    while not path.exists():
        assert time.monotonic() < until, f"no {path.name} after {WAIT} s"
        time.sleep(0.02)


def check_case(case, dock, address: str, folder: Path, versions: int) -> None:
    initialize(case)
    rank, gather = dist.get_rank(), GroupPeers(dist.group.WORLD).gather
    like = start_weights(shape_of(case.family))
    plain, job = PairJob(case, like), PairJob(case, like)
    given = (job.shape, job.parallel, rank, job.chunks, getattr(torch, case.engine_dtype), gather, True)
    weights = TrainerWeights.of(*given)
    publisher = Publisher(weights, rank, dock.exchange.offer, gather=gather)
    if rank == 0:
        text = json.dumps(dict(address=address, weights=weights.text()))
        leave(folder / f"{case.name}.json", lambda path: path.write_text(text))
    for version in range(versions):
        publisher.publish(job.chunks, version)
        with gathered(job.chunks):
            canonical = job.canonical(like)
        if rank == 0:
            leave(folder / f"{case.name}-{version}.pt", lambda path, what=canonical: torch.save(what, path))
        await_file(folder / f"{case.name}-{version}.ok")
        plain.train_step(version)
        job.train_step(version)
    assert same(plain.snapshot(), job.snapshot()), "publishing changed training"
    if rank == 0:
        print(f"passed {case.name}", flush=True)
    mpu.destroy_model_parallel()


def main() -> None:
    job = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    folder = Path(job["folder"])
    (dock,) = make_docks([], [], [None], group=dist.group.WORLD, deadline=60)
    address = dock.exchange.invite(folder / "secret", "127.0.0.1")
    defaults = dict(tp=1, pp=1, vpp=1, ep=1, etp=None, distributed=False, overlap=False, grouped=False, tied=False)
    for case in job["cases"]:
        each = SimpleNamespace(**dict(dtype="float32", engine_dtype="float32", **defaults) | case)
        check_case(each, dock, address, folder, job["versions"])
    dist.barrier()
    dock.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
