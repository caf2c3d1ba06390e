"""The quickstart's claim: what counts as broken, and what the file then says."""

from pathlib import Path

import pytest
from commands import imported

SCRIPT = Path(__file__).parents[2] / "examples" / "summarize.py"
summarize = imported(SCRIPT)


@pytest.mark.parametrize(
    ("before", "after", "broken"),
    [
        (0.60, 0.80, []),
        (0.61, 0.99, ["before RL is 0.61"]),
        (0.50, 0.79, ["after RL is 0.79"]),
        (0.70, 0.70, ["before RL is 0.7,", "after RL is 0.7,"]),
        (None, 0.90, ["before RL is None"]),
        (0.50, None, ["after RL is None"]),
    ],
)
def test_claims(before, after, broken):
    summary = {"accuracy_before": before, "accuracy_after": after, "logprob_diff_max": None}
    claims = summarize.broken_claims(summary, 0.60, 0.80)
    assert len(claims) == len(broken)
    assert all(text in line for text, line in zip(broken, claims, strict=True))


def test_no_bound_asks_nothing():
    nothing = dict.fromkeys(("accuracy_before", "accuracy_after", "logprob_diff_max"))
    assert summarize.broken_claims(nothing, None, None) == []


@pytest.mark.parametrize(("difference", "broken"), [(2e-4, 0), (2.1e-4, 1), (None, 1)])
def test_engine_and_trainer_may_not_part(difference, broken):
    summary = {"accuracy_before": 0.5, "accuracy_after": 1.0, "logprob_diff_max": difference}
    claims = summarize.broken_claims(summary, 0.60, 0.80, 2e-4)
    assert len(claims) == broken and all(f"differ by {difference} nats, the limit is 0.0002" in line for line in claims)


@pytest.mark.parametrize(("after", "broken"), [(0.4, 0), (0.41, 1), (None, 1)])
def test_a_control_may_not_learn(after, broken):
    summary = {"accuracy_before": 0.0, "accuracy_after": after, "logprob_diff_max": None}
    claims = summarize.broken_claims(summary, None, None, None, 0.4)
    assert len(claims) == broken and all(f"after RL is {after}, the claim is at most 0.4" in line for line in claims)
