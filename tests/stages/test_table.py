"""The stage table: the dock's columns and states follow from it; a user's own stage finds its place in it."""

import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from stage_context import context_of, episodes
from tensordict import TensorDict

from mindspeed_rl_plugin.algorithms import ALGORITHMS, resolve
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.dock import ColumnSpec, from_tensordict, make_docks
from mindspeed_rl_plugin.engine.response_kind import ONE_TURN
from mindspeed_rl_plugin.rows import Prompt, Ragged, Rows, SampleId, unpack_json
from mindspeed_rl_plugin.stages import prompts
from mindspeed_rl_plugin.stages.stage import Stage, Stages, StageSpec, columns_of, resolved, states_of
from mindspeed_rl_plugin.stages.table import stage_table, taken_names
from mindspeed_rl_plugin.stages.user import UserStage, load_stages, try_once

pytestmark = pytest.mark.quick

BONUS = """
    import torch
    from tensordict import TensorDict
    from mindspeed_rl_plugin.dock import ColumnSpec

    class LengthBonus:
        reads = ("reward", "tokens")
        writes = ("reward", "valid", ColumnSpec("bonus", torch.float32, "sample", ragged=False))
        unit = "group"

        def compute(self, rows):
            bonus = 0.5 * rows["tokens"].offsets().diff()
            values = {"reward": rows["reward"] + bonus, "valid": bonus < 1.2, "bonus": bonus}
            return TensorDict(values, batch_size=rows.batch_size)

    class Second:
        reads = ("reward", "bonus")
        writes = ("reward",)

        def compute(self, rows):
            return TensorDict({"reward": rows["reward"] - rows["bonus"]}, batch_size=rows.batch_size)
"""


def algorithm(name, **more):
    return resolve(AlgorithmConfig(algorithm=name, **more))


@pytest.mark.parametrize("dump", [False, True])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_column_that_is_read_is_written_before(name, dump):
    written = set()
    for spec in stage_table(algorithm(name), 2, dump=dump):
        assert set(spec.reads) <= written, spec.name
        assert not written & set(spec.written), "each column has one writer"
        written |= set(spec.written)
        if spec.name in ("logp_old", "logp_ref", "values", "advantage"):
            assert set(spec.written) <= taken_names()


def test_states_and_columns_are_the_tables():
    table = stage_table(algorithm("ppo", kl_reward_coef=0.1), 3)
    names = [spec.name for spec in table]
    sampled, passes = ["prompts", "generate", "reward", "groups"], ["logp_old", "logp_ref", "values"]
    assert names == [*sampled, *passes, "select", "advantage", "measure", "update"]
    leased = [name for name in names[1:] if name != "groups"]
    assert [s.name for s in states_of(table)] == leased, "what reads nothing, and what only looks, is no worker state"
    groups = {s.name for s in states_of(table) if s.whole_groups}
    assert groups == {"reward", "select", "advantage"}
    parts = next(c for c in columns_of(table) if c.name == "reward_parts")
    assert parts.trailing == (3,)
    assert [s.name for s in stage_table(algorithm("dpo"), 0)] == ["pairs", "update"]


