"""Agents with real clients over the gateway: their rows are those of our own episodes, and their faults cost no job."""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from commands import until
from engine_parts import FIELDS, told
from families import make_tokenizer, template
from pool_parts import alive
from test_trl_loop import Scripted, sampled

from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.config.algorithm_flags import AlgorithmConfig
from mindspeed_rl_plugin.config.episode_flags import EpisodeConfig
from mindspeed_rl_plugin.dock.peers import Peers
from mindspeed_rl_plugin.engine.rollout_engine import generate, response_request
from mindspeed_rl_plugin.episodes import setup as episode_setup
from mindspeed_rl_plugin.episodes.chat import ChatFormat
from mindspeed_rl_plugin.episodes.environments import EpisodeError, begin_once
from mindspeed_rl_plugin.episodes.setup import EpisodeSetup
from mindspeed_rl_plugin.gateway.agent_messages import JobSampling, RefusedRequest, TurnRequest
from mindspeed_rl_plugin.gateway.chat_api import read
from mindspeed_rl_plugin.gateway.conversation import MOST_COUNTED, Conversation
from mindspeed_rl_plugin.rows import SampleId, Sampling

AGENTS = Path(__file__).with_name("agents.py")
COMMAND = f"{sys.executable} {AGENTS}"
TOOLS = tuple(f"{Path(__file__).parents[1] / 'episodes' / 'user_code.py'}:{name}" for name in ("say", "repeat"))
CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"text": "{}"}}}}\n</tool_call>'
CALLS = [
    "I say.\n" + "\n".join(CALL.format(*call) for call in turn)
    for turn in ([("say", "a  b"), ("repeat", "<|im_end|>")], [("repeat", " é\\n")])
]
SAID = "It is 12."
TURNS = [sampled("qwen2_5", text, 3) for text in (*CALLS, SAID)]
LAST = TURNS[2:]


def setup(agent=None, tools=(), **more):
    flags = {"max_turns": 9, "environment_timeout": 60.0, "environment_workers": 1, "environment_lockstep": True}
    config = EpisodeConfig(agent=agent, tools=tools, **{**flags, **more})
    return EpisodeSetup(config, "chat", "", 10**6, 10**6, 200.0)


def played(made, environments, turns, record, count=1, engine=Scripted):
    """Episodes of one prompt, whose turns a script gives. Returns their completions."""
    tokenizer = make_tokenizer("qwen2_5", template("qwen2_5"))
    over = made.over(engine(iter(turns)), tokenizer, environments, Peers())
    prompt = made.format(tokenizer, environments).prompt([{"role": "user", "content": "What?"}])
    fields = {**FIELDS, "text": "What?", "answer": "42", "record": record}
    sampling, ids = Sampling(10**6), [SampleId(0, 0, member) for member in range(count)]
    requests = [response_request(sampling, 0, sample, prompt, fields=fields) for sample in ids]
    return generate(over, requests, deadline=120)


def run(made, turns, count=1, **record):
    with contextlib.closing(made.environments()) as environments:
        return played(made, environments, turns, record, count)


@pytest.fixture(scope="module")
def agent():
    """Runs episodes of an agent of the file, all in one process. Returns the first row."""
    made = dataclasses.replace(setup(f"{AGENTS}:agent"), rewarded=True)
    with contextlib.closing(made.environments()) as environments:

        def run(name, turns=LAST, engine=Scripted, count=1, **record):
            run.rows = played(made, environments, turns, {"agent": name, **record}, count, engine)
            return run.rows[0]

        run.environments = environments
        yield run


@pytest.fixture(scope="module")
def own():
    """The row of our own episode, and the schemas of its tools."""
    made = setup(tools=TOOLS)
    with contextlib.closing(made.environments()) as environments:
        return played(made, environments, TURNS, {})[0], environments.tools


