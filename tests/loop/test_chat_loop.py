"""Whole jobs whose episodes are rendered by a chat template: tools, and environments of others: verifiers itself and a
server of OpenEnv's own package, installed apart."""

import contextlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from bytes_tokenizer import byte_tokenizer
from openenv_serving import serving
from test_replay_loop import recorded, replay  # noqa: F401 - a fixture
from test_routes_loop import REPLAY
from test_server_loop import serving as server_of

from mindspeed_rl_plugin.monitor.run_files import dump_files

EPISODES, TALK = Path(__file__).parents[1] / "episodes", Path(__file__).with_name("talk.py")
GATEWAY = Path(__file__).parents[1] / "gateway"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
VERIFIERS, OPENENV = "verifiers==0.4.0", "openenv==0.10.0"
LENGTHS = ("--rl-max-prompt-length", "160", "--rl-max-response-length", "200", "--rl-max-turn-length", "6")
# An untrained model ends a turn by every third byte.
STOPS = ("--rl-stop-token-ids", *map(str, range(0, 256, 3)), "--rl-max-turns", "3", "--rl-kv-cache-gb", "0.2")
COMMON = (*LENGTHS, *STOPS, "--rl-apply-chat-template", "--train-iters", "3", "--lr", "3e-3", "--rl-verify-weights")
ENVIRONMENT = ("--rl-reward", "environment", f"{TALK}:letters")
PROMPTS = "".join(json.dumps({"prompt": f"Say {i}", "answer": ""}) + "\n" for i in range(16))


@pytest.fixture
def chats(job, dense_model, tmp_path):
    """A job with data of its own."""

    def make(*flags: str, rows: str, model: str = dense_model, **more):
        model = model.replace("length 32", "length 360").replace("embeddings 32", "embeddings 360")
        made = job(*COMMON, *flags, model=model, **more)
        made.data = tmp_path / "data"
        byte_tokenizer(made.data / "tokenizer")
        (made.data / "prompts.jsonl").write_text(rows)
        return made.dumping()

    return make


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def chat(chats):
    """Runs such a job, whose engine and trainer agree. Returns its metrics and last conversations."""

    def run(*flags: str, rows: str, lags: bool = False):
        made = chats(*flags, rows=rows)
        result = made.run(600)
        result.check_log_probs() if lags else result.check_agreement(3)
        assert all(line["episode/turns_mean"] > 1.3 and line["episode/failed"] == 0 for line in result.metrics)
        rows = pq.read_table([*dump_files(made.save / "dump").values()][-1]).to_pylist()
        return result.metrics, [json.loads(row["conversation"]) for row in rows]

    return run


def test_tools(chat, nothing_left) -> None:
    """An untrained model calls one where the user's parser says so; what it returns is what the model sees."""
    tools = ("--rl-tools", f"{TALK}:shout", "--rl-tool-parser", f"{TALK}:calls", "--rl-reward", f"{TALK}:letters")
    lines, conversations = chat(*tools, rows=PROMPTS)
    assert all(line["tools/calls"] > 0.3 and line["tools/raised"] == 0 for line in lines)
    answered = [(c[i - 1], c[i]) for c in conversations for i in range(len(c)) if c[i]["role"] == "tool"]
    assert len(answered) > 3 and all(seen["content"] == said["content"].upper() for said, seen in answered)
    nothing_left()


