"""EnvironmentPool: real processes that answer, overlap, close, and say what cannot be loaded."""

import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from commands import until
from pool_parts import FILE, FUNCTIONS, act, begin, call, contents, replies, sample, task, turn, unread

from mindspeed_rl_plugin.episodes.environment_pool import EnvironmentPool
from mindspeed_rl_plugin.episodes.environments import EpisodeError, MalformedCall, Reply
from mindspeed_rl_plugin.workers.process import wait_for


def test_functions_are_called_in_order_and_wrong_calls_are_one_line_each(started) -> None:
    pool = started(None, FUNCTIONS)
    assert not pool.begins and [tool["function"]["name"] for tool in pool.tools] == list(FUNCTIONS)
    pool.begin(sample(0), task(), 7)
    assert not pool.pending and pool.poll(5) == []
    reply = act(
        *(pool, 0, "", call("nap", seconds=0.2), call("multiply", a=6, b=7), MalformedCall("no JSON")),
        *(call("search"), call("multiply", a="6"), call("wait", seconds=0.1), call("fault", kind="nothing")),
    )
    assert [(message["role"], message["name"], message["content"]) for message in reply.messages] == [
        ("tool", "nap", "slept 0.2"),
        ("tool", "multiply", "42"),
        ("tool", "unknown", "error: no JSON"),
        ("tool", "search", "error: no such tool; there are: multiply, nap, wait, fault"),
        ("tool", "multiply", "error: wrong arguments; multiply takes a: integer, b: integer (optional)"),
        ("tool", "wait", "waited 0.1"),
        ("tool", "fault", "error: KeyError: 'nothing'"),
    ]
    assert reply.counts == {"calls": 4, "malformed": 1, "unknown": 1, "arguments": 1, "raised": 1}
    assert list(reply.raised) == ["fault"] and "return FAULTS[kind]()" in reply.raised["fault"]
    assert 0.3 <= reply.seconds < 20 and not reply.done and reply.reward == 0
    last = act(pool, 0, "the answer")
    assert last == Reply(sample(0), done=True)
    for number, attempts in enumerate(((), (MalformedCall("no JSON"),)), start=1):  # answered at once
        pool.begin(sample(number), task(), 7)
        pool.act(sample(number), turn("", *attempts))
        pool.end(sample(number))
        assert not pool.pending and pool.poll(0) == [], "what is given up has no reply"


def test_an_environment_answers_and_rewards(started) -> None:
    """Beside tools: a turn that calls some is no step."""
    pool = started(functions=["multiply"])
    assert pool.begins
    pool.begin(sample(0), task(log="/dev/null"), 7)
    pool.begin(sample(1), task(log="/dev/null"), (1 << 32) + 7)
    first = replies(pool)
    assert all(first[n].messages == [{"role": "user", "content": "the prompt 7"}] for n in (0, 1))
    start = f"{random.Random(7).random():.3f}"
    reply = act(pool, 0, "hello")
    assert (contents(reply), reply.reward, reply.done) == ([f"1 hello {start}"], 0.5, False)
    reply = act(pool, 0, "17 x 2?", call("multiply", a=17))
    assert (contents(reply), reply.reward, reply.counts) == (["34"], 0.0, {"calls": 1})
    reply = act(pool, 0, "end")
    assert (reply.reward, reply.done) == (0.5 + 2 / 4, True)
    reply = act(pool, 1, "late")
    assert (contents(reply), reply.reward, reply.done) == ([], 0.25 + 1 / 4, True)