def test_the_page_shows_the_table():
    page = (Path(__file__).parents[2] / "docs" / "stages.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:3] == "| `"]
    shown = {name: row for row in rows for name in re.findall("`(.+?)`", row[0])}
    names = {"leader": "first rank", "cpu": "CPU"}
    for spec in stage_table(algorithm("ppo", kl_reward_coef=0.1), 3):
        _, reads, writes, groups, resource, *_ = shown[spec.name]
        assert groups.startswith("yes") == spec.whole_groups and resource == names.get(spec.resource, spec.resource)
        for columns, cell in ((spec.reads, reads), (spec.written, writes)):
            listed = set(re.findall("`(.+?)`", cell))
            assert listed <= set(columns) | {"valid", "multiplicity", "returns", "advantage"}, spec.name
            assert "..." in cell or "of that name" in cell or "numbers" in cell or set(columns) <= listed, spec.name


def test_a_schedule_walks_the_stages_between_two_others():
    stages = Stages({spec.name: spec.name for spec in stage_table(algorithm("ppo"), 1)})
    assert stages.between("reward", "groups") == [] and stages["groups"] == "groups"
    assert stages.between("groups", "measure") == ["logp_old", "logp_ref", "values", "select", "advantage"]


def test_a_stage_reads_more_where_another_writes_it():
    bonus = ColumnSpec("bonus", torch.float32, "sample", ragged=False)
    first, last = StageSpec("a", (), (bonus,), "cpu"), StageSpec("b", (), (), "cpu", if_written=("bonus", "other"))
    assert [spec.reads for spec in resolved([first, last])] == [(), ("bonus",)]
    assert [spec.reads for spec in resolved([last, first])] == [(), ()]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(textwrap.dedent(BONUS))
    return path


def test_a_users_stages_see_and_change_the_reward_and_later_stages_see_it(file):
    own = load_stages([f"{file}:LengthBonus", f"{file}:Second"], 1)
    assert [spec.name for spec, _ in own] == ["length_bonus", "second"]
    table = stage_table(algorithm("grpo"), 1, dump=True, own=[spec for spec, _ in own])
    specs = {spec.name: spec for spec in table}
    assert "bonus" in specs["measure"].reads and "valid" in specs["select"].reads
    (dock,) = make_docks(columns_of(table), states_of(table), [(0, 1)])
    dock.open(0, 1, 2)
    ids = (SampleId(0, 0, 0), SampleId(0, 0, 1))
    tokens = Ragged.from_rows([torch.ones(n, dtype=torch.int32) for n in (2, 3)])
    dock.put(Rows(ids, {"tokens": tokens}))
    first_reward = specs["reward"].stored_writes["reward"]
    assert first_reward != "reward", "three stages write it, the last keeps the name"
    dock.put(Rows(ids, {first_reward: torch.tensor([1.0, 2.0])}))
    for spec, instance in own:
        UserStage(instance, specs[spec.name], context_of(dock)).run(ids)
    dock.put(Rows(ids, {"graded": torch.ones(2, dtype=torch.int8)}))
    rows = Stage(specs["select"], context_of(dock)).lease(ids).rows
    assert rows["reward"].tolist() == [1.0, 2.0] and rows["valid"].tolist() == [1, 0]
    assert dock.read(ids, ["bonus", "reward"])["bonus"].tolist() == [1.0, 1.5]


def test_a_stage_may_be_a_dataclass_and_import_its_neighbours(tmp_path):
    (tmp_path / "neighbour.py").write_text("READS = ('reward',)")
    (tmp_path / "own.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom neighbour import READS\n"
        "@dataclass\nclass A:\n    size: int = 1\n    reads = READS\n    writes = ('reward',)\n    compute = print\n"
    )
    ((spec, _),) = load_stages([f"{tmp_path / 'own.py'}:A"], 1)
    assert spec.reads == ("reward",)


BODY = "class A:\n    reads = ('reward',)\n    writes = ('reward',)\n    compute = print\n"
FLOAT64 = "from mindspeed_rl_plugin.dock import ColumnSpec\nimport torch\n" + BODY.replace(
    "writes = ('reward',)", "writes = (ColumnSpec('reward', torch.float64, 'sample', ragged=False),)"
)


@pytest.mark.parametrize(
    ("source", "word", "said"),
    [
        ("", "nowhere.py:X", "nowhere.py.* no file"),
        ("class A:\n    pass", "{file}:Missing", "Missing.*it has A"),
        ("class A(", "{file}:A", "SyntaxError.*a.py"),
        ("import nowhere_to_be", "{file}:A", "nowhere_to_be"),
        ("class A:\n    def __init__(self, n):\n        pass", "{file}:A", "TypeError.*'n'"),
        ("class A:\n    pass", "{file}:A", "reads, writes, compute"),
        (BODY.replace("reads = ('reward',)", "reads = ('x',)"), "{file}:A", r"\['x'\]"),
        (BODY.replace("writes = ('reward',)", "writes = ('bonus',)"), "{file}:A", "bonus"),
        (FLOAT64, "{file}:A", "reward by name"),
        (BODY + "    unit = 'batch'", "{file}:A", "'batch' is unknown; known: row, group"),
    ],
)
def test_a_stage_that_cannot_be_is_refused_by_name(tmp_path, source, word, said):
    path = tmp_path / "a.py"
    path.write_text(source)
    with pytest.raises(ValueError, match=f"(?s)--rl-stage.*{said}"):
        load_stages([word.format(file=path)], 1)


@pytest.mark.parametrize(
    ("name", "column"),
    [("update", "own"), ("mine", "advantage"), ("mine", "advantages"), ("mine", "answer"), ("mine", "weights")],
)
def test_a_stage_has_names_that_no_other_has(name, column):
    """Those of dumps and of old checkpoints included."""
    own = StageSpec(name, ("reward",), (ColumnSpec(column, torch.float32, "sample", ragged=False),), "cpu")
    with pytest.raises(ValueError, match=f"--rl-stage.* {'named' if column == 'own' else 'writes'} .*"):
        stage_table(algorithm("grpo"), 1, own=[own])
    twice = [StageSpec(name, ("reward",), (own.writes[0],), "cpu") for name in ("a", "b")]
    with pytest.raises(ValueError, match=f"--rl-stage a writes {column}"):
        stage_table(algorithm("grpo"), 1, own=twice)


def test_what_a_stage_returns_must_fit_its_declaration(file):
    ((spec, instance),) = load_stages([f"{file}:LengthBonus"], 1)
    stage = UserStage(instance, spec, context_of())
    rows = Rows((SampleId(0, 0, 0),), {"reward": torch.zeros(1), "tokens": Ragged.from_rows([torch.ones(2)])})
    assert set(stage.compute(rows).columns) == {"reward", "valid", "bonus"}
    assert stage.compute(Rows(())) is None
    whole = instance.compute
    stage.instance = type("Half", (), {"compute": lambda self, given: whole(given).exclude("bonus")})()
    with pytest.raises(ValueError, match="bonus"):
        stage.compute(rows)


@pytest.mark.parametrize("kind", [ONE_TURN, episodes(0), episodes(2)])
def test_a_stage_is_tried_on_the_group_that_a_data_row_would_make(kind):
    """Every column that it may read is there, as real rows have it; what is wrong with it is said with its line."""
    table = stage_table(algorithm("grpo"), 2, kind=kind)
    every = {column.name: column for spec in table[:3] for column in spec.writes}
    own, seen, state = ColumnSpec("own", torch.float32, "sample", ragged=False), [], torch.get_rng_state()

    def tried(*computes):
        specs = [StageSpec(name, reads, (own,), "cpu") for name, reads in (("a", tuple(every)), ("b", ("own",)))]
        stages = [(spec, SimpleNamespace(compute=compute)) for spec, compute in zip(specs, computes, strict=False)]
        try_once(stages, Prompt((1, 2), "a", "b", 0), (5, 6, 7), 4, 2, "a.jsonl line 1", kind)

    def written(values):
        return TensorDict({} if values is None else {"own": values}, batch_size=[4])

    tried(lambda rows: seen.append(rows) or written(torch.rand(4)), lambda rows: written(rows["own"]))
    rows = from_tensordict(seen[0])
    for name, column in every.items():
        column.check(rows[name])
    if kind.columns:
        (said, *_) = unpack_json(rows["conversation"])
        turn = {"role": "assistant", "content": "b", "turn": [0, 3], "reward": 0.0}
        assert said == [{"role": "user", "content": "a"}, turn]
    assert rows["tokens"].row(3).tolist() == [1, 2, 5, 6, 7] and rows["reward"].tolist() == [1, 0, 1, 0]
    assert torch.equal(torch.get_rng_state(), state)
    for compute, *words in (
        (lambda rows: {}["here"], "KeyError: 'here'", "test_table.py"),
        (lambda rows: written(rows["reward_parts"]), "'own'", "[2]"),
        (lambda rows: written(None), "own", "returned []"),
    ):
        with pytest.raises(ValueError, match="(?s)^--rl-stage a .* tried on a.jsonl line 1") as error:
            tried(compute)
        assert all(word in str(error.value) for word in words)


def test_prompts_become_one_row_a_group():
    rows = prompts.prompt_rows(3, [Prompt((1, 2), "a", "b", 0), Prompt((4,), "c", "d", 1)])
    assert rows.ids == (SampleId(3, 0, 0), SampleId(3, 1, 0))
    assert [r.tolist() for r in rows["prompt"].rows()] == [[1, 2], [4]]
