"""Snapshots: what a checkpoint keeps of the dock, and what is restored of it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from dock_help import COLUMNS, SMALL, STATES, ids, make_members, plain, prompts, sid, together, tokens

from mindspeed_rl_plugin.checkpoints.checkpoint_files import outline
from mindspeed_rl_plugin.dock import ColumnSpec, Rows, VersionBound, snapshot

pytestmark = pytest.mark.quick


def test_snapshot_and_restore(make) -> None:
    dock = make.filled(4, 2)
    lease = dock.lease("generate", ids=[sid(0, 0), sid(3, 1)], deadline=5)
    dock.commit(lease, tokens(lease.rows.ids, 2, 3))
    dock.put(Rows((sid(1, 1),), {"parts": torch.tensor([[1.0, 2.0]])}))
    dock.clear(0, [2])
    dock.lease("generate", ids=[sid(1, 0)], deadline=5)
    file = io.BytesIO()
    torch.save(dock.snapshot(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = make()
    other.restore(saved)
    assert other.remaining("generate") == 4, "leased rows count as undone"
    assert [len(r) for r in other.read([sid(3, 1), sid(0, 0)], ["tokens"])["tokens"].rows()] == [3, 2]
    assert other.read([sid(1, 1)], ["parts"])["parts"].tolist() == [[1.0, 2.0]]
    with pytest.raises(ValueError, match="epoch 0"):
        other.open(0, 2, 2)
    with pytest.raises(ValueError, match="start a new one"):
        other.restore(saved)
    assert plain(other.snapshot()) == plain(saved)
    assert not dock.traffic.take() or "read" not in {m.state for m in dock.traffic.take()}


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_written_while_a_snapshot_is_taken_is_done_with_its_cells_or_not_at_all(
    make_one, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Processes outside of the job do not stop for it. Whoever samples a row anew keeps the cells that are there."""
    dock = make_one.filled(1, 2)
    lease = dock.lease("generate", ids=[sid(0, 1)], deadline=5)
    locate = snapshot.locate

    def meanwhile(*arguments: object) -> object:
        if when == "before":
            dock.commit(lease, tokens(lease.rows.ids, 3))
        places = locate(*arguments)
        if when == "after":
            dock.commit(lease, tokens(lease.rows.ids, 3))
        return places

    monkeypatch.setattr(snapshot, "locate", meanwhile)
    saved = dock.snapshot()
    monkeypatch.undo()
    other = make_one()
    other.restore(saved)
    assert other.remaining("generate") == 2
    again = other.lease("generate", ids=[sid(0, 1)], deadline=5)
    other.commit(again, tokens(again.rows.ids, 5, start=7))
    kept = other.lease("logp", ids=[sid(0, 1)], deadline=5).rows["tokens"].row(0).tolist()
    assert kept == ([0, 1, 2] if when == "before" else [7, 8, 9, 10, 11])


def test_a_snapshot_of_another_algorithm_is_refused_and_new_columns_are_not(make_one) -> None:
    dock = make_one()
    dock.open(0, 1, 1)
    dock.put(Rows(ids(1, 1), {"reward": torch.ones(1)}))
    changed = [ColumnSpec("reward", torch.float64, "sample", ragged=False), *(c for c in COLUMNS if c.name != "reward")]
    with pytest.raises(ValueError, match="'reward' .* float32 .* float64"):
        make_one(changed).restore(dock.snapshot())
    fewer = make_one(COLUMNS, STATES[:-1])
    fewer.restore(dock.snapshot())
    assert fewer.remaining("generate") == 1
    dock.clear(0)
    make_one(changed).restore(dock.snapshot())  # without rows any declaration will do
    make_one([*COLUMNS, ColumnSpec("new", torch.int8, "sample", ragged=False)]).restore(dock.snapshot())


def test_versions_that_may_sample_an_epoch_are_restored(make_one) -> None:
    """From a column of the groups, too, in which docks before this one had them."""
    dock = make_one()
    dock.open(0, 2, 1, VersionBound(3, 5))
    dock.put(prompts(2))
    saved = dock.snapshot()
    epoch = dict(saved["epochs"][0])
    del epoch["version_bound"]
    values = torch.tensor([[3, 5, 2, 1], [3, 5, 2, 1]])
    epoch["columns"] = {**epoch["columns"], "order": {"slots": torch.arange(2), "values": values}}
    former = {**saved, "columns": {**saved["columns"], "order": "group dense int64 [4]"}, "epochs": [epoch]}
    for state in (saved, former):
        other, second = docks = [m.dock(deadline=20) for m in make_members(COLUMNS, STATES, ["a", "b"], limits=SMALL)]
        together(2, lambda r, docks=docks, state=state: docks[r].restore(outline(state) if r else state))
        assert other.version_bound(0) == second.version_bound(0) == (3, 5), "of a rank that reads no rows, too"
        assert other.lease("generate", version=6, deadline=0).needs == (3, 5)
        assert len(other.lease("generate", version=4, deadline=0)) == 2
        together(2, lambda r, docks=docks: docks[r].close())


def test_a_snapshot_of_the_docks_before_this_one_is_restored(make) -> None:
    """Written at commit bca148e by its dock in shared memory: four groups, of which one was cleared and one leased."""
    dock = make()
    saved = torch.load(Path(__file__).parent / "data" / "snapshot_format_1.pt", weights_only=True)
    dock.restore(saved)
    rows = [sid(0, 0, 3), sid(0, 1, 3), sid(3, 1, 3)]
    columns = dock.read(rows, ["tokens", "prompt"])
    assert [r.tolist() for r in columns["tokens"].rows()] == [list(range(n)) for n in (2, 3, 5)]
    assert [len(r) for r in columns["prompt"].rows()] == [1, 1, 4]
    assert dock.read(rows[:2], ["logp"])["logp"].values.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert dock.read([sid(1, 1, 3)], ["parts"])["parts"].tolist() == [[1.0, 2.0]]
    assert [dock.remaining(name) for name in ("generate", "logp", "update")] == [3, 4, 6]
    assert dock.lease("logp", deadline=5).rows.ids == (sid(3, 1, 3),)
    assert plain(dock.snapshot()) == plain(saved)
