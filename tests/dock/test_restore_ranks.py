"""A resume on several ranks: one has the rows, the others know sizes, and all forget what is no longer there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from mindspeed_rl_plugin.dock import ColumnSpec, DistributedDock, LocalDock, StateSpec
from mindspeed_rl_plugin.launch.checkpoint_files import outline
from mindspeed_rl_plugin.loop.resume import gone, rounds_of
from mindspeed_rl_plugin.rows import Rows, SampleId

COLUMNS = [ColumnSpec("reward", torch.float32, "sample", ragged=False)]
STATES = [StateSpec("train", ("reward",), ())]
KEPT = [(5, 0), (5, 5)]


def test_one_rank_brings_the_rows_back_for_all(members) -> None:
    """Six groups were drawn, two are left."""
    saved = LocalDock(COLUMNS, STATES)
    saved.open(5, 6, 1)
    ids = tuple(SampleId(5, g, 0) for g in range(6))
    saved.put(Rows(ids, {"reward": torch.arange(6.0)}))
    saved.clear(5, [1, 2, 3, 4])
    rows = saved.snapshot()
    known = outline(rows)
    assert known["epochs"] == [{"number": 5, "groups": 6, "members": 1, "held": ["reward"]}]
    made = members(COLUMNS, STATES, ["a", "b"], homes=lambda epoch, groups: np.arange(groups) * 2 // groups)
    docks = [DistributedDock(COLUMNS, STATES, m.connections, leader=r == 0) for r, m in enumerate(made)]

    def resume(rank: int) -> None:
        docks[rank].restore(rows if rank == 0 else known)
        for epoch, group in gone(rounds_of(known), KEPT):
            docks[rank].clear(epoch, [group])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(resume, range(2)))
    lease = docks[1].lease("train", ids=[ids[0], ids[5]], deadline=5)
    assert lease.rows["reward"].tolist() == [0.0, 5.0]
    docks[1].commit(lease)
    for dock in docks:
        dock.clear(5, [0, 5])
    assert [m.connections.shapes for m in made] == [{}, {}], "no rank thinks that the epoch goes on"
