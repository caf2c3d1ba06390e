"""EnvironmentPool: each fault costs its call, and the environments beside it are replayed."""

import os
import random
import re
import signal
import socket
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from commands import until
from pool_parts import FILE, FUNCTIONS, act, begin, below, call, contents, replies, sample, task, turn, unread

from mindspeed_rl_plugin.episodes.environment_pool import EnvironmentPool
from mindspeed_rl_plugin.episodes.environments import EpisodeError, MalformedCall, begin_once

LIMIT = " (--rl-environment-timeout)"
# What the model sees of a fault of a tool.
SEEN = {
    "raises": "error: ValueError: two lines!!!",
    "exits": "error: SystemExit: 3",
    "loops": "error: the tool ran longer than 0.5 s and was killed",
    "stuck in C": "error: the tool ran longer than 0.5 s and was killed",
    "hangs beside a session": "error: the tool ran longer than 0.5 s and was killed",
    "prints": "error: the tool ran longer than 0.5 s and was killed",
    "ends": "error: the tool ended its process, which exited with code 7",
    "segfault": "error: the tool ended its process, which died of signal 11 (SIGSEGV)",
    "child holds the pipe": "error: the tool ended its process, which exited with code 5",
    "pickle in the pipe": "error: the tool wrote into the pipe of its worker, which was killed",
    "bytes in the pipe": "error: the tool wrote into the pipe of its worker, which was killed",
    "gigabyte in the pipe": "error: the tool wrote into the pipe of its worker, which was killed",
    "leaves a session": "left",
    "both go on": "parent",
    "endless text": "x" * (1 << 18) + "\n[29737856 further characters are left out]",
    "half a pair": "a?b\x00",
    "no text": "[1, 2]",
}


def test_a_worker_that_takes_all_memory_is_ended_before_the_job_is(started) -> None:
    (worker,) = started()._pool.workers
    until(lambda: Path(f"/proc/{below(worker)}/oom_score_adj").read_text() == "1000\n")


WHY = {
    "raises": r"raised ValueError: substring not found\n(.*\n)*.*user_code.py.*",
    "endless": "returned calls of 2621\\d\\d characters; at most 262144 are read",
    "hangs": "ran longer than 0.5 s and was killed",
}


@pytest.mark.parametrize("kind", WHY)
def test_a_parser_that_goes_wrong_stops_the_run_with_its_reason(started, kind: str) -> None:
    pool = started(None, FUNCTIONS, parser=f"{FILE}:parser_that_goes_wrong")
    pool.begin(sample(0), task(), 7)
    pool.act(sample(0), unread(kind))
    with pytest.raises(EpisodeError) as raised:
        replies(pool)
    where = f"on the turn '{kind}' of rollout 0, prompt 0, response 0"
    told = rf"--rl-tool-parser {FILE}:parser_that_goes_wrong {WHY[kind]}(.*\n)*  {where}"
    assert re.fullmatch(told, str(raised.value)), raised.value


def test_a_fault_of_a_tool_costs_its_call(started) -> None:
    pool = started(None, FUNCTIONS, workers=2)
    for number, kind in enumerate(SEEN):
        pool.begin(sample(number), task(), 7)
        pool.act(sample(number), turn("", call("fault", kind=kind), call("multiply", a=number)))
    given = replies(pool)
    for number, (kind, seen) in enumerate(SEEN.items()):
        first, second = contents(given[number])
        assert first.startswith(seen) and len(first) <= max(len(seen), 210), f"{kind}: {first:.300}"
        assert "\n" not in first or kind == "endless text"
        assert second == str(2 * number), kind
        assert given[number].counts == {"calls": 2} | ({"raised": 1} if seen.startswith("error") else {})


def test_where_the_engines_process_ends_environments_close_themselves(started, tmp_path: Path) -> None:
    """Behind the call that is running, too, and nothing is left of what they have started."""
    pool, logs = started("Count", ["fault"]), [tmp_path / str(number) for number in range(2)]
    for number, log in enumerate(logs):
        pool.begin(sample(number), task(log=str(log)), 7)
    replies(pool)
    worker = pool._pool.workers[0]
    assert contents(act(pool, 0, "", call("fault", kind="leaves a session"))) == ["left"]
    pool.act(sample(1), turn("nap 0.3"))
    while worker.calls == {}:
        pool.poll(0.0)
    time.sleep(0.1)
    with socket.socket(fileno=os.dup(worker._connection.fileno())) as ours:  # as the kernel does it
        ours.shutdown(socket.SHUT_RDWR)
    worker.cut()
    worker._process.wait(10)
    assert [log.read_text().count("close") for log in logs] == [1, 1]


