"""One rank of the SharedDock tests: `python shared_dock_worker.py CASE`, ranks as torchrun sets them."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from mindspeed_rl_plugin.dock import ColumnSpec, LocalDock, StateSpec, make_dock
from mindspeed_rl_plugin.types import Ragged, Rows, SampleId

COLUMNS = [
    ColumnSpec("prompt", torch.int32, "group", ragged=True),
    ColumnSpec("tokens", torch.int32, "token", ragged=True),
    ColumnSpec("reward", torch.float32, "sample", ragged=False),
]
STATES = [
    StateSpec("generate", ("prompt",), ("tokens",)),
    StateSpec("reward", ("tokens",), ("reward",)),
    StateSpec("update", ("tokens", "reward"), (), whole_groups=True),
]
GROUPS, MEMBERS = 5, 2
ALL = [SampleId(0, g, m) for g in range(GROUPS) for m in range(MEMBERS)]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def prompts(groups: int = GROUPS) -> Rows:
    rows = [torch.arange(3000 + g, dtype=torch.int32) for g in range(groups)]  # more than one frame
    return Rows(tuple(SampleId(0, g, 0) for g in range(groups)), {"prompt": Ragged.from_rows(rows)})


def respond(rows: Rows) -> Rows:
    pairs = zip(rows.ids, rows["prompt"].rows(), strict=True)
    tokens = [torch.cat([p[:3], torch.tensor([i.group, i.member])]) for i, p in pairs]
    return Rows(rows.ids, {"tokens": Ragged.from_rows(tokens, dtype=torch.int32)})


def score(rows: Rows) -> Rows:
    return Rows(rows.ids, {"reward": torch.tensor([float(t.sum()) for t in rows["tokens"].rows()])})


def reference() -> LocalDock:
    dock = LocalDock(COLUMNS, STATES)
    dock.open(0, GROUPS, MEMBERS)
    dock.put(prompts())
    for state, work in (("generate", respond), ("reward", score)):
        lease = dock.lease(state, deadline=0)
        dock.commit(lease, work(lease.rows))
    return dock


def shared(deadline: float, consumers: int) -> object:
    group, consumer = dist.group.WORLD, RANK * consumers // WORLD
    return make_dock(COLUMNS, STATES, group=group, consumer=consumer, consumers=consumers, deadline=deadline)


def loop() -> None:
    consumers = WORLD // 2 if WORLD > 2 else 2
    writer = RANK * consumers // WORLD != (RANK - 1) * consumers // WORLD  # the first rank of each consumer
    dock = shared(20, consumers)
    dock.open(0, GROUPS, MEMBERS)
    dock.put(prompts() if RANK == WORLD - 1 else None)
    lease = dock.lease("generate", deadline=5)
    dock.commit(lease, respond(lease.rows) if writer else None)
    assert dock.remaining("generate") == 0
    for limit in (3, None):
        lease = dock.lease("reward", max_rows=limit, deadline=5)
        assert limit is None or len(lease) == limit
        dock.commit(lease, score(lease.rows) if writer else None)
    assert len(dock.lease("reward", deadline=0)) == 0
    released = dock.lease("update", deadline=5)
    dock.release(released)
    mine = ALL[:4] if lease_of(RANK, consumers) == 0 else ALL[4:6]
    lease = dock.lease("update", ids=mine, deadline=5)
    assert list(lease.rows.ids) == mine and dock.remaining("update") == 10
    dock.commit(lease)
    snapshot = dock.snapshot()
    assert bool(snapshot) == (RANK == 0)
    dock.clear(0, [0])
    dock.restore(snapshot)
    assert dock.remaining("update") == (4 if consumers > 1 else 6)
    got, want = dock.read(ALL[RANK:], ["tokens", "reward"]), reference().read(ALL[RANK:], ["tokens", "reward"])
    assert got.ids == want.ids and torch.equal(got["reward"], want["reward"])
    assert torch.equal(got["tokens"].values, want["tokens"].values)
    assert torch.equal(got["tokens"].offsets, want["tokens"].offsets)
    assert len(dock.read([], ["tokens"])) == 0
    timings = []
    for _ in range(20):
        begin = time.perf_counter()
        dock.remaining("update")
        timings.append(time.perf_counter() - begin)
    print(f"loop ok, a call takes {sorted(timings)[10] * 1e3:.2f} ms")


def lease_of(rank: int, consumers: int) -> int:
    return rank * consumers // WORLD


def expect(kind: type[Exception], text: str, call, *args, **kwargs) -> None:
    try:
        call(*args, **kwargs)
    except kind as error:
        assert text in str(error), f"{text!r} not in {error}"
        return
    raise AssertionError(f"no {kind.__name__} with {text!r}")


def errors() -> None:
    dock = shared(20, 2)
    dock.open(0, GROUPS, MEMBERS)
    expect(ValueError, "'nope'", dock.put, Rows((ALL[0],), {"nope": torch.ones(1)}) if RANK else None)
    expect(TimeoutError, "column 'prompt' (written by a producer's put)", dock.lease, "generate", deadline=0.1)
    expect(ValueError, "all ranks make the same calls", dock.open if RANK else dock.clear, 3, *([1, 1] if RANK else []))
    dock.put(prompts() if RANK else None)
    lease = dock.lease("generate", max_rows=2, deadline=1)
    expect(ValueError, "must write column 'tokens'", dock.commit, lease, respond(lease.rows) if RANK else None)
    dock.commit(lease, None if RANK else respond(lease.rows))
    expect(ValueError, "already acknowledged", dock.lease, "generate", ids=ALL[:1] if RANK else ALL[4:5], deadline=1)
    # the failed call released what it had leased for the other consumer
    lease = dock.lease("generate", ids=[] if RANK else ALL[4:5], deadline=1)
    assert len(lease) == 1 - RANK
    print("errors ok")


def absent() -> None:
    dock = shared(1.0, 1)
    dock.open(0, GROUPS, MEMBERS)
    if RANK == 2:
        time.sleep(6)
        os._exit(0)
    begin = time.monotonic()
    try:
        dock.lease("generate", deadline=30)
    except (TimeoutError, ConnectionError) as error:
        assert isinstance(error, TimeoutError) == (RANK == 0)
        assert time.monotonic() - begin < 4
        print(error)
    sys.stdout.flush()
    os._exit(0)


def dead() -> None:
    dock = shared(30, 1)
    dock.open(0, GROUPS, MEMBERS)
    if RANK == 1:
        os._exit(3)
    begin = time.monotonic()
    try:
        dock.remaining("generate")
    except ConnectionError as error:
        assert time.monotonic() - begin < 10
        print(error)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    {"loop": loop, "errors": errors, "absent": absent, "dead": dead}[sys.argv[1]]()
    dist.barrier()
    dist.destroy_process_group()
