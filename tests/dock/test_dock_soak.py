"""A thousand rollouts through one dock, of responses that grow: nothing else grows, nothing is left."""

import gc
import mmap
import os
import resource

import pytest
import torch

from mindspeed_rl_plugin.dock import ColumnSpec, DistributedDock, Limits, StateSpec
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId

COLUMNS = [
    ColumnSpec("prompt", torch.int32, "group", ragged=True),
    ColumnSpec("tokens", torch.int32, "token", ragged=True),
    ColumnSpec("logp", torch.float32, "token", ragged=True),
    ColumnSpec("reward", torch.float32, "sample", ragged=False),
]
STATES = [
    StateSpec("generate", ("prompt",), ("tokens",)),
    StateSpec("logp", ("tokens",), ("logp",)),
    StateSpec("reward", ("tokens", "prompt"), ("reward",)),
    StateSpec("update", ("tokens", "logp", "reward"), (), whole_groups=True),
]
GROUPS, MEMBERS = 8, 4
SHORT, LONG = 1000, 6000  # tokens of the longest response, in the first rollout and in the last
EPOCHS = 1000
CAPACITY = 5 << 20  # bytes of cells on a machine


def resident() -> int:
    """Bytes of this process in memory that are not shared."""
    with open("/proc/self/statm") as file:
        pages = file.read().split()
    return (int(pages[1]) - int(pages[2])) * resource.getpagesize()


def rollout(docks: list[DistributedDock], epoch: int, generator: torch.Generator) -> None:
    """One epoch by two consumers; every third is carried over half, and cleared with the next."""
    for dock in docks:
        dock.open(epoch, GROUPS, MEMBERS)
    prompts = torch.randint(0, 99, (GROUPS, 50), generator=generator, dtype=torch.int32)
    firsts = tuple(SampleId(epoch, g, 0) for g in range(GROUPS))
    docks[0].put(Rows(firsts, {"prompt": Ragged.from_rows(list(prompts))}))
    for state, column in (("generate", "tokens"), ("logp", "logp"), ("reward", "reward"), ("update", None)):
        leases = [dock.lease(state, deadline=20) for dock in docks]
        for dock, lease in zip(docks, leases, strict=True):
            if column is None:
                rows = None
            elif column == "reward":
                rows = Rows(lease.rows.ids, {column: torch.ones(len(lease))})
            elif column == "tokens":
                longest = SHORT + (LONG - SHORT) * epoch // EPOCHS
                lengths = torch.randint(1, longest, (len(lease),), generator=generator).tolist()
                values = [torch.full((n,), epoch, dtype=torch.int32) for n in lengths]
                rows = Rows(lease.rows.ids, {column: Ragged.from_rows(values)})
            else:
                tokens = lease.rows["tokens"]
                rows = Rows(lease.rows.ids, {column: Ragged(tokens.values.float(), tokens.offsets)})
            dock.commit(lease, rows)
    for dock in docks[::-1]:  # the leader first: two docks of one process share what is open
        dock.clear(epoch, range(0, GROUPS, 2) if epoch % 3 == 0 else None)
    if epoch % 3 == 1:
        for dock in docks[::-1]:
            dock.clear(epoch - 1)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("nodes", [["one"], ["left", "right"]], ids=["one node", "two nodes"])
@pytest.mark.parametrize("capped", [False, True], ids=["", "capped"])
def test_a_thousand_rollouts_leave_memory_flat(members, nodes: list[str], capped: bool) -> None:
    limits = Limits(CAPACITY if capped else None, LONG, segment_bytes=1 << 16)  # most blocks have segments of their own
    made = members(COLUMNS, STATES, nodes, limits=limits)
    nets = [m.connections for m in made] if len(made) == 2 else [made[0].connections] * 2
    docks = [DistributedDock(COLUMNS, STATES, n, consumer=c, consumers=2, leader=c == 1) for c, n in enumerate(nets)]
    generator = torch.Generator().manual_seed(0)
    houses = [m.host.warehouse for m in made]
    seen = []
    for epoch in range(EPOCHS):
        rollout(docks, epoch, generator)
        for house in houses:
            most = CAPACITY * 65 // 64 if capped else 2 * house.arena._most + house.arena.segment_bytes
            assert house.arena.reserved <= most + 2 * mmap.PAGESIZE * (len(house._extents) + len(house.arena._free))
        if epoch in (EPOCHS // 5 - 1, EPOCHS - 1):
            gc.collect()
            assert all(h.used == 0 for h in houses if epoch % 3 != 0)
            seen.append(resident())
    assert seen[1] < seen[0] + (8 << 20), f"memory grew from {seen[0]} to {seen[1]} bytes"
    for house in houses:
        assert house._journal.nbytes < 16 << 20
        files = len(list(house.arena.directory.glob("segment-*")))
        assert files <= most // house.arena.segment_bytes + 2
    for member in made:
        for controller in member.host.controllers.values():
            assert len(controller._epochs) <= 1 and not controller._leases and not controller._joined
    assert all(len(net.shapes) <= 1 and len(net._homes) <= 1 for net in nets)
    for member in made:
        member.connections.close()
    assert not any(os.path.exists(h.arena.directory) for h in houses)