@pytest.mark.parametrize("name", ["plays", "plays_streaming", "plays_messages", "plays_messages_streaming"])
def test_an_agents_row_is_that_of_our_own_episode(own, agent, name):
    row, tools = own
    if name.startswith("plays_messages"):  # whose tools have no field "return"
        tools = [{**t, "function": {k: v for k, v in t["function"].items() if k != "return"}} for t in tools]
        row = agent("plays", TURNS, tools=tools, reward=0.0)
    made = agent(name, TURNS, tools=tools, reward=0.0)
    for field in ("prompt", "tokens", "logps", "turns", "finish", "segments"):
        assert getattr(made, field) == getattr(row, field), field
    assert made.mask.equal(row.mask) and len(made.turns) == 3 and 0 < made.mask.sum() < len(made.tokens)
    assert [m["content"] for m in told(made).conversation] == [m["content"] for m in told(row).conversation]
    assert told(made).counts["calls"] == told(row).counts["calls"] == 3


def test_tools_that_the_model_cannot_see_are_refused_before_training(agent):
    record = {"agent": "plays", "tools": [{"type": "function", "function": {"name": "a", "parameters": {}}}]}
    see = setup("a").formats(make_tokenizer("llama3", template("llama3")))
    task = {**FIELDS, "record": record, "prompt": "What?", "answer": "", "messages": []}
    why = begin_once(agent.environments, task, 0, see)
    assert why.startswith("asks with tools that the model cannot see: --rl-tool-parser auto: the chat template")


def test_a_function_that_is_no_coroutine_its_limits_and_its_end(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # which is not asked for the gateway
    made, turn = setup(f"{AGENTS}:waits"), sampled("qwen2_5", "Hello! you", 3)
    with contextlib.closing(made.environments()) as environments:
        one, two = played(made, environments, [turn] * 2, {}, 2)
        assert told(one).rewards == told(two).rewards == [5.0], "the text behind the stop is not the agent's"
        with pytest.raises(EpisodeError, match="raised SystemExit: no key"):
            played(made, environments, [turn], {"does": "exits"})


def test_a_history_that_differs_is_a_path_of_its_own(agent, tmp_path):
    made = agent("edits", LAST * 3, out=str(tmp_path / "said"))
    assert "the last message is the assistant's" in (tmp_path / "said").read_text()
    counts, starts = told(made).counts, made.columns["paths"].row(0)[:, 0].tolist()
    assert (counts["roots"], counts["forks"], counts["differ_content"]) == (3, 0, 2) and len(starts) == 3
    assert len(made.turns) == 3 and sum(made.mask) == 3 * len(LAST[0])
    assert [m["role"][0] for m in told(made).conversation if m["path"] == 1] == ["u", "a", "u", "a"]
    assert [("turn" in m) for m in told(made).conversation if m["path"] == 1] == [False, False, False, True]


NO_CALL = "400 message 0 has a tool call that is no"
IMAGE = [{"role": "user", "content": [{"type": "image_url"}]}]
REFUSED = [
    ({"temperature": 0.5}, "400 `temperature` is 0.5, and the job samples with 1.0"),
    ({"tool_choice": {"type": "function", "function": {"name": "a"}}}, "400 `tool_choice` is"),
    ({"response_format": {"type": "json_object"}}, "400 `response_format` is"),
    ({"logit_bias": {"7": 1}}, "400 `logit_bias` is"),
    ({"n": 17}, "400 `n` is 17"),
    ({"stop": ["x"] * 9}, "400 `stop` must be at most 4"),
    ({"chat_template": "{{ x }}"}, "400 `chat_template` is not supported"),
    ({"messages": IMAGE}, "400 message 0 has a part of type 'image_url'"),
    ({"messages": []}, "400 the body must be"),
    ({"messages": [{"role": "robot", "content": ""}]}, "400 message 0 has no role of"),
    ({"tools": [{"function": 1}]}, "400 a tool must be"),
    ({"max_tokens": 0}, "400 `max_tokens` is 0"),
    ({"max_tokens": True}, "400 `max_tokens` is True"),
    ({"messages": [{"role": ["user"]}]}, "400 message 0 has no role of"),
    ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "400 message 0 has `tool_calls` that are no list"),
    *(
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": text}}]}]}, NO_CALL)
        for text in ('{"a": NaN}', '{"a": 1e999}', '{"a": ' + "[" * 900 + "]" * 900 + "}", "[" * 10**5)
    ),
]
GUESSED = {"Authorization": "Bearer 0-guessed"}


