"""Ground truths are read before anything is built: of the data and of the held-out rows, shared out over the ranks."""

import dataclasses
from types import SimpleNamespace

import pytest

from mindspeed_rl_plugin import ranks
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.config.run_flags import RewardConfig
from mindspeed_rl_plugin.launch import read_inputs
from mindspeed_rl_plugin.loop import inputs as inputs_module
from mindspeed_rl_plugin.loop.inputs import Inputs

CONFIG = RLConfig(reward=RewardConfig(reward=("math",)))
ROWS = {f"a.jsonl line {i}": str(i) for i in range(1, 6)}


def rows(answers):
    """What of a `PromptStream` is asked."""
    return SimpleNamespace(
        answers=lambda: answers, kinds_of_rows=dict, at=lambda place: "a prompt", where=lambda place: "a.jsonl line 1"
    )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("held_out", [False, True])
def test_each_row_is_read_by_one_rank_and_all_hear_of_a_bad_one(monkeypatch, rank: int, held_out: bool) -> None:
    bad, seen = ROWS | {"a.jsonl line 4": "???"}, []

    def check(specs, regex, answers) -> None:
        seen.append([*answers])
        if wrong := [where for where, answer in answers.items() if answer == "???"]:
            raise ValueError(f"{wrong[0]}: cannot be parsed")

    def gathered(value):
        other = None if value is None else (None, "another rank's" if rank == 0 else None)
        return [value, other] if rank == 0 else [other, value]

    data, held = (ROWS, bad) if held_out else (bad, ROWS)
    pool = SimpleNamespace(names=("math",), check_fields=print, try_once=lambda *given: [])
    monkeypatch.setattr(read_inputs, "RewardPool", lambda *given, **options: pool)
    monkeypatch.setattr(inputs_module, "check_answers", check)
    monkeypatch.setattr(read_inputs, "rank_of_job", lambda: rank)
    monkeypatch.setattr(read_inputs, "gather_all", gathered)
    monkeypatch.setattr(ranks, "gather_all", gathered)
    empty = dict.fromkeys(field.name for field in dataclasses.fields(Inputs))
    given = {"config": CONFIG, "data": rows(data), "held_out": rows(held), "responses": inputs_module.ONE_TURN}
    inputs = Inputs(**{**empty, **given})
    with pytest.raises(ValueError, match="another rank's" if rank == 0 else "a.jsonl line 4: cannot be parsed"):
        read_inputs._graders(inputs)
    assert seen[0] == [*ROWS][rank::2]
