"""RL state of checkpoints that commit bca148e wrote, before columns were renamed: it is read, and its rows are there.

data/ holds their RL files only. They were made on that commit by one rank with the flags MODEL, DENSE, TRAIN and
ROLLOUT of tests/golden.py, `--rl-rollout-prompts 4 --global-batch-size 8 --save-interval 1`, and for
  old-dapo    --rl-algorithm dapo --rl-reward graders.py:odd_only --rl-kl-loss-coef 0.05 --rl-verify-weights \
              --train-iters 8, iteration 3: one of two steps of the second rollout is left, and one group deferred
  old-pf-ppo  --rl-algorithm pf-ppo --train-iters 4, iteration 1: one of two steps of the first rollout is left
Whole runs that go on from such a checkpoint: the case old-resume of tests/golden.py.
"""

from pathlib import Path

import pytest

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.checkpoints import checkpoint_files as files
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.dock import make_docks
from mindspeed_rl_plugin.loop.resume import check_columns, choices, renamed
from mindspeed_rl_plugin.rows import Ragged, SampleId
from mindspeed_rl_plugin.stages.stage import columns_of, states_of
from mindspeed_rl_plugin.stages.table import RENAMED, stage_table

pytestmark = pytest.mark.quick

DATA = Path(__file__).with_name("data")
ITERATION = {"dapo": 3, "pf-ppo": 1}
TRAINED = {"dapo": [(4, 1), (4, 2), (4, 3), (5, 2)], "pf-ppo": [(0, 0), (0, 1), (0, 2), (0, 3)]}
DEFERRED = {"dapo": [(5, 3)], "pf-ppo": []}


def algorithm(name: str):
    return resolve(AlgorithmConfig(algorithm=name, kl_loss_coef=0.05 if name == "dapo" else None))


def read(name: str) -> tuple[dict, dict]:
    """The state that all ranks read, with an outline of the dock, and the dock that the leader reads."""
    folder, iteration = str(DATA / f"old-{name}"), ITERATION[name]
    state, dock = files.read_state(folder, iteration)
    return state["loop"], dock


def restored(name: str):
    """A dock with today's columns that has taken over the rows."""
    table = stage_table(algorithm(name), 1)
    (dock,) = make_docks(columns_of(table), states_of(table), [(0, 1)])
    dock.restore(renamed(read(name)[1]))
    return dock


def cells(dock, group: tuple[int, int], old: str) -> list:
    """A column of the four samples of a group."""
    column = RENAMED.get(old, old)
    values = dock.read([SampleId(*group, member) for member in range(4)], [column])[column]
    return [row.tolist() for row in values.rows()] if isinstance(values, Ragged) else values.tolist()


@pytest.mark.parametrize("name", ITERATION)
def test_every_rank_reads_where_the_rollout_stands(name):
    state, _ = read(name)
    assert state["steps_left"] == 1
    assert [tuple(g) for g in state["groups"]] == TRAINED[name]
    assert [tuple(g) for g in state["carried"]] == DEFERRED[name]
    held = {epoch["number"]: set(epoch["held"]) for epoch in state["dock"]["epochs"]}
    held = [{RENAMED.get(column, column) for column in held[epoch]} for epoch, _ in TRAINED[name]]
    this = algorithm(name)
    check_columns(this, stage_table(this, 1), held, choices(this), 1, 4)


@pytest.mark.parametrize(
    ("name", "group", "column", "expected"),
    [
        ("dapo", (4, 1), "kept", [1, 1, 1, 1]),
        ("dapo", (4, 1), "weights", [-5917888831760638290] * 4),
        ("dapo", (4, 1), "reward", [0.75, 0.75, 1.0, 0.0]),
        ("dapo", (4, 1), "advantage", [0.2886744737625122, 0.2886744737625122, 0.8660234212875366, -1.443372368812561]),
        ("dapo", (5, 2), "tokens", [[20, 16, 23, 19, 10, 18, 29, 16, 96]]),
        ("dapo", (5, 2), "logp_ref", [[0.0] * 7 + [-4.7115888595581055, -4.304193019866943]]),
        ("dapo", (5, 3), "weights", [-5917888831760638290] * 4),
        ("dapo", (5, 3), "reward", [1.0, 0.75, 1.0, 1.0]),
        ("dapo", (5, 3), "segments", [[[7, 2]]] * 4),
        ("pf-ppo", (0, 0), "times", [3, 1, 0, 0]),
        ("pf-ppo", (0, 3), "times", [2, 2, 0, 0]),
        ("pf-ppo", (0, 2), "kept", [1, 1, 1, 1]),
        ("pf-ppo", (0, 2), "weights", [0, 0, 0, 0]),
    ],
)
def test_cells_are_those_that_were_saved(name, group, column, expected):
    """Of the first samples of a group, as many as are expected."""
    assert cells(restored(name), group, column)[: len(expected)] == expected


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("dapo", {"reward": 0, "logp_ref": 4, "advantage": 4, "measure": 4, "update": 12}),
        ("pf-ppo", {"reward": 0, "values": 0, "advantage": 0, "measure": 0, "update": 8}),
    ],
)
def test_each_state_goes_on_where_it_was(name, left):
    """In samples: what was trained is done, what is deferred has no log-probs yet."""
    dock = restored(name)
    assert {state: dock.remaining(state) for state in left} == left
    ids = [SampleId(*group, member) for group in TRAINED[name][2:] for member in range(4)]
    assert dock.lease("update", ids=ids, deadline=0.0).rows.ids == tuple(ids)