def test_requests_that_would_be_wrong_are_refused_and_the_rest_is_answered(agent, tmp_path, capsys):
    requests = [({}, more) for more, _ in REFUSED] + [(GUESSED, {}), ({"X-Api-Key": "1-", "Authorization": ""}, {})]
    requests.append(({}, {"tool_choice": "required", "temperature": 1, "user": "me", "top_p": None, "seed": 3}))
    requests.append(({}, {f"field {number}": 0 for number in range(300)}))
    out = tmp_path / "said"
    made = agent("asks_for", LAST * 2, requests=requests, out=str(out))
    *refused, last, _ = out.read_text().splitlines()
    expected = [text for _, text in REFUSED] + ["401 this key opens no conversation"] * 2
    assert [line[: len(text)] for line, text in zip(refused, expected, strict=True)] == expected
    assert last == "200 ok" and told(made).rewards == [0.0, 1.0]
    said = capsys.readouterr().out
    assert "'tool_choice' of agents' requests, \"required\", counts as" in said
    assert said.count("of agents' requests") <= 101 and said.count("there are no further lines about it") == 1
    assert said.count("'seed' of agents' requests is ignored") == said.count("'user' of agents' requests") == 1


def test_what_is_no_request_costs_nothing(agent, tmp_path):
    with pytest.raises(EpisodeError, match="ended before it had a turn"):
        agent("floods", out=str(tmp_path / "said"))
    long, deep, deeper, no, infinite, path, models, host = (tmp_path / "said").read_text().splitlines()
    assert long.startswith("413 the body is longer than 33554432 bytes") and "more than 64 deep" in deep
    assert (
        all("400 the body is no JSON" in line for line in (deeper, no, infinite)) and "404" in path and "no GET" in path
    )
    assert models.startswith("200") and '"policy"' in models and host == "400 Invalid host header"


class Slow(Scripted):
    """Takes longer than an agent has patience."""

    def step_along(self, steps):
        time.sleep(0.5)
        return super().step_along(steps)


@pytest.mark.parametrize(("stays", "stream"), [(0.1, False), (1.5, False), (1.5, True)])
def test_an_answer_that_reached_nobody_is_not_trained(agent, stays, stream):
    turn = sampled("qwen2_5", "Hello", 2)
    row = agent("goes_away", [turn, turn], engine=Slow, stays=stays, stream=stream)
    assert row.tokens == tuple(turn) and row.turns == ((0, len(turn)),) and told(row).rewards == [1.0]
    assert [m["role"] for m in told(row).conversation] == ["user", "assistant"]


def test_an_agent_that_heard_no_turn_has_no_row(agent):
    with pytest.raises(EpisodeError, match="ended before it had a turn"):
        agent("hears_nothing", engine=Slow)


def test_a_turn_that_is_not_sampled_yet_takes_no_heard_turn_back():
    async def ask():
        conversation, request = Conversation(0, lambda _: None), TurnRequest(({"role": "user", "content": ""},))
        first = await conversation.ask(request, b"1", False)
        conversation.speak(0, "one", (), (1, 1, False))
        heard = [conversation.heard]
        first.heard = True
        held = ({"role": "assistant", "content": "one"}, {"role": "user", "content": ""})
        await conversation.ask(TurnRequest((*request.messages, *held)), b"2", False)
        heard.append(conversation.heard)
        conversation.speak(1, "two", (), (1, 1, False))
        return [*heard, conversation.heard]

    assert asyncio.run(ask()) == [[], [0], [0]]


