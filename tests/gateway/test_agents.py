"""Agents with real clients over the gateway: their rows are those of our own episodes, and their faults cost no job."""

import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
from engine_parts import FIELDS, told
from families import make_tokenizer, template
from test_trl_loop import Scripted, sampled

from mindspeed_rl_plugin.config.episode_flags import EpisodeConfig
from mindspeed_rl_plugin.dock.peers import Peers
from mindspeed_rl_plugin.engine.rollout_engine import generate, response_request
from mindspeed_rl_plugin.episodes.environments import EpisodeError
from mindspeed_rl_plugin.episodes.setup import EpisodeSetup
from mindspeed_rl_plugin.rows import SampleId, Sampling

AGENTS = Path(__file__).with_name("agents.py")
TOOLS = tuple(f"{Path(__file__).parents[1] / 'episodes' / 'user_code.py'}:{name}" for name in ("say", "repeat"))
CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"text": "{}"}}}}\n</tool_call>'
CALLS = [
    "I say.\n" + "\n".join(CALL.format(*call) for call in turn)
    for turn in ([("say", "a  b"), ("repeat", "<|im_end|>")], [("repeat", " é\\n")])
]
TURNS = [sampled("qwen2_5", text, 3) for text in (*CALLS, "It is 12.")]


def setup(agent=None, tools=(), **more):
    flags = {"max_turns": 9, "environment_timeout": 30.0, "environment_workers": 1, "environment_lockstep": True}
    config = EpisodeConfig(agent=agent, tools=tools, **{**flags, **more})
    return EpisodeSetup(config, "chat", "", 10**6, 10**6, 60.0)


def run(made, turns, record=None, count=1, **options):
    """Episodes of one prompt, whose turns a script gives. Returns their completions."""
    tokenizer = make_tokenizer("qwen2_5", template("qwen2_5"))
    with contextlib.closing(made.environments()) as environments:
        engine = made.over(Scripted(turns, **options), tokenizer, environments, Peers())
        prompt = made.format(tokenizer, environments).prompt([{"role": "user", "content": "What?"}])
        fields = {**FIELDS, "text": "What?", "answer": "42", "record": record or {}}
        requests = [
            response_request(Sampling(10**6), 0, SampleId(0, 0, n), prompt, fields=fields) for n in range(count)
        ]
        return generate(engine, requests, deadline=60)


@pytest.fixture(scope="module")
def played():
    """The row of our own episode, and the schemas of its tools."""
    made = setup(tools=TOOLS)
    with contextlib.closing(made.environments()) as environments:
        schemas = environments.tools
    return run(made, iter(TURNS))[0], json.dumps(schemas)


@pytest.mark.parametrize("agent", ["plays", "plays_streaming"])
def test_an_agents_row_is_that_of_our_own_episode(played, monkeypatch, agent):
    row, schemas = played
    monkeypatch.setenv("SCHEMAS", schemas)
    (made,) = run(setup(f"{AGENTS}:{agent}"), iter(TURNS))
    for name in ("prompt", "tokens", "logps", "mask", "turns", "finish", "segments"):
        same = getattr(made, name) == getattr(row, name)
        assert same if isinstance(same, bool) else same.all(), name
    assert made.prompt[0] != made.tokens[0] and len(made.turns) == 3
    assert [m["content"] for m in told(made).conversation] == [m["content"] for m in told(row).conversation]


def test_a_function_that_is_no_coroutine_has_its_own_limits(tmp_path):
    (one, two) = run(setup(f"{AGENTS}:waits"), iter([sampled("qwen2_5", "Hello! you", 3)] * 2), count=2)
    assert told(one).rewards == told(two).rewards == [5.0], "the text behind the stop is not the agent's"


def test_a_history_that_differs_is_refused_with_the_place(tmp_path):
    (made,) = run(setup(f"{AGENTS}:edits"), iter(TURNS[2:]), {"out": str(tmp_path / "said")})
    said = (tmp_path / "said").read_text()
    assert "message 1 (assistant) has another content" in said and "message 0 (user) has another content" in said
    assert "the last message is the assistant's" in said and len(made.turns) == 1


REFUSED = [
    ({"temperature": 0.5}, "400 `temperature` is 0.5, and the job samples with 1.0"),
    ({"tool_choice": {"type": "function", "function": {"name": "a"}}}, "400 `tool_choice` is"),
    ({"response_format": {"type": "json_object"}}, "400 `response_format` is"),
    ({"logit_bias": {"7": 1}}, "400 `logit_bias` is"),
    ({"n": 2}, "400 `n` is 2"),
    ({"stop": ["x"] * 9}, "400 `stop` must be at most 4"),
    ({"chat_template": "{{ x }}"}, "400 `chat_template` is not supported"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "400 message 0 has a part of type 'image_url'",
    ),
    ({"messages": []}, "400 the body must be"),
    ({"messages": [{"role": "robot", "content": ""}]}, "400 message 0 has no role of"),
    ({"tools": [{"function": 1}]}, "400 a tool must be"),
    ({"max_tokens": 0}, "400 `max_tokens` is 0"),
]
STRANGE = [({"Authorization": "Bearer 0-guessed"}, {}, "401 this key opens no conversation")]


