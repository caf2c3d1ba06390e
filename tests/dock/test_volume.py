"""What `plan --dock` says of this dock's own metadata is what the records of a real fleet weigh."""

import numpy as np
import pytest
import torch

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.dock import ColumnSpec, DistributedDock, Limits
from mindspeed_rl_plugin.dock.distributed import frames
from mindspeed_rl_plugin.dock.distributed.records import Record
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId
from mindspeed_rl_plugin.stages.stage import columns_of, states_of
from mindspeed_rl_plugin.stages.table import stage_table
from mindspeed_rl_plugin.tools.plan.dock_volume import GIB, Load, listeners_elsewhere, packed_gib, record_bytes

GROUPS, MEMBERS = 16, 4


def cells(spec: ColumnSpec, rows: int) -> torch.Tensor | Ragged:
    if not spec.ragged:
        return torch.ones(rows, *spec.trailing, dtype=spec.dtype)
    return Ragged.from_rows([torch.ones(3, *spec.trailing, dtype=spec.dtype)] * rows, spec.dtype)


@pytest.mark.parametrize("nodes", [list("abcdefgh"), list("aabb")], ids=["8 machines", "2 of 2 ranks"])
def test_the_records_of_a_rollout_weigh_what_the_plan_says(members, nodes: list[str]) -> None:
    """The columns and states of GRPO. Counted where a record goes out, once for each process on another machine."""
    table = stage_table(resolve(AlgorithmConfig(algorithm="grpo")), 1)
    specs, states = columns_of(table), states_of(table)
    made = members(specs, states, nodes, limits=Limits(version_column="version"))
    said, heads = {"payload": 0, "head": 0}, []

    def weigh(host, tell):
        def told(record: Record) -> None:
            head, payload = frames.prefix(record.encoded[: frames.PREFIX.size])
            assert record.encoded == b"".join(bytes(part) for part in frames.encode(record.to_message()))
            away = {a for a in host.directory.controllers.values() if a.node != host.node}
            said["payload"] += payload * len(away)
            said["head"] += (frames.PREFIX.size + head) * len(away)
            heads.append(frames.PREFIX.size + head)
            tell(record)

        return told

    houses = [m for m in made if m.host.warehouse is not None]
    for member in houses:
        member.host._broadcast = weigh(member.host, member.host._broadcast)
    docks = [DistributedDock(specs, states, m.connections, deadline=20) for m in houses]
    for dock in docks:
        dock.open(0, GROUPS, MEMBERS)
    by_name = {c.name: c for c in specs}
    firsts = tuple(SampleId(0, g, 0) for g in range(GROUPS))
    docks[0].put(Rows(firsts, {name: cells(by_name[name], GROUPS) for name in ("prompt", "meta")}))
    homes = np.arange(GROUPS) * len(houses) // GROUPS
    for state in states:
        for machine, dock in enumerate(docks):
            ids = [SampleId(0, g, m) for g in (homes == machine).nonzero()[0].tolist() for m in range(MEMBERS)]
            lease = dock.lease(state.name, ids=ids, deadline=20)
            back = {name: cells(by_name[name], len(ids)) for name in state.writes}
            dock.commit(lease, Rows(lease.rows.ids, back) if back else None)
    machines = [sorted(set(nodes)).index(node) for node in nodes]
    load, told = Load(GROUPS, MEMBERS, 100, 900), listeners_elsewhere(len(states), machines)
    moved = packed_gib(load, len(houses), specs, states, version_column="version", listeners=told)
    assert said["payload"] == pytest.approx(moved.records * GIB) == told * record_bytes(load, specs, states, "version")
    assert max(heads) < 1000, "what is left out is less than a thousand bytes a commit"
