"""Streams of rows: what is ready, near rows first, bounded by rows, tokens, time and age; the documented example."""

import json
import re
import threading
import time
from pathlib import Path

import pytest
import torch

from mindspeed_rl_plugin.dock import ColumnSpec, DistributedDock, Limits, LocalDock, StateSpec
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId

DOC = Path(__file__).parents[2] / "docs" / "dock.md"
COLUMNS = [
    ColumnSpec("tokens", torch.int32, "token", ragged=True),
    ColumnSpec("version", torch.int64, "sample", ragged=False),
]
STATES = [StateSpec("work", ("tokens",), ()), StateSpec("train", ("tokens", "version"), (), whole_groups=True)]
LIMITS = Limits(version_column="version")


def stream(maker, groups: int, members: int = 1):
    """A stream on every medium: `LocalDock` knows the version column itself."""
    dock = LocalDock(COLUMNS, STATES, "version") if maker.medium == "local" else maker(COLUMNS, STATES, limits=LIMITS)
    dock.open(0, groups, members)
    return dock


def put(dock, lengths: dict[int, int], versions: dict[int, int] | None = None, members: int = 1) -> None:
    """Rows by number: their tokens, and their versions (0 if not told)."""
    ids = tuple(SampleId(0, *divmod(row, members)) for row in lengths)
    tokens = Ragged.from_rows([torch.full((n,), row, dtype=torch.int32) for row, n in lengths.items()])
    ages = torch.tensor([(versions or {}).get(row, 0) for row in lengths])
    dock.put(Rows(ids, {"tokens": tokens, "version": ages}))


def take(dock, state: str = "work", members: int = 1, **ask) -> list[int]:
    """Row numbers of a batch, acknowledged; every cell is looked at."""
    lease = dock.lease(state, **{"deadline": 5, **ask})
    rows = [i.group * members + i.member for i in lease.rows.ids]
    for row, tokens in zip(rows, lease.rows["tokens"].rows(), strict=True):
        assert (tokens == row).all()
    dock.commit(lease)
    return rows


def test_min_rows_linger_deadline_and_the_end(maker) -> None:
    dock = stream(maker, 6)
    put(dock, {0: 1, 1: 1})
    begin = time.monotonic()
    assert take(dock, min_rows=2, max_rows=4, linger=0.3) == [0, 1]
    assert time.monotonic() - begin >= 0.25, "it lingers for a fuller batch"
    put(dock, {2: 1})
    threading.Timer(0.2, put, (dock, {4: 1, 5: 1})).start()
    assert take(dock, min_rows=3, max_rows=3, linger=9.0) == [2, 4, 5], "a full batch does not linger"
    with pytest.raises(TimeoutError, match=r"'tokens' \(written by a producer's put\) is missing for \(0, 3, 0\)"):
        take(dock, linger=0.1, deadline=0.2)
    threading.Timer(0.2, put, (dock, {3: 1})).start()
    assert take(dock, min_rows=2, linger=0.1) == [3], "fewer where no more are left"
    assert take(dock, linger=0.1) == [] and dock.remaining("work") == 0, "the end of the epoch"


def test_max_tokens_and_the_window(maker) -> None:
    dock = stream(maker, 6)
    put(dock, dict(enumerate([10, 60, 30, 5, 90, 35])))
    assert take(dock, max_tokens=100, window=6) == [0, 4]
    assert take(dock, max_tokens=100) == [1, 2, 3]
    assert take(dock, max_tokens=4) == [5], "one row at least"


def test_stale_rows_are_never_given_out_and_nobody_waits_for_them(maker) -> None:
    dock = stream(maker, 3, members=2)
    ages = {0: 3, 1: 2, 2: 3, 3: 5, 4: 1, 5: 4}
    put(dock, dict.fromkeys(range(6), 2), ages, members=2)
    ask = {"newest": 5, "max_staleness": 2}
    assert take(dock, "train", members=2, **ask) == [2, 3], "of a whole group one old row is enough"
    assert take(dock, "work", members=2, **ask) == [0, 2, 3, 5]
    for state in ("work", "train"):
        assert take(dock, state, members=2, **ask) == [] and dock.remaining(state) == 0


def test_rows_of_the_own_machine_come_first(members) -> None:
    """Two machines, one stream each: both begin with what lies beside them, and end with what is left."""
    made = members(COLUMNS, STATES, ["left", "right"], limits=LIMITS)
    docks = [DistributedDock(COLUMNS, STATES, m.connections) for m in made]
    for dock in docks:
        dock.open(0, 6, 1)
    put(docks[0], dict.fromkeys(range(6), 3))
    assert docks[0].remaining("work") == 6  # its controller knows then what this rank has put
    assert take(docks[1], max_rows=2) == [3, 4]
    assert take(docks[0], max_rows=2) == [0, 1]
    assert take(docks[1], max_rows=2) == [5, 2]
    assert docks[1].traffic.read == {("work", "tokens", "local"): 36, ("work", "tokens", "remote"): 12}
    assert take(docks[0], max_rows=2) == []


@pytest.mark.parametrize("medium", ["local", "shm"])
def test_the_documented_example_runs(medium: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    (example,) = [b for b in blocks if "MEDIUM" in b]
    found = {"MEDIUM": medium}
    exec(compile(example, str(DOC), "exec"), found)  # noqa: S102
    assert len(found["trained"]) == 7


def test_bytes_are_counted_by_state_column_and_place(maker) -> None:
    """What a process moved since it was last asked, as JSON; remote is what was not in its own machine's memory."""
    dock = stream(maker, 2)
    put(dock, {0: 10, 1: 1000})
    take(dock, max_rows=1)
    rows = dock.read([SampleId(0, 1, 0)], ["version"])
    assert len(rows) == 1
    where = "remote" if maker.medium == "sockets" else "local"
    found = json.loads(json.dumps([list(moved) for moved in dock.traffic.take()]))
    assert sorted(found) == [
        ["read", "read", "version", where, 8],
        ["read", "work", "tokens", where, 40],
        ["written", "put", "tokens", where, 4040],
        ["written", "put", "version", where, 16],
    ]
    assert dock.traffic.take() == []
    take(dock)
    assert [list(m) for m in dock.traffic.take()] == [["read", "work", "tokens", where, 4000]]
    served = json.loads(json.dumps(dock.served))
    assert served["states"] == (["train"] if maker.medium == "sockets" else ["train", "work"])
