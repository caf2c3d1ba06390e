"""Prompts whose responses were long come first, within the optimizer step that they belong to."""

from mindspeed_rl_plugin.loop.schedules.longest_first import LongestFirst
from mindspeed_rl_plugin.rows import Prompt


def prompts(*rows: int) -> list[Prompt]:
    return [Prompt(tokens=(1, 2, 3), text="", answer="", row=row, record={}) for row in rows]


def test_longest_first_within_a_step_and_unknown_ones_as_the_mean():
    order = LongestFirst(step=3)
    rows = lambda epoch, *given: [p.row for p in order.order(epoch, prompts(*given))]  # noqa: E731
    assert rows(0, 0, 1, 2, 3, 4, 5) == [0, 1, 2, 3, 4, 5], "nothing is known"
    order.finished({(0, 0): (13, 13), (0, 1): (43, 83), (0, 2): (3 + 30, 3 + 30), (0, 4): (3, 203)})
    # Means without the prompt: 10, 60, 30, 100; of all 50.
    assert rows(1, 0, 1, 2, 3, 4, 5) == [1, 2, 0, 4, 3, 5]
    assert rows(2, 9, 4, 0, 1) == [4, 9, 0, 1], "the last step is a short one"
    order.finished({(2, 0): (3,), (7, 0): (99,)})  # (2, 0) is row 4 now; the other one is of a former start
    assert rows(3, 3, 4, 9) == [3, 9, 4]


def test_where_a_step_trains_on_a_part_of_a_group_prompts_stay_in_their_order():
    order = LongestFirst(step=0)
    assert [p.row for p in order.order(0, prompts(0, 1))] == [0, 1]
    order.finished({(0, 0): (4,), (0, 1): (9,)})
    assert [p.row for p in order.order(1, prompts(0, 1))] == [0, 1]