AGENT = ("--rl-agent", f"{GATEWAY}/agents.py:talks", "--rl-environment-workers", "1", *ENVIRONMENT)
SCHEDULES = {
    "sync": (),
    "streamed, interrupted": ("--rl-schedule", "streamed", "--rl-carry-unfinished", "--rl-oversample", "2")
    + ("--rl-correction", "truncate", "--rl-max-staleness", "1"),
    "async": ("--rl-schedule", "async", "--rl-generators", "1", "--rl-correction", "truncate"),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_agents(chat, nothing_left, schedule) -> None:
    """They talk until a limit is reached; what they said is what the model saw."""
    lines, conversations = chat(*AGENT, *SCHEDULES[schedule], rows=PROMPTS, lags=schedule != "sync")
    assert all(line["episode/turn_limit"] > 0 for line in lines)
    said = [[m["content"] for m in c if m["role"] == "user"] for c in conversations]
    assert all(one[1:] == [f"[{i}]" for i in range(1, len(one))] for one in said) and max(map(len, said)) == 3
    assert len({sum(m.get("reward", 0.0) for m in c) for c in conversations}) > 1
    nothing_left()


LAYOUTS = {
    "packed": ("streamed, interrupted", ()),
    "trees": ("async", ("--rl-share-prompts",)),
    "trees, colocated": ("sync", ("--rl-share-prompts",)),
}


FORKS = (AGENT[0], AGENT[1].replace("talks", "forks"), *AGENT[2:], "--rl-max-turns", "9")
FORKS += ("--rl-max-tokens-per-microbatch", "1600", "--rl-pack-sequences")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_agents_that_fork(chat, nothing_left, layout) -> None:
    """Each token of each path has the log-prob with which the engine sampled it."""
    schedule, flags = LAYOUTS[layout]
    lines, conversations = chat(*FORKS, *SCHEDULES[schedule], *flags, rows=PROMPTS, lags=schedule != "sync")
    # "first" and its continuation, another, "d"; the edited one twice
    counts = [[line[f"episode/{name}"] for name in ("roots", "forks", "turns_mean")] for line in lines]
    assert counts == [[2, 3, 6]] * len(lines)
    assert all({m["path"] for m in c} == {0, 1, 2, 3, 4} for c in conversations)
    nothing_left()


@pytest.mark.parametrize("where", ["joined, experts", "on Ray", "a server"])
def test_agents_of_engines_elsewhere(request, chats, joined, monkeypatch, moe_model, tmp_path, nothing_left, where):
    apart = ("--rl-schedule", "async", "--rl-max-staleness", "0", "--rl-correction", "truncate")
    flags, guests, more = (*FORKS, *apart, "--rl-wait-timeout", "300"), [], {}
    if where == "on Ray":
        monkeypatch.setenv("RAY_ADDRESS", request.getfixturevalue("ray_cluster"))
        flags += ("--rl-generators", "ray:1,device=cpu")
    elif where == "a server":
        byte_tokenizer(tmp_path / "tokenizer")
        (tmp_path / "served").mkdir()
        server = contextlib.contextmanager(server_of)(tmp_path / "served", tmp_path / "tokenizer", 360)
        flags += ("--rl-engine-url", request.getfixturevalue("stack").enter_context(server).url)
    else:
        flags, more = (*flags, "--rl-generators", "0", *REPLAY), {"model": moe_model}
    running = chats(*flags, rows=PROMPTS, ranks=1, **more).start()
    if where == "joined, experts":
        guests.append(joined(running).join())
    result = running.wait(600)
    assert result.code == 0 and all(guest.wait(30) == 0 for guest in guests), result.log[-4000:]
    result.check_log_probs(3)
    assert all(line["episode/forks"] == 3 and line["segments/mean"] == 1 for line in result.metrics)
    if where == "joined, experts":  # routes stay with their tokens in each path
        assert all(line["router/differ"] < 1e-3 for line in result.metrics)
        nothing_left()  # elsewhere the cluster and the server go on


@pytest.mark.parametrize(("rank", "how"), [(None, "SIGTERM"), (0, "SIGKILL")])
def test_a_job_with_agents_that_is_killed_leaves_nothing_behind(chats, nothing_left, rank, how) -> None:
    command = ("--rl-agent", f"{sys.executable} {GATEWAY}/agents.py forever", "--rl-agent-processes", "2", *ENVIRONMENT)
    command += ("--rl-wait-timeout", "400", "--rl-environment-timeout", "200")
    flags = (*command, "--rl-schedule", "streamed", "--rl-carry-unfinished", "--rl-max-staleness", "1")
    made = chats(*flags, "--rl-correction", "truncate", "--train-iters", "50", rows=PROMPTS, cold=True)
    made.kill_after(1, "generate", rank=rank, how=getattr(signal, how))
    nothing_left()


def test_a_replay_of_an_agents_episodes_gives_the_recorded_numbers(chats, replay) -> None:  # noqa: F811
    flags = (*FORKS, "--rl-share-prompts", "--train-iters", "4", "--save-interval", "1")
    lines = replay(recorded(chats(*flags, rows=PROMPTS), 1), 3)
    assert re.fullmatch(r"(\d+) of \1 numbers are equal bit for bit", lines[2]), lines[2:5]


def test_over_verifiers(chat, apart, tmp_path, monkeypatch, nothing_left) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EPISODES / "verifiers_environments"))
    python, out = apart(VERIFIERS), tmp_path / "tasks.jsonl"
    command = [sys.executable, "-m", "mindspeed_rl_plugin", "tasks", "verifiers:guess_number", "--python", python]
    subprocess.run([*command, "--out", str(out)], check=True, timeout=120)
    who = ("--rl-environment", "verifiers:guess_number", "--rl-environment-python", python)
    limits = ("--rl-environment-workers", "1", "--rl-environment-timeout", "60")
    _, conversations = chat(*who, *limits, "--rl-reward", "environment", rows=out.read_text() * 4)
    rewards = {sum(message.get("reward", 0.0) for message in said) for said in conversations}
    assert len(rewards) > 1, "what is learned is verifiers' own reward"
    assert {"user", "assistant"} == {message["role"] for said in conversations for message in said}
    nothing_left()


def test_over_an_openenv_server(chat, apart, nothing_left) -> None:
    with serving(apart(OPENENV), "echo", sessions=64) as url:
        who = ("--rl-environment", f"openenv:{url}", "--rl-environment-workers", "2")
        _, conversations = chat(*who, *ENVIRONMENT, rows=PROMPTS)
    assert any(f"{turn} " in message["content"] for said in conversations for turn in "12" for message in said[1:])
    nothing_left()