def test_reset_can_name_the_run_and_the_episode(started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDSPEED_RL_RUN", "/runs/a")
    pool = started()
    begin(pool, (0, 3))
    assert contents(act(pool, 3, "names")) == ["/runs/a 0/0/3"]


def test_public_methods_are_tools_and_the_reward_comes_at_the_end(started) -> None:
    pool = started("Shop", ["multiply"])
    assert [tool["function"]["name"] for tool in pool.tools] == ["multiply", "buy", "fail"]
    for number in range(4):
        pool.begin(sample(number), task(money=5), 7)
    assert all(contents(reply) == ["You have 5."] for reply in replies(pool).values())
    for number in range(3):
        reply = act(pool, number, "", call("buy", item="tea"), call("multiply", a=1), call("buy", item="milk"))
        assert contents(reply) == ["basket: ['tea']", "2", "basket: ['tea', 'milk']"]
    reply = act(pool, 0, "", call("fail", kind="raises"), call("buy", item="rum"))
    assert contents(reply)[1].startswith("basket: ['tea', 'milk', 'rum']") and list(reply.raised) == ["fail"]
    reply = act(pool, 0, "done")
    assert reply.done and reply.reward == 3.0 and not reply.messages
    pool.finish(sample(1))
    assert replies(pool)[1].reward == 2.0


def test_the_reward_of_all(started) -> None:
    said = {
        0.5: None,
        True: None,
        "nan": "returned nan, not a finite number",
        "raises": "raised ValueError: two\nlines",
    }
    pool = started("Judge")
    for number, (give, message) in enumerate(said.items()):
        begin(pool, [number], give=give)
        assert contents(act(pool, number, "x")) == ["go on"]
        pool.finish(sample(number))
        reply = replies(pool)[number]
        if message is None:
            assert (reply.reward, reply.done, reply.failure) == (float(give), True, None)
        else:
            assert reply.failure.startswith(f"failed: Judge.get_reward {message}")


def test_episodes_overlap_and_waiting_takes_no_time_of_the_processor(started, tmp_path: Path) -> None:
    pool = started(workers=3)
    begin(pool, range(6))
    for number in range(2):
        pool.act(sample(number), turn(f"meet {tmp_path}"))
    assert pool.poll(0.0) == [] and pool.pending, "calls return before they are answered"
    assert len(contents(act(pool, 2, f"meet {tmp_path}"))) == 1, "it met the other two"
    worked = time.process_time()
    for number in range(6):
        pool.act(sample(number), turn("nap 0.4"))
    assert len(replies(pool)) == 6 and time.process_time() - worked < 0.2


def test_coroutines_of_a_process_are_awaited_together(started) -> None:
    """In one event loop, which a semaphore of the file is bound to; a call that has a loop of its own is made alone."""
    pool = started(None, ["wait", "limited", "runs"], timeout=20.0)
    for number in range(300):
        pool.begin(sample(number), task(), 7)
    began = time.monotonic()
    for number in range(256):
        pool.act(sample(number), turn("", call("wait", seconds=0.5)))
    assert {*replies(pool)} == {*range(256)}
    assert time.monotonic() - began < 20, "one after the other: 128 s"
    for number in range(6):
        attempts = [call("limited", seconds=0.2), call("runs" if number % 2 else "wait", seconds=0.1)]
        pool.act(sample(number), turn("", *attempts))
    assert [contents(reply) for reply in replies(pool).values()] == [["at most 2", "waited 0.1"]] * 6


def test_every_environment_is_closed(started, tmp_path: Path, capsys) -> None:
    """Over, failed, given up, in the middle of a call too, and at the end of all."""
    pool, logs = started(), [tmp_path / str(number) for number in range(7)]
    closed = lambda number: logs[number].read_text().count("close")  # noqa: E731
    for number in range(6):
        pool.begin(sample(number), task(log=str(logs[number])), 7)
    replies(pool)
    assert act(pool, 0, "end").done
    assert act(pool, 1, "raises").failure
    pool.end(sample(2))
    pool.act(sample(3), turn("nap 0.3"))
    pool.begin(sample(6), task(log=str(logs[6])), 7)
    pool.act(sample(4), turn("two"))
    asked = pool._opened[sample(3)].call
    while asked not in pool._pool.workers[0].calls.values():
        assert pool.poll(0.01) == []
    for number in (3, 6, 4):  # at work, not begun, and waiting for its turn
        pool.end(sample(number))
    assert not pool.pending, "no reply is due of what is given up"
    assert contents(act(pool, 5, "one"))
    assert [closed(number) for number in range(6)] == [1, 1, 1, 1, 1, 0] and not logs[6].exists()
    pool.close()
    assert closed(5) == 1
    with pytest.raises(EpisodeError, match="closed"):
        pool.poll(0)


def test_environments_that_end_together_are_closed_together(started, tmp_path: Path) -> None:
    """Whoever asks no more, since its rollout is over, leaves none of them open but for the first ones' time."""
    pool, logs = started(), [tmp_path / str(number) for number in range(8)]
    for number, log in enumerate(logs):
        pool.begin(sample(number), task(log=str(log)), 7)
    replies(pool)
    for number in range(8):
        pool.end(sample(number))
    (worker,) = pool._pool.workers
    wait_for([worker], time.monotonic() + 5)
    assert pool.poll(0) == [] and not worker.closing
    # Asked in one or several calls, none of which is read here.
    until(lambda: [log.read_text().count("close") for log in logs] == [1] * 8)


def test_one_that_does_not_close_is_told_once_and_one_that_hangs_is_killed(started, tmp_path: Path, capsys) -> None:
    pool = started("BadClose")
    begin(pool, (0, 1))
    for number in (0, 1):
        pool.finish(sample(number))
    assert len(replies(pool)) == 2
    while pool._pool.workers[0].calls or pool._pool.workers[0].closing:
        pool.poll(0.1)
    assert capsys.readouterr().out.count("warning: BadClose.close raised OSError: no such sandbox") == 1
    pool, logs = started("SlowClose", timeout=0.5), [tmp_path / str(number) for number in range(2)]
    for number in (0, 1):
        pool.begin(sample(number), task(log=str(logs[number])), 7)
    replies(pool)
    pool.close()
    assert sum(log.read_text().count("close") for log in logs) == 1


@pytest.mark.parametrize(
    ("functions", "environment", "message"),
    [
        (["/nowhere/f.py:g"], None, "--rl-tools '/nowhere/f.py:g': there is no file '/nowhere/f.py'"),
        (["multiply"], None, "--rl-tools 'multiply': give path/to/file.py:function"),
        ([FILE], None, "names no function: give .*py:NAME; it has multiply, say, "),
        ([], FILE, "--rl-environment .*names no class: give .*py:NAME; it has Count, "),
        ([], "gym:CartPole", "--rl-environment 'gym:CartPole': give path/to/file.py:class"),
        ([], f"{FILE}:Nowhere", "--rl-environment .* has no 'Nowhere'; it has .*Count"),
        ([f"{FILE}:multiply"], f"{FILE}:Same", "Same and --rl-tools both have multiply"),
    ],
)
def test_what_cannot_be_loaded_is_refused(functions, environment, message: str) -> None:
    with pytest.raises(EpisodeError, match=message):
        EnvironmentPool(functions, environment, workers=1, timeout=1, wait_timeout=60)


@pytest.mark.parametrize(
    ("parser", "message"),
    [
        (f"{FILE}:nowhere", f"{FILE}:nowhere: .*user_code.py has no 'nowhere'; it has "),
        (f"{FILE}:parser_that_raises", f"{FILE}:parser_that_raises raised IndexError: list index out of range\n"),
    ],
)
def test_a_parser_that_does_not_load_is_refused(parser: str, message: str) -> None:
    with pytest.raises(EpisodeError, match=f"^--rl-tool-parser {message}"):
        EnvironmentPool([f"{FILE}:multiply"], None, parser, workers=1, timeout=1, wait_timeout=60)


def test_a_users_parser_finds_the_calls(started) -> None:
    pool = started(None, ["multiply"], parser=f"{FILE}:lines")
    pool.begin(sample(0), task(), 7)
    pool.act(sample(0), unread("CALL multiply 3\nCALL multiply\nso\nCALL search 4"))
    reply = replies(pool)[0]
    assert contents(reply) == ["6", "error: the call cannot be read", "error: no such tool; there are: multiply"]
    assert reply.counts == {"calls": 1, "malformed": 1, "unknown": 1}
    pool.act(sample(0), unread("CALL multiply 3\nCALL multiply 4", most=1))
    assert contents(replies(pool)[0]) == ["error: at most 1 call in a turn"]
    pool.act(sample(0), unread("It is 6."))
    assert replace(replies(pool)[0], seconds=0.0) == Reply(sample(0), done=True)
    pool = started("Count", ["multiply"], parser=f"{FILE}:lines")
    begin(pool, [0], log="/dev/null")
    pool.act(sample(0), unread("hello<end>", said="hello"))
    assert contents(replies(pool)[0])[0].startswith("1 hello "), "a step, with the text that an environment sees"


def test_a_field_that_reset_needs_and_some_row_lacks_is_refused(started) -> None:
    pool = started("Asks")
    pool.check_fields({"a.jsonl line 1": frozenset({"level"})})
    with pytest.raises(EpisodeError, match=r"Asks: its reset has .* 'level', but a.jsonl line 2 .*Allowed: seed, "):
        pool.check_fields({"a.jsonl line 1": frozenset({"level"}), "a.jsonl line 2": frozenset()})


def test_workers_start_without_torch() -> None:
    module = "mindspeed_rl_plugin.episodes.environment_process"
    code = f"import sys, {module}; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