def test_equal_requests_that_come_again_join_different_ones():
    async def ask():
        conversation, request = Conversation(0, lambda _: None), TurnRequest(({"role": "user", "content": ""},))
        left = set()

        async def begun(client, again=False):
            async def gone():
                return client in left

            call = await conversation.ask(request, b"1", again)
            call.gone = gone
            return call.calls

        first = [await begun(n) for n in range(3)]
        left.update(range(3))
        return first, [await begun(n + 3, again=True) for n in range(3)]

    first, joined = asyncio.run(ask())
    assert sorted(joined) == first == [(0,), (1,), (2,)]


def test_an_agent_that_only_counts_comes_to_an_end():
    async def count():
        conversation, request = Conversation(0, lambda _: None), TurnRequest(({"role": "user", "content": ""},))
        for number in range(MOST_COUNTED):
            counting = asyncio.ensure_future(conversation.count(request))
            await asyncio.sleep(0)
            conversation.counted(number, 7)
            assert await counting == 7
        with pytest.raises(RefusedRequest, match=f"may count tokens {MOST_COUNTED} times"):
            await conversation.count(request)

    asyncio.run(count())


def test_an_agent_that_forks_a_thousand_times_has_the_turns_that_it_may_have(agent):
    made = agent("forks_often", LAST * 9)
    assert len(made.turns) == 9 and sum(made.mask) == 9 * len(LAST[0]) and made.finish == "turns"
    assert sum(told(made).rewards) == told(made).counts["roots"] == 9


def test_an_agent_that_lies_about_its_key_gets_no_turn_of_another(agent):
    agent("lies", LAST * 2, count=2)
    one, two = agent.rows
    assert one.tokens == two.tokens == tuple(LAST[0]) and told(one).rewards == told(two).rewards == [1.0]


def test_messages_that_the_template_cannot_write_fail_one_episode(monkeypatch, capsys):
    def written(*_):
        raise TypeError("no")

    monkeypatch.setattr(ChatFormat, "written", written)
    (made,) = run(setup(f"{AGENTS}:waits", environment_on_error="zero"), LAST)
    assert made.columns["environment_failed"].item() == 1
    assert "these messages cannot become tokens: the chat template raised TypeError: no" in capsys.readouterr().out


def test_stop_texts_that_would_not_be_found_are_refused():
    body, config = (
        {"messages": [{"role": "user", "content": ""}], "stop": "x"},
        RLConfig(algorithm=AlgorithmConfig("grpo")),
    )
    schedule = dataclasses.replace(config.schedule, schedule="streamed", carry_unfinished=True)
    agent = dataclasses.replace(config.episodes, agent="true")
    split = EpisodeSetup.of(dataclasses.replace(config, episodes=agent, schedule=schedule), "").no_stops
    assert read(body, JobSampling(1.0, 1.0, 0, False, "")).stop == ("x",)
    with pytest.raises(RefusedRequest, match="`stop` is not supported with --rl-carry-unfinished"):
        read(body, JobSampling(1.0, 1.0, 0, False, split))


def test_the_files_of_a_command_have_absolute_paths_and_links_stay(tmp_path, monkeypatch):
    (tmp_path / "python").symlink_to(sys.executable)  # by a link Python finds a virtual environment
    monkeypatch.chdir(tmp_path)
    config, script = RLConfig(algorithm=AlgorithmConfig("grpo")), "x" * 5000  # longer than a file's name may be
    agent = dataclasses.replace(config.episodes, agent=f"./python -c {script}")
    made = EpisodeSetup.of(dataclasses.replace(config, episodes=agent), "")
    assert made.flags.agent == f"{tmp_path}/python -c {script}"


@pytest.mark.parametrize("host", ["203.0.113.1", "0.0.0.0"])
def test_the_gateway_says_why_it_cannot_listen(monkeypatch, host):
    monkeypatch.setattr(episode_setup, "own_address", lambda: "203.0.113.1")  # of each machine
    with pytest.raises(EpisodeError, match="--rl-agent-host 203.0.113.1, which must be .* address"):
        run(setup(f"{AGENTS}:waits", agent_host=host), LAST)


