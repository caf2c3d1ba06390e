"""The example reward functions, through the pool that a run grades with."""

from contextlib import closing
from pathlib import Path

import pytest

from mindspeed_rl_plugin.reward import GradeItem, RewardPool
from mindspeed_rl_plugin.rows import SampleId

FILE = Path(__file__).parents[2] / "examples" / "rewards" / "length_and_digits.py"


def test_the_example_rewards():
    responses = ["246", " 246 ", "146", "9" * 300]
    items = [GradeItem("123+123=", r, "246", {"limit": 100}, SampleId(0, 0, i)) for i, r in enumerate(responses)]
    specs = ["exact", *(f"{FILE}:{name}" for name in ("digits=0.5", "brevity=0.1", "shortest"))]
    with closing(RewardPool(specs, workers=1)) as pool:
        grades = pool.grade(items)
    parts = [(1, 1, 0, 1), (1, 1, 0, 0), (0, pytest.approx(2 / 3), 0, 0), (0, 0, -2, 0)]
    assert [g.parts for g in grades] == parts
    assert [g.total for g in grades] == pytest.approx([2.5, 1.5, 1 / 3, -0.2])


def test_every_parameter_and_grader_is_in_the_documentation():
    from mindspeed_rl_plugin.reward.calling import BATCH, SINGLE
    from mindspeed_rl_plugin.reward.specs import BUILTIN

    text = (FILE.parents[2] / "docs" / "data-and-rewards.md").read_text()
    assert [name for name in (*SINGLE, *BATCH, *BUILTIN, "stop", "zero", "drop") if f"`{name}`" not in text] == []
