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
from mindspeed_rl_plugin.episodes.environments import ToolCall, Turn
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


def spoken(text: str, *calls: ToolCall) -> Turn:
    return Turn((1,), text, calls)


def flags_of(environment: str | None) -> RLConfig:
    """By the one line of the page that gives this environment."""
    lines = [shlex.split(line[line.index("--rl-") :], comments=True) for line in SHELL if "--rl-" in line]
    parser = add_flags(argparse.ArgumentParser(allow_abbrev=False))
    (config,) = (
        c for c in map(RLConfig.from_args, map(parser.parse_args, lines)) if c.episodes.environment == environment
    )
    assert not [*problems(None, config)]
    return config


# What plays, turns, texts that the model sees, and rewards of the replies.
PLAYED = [
    ("tools.py:multiply", [ToolCall("multiply", {"a": 6, "b": 7})], ["42"], [0, 0]),
    ("search.py:lookup", [ToolCall("lookup", {"word": "tea"})], ["tea has 3 letters"], [0, 0]),
    ("guess.py:GuessTheNumber", [*"x397"], ["give a number", "higher", "lower", "right"], [0, 0, 0, 0, 1]),
    ("countdown.py:Countdown", [*"321"], ["count down from 4", *["go on"] * 3], [0, 1, 1, 1]),
    ("countdown.py:Countdown", ["9"], ["count down from 4", "go on"], [0, 0]),
    ("spell.py:Spell", ["7"], ["the next letter"], [0, 1]),
    ("spell.py:Spell", ["8"], ["wrong"], [0, 0]),
    ("notes.py:Notes", [ToolCall("write", {"text": "7"}), "done"], ["page 1 is written"], [0, 0, 1]),
]


def test_no_file_is_new_here() -> None:
    """One that the page shows anew needs a row above, or a test below."""
    assert FILES.keys() == {what.partition(":")[0] for what, *_ in PLAYED} | {"parser.py", "reward.py"}


@pytest.mark.parametrize(("what", "turns", "texts", "rewards"), PLAYED)
def test_what_is_shown_plays(shown, what: str, turns: list, texts: list[str], rewards: list) -> None:
    """Replies to the beginning, each turn, and the end where the last one is not."""
    tool = what.partition(":")[2].islower()
    given = ([f"{shown}/{what}"], None) if tool else ([], f"{shown}/{what}")
    with closing(EnvironmentPool(*given, workers=1, timeout=20, wait_timeout=60)) as pool:
        pool.begin(SAMPLE, TASK, 1)
        said = [] if tool else pool.poll(20)
        for turn in turns:
            pool.act(SAMPLE, spoken(turn) if isinstance(turn, str) else spoken("", turn))
            said += pool.poll(20)
        if not said[-1].done:
            pool.finish(SAMPLE)
            said += pool.poll(20)
    assert [message["content"] for reply in said for message in reply.messages] == texts
    assert [reply.reward for reply in said] == rewards and said[-1].done


def test_the_flags_of_tools_and_of_an_environment() -> None:
    tools, game = flags_of(None), flags_of("my/guess.py:GuessTheNumber")
    assert tools.episodes.tools == ("my/tools.py:multiply",) and tools.graders == ("math",)
    assert game.episodes.max_turns == 5 and game.graders == ("environment",)
    assert tools.data.apply_chat_template and game.data.apply_chat_template
    assert flags_of("openenv:http://HOST:PORT").graders == ("environment",)


def test_the_lines_for_verifiers(monkeypatch) -> None:
    config, given = flags_of("verifiers:ID"), []
    assert config.episodes.foreign and config.graders == ("environment",)
    monkeypatch.setattr(tasks, "write", lambda *arguments: given.append(arguments) or 1)
    (line,) = (line for line in SHELL if " tasks verifiers:" in line)
    assert tasks.main(shlex.split(line, comments=True)[4:]) == 0
    assert given == [("ID", config.episodes.environment_python, *config.data.prompt_data, None)]


def test_the_parser(shown) -> None:
    found = load_function(f"{shown}/parser.py", "calls")("well, CALL multiply(6, 7)")
    assert json.loads(read_calls(found)) == [["multiply", {"a": 6, "b": 7}]]


def test_the_grader(shown) -> None:
    said = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "r"}] * 2
    item = GradeItem("p", "r", "a", {}, SAMPLE, None, said, 1.0)
    with closing(RewardPool([f"{shown}/reward.py:short", "environment=0.5"], regex=None, workers=1)) as pool:
        assert pool.grade([item])[0].parts == pytest.approx((0.8, 1.0))