def test_of_coroutines_beside_each_other_each_has_its_own_limit_and_fault(started) -> None:
    """Who is cancelled, who holds the loop up, and whose process ends: the others are as if nothing had happened."""
    seen = {
        "loops": "error: the tool ran longer than 1 s and was killed",
        "ends": "error: the tool ended its process, which exited with code 7",
        "raises": "error: ValueError: two lines",
        "exits": "error: SystemExit: 3",
    }
    pool = started(None, ["wait", "block"], timeout=1.0)
    for number in range(9):
        pool.begin(sample(number), task(), 7)
        seconds = 100.0 if number == 4 else 0.3
        kinds = dict(zip((1, 3, 5, 7), seen, strict=True))
        made = call("block", kind=kinds[number]) if number in kinds else call("wait", seconds=seconds)
        pool.act(sample(number), turn("", made))
    given = {number: contents(reply)[0] for number, reply in replies(pool).items()}
    assert given[4] == "error: the tool ran longer than 1 s and was cancelled"
    assert all(given[number].startswith(seen[kind]) for number, kind in kinds.items())
    assert {given[number] for number in (0, 2, 6, 8)} == {"waited 0.3"}


def test_what_a_plain_function_gives_to_be_awaited_is_cancelled_at_the_limit(started) -> None:
    """Which costs no process: the environment beside it is as it was, without a replay."""
    pool = started("Count", ["wrapped"])
    begin(pool, (0, 1), log="/dev/null")
    pid = contents(act(pool, 1, "pid"))
    assert contents(act(pool, 0, "", call("wrapped", seconds=0.1))) == ["waited 0.1"]
    late = contents(act(pool, 0, "", call("wrapped", seconds=100.0)))
    assert late == ["error: the tool ran longer than 0.5 s and was cancelled"]
    assert contents(act(pool, 1, "pid")) == pid


# What is said of a method that is lost, and how often its environment was closed by then.
LOST = {
    "wait": ("ran longer than 0.5 s and was cancelled", 1),
    "hang": ("ran longer than 0.5 s and was killed", 1),
    "end": ("ended its process, which exited with code 7", 1),
}


def test_a_method_that_is_lost_costs_its_call_and_leaves_nothing_half_done(started, tmp_path: Path) -> None:
    """Its environment is made again as it was before the call, and the other one of its process too."""
    pool, logs = started("SlowShop"), [tmp_path / str(number) for number in range(2)]
    for number, log in enumerate(logs):
        pool.begin(sample(number), task(money=5, log=str(log)), 7)
    replies(pool)
    basket = []
    for name, (seen, closed) in LOST.items():
        reply = act(pool, 0, "", call(name), call("buy", item=name))
        basket.append(name)
        assert contents(reply) == [f"error: the tool {seen}", f"basket: {basket}"]
        assert reply.counts == {"calls": 2, "raised": 1} and reply.calls == {name: (1, 1), "buy": (1, 0)}
        assert reply.raised == {name: seen} and logs[0].read_text() == "closed with ['half']\n" * closed
        assert contents(act(pool, 1, "", call("buy", item=name))) == [f"basket: {basket}"]
    pool.finish(sample(0))
    assert replies(pool)[0].reward == 3.0
    pool.close()
    assert [log.read_text().count(f"{basket}") for log in logs] == [1, 1]


def test_a_coroutine_of_an_environment_that_runs_too_long(started) -> None:
    """As any other one; a time limit of its own is an error of its own."""
    pool = started("Slow")
    pool.begin(sample(0), task(), 7)
    assert replies(pool)[0].failure == f"failed: Slow.reset ran longer than 0.5 s and was cancelled{LIMIT}"
    pool.begin(sample(1), task(own=0.1), 7)
    assert replies(pool)[1].failure == "failed: Slow.reset ran out of time"


# What is said of a fault of an environment; None where it is none.
SAID = {
    "loops": "ran longer than 0.5 s and was killed",
    "ends": "ended its process, which exited with code 7",
    "raises": "raised ValueError: two\nlines!!!",
    "exits": "raised SystemExit: 3\n  ",
    "no text": "returned an observation of type list, not a text: [1, 2]; turn it into a text",
    "gigabyte in the pipe": "wrote into the pipe of its worker, which was killed",
    "both go on": None,
}


def test_a_fault_of_an_environment_is_its_own(started, tmp_path: Path) -> None:
    """The others of its process go on as if nothing had happened: they are replayed where it ended."""
    pool = started()
    for first, (kind, said) in enumerate(SAID.items()):
        numbers = one, two, three = range(3 * first, 3 * first + 3)
        logs = [tmp_path / str(number) for number in numbers]
        for number, log in zip(numbers, logs, strict=True):
            pool.begin(sample(number), task(log=str(log)), number)
        replies(pool)
        assert [act(pool, number, "one").reward for number in numbers] == [0.5] * 3
        for number, text in zip(numbers, ("two", kind, "two"), strict=True):
            pool.act(sample(number), turn(text))
        given = replies(pool)
        for number in (one, three):
            assert contents(given[number]) == [f"2 two {random.Random(number).random():.3f}"]
        if said is None:
            assert contents(given[two]) == ["parent"]
            continue
        assert given[two].failure.startswith(f"failed: Count.step {said}")
        killed = kind in ("loops", "ends", "gigabyte in the pipe")
        lives = [Counter(line.split()[0] for line in log.read_text().splitlines()) for log in logs]
        assert lives[2] == {"reset": 1 + killed} and lives[1] == ({"reset": 1} if killed else {"reset": 1, "close": 1})
        pool.finish(sample(three))
        assert replies(pool)[three].reward == 2 / 4
        pool.end(sample(two))  # without effect