def test_requests_that_would_be_wrong_are_refused_and_the_rest_is_answered(tmp_path, capsys):
    requests = [({}, more) for more, _ in REFUSED] + [(headers, more) for headers, more, _ in STRANGE]
    requests.append(({}, {"tool_choice": "required", "temperature": 1, "user": "me", "top_p": None, "seed": 3}))
    out = tmp_path / "said"
    (made,) = run(setup(f"{AGENTS}:asks_for"), iter(TURNS[2:]), {"requests": requests, "out": str(out)})
    *refused, last = out.read_text().splitlines()
    expected = [text for _, text in REFUSED] + [STRANGE[0][2]]
    assert [line[: len(text)] for line, text in zip(refused, expected, strict=True)] == expected
    assert last == "200 ok" and told(made).rewards == [1.0]
    said = capsys.readouterr().out
    assert "'tool_choice' of agents' requests, \"required\", counts as" in said
    assert "'seed' of agents' requests is ignored" in said and "'user' of agents' requests is ignored" in said


def test_an_answer_that_reached_nobody_is_not_trained(tmp_path):
    class Slow(Scripted):
        def step_along(self, steps):
            time.sleep(0.5)
            return super().step_along(steps)

    turn = sampled("qwen2_5", "Hello", 2)
    made = setup(f"{AGENTS}:goes_away")
    tokenizer = make_tokenizer("qwen2_5", template("qwen2_5"))
    rows = []
    for stays in (0.1, 3):
        with contextlib.closing(made.environments()) as environments:
            engine = made.over(Slow(iter([turn, turn])), tokenizer, environments, Peers())
            fields = {**FIELDS, "text": "What?", "record": {"stays": stays}}
            request = response_request(Sampling(10**6), 0, SampleId(0, 0, 0), (1, 2), fields=fields)
            rows += generate(engine, [request], deadline=60)
    for row in rows:
        assert row.tokens == tuple(turn) and row.turns == ((0, len(turn)),) and told(row).rewards == [1.0]
        assert [m["role"] for m in told(row).conversation] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    "agent, why",
    [
        ("asks_nothing", "ended before it had a turn of the model"),
        ("raises", "raised OSError: out of order"),
        ("plays_nothing", "has no 'plays_nothing'"),
    ],
)
def test_agents_that_fail_say_why(agent, why):
    with pytest.raises(EpisodeError, match=why):
        run(setup(f"{AGENTS}:{agent}"), iter(TURNS))


def test_an_agent_that_hangs_is_ended_and_graded():
    (made,) = run(setup(f"{AGENTS}:hangs", environment_timeout=4.0), iter(TURNS[2:]))
    assert made.finish == "time" and len(made.turns) == 1 and told(made).rewards == [0.0]


COMMAND = f"{sys.executable} {AGENTS}"


def test_a_command_gets_a_row_and_a_place_of_its_own_and_gives_its_reward(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    out = tmp_path / "said"
    (made,) = run(setup(COMMAND), iter(TURNS[2:]), {"out": str(out)})
    said = json.loads(out.read_text())
    assert said["said"] == "It is 12." and told(made).rewards == [0.75]
    assert not os.path.exists(said["in"]) and "SECRET" not in said["env"] and "OPENAI_API_KEY" in said["env"]


def test_a_command_that_fails_eats_or_gives_no_reward(tmp_path):
    made, turns = setup(COMMAND), TURNS[2:]
    with pytest.raises(EpisodeError, match="exited with code 3; the end of its output:\nin "):
        run(made, iter(turns), {"out": str(tmp_path / "a"), "does": "fails"})
    with pytest.raises(EpisodeError, match="had .* GiB, the limit is --rl-agent-memory 0.5"):
        run(setup(COMMAND, agent_memory=0.5), iter(turns), {"out": str(tmp_path / "a"), "does": "eats"})


PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
MULTIPLIES = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'


@pytest.mark.parametrize(
    "file, agent, turns, results",
    [
        ("agent.py", "{}/agent.py:play", [MULTIPLIES, "42"], ["42"]),
        ("ask.py", sys.executable + " {}/ask.py", ["42"], []),
    ],
)
def test_the_agents_of_the_page_run_as_they_stand_there(tmp_path, file, agent, turns, results):
    (tmp_path / file).write_text(re.search(rf"<!-- my/{file} -->\n```python\n(.*?)```", PAGE, re.DOTALL)[1])
    (made,) = run(setup(agent.format(tmp_path)), iter([sampled("qwen2_5", turn, 2) for turn in turns]))
    assert [m["content"] for m in told(made).conversation if m["role"] == "tool"] == results
    assert sum(told(made).rewards) == 1.0
