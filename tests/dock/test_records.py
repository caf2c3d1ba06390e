"""What `plan --dock` says of this dock's own metadata is what the records of a real dock weigh."""

import pytest
import torch
from dock_help import ids

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.dock import ColumnSpec, Ragged, Rows, SampleId
from mindspeed_rl_plugin.dock.messages import pack
from mindspeed_rl_plugin.stages.stage import columns_of, states_of
from mindspeed_rl_plugin.stages.table import stage_table
from mindspeed_rl_plugin.tools.plan.dock_volume import Load, listeners_elsewhere, record_bytes

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
    made = members(specs, states, nodes)
    sent, records = [0], [0]
    houses = [m for m in made if m.core.warehouse is not None]
    for member in houses:
        away = {a for a in member.directory.controllers.values() if a.node != member.me.node}

        def counted(record, tell=member.core.tell, away=away) -> None:
            sent[0] += len(pack(record)) * len(away)
            records[0] += len(away)
            tell(record)

        member.core.tell = counted
    docks = [m.dock(deadline=20) for m in houses]
    for dock in docks:
        dock.open(0, GROUPS, MEMBERS)
    by_name = {c.name: c for c in specs}
    firsts = tuple(SampleId(0, g, 0) for g in range(GROUPS))
    docks[0].put(Rows(firsts, {name: cells(by_name[name], GROUPS) for name in ("prompt", "meta")}))
    share = GROUPS // len(houses)
    for state in states:
        for machine, dock in enumerate(docks):
            mine = ids(GROUPS, MEMBERS)[machine * share * MEMBERS : (machine + 1) * share * MEMBERS]
            lease = dock.lease(state.name, ids=mine, deadline=20)
            back = {name: cells(by_name[name], len(mine)) for name in state.writes}
            dock.commit(lease, Rows(lease.rows.ids, back) if back else None)
    machines = [sorted(set(nodes)).index(node) for node in nodes]
    listeners = listeners_elsewhere(len(states), machines)
    planned = listeners * record_bytes(Load(GROUPS, MEMBERS, 100, 900), specs, states)
    assert planned < sent[0] < planned + 600 * records[0], "what is left out is some hundred bytes per commit"
