"""Each kind of code that docs/episodes.md shows runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mindspeed_rl_plugin.episodes.parsers import make_parser
from mindspeed_rl_plugin.episodes.pool import EnvironmentPool
from mindspeed_rl_plugin.episodes.protocol import Reply, ToolCall, Turn
from mindspeed_rl_plugin.reward import GradeItem, RewardPool
from mindspeed_rl_plugin.rows import SampleId

PAGE = (Path(__file__).parents[2] / "docs" / "episodes.md").read_text()
FILES = dict(re.findall(r"<!-- my/(\w+\.py) -->\n```python\n(.*?)```", PAGE, re.DOTALL))
SAMPLE = SampleId(0, 0, 0)
TASK = {"prompt": "p", "answer": "7", "record": {}, "messages": None}


@pytest.fixture
def shown(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def played(tools: list[str], environment: str | None, turns: list[Turn]) -> list[Reply]:
    """What comes of a beginning, of each turn, and of the end where the last one is not."""
    with EnvironmentPool(tools, environment, workers=1, timeout=20, wait_timeout=60) as pool:
        pool.begin(SAMPLE, TASK, 1)
        said = pool.poll(20) if environment else []
        for turn in turns:
            pool.act(SAMPLE, turn)
            said += pool.poll(20)
        if not said[-1].done:
            pool.finish(SAMPLE)
            said += pool.poll(20)
        return said


def spoken(text: str, *calls: ToolCall) -> Turn:
    return Turn((1,), (0.0,), text, calls)


def test_every_file_is_in_a_test() -> None:
    assert FILES.keys() == {"tools.py", "parser.py", "guess.py", "notes.py", "reward.py"}


def test_the_tool(shown) -> None:
    (said, last) = played([f"{shown}/tools.py:multiply"], None, [spoken("", ToolCall("multiply", {"a": 6, "b": 7}))])
    assert [message["content"] for message in said.messages] == ["42"] and last.done


def test_the_parser(shown) -> None:
    parse = make_parser(f"{shown}/parser.py:calls", None)
    assert list(parse("well, CALL multiply(6, 7)")) == [ToolCall("multiply", {"a": 6, "b": 7})]


def test_the_environment_with_steps(shown) -> None:
    turns = [spoken(text) for text in ("x", "3", "9", "7")]
    said = played([], f"{shown}/guess.py:GuessTheNumber", turns)
    texts = [message["content"] for reply in said for message in reply.messages]
    assert texts == ["give a number", "higher", "lower", "right"]
    assert [reply.reward for reply in said] == [0, 0, 0, 0, 1] and [reply.done for reply in said][-1]


def test_the_environment_with_tools(shown) -> None:
    turns = [spoken("", ToolCall("write", {"text": "7"})), spoken("done")]
    said = played([], f"{shown}/notes.py:Notes", turns)
    assert [message["content"] for reply in said for message in reply.messages] == ["page 1 is written"]
    assert said[-1].done and said[-1].reward == 1.0


def test_the_grader(shown) -> None:
    said = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "r"}] * 2
    item = GradeItem("p", "r", "a", {}, SAMPLE, None, said, 1.0)
    with RewardPool([f"{shown}/reward.py:short", "environment=0.5"], regex=None, workers=1) as pool:
        assert pool.grade([item])[0].parts == pytest.approx((0.8, 1.0))