def test_an_environment_that_differs_under_replay_fails(started) -> None:
    pool = started("Fickle")
    begin(pool, (0, 1, 2))
    act(pool, 0, "one")
    assert act(pool, 2, "ends").failure
    failure = act(pool, 0, "two").failure
    assert "Fickle.step cannot be called: its environment was lost, and gives other answers when its calls " in failure
    assert "step gave '1 one 0.324 in " in failure and ", but '1 one 0.324 in " in failure
    assert contents(act(pool, 1, "one")), "it has answered nothing that could differ"


def test_a_fault_in_replay_is_that_of_its_environment(started, tmp_path: Path) -> None:
    """What is slow only the second time."""
    pool = started()
    begin(pool, (0, 1))
    (worker,) = pool._pool.workers
    home = pool._opened[sample(0)]
    assert act(pool, 0, "one").reward == 0.5
    former, answer = home.asked[1]
    home.asked[1] = (replace(former, message=(*former.message[:2], "loops")), answer)
    os.kill(below(worker), signal.SIGKILL)
    answered = pool.answered
    failure = act(pool, 0, "two").failure
    assert pool.answered == answered + 2, "its reset, and the call that was lost"
    lost = "ran longer than 0.5 s and was killed when step was repeated to make the environment again"
    assert failure == f"failed: Count.step {lost}{LIMIT}"
    assert contents(act(pool, 1, "one"))[0].startswith("1 one")


def test_environments_are_shared_evenly(started) -> None:
    pool = started(workers=2)
    for number in range(4):
        begin(pool, [number])
    assert sorted(Counter(contents(act(pool, number, "pid"))[0] for number in range(4)).values()) == [2, 2]


def test_a_file_that_loads_only_once_stops_the_run_in_poll(started, tmp_path: Path) -> None:
    """Not in a call, from which the other ranks would not hear."""
    (tmp_path / "once.py").write_text(
        f"import os\nif os.path.exists('{tmp_path}/x'): raise OSError('gone')\nopen('{tmp_path}/x', 'w')\n"
        "class E:\n    def reset(self): ...\n    def step(self, text): os._exit(1)\n"
    )
    given = {"workers": 1, "timeout": 5, "wait_timeout": 60}
    with closing(EnvironmentPool([], f"{tmp_path}/once.py:E", **given)) as pool:
        begin(pool, (0, 1))
        assert act(pool, 0, "x").failure
        pool._pool.workers[0]._process.wait()
        pool.act(sample(1), turn("x"))
        with pytest.raises(EpisodeError, match=r"(?s)--rl-environment \S*once.py:E: it raised OSError: gone.*line 2"):
            replies(pool)
        pool.end(sample(0))


def test_a_reset_that_fails(started) -> None:
    pool = started("Count", workers=2)
    for number, kind in enumerate(("raises", "loops", "ends", "no text")):
        pool.begin(sample(number), task(reset=kind), 7)
    given = replies(pool)
    for number, said in enumerate(("raised ValueError", "ran longer", "ended its process", "returned an ob")):
        assert given[number].failure.startswith(f"failed: Count.reset {said}")
    assert begin_once(pool, task(reset="raises"), 1).startswith("failed: Count.reset raised ValueError: two")
    assert begin_once(pool, task(), 1) is None and not pool.pending


def test_replies_come_exactly_once(started) -> None:
    """Whatever is asked in whatever order, of two workers whose processes end now and then."""
    pool, rng = started(functions=["multiply", "fault"], workers=2, timeout=5.0), random.Random(3)
    due: set[int] = set()
    ready: set[int] = set()
    numbers = iter(range(1000))
    for _ in range(400):
        choice = rng.random()
        if choice < 0.2 and len(ready | due) < 12:
            due.add(number := next(numbers))
            pool.begin(sample(number), task(), number)
        elif choice < 0.7 and ready:
            ready.remove(number := rng.choice(sorted(ready)))
            due.add(number)
            step = rng.choice([*["go"] * 20, *["end", "raises", "finish"] * 2, *["tools", "no call"] * 5, "ends"])
            if step == "finish":
                pool.finish(sample(number))
            elif step == "no call":  # answered at once
                pool.act(sample(number), turn("", MalformedCall("no JSON")))
            else:
                some = [call("multiply", a=3), call("fault", kind="raises")]
                pool.act(sample(number), turn(step, *some[: rng.randint(1, 2)]) if step == "tools" else turn(step))
        elif choice < 0.75 and due | ready:
            number = rng.choice(sorted(due | ready))
            due.discard(number)
            ready.discard(number)
            pool.end(sample(number))
        else:
            for reply in pool.poll(rng.choice([0.0, 0.01])):
                due.remove(reply.id.member)
                if reply.failure is None and not reply.done:
                    ready.add(reply.id.member)
    assert {*replies(pool)} == due and not pool.pending and next(numbers) > 40
