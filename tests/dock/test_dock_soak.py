"""A thousand rollouts through one dock: nothing grows, nothing is left."""

import gc
import os
import resource

import pytest
import torch

from mindspeed_rl_plugin.dock import ColumnSpec, DistributedDock, StateSpec
from mindspeed_rl_plugin.types import Ragged, Rows, SampleId

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
                lengths = torch.randint(1, 4000, (len(lease),), generator=generator).tolist()
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
def test_a_thousand_rollouts_leave_memory_flat(members, nodes: list[str]) -> None:
    made = members(COLUMNS, STATES, nodes)
    nets = [m.connections for m in made] if len(made) == 2 else [made[0].connections] * 2
    docks = [DistributedDock(COLUMNS, STATES, n, consumer=c, consumers=2, leader=c == 1) for c, n in enumerate(nets)]
    generator = torch.Generator().manual_seed(0)
    houses = [m.host.warehouse for m in made]
    seen = {}
    for epoch in range(1000):
        rollout(docks, epoch, generator)
        if epoch in (199, 999):
            gc.collect()
            assert all(h.used == 0 for h in houses if epoch % 3 != 0)
            shared = sum(h.arena.reserved for h in houses)
            journal = sum(h._journal.nbytes for h in houses)
            files = sum(len(os.listdir(h.arena.directory)) for h in houses)
            seen[epoch] = (resident(), shared, journal, files)
    (before, shared, _, files), after = seen[199], seen[999]
    assert after[0] < before + (8 << 20), f"memory grew from {before} to {after[0]} bytes"
    assert after[1] <= shared + (64 << 20) and after[3] <= files + 1 and after[2] < 16 << 20
    for member in made:
        for controller in member.host.controllers.values():
            assert len(controller._epochs) <= 1 and not controller._leases and not controller._joined
    assert all(len(net.shapes) <= 1 and len(net._homes) <= 1 for net in nets)
    for member in made:
        member.connections.close()
    assert not any(os.path.exists(h.arena.directory) for h in houses)