FAILURES = {
    "asks_nothing": "ended before it had a turn of the model",
    "gives_no_number": "float.. argument must be",
    "raises": "raised OSError: out of order",
    "leaves": "raised SystemExit: no key",
    "dies": "was in an agents' process whose code ended its process, which exited with code 3",
    "plays": "gave no reward",
}


@pytest.mark.parametrize("name", FAILURES)
def test_agents_that_fail_say_why(agent, name):
    with pytest.raises(EpisodeError, match=FAILURES[name]):
        agent(name, tools=[])


def test_an_agent_that_hangs_is_ended_and_graded():
    (made,) = run(setup(f"{AGENTS}:hangs", environment_timeout=6.0), LAST)
    assert made.finish == "time" and len(made.turns) == 1 and told(made).rewards == [0.0]


def test_a_command_gets_a_row_and_a_place_of_its_own_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    monkeypatch.setenv("LC_ALL", mark := f"C.{uuid.uuid4().hex}")
    out = tmp_path / "said"
    made = setup(COMMAND)
    with contextlib.closing(made.environments()) as environments:
        (row,) = played(made, environments, LAST, {"out": str(out)})
        said = json.loads(out.read_text())
        assert said["said"] == SAID and told(row).rewards == [0.75] and row.finish == "stop"
        assert not os.path.exists(said["in"]) and "SECRET" not in said["env"] and "OPENAI_API_KEY" in said["env"]
        with pytest.raises(EpisodeError, match="exited with code 3; the end of its output:\nin "):
            played(made, environments, LAST, {"out": str(out), "does": "fails"})
        with pytest.raises(EpisodeError, match="was in an agents' process whose code ended its process"):
            played(made, environments, LAST, {"out": str(out), "does": "kills"})
    until(lambda: not alive(mark) and not os.path.exists(json.loads(out.read_text())["in"]))


@pytest.mark.slow
def test_a_command_that_eats_memory_is_killed(tmp_path):
    with pytest.raises(EpisodeError, match="had .* GiB with its children; the limit is --rl-agent-memory 0.5"):
        run(setup(COMMAND, agent_memory=0.5), LAST, out=str(tmp_path / "said"), does="eats")


def test_the_worker_of_the_page_runs_as_it_stands_there(tmp_path):
    (tmp_path / "worker.py").write_text(shown("worker.py"))

    def play(client, url):
        (file,) = tmp_path.glob("agents-*.json")
        return subprocess.Popen([sys.executable, tmp_path / "worker.py", file], stderr=subprocess.DEVNULL)

    (made,), worker = external(tmp_path, play, [sampled("qwen2_5", "42", 2)])
    assert told(made).rewards == [1.0] and worker.wait(30) == 0, "it hears that the job has ended"


def external(tmp_path, play, turns, count=1, **more):
    """Episodes that `play(client, base_url)` ends, a program that the job did not start; what it returns."""
    made = setup("external", **{"environment_lockstep": False, **more})
    made = dataclasses.replace(made, run=str(tmp_path), rewarded=True)

    def program():
        while not (files := [*tmp_path.glob("agents-*.json")]):
            time.sleep(0.1)
        until(lambda: files[0].read_text())
        where = json.loads(files[0].read_text())
        assert files[0].stat().st_mode & 0o777 == 0o600
        with httpx.Client(timeout=60, headers={"Authorization": f"Bearer {where['secret']}"}) as client:
            return play(client, where["url"])

    with ThreadPoolExecutor() as pool, contextlib.closing(made.environments()) as environments:
        said = pool.submit(program)
        rows = played(made, environments, turns, {"name": "row"}, count)
        result = said.result(timeout=60)
    assert not [*tmp_path.glob("agents-*.json")]
    return rows, result


