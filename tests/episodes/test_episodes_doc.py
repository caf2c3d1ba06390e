"""Each kind of code that docs/episodes.md shows runs as it stands there, and its flags are read as it says."""

import argparse
import json
import re
import shlex
from contextlib import closing
from pathlib import Path

import pytest

from mindspeed_rl_plugin.checks.episode_checks import problems
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.config.rl_config import add_flags
from mindspeed_rl_plugin.episodes.environment_pool import EnvironmentPool
from mindspeed_rl_plugin.episodes.environments import Reply, ToolCall, Turn
from mindspeed_rl_plugin.episodes.tools import read_calls
from mindspeed_rl_plugin.reward import GradeItem, RewardPool
from mindspeed_rl_plugin.rows import SampleId
from mindspeed_rl_plugin.tools import tasks
from mindspeed_rl_plugin.workers.user_files import load_function

PAGE = (Path(__file__).parents[2] / "docs" / "episodes.md").read_text()
FILES = dict(re.findall(r"<!-- my/(\w+\.py) -->\n```python\n(.*?)```", PAGE, re.DOTALL))
SHELL = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
SAMPLE = SampleId(0, 0, 0)
TASK = {"prompt": "p", "answer": "7", "record": {}, "messages": None}


@pytest.fixture
def shown(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def played(tools: list[str], environment: str | None, turns: list[Turn]) -> list[Reply]:
    """What comes of a beginning, of each turn, and of the end where the last one is not."""
    with closing(EnvironmentPool(tools, environment, workers=1, timeout=20, wait_timeout=60)) as pool:
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


def flags_of(environment: str | None) -> RLConfig:
    """By the one line of the page that gives this environment."""
    lines = [shlex.split(line[line.index("--rl-") :], comments=True) for line in SHELL if "--rl-" in line]
    parser = add_flags(argparse.ArgumentParser(allow_abbrev=False))
    (config,) = (
        c for c in map(RLConfig.from_args, map(parser.parse_args, lines)) if c.episodes.environment == environment
    )
    assert not [*problems(None, config)]
    return config


def test_no_file_is_new_here() -> None:
    """One that the page shows anew needs a test below."""
    assert FILES.keys() == {
        *("tools.py", "search.py", "parser.py", "guess.py", "countdown.py", "spell.py", "notes.py", "reward.py")
    }


def test_the_tool(shown) -> None:
    (said, last) = played([f"{shown}/tools.py:multiply"], None, [spoken("", ToolCall("multiply", {"a": 6, "b": 7}))])
    assert [message["content"] for message in said.messages] == ["42"] and last.done


def test_the_asynchronous_tool(shown) -> None:
    (said, _) = played([f"{shown}/search.py:lookup"], None, [spoken("", ToolCall("lookup", {"word": "tea"}))])
    assert [message["content"] for message in said.messages] == ["tea has 3 letters"]


def test_the_flags_of_tools_and_of_an_environment() -> None:
    tools, game = flags_of(None), flags_of("my/guess.py:GuessTheNumber")
    assert tools.episodes.tools == ("my/tools.py:multiply",) and tools.graders == ("math",)
    assert game.episodes.max_turns == 5 and game.graders == ("environment",)
    assert tools.data.apply_chat_template and game.data.apply_chat_template


def test_the_lines_for_verifiers(monkeypatch) -> None:
    config, given = flags_of("verifiers:ID"), []
    assert config.episodes.foreign and config.graders == ("environment",)
    monkeypatch.setattr(tasks, "write", lambda *arguments: given.append(arguments) or 1)
    (line,) = (line for line in SHELL if " tasks verifiers:" in line)
    assert tasks.main(shlex.split(line, comments=True)[4:]) == 0
    assert given == [("ID", config.episodes.environment_python, *config.data.prompt_data, None)]


def test_the_line_for_openenv() -> None:
    assert flags_of("openenv:http://HOST:PORT").graders == ("environment",)


def test_the_parser(shown) -> None:
    found = load_function(f"{shown}/parser.py", "calls")("well, CALL multiply(6, 7)")
    assert json.loads(read_calls(found)) == [["multiply", {"a": 6, "b": 7}]]


def test_the_environment_with_steps(shown) -> None:
    turns = [spoken(text) for text in ("x", "3", "9", "7")]
    said = played([], f"{shown}/guess.py:GuessTheNumber", turns)
    texts = [message["content"] for reply in said for message in reply.messages]
    assert texts == ["give a number", "higher", "lower", "right"]
    assert [reply.reward for reply in said] == [0, 0, 0, 0, 1] and [reply.done for reply in said][-1]


def test_the_environment_in_the_form_of_gymnasium(shown) -> None:
    said = played([], f"{shown}/countdown.py:Countdown", [spoken("3"), spoken("2"), spoken("1")])
    texts = [message["content"] for reply in said for message in reply.messages]
    assert texts == ["count down from 4", *["go on"] * 3]
    assert [(reply.reward, reply.done) for reply in said[1:]] == [(1, False), (1, False), (1, True)]
    assert [reply.done for reply in played([], f"{shown}/countdown.py:Countdown", [spoken("9")])] == [False, True]


def test_the_environment_in_the_form_of_skyrl(shown) -> None:
    said = played([], f"{shown}/spell.py:Spell", [spoken("7")])
    assert said[-1].messages[0]["content"] == "the next letter" and said[-1].reward == 1.0 and said[-1].done
    said = played([], f"{shown}/spell.py:Spell", [spoken("8")])
    assert said[-1].messages[0]["content"] == "wrong" and said[-1].reward == 0.0 and said[-1].done


def test_the_environment_with_tools(shown) -> None:
    turns = [spoken("", ToolCall("write", {"text": "7"})), spoken("done")]
    said = played([], f"{shown}/notes.py:Notes", turns)
    assert [message["content"] for reply in said for message in reply.messages] == ["page 1 is written"]
    assert said[-1].done and said[-1].reward == 1.0


def test_the_grader(shown) -> None:
    said = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "r"}] * 2
    item = GradeItem("p", "r", "a", {}, SAMPLE, None, said, 1.0)
    with closing(RewardPool([f"{shown}/reward.py:short", "environment=0.5"], regex=None, workers=1)) as pool:
        assert pool.grade([item])[0].parts == pytest.approx((0.8, 1.0))
