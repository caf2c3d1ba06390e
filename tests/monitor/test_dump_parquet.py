"""Dumps: what is in them, that they come back whole, that they are never half there."""

import json
import shutil
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch

from mindspeed_rl_plugin.monitor.dump import (
    DUMP_FIELDS,
    TOKEN_COLUMNS,
    discard_dumps_after,
    dump_rollout,
    lacking,
    read_rollout,
)
from mindspeed_rl_plugin.monitor.run_files import check_dumps, claim_dumps, dump_files, write_json
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId, pack_json

pytestmark = pytest.mark.quick


def decode(tokens):
    return "".join(map(chr, tokens))


def same_rows(back, rows, lacking):
    assert back.ids == rows.ids
    assert set(back.columns) == set(rows.columns) - lacking
    for name, column in back.columns.items():
        want = rows[name]
        if isinstance(column, Ragged):
            assert torch.equal(column.offsets, want.offsets), name
            column, want = column.values, want.values
        assert column.dtype == want.dtype and torch.equal(column, want), name


def test_rows_come_back_as_they_were(rows_builder, tmp_path):
    rows = rows_builder(12, 0.5)
    path = dump_rollout(tmp_path, rows, decode, iteration=13, graders=("math", "format"))
    assert path == tmp_path / "rollout-000012.parquet"
    same_rows(read_rollout(path), rows, {"meta"})


def test_turns_come_back_as_they_were(two_episodes, episode_dump):
    path = episode_dump / "rollout-000000.parquet"
    same_rows(read_rollout(path, ["turn_reward", "episode_counts"]), two_episodes, {"meta", "conversation"})
    assert lacking(pq.read_schema(path).names) == {"environment_failed"}


def test_one_row_a_sample_in_words_and_numbers(rows_builder, tmp_path):
    rows = rows_builder(0, 0.5)
    table = pq.read_table(dump_rollout(tmp_path, rows, decode, iteration=1, graders=("math", "format")))
    row = table.slice(5, 1).to_pylist()[0]
    tokens, mask = rows["tokens"].row(5).tolist(), rows["loss_mask"].row(5).tolist()
    assert (row["epoch"], row["group"], row["member"], row["iteration"]) == (0, 1, 1, 1)
    assert row["prompt"] + row["response"] == decode(tokens) and row["prompt"].startswith("What is")
    assert row["response_length"] == sum(mask) == len(row["logp_rollout"]) == len(row["advantages"])
    assert (row["reward"], row["reward_parts"]) == (rows["reward"][5], rows["reward_parts"][5].tolist())
    assert row["advantage"] == pytest.approx(float(rows["advantages"].row(5)[-1]))
    assert row["finish"] == ("length" if rows["finish"][5] else "stop") and row["version"] == 0
    assert row["segments"] == [[0, 0], [3, 1]], "first token of the response, and the version"
    names, graders = {*table.column_names} - {*TOKEN_COLUMNS}, table.schema.metadata[b"graders"]
    assert names == {*DUMP_FIELDS} and json.loads(graders) == ["math", "format"]


def test_half_a_surrogate_pair_and_no_response(rows_builder, tmp_path):
    rows = rows_builder(2, 0.5, groups=1, members=1)
    prompt = rows["prompt"]
    bare = {"tokens": prompt, "loss_mask": Ragged(torch.zeros_like(prompt.values).byte(), prompt.offsets)}
    bare |= dict.fromkeys(("advantages", "logp_rollout", "logp_old"), Ragged(prompt.values * 0.0, prompt.offsets))
    rows = rows.with_columns(**bare, meta=pack_json([{}]))
    table = pq.read_table(dump_rollout(tmp_path, rows, lambda t: f"\ud83d{len(t)}", iteration=1))
    assert table["prompt"].to_pylist() == [f"?{len(prompt.row(0))}"]
    assert table["response_tokens"].to_pylist() == [[]] and table["advantage"].to_pylist() == [0.0]


def test_rollouts_of_the_same_epochs_have_a_dump_each(rows_builder, tmp_path):
    """As carried groups make them, and asynchronous ones."""
    rows = rows_builder(2, 0.5)
    mixed = Rows((SampleId(1, 9, 9), *rows.ids[1:]), rows.columns)
    first, second = (dump_rollout(tmp_path, r, decode, iteration=i) for r, i in ((mixed, 3), (rows, 4)))
    assert first.name == "rollout-000002.parquet" and read_rollout(first).ids == mixed.ids
    assert read_rollout(second).ids == rows.ids


def test_dumps_later_than_the_resumed_iteration_go(rows_builder, tmp_path):
    """A rollout of several steps is dumped at its first."""
    for iteration in (1, 3, 5, 13):
        dump_rollout(tmp_path, rows_builder(iteration, 0.5, groups=1), decode, iteration=iteration)
    assert list(dump_files(tmp_path)) == [0, 2, 4, 12]
    assert discard_dumps_after(tmp_path, 4) == 2
    assert list(dump_files(tmp_path)) == [0, 2]
    assert discard_dumps_after(tmp_path / "absent", 1) == 0


@pytest.fixture
def claimed(tmp_path):
    """Dumps of a run that has an id, and of one that left no run.json; the folders of three runs."""
    folders = SimpleNamespace(**{name: tmp_path / name for name in ("dumps", "nameless", "old", "new", "third")})
    folders.old.mkdir()
    write_json(folders.old / "run.json", {"id": "a"})
    for dumps, owner in ((folders.dumps, folders.old), (folders.nameless, folders.third)):
        claim_dumps(dumps, owner)
        check_dumps(dumps, folders.new, resumed=False)  # nothing is written yet
        (dumps / "rollout-000000.parquet").write_bytes(b"")
    return folders


def refused(dumps, run_dir, resumed):
    with pytest.raises(ValueError, match="1 rollouts of another run"):
        check_dumps(dumps, run_dir, resumed=resumed)


def test_dumps_of_another_run_are_refused_and_those_of_the_same_are_not(claimed):
    check_dumps(claimed.nameless, claimed.third, resumed=True)
    check_dumps(claimed.nameless, claimed.third, resumed=False)  # it ended before its first checkpoint
    refused(claimed.nameless, claimed.new, False)
    check_dumps(claimed.nameless, claimed.new, resumed=True)  # it was moved and is another by name
    claimed.third.mkdir()
    refused(claimed.nameless, claimed.new, True)


def test_a_run_that_was_moved_finds_its_own_dumps(claimed):
    """By its id, also where something else lies at its old place by now; a copy of it is another run."""
    shutil.copytree(claimed.old, claimed.new)
    refused(claimed.dumps, claimed.new, True)
    write_json(claimed.old / "run.json", {"id": "b"})
    for resumed in (True, False):
        check_dumps(claimed.dumps, claimed.new, resumed=resumed)
    refused(claimed.dumps, claimed.third, False)


def test_dumps_that_name_no_run_are_refused_to_a_new_one_only(tmp_path):
    (tmp_path / "rollout-000003.parquet").write_bytes(b"")
    check_dumps(tmp_path, tmp_path / "rl", resumed=True)
    refused(tmp_path, tmp_path / "rl", False)