def asked(episode, text="What?"):
    client = openai.OpenAI(base_url=episode["base_url"], api_key=episode["api_key"], max_retries=0)
    return client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])


def test_programs_that_the_job_did_not_start_take_episodes_and_end_them(tmp_path):
    def play(client, url):
        said = [client.post(f"{url}/episodes", headers={"Authorization": "Bearer guessed"}).status_code]
        one, two = (client.post(f"{url}/episodes").json() for _ in range(2))
        key = {"Authorization": f"Bearer {one['api_key']}"}
        end = f"{url}/episodes/{one['id']}/end"
        said += [client.post(end, headers=key, json={"reward": 9}).status_code]  # an agent does not grade itself
        said += [client.post(f"{url}/v1/chat/completions", json={"messages": []}).status_code]  # nor the secret ask
        said += [client.post(f"{url}/episodes/99/end").status_code]
        first, second = asked(one), asked(one, "Again?")
        other = asked(two).id  # the same turn of the same conversation, of another episode
        for body in ({"reward": "much"}, {"reward": True}, {"rewards": {other: 1}}, {"other": 1}, [], {}):
            said += [client.post(end, json=body).status_code]
        ended = client.post(end, json={"rewards": {first.id: 0.25, second.id: 0.5}})
        said += [ended.status_code, ended.json()["heard"], client.post(end, json={"reward": 1}).status_code]
        said += [client.post(f"{url}/episodes/{two['id']}/end", json={"reward": 2.0}).status_code]
        return said, one["row"]

    rows, (said, row) = external(tmp_path, play, LAST * 3, count=2)
    assert said == [401, 401, 401, 404, *[400] * 6, 200, 2, 404, 200] and row["name"] == "row"
    assert sorted(told(made).rewards for made in rows) == [[0.25, 0.5], [2.0]]


def test_an_external_program_that_fails_says_why_and_one_that_goes_is_late(tmp_path):
    def play(client, url):
        one, two, three = (client.post(f"{url}/episodes").json() for _ in range(3))
        asked(two)
        client.post(f"{url}/episodes/{one['id']}/end", json={"failure": "no more"})
        again = client.post(f"{url}/episodes").json()  # the one that nobody played is offered again
        asked(again)
        assert again["api_key"] != three["api_key"]
        client.post(f"{url}/episodes/{again['id']}/end", json={"reward": 1.0})

    rows, _ = external(tmp_path, play, LAST * 3, 3, environment_timeout=2.0, environment_on_error="zero")
    assert sorted(made.finish for made in rows) == ["stop", "stop", "time"]
    assert [bool(made.columns["environment_failed"].item()) for made in rows].count(True) == 1


def test_a_job_whose_episodes_nobody_takes_says_so(tmp_path):
    made = dataclasses.replace(setup("external"), run=str(tmp_path), wait=30.0)
    with contextlib.closing(made.environments()) as environments:
        until(lambda: [*tmp_path.glob("agents-*.json")] or environments.poll(0.1))
        environments._most = 1.0
        with pytest.raises(EpisodeError, match="no program has taken one of 1 episodes for 1 s"):
            played(made, environments, LAST, {})


PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
MULTIPLIES = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
SHOWN = {
    "agent.py": ("{}/agent.py:play", [MULTIPLIES, "42"], ["42"]),
    "ask.py": (sys.executable + " {}/ask.py", ["42"], []),
}


def shown(file):
    return re.search(rf"<!-- my/{file} -->\n```python\n(.*?)```", PAGE, re.DOTALL)[1]


@pytest.mark.parametrize("file", SHOWN)
def test_the_agents_of_the_page_run_as_they_stand_there(tmp_path, file):
    who, turns, results = SHOWN[file]
    (tmp_path / file).write_text(shown(file))
    (made,) = run(setup(who.format(tmp_path)), [sampled("qwen2_5", turn, 2) for turn in turns])
    assert [m["content"] for m in told(made).conversation if m["role"] == "tool"] == results
    assert sum(told(made).rewards) == 1.0
