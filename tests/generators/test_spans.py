"""When an engine did what: neighbours of one kind are one span, by a clock since 1970."""

import time

import pytest

from mindspeed_rl_plugin.generators.lead import LONGEST_SECONDS, MOST, Spans


def test_neighbours_of_a_kind_are_one_and_what_goes_on_is_not_told():
    spans = Spans()
    for first in (100.0, 100.2, 100.4):
        spans.add("generate", first, first + 0.195)
    spans.add("pull", 100.1, 100.3)  # beside it
    spans.add("generate", 101.0, 101.2)
    offset = time.time() - time.monotonic()
    told = {(what, round(begin - offset, 3), round(end - offset, 3)) for what, begin, end in spans.take(101.21)}
    assert told == {("generate", 100.0, 100.595), ("pull", 100.1, 100.3)}
    assert [what for what, *_ in spans.take(101.3)] == ["generate"] and spans.take(200) == []


def test_they_are_bounded():
    spans = Spans()
    spans.add("generate", 0.0, LONGEST_SECONDS + 1)
    assert len(spans.take(LONGEST_SECONDS + 1)) == 1, "a long one is told while it goes on"
    for k in range(MOST + 10):
        spans.add("pull", float(k), k + 0.5)
    told = spans.take(1e9)
    assert len(told) == MOST
    assert told[-1][2] - told[0][2] == pytest.approx(MOST - 1)
