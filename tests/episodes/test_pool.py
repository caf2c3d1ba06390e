"""EnvironmentPool: real processes, each fault costs its call, environments are replayed, and nothing stays behind."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from mindspeed_rl_plugin.episodes.dispatch import RESTARTS
from mindspeed_rl_plugin.episodes.pool import EnvironmentPool
from mindspeed_rl_plugin.episodes.protocol import EpisodeError, MalformedCall, Reply, ToolCall, Turn, begin_once
from mindspeed_rl_plugin.episodes.tools import load_environment, load_tool
from mindspeed_rl_plugin.episodes.worker import Desk
from mindspeed_rl_plugin.rows import SampleId
from mindspeed_rl_plugin.workers.process import Worker

FILE = str(Path(__file__).with_name("user_code.py"))
FUNCTIONS = ("multiply", "nap", "wait", "fault")
LIMIT = 0.5  # seconds of a call
# What the model sees of a fault of a tool.
SEEN = {
    "raises": "error: ValueError: two lines!!!",
    "exits": "error: SystemExit: 3",
    "loops": "error: the tool ran longer than 0.5 s and was killed",
    "stuck in C": "error: the tool ran longer than 0.5 s and was killed",
    "hangs beside a child": "error: the tool ran longer than 0.5 s and was killed",
    "prints": "error: the tool ran longer than 0.5 s and was killed",
    "ends": "error: the tool ended its process, which exited with code 7",
    "segfault": "error: the tool ended its process, which died of signal 11 (SIGSEGV)",
    "killed": "error: the tool ended its process, which died of signal 9 (SIGKILL)",
    "child holds the pipe": "error: the tool ended its process, which exited with code 5",
    "pickle in the pipe": "error: the tool wrote into the pipe of its worker, which was killed",
    "bytes in the pipe": "error: the tool wrote into the pipe of its worker, which was killed",
    "gigabyte in the pipe": "error: the tool wrote into the pipe of its worker, which was killed",
    "leaves a child": "left",
    "both go on": "parent",
    "endless text": "x" * (1 << 18) + "\n[29737856 further characters are left out]",
    "half a pair": "a?b\x00",
    "no text": "[1, 2]",
}


def schemas(pool: EnvironmentPool) -> list:
    """As another process makes them, which has to import transformers first."""
    sources = pool._sources
    environment = pool._environment and load_environment(FILE, pool._environment.name)
    return Desk({s.name: load_tool(s.file, s.name) for s in sources}, environment, 1.0).schemas()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch):
    """Starts pools, and closes them; then nothing is left of their process groups."""
    monkeypatch.setattr(EnvironmentPool, "_describe", schemas)
    groups, start, pools = set(), Worker._start, []

    def noted(worker: Worker) -> None:
        start(worker)
        groups.add(worker.pid)

    def begin(environment: str | None = "Count", functions=(), **options) -> EnvironmentPool:
        paths = [f"{FILE}:{name}" for name in functions]
        given = {"workers": 1, "timeout": LIMIT, "wait_timeout": 60.0} | options
        pools.append(EnvironmentPool(paths, environment and f"{FILE}:{environment}", **given))
        return pools[-1]

    monkeypatch.setattr(Worker, "_start", noted)
    yield begin
    for pool in pools:
        pool.close()
    end = time.monotonic() + 10
    while (left := alive(groups)) and time.monotonic() < end:
        time.sleep(0.02)
    assert groups and not left


def alive(groups: set[int]) -> set[int]:
    """Processes of these groups, or those that the kernel has yet to remove."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) in groups and state != "Z":
            found.add(int(stat.parent.name))
    return found


def sample(number: int) -> SampleId:
    return SampleId(0, 0, number)


def task(**record) -> dict:
    return {"prompt": "the prompt", "answer": "a", "record": record, "messages": None}


def turn(text: str, *attempts) -> Turn:
    return Turn((1,), (0.0,), text, attempts)


def call(name: str, **arguments) -> ToolCall:
    return ToolCall(name, arguments)


def replies(pool: EnvironmentPool) -> dict[int, Reply]:
    """All that are due, by the number of the episode."""
    given: list[Reply] = []
    while pool.pending:
        given += pool.poll(5)
    assert len({reply.id for reply in given}) == len(given)
    return {reply.id.member: reply for reply in given}


def contents(reply: Reply) -> list[str]:
    assert reply.failure is None, reply.failure
    return [message["content"] for message in reply.messages]


def act(pool: EnvironmentPool, number: int, text: str, *attempts) -> Reply:
    pool.act(sample(number), turn(text, *attempts))
    return replies(pool)[number]


def begin(pool: EnvironmentPool, numbers, **record) -> None:
    for number in numbers:
        pool.begin(sample(number), task(**record), 7)
    assert all(reply.failure is None for reply in replies(pool).values())


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
    assert 0.3 <= reply.seconds < 1 and not reply.done and reply.reward == 0
    last = act(pool, 0, "the answer")
    assert last == Reply(sample(0), done=True)
    for number, attempts in enumerate(((), (MalformedCall("no JSON"),)), start=1):  # answered at once
        pool.begin(sample(number), task(), 7)
        pool.act(sample(number), turn("", *attempts))
        pool.end(sample(number))
        assert not pool.pending and pool.poll(0) == [], "what is given up has no reply"


def test_a_worker_that_takes_all_memory_is_ended_before_the_job_is(started) -> None:
    (slot,) = started()._dispatcher._slots
    end = time.monotonic() + 5
    while (score := Path(f"/proc/{slot.pid}/oom_score_adj").read_text()) != "1000\n" and time.monotonic() < end:
        time.sleep(0.01)
    assert score == "1000\n"


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


def test_an_asynchronous_call_that_is_too_slow_costs_no_process(started) -> None:
    pool = started(None, ("wait",))
    pids = [slot.worker.pid for slot in pool._dispatcher._slots]
    pool.begin(sample(0), task(), 7)
    assert contents(act(pool, 0, "", call("wait", seconds=100.0))) == ["error: TimeoutError"]
    assert pids == [slot.worker.pid for slot in pool._dispatcher._slots]


def test_an_environment_answers_and_rewards(started) -> None:
    """Beside tools: a turn that calls some is no step."""
    pool = started(functions=["multiply"])
    assert pool.begins
    pool.begin(sample(0), task(log="/dev/null"), 7)
    pool.begin(sample(1), task(log="/dev/null"), (1 << 32) + 7)
    first = replies(pool)
    assert all(first[n].messages == ({"role": "user", "content": "the prompt 7"},) for n in (0, 1))
    start = f"{random.Random(7).random():.3f}"
    reply = act(pool, 0, "hello")
    assert (contents(reply), reply.reward, reply.done) == ([f"1 hello {start}"], 0.5, False)
    reply = act(pool, 0, "17 x 2?", call("multiply", a=17))
    assert (contents(reply), reply.reward, reply.counts) == (["34"], 0.0, {"calls": 1})
    reply = act(pool, 0, "end")
    assert (reply.reward, reply.done) == (0.5 + 2 / 4, True)
    reply = act(pool, 1, "late")
    assert (contents(reply), reply.reward, reply.done) == ([], 0.25 + 1 / 4, True)


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
    reply = act(pool, 2, "", call("fail", kind="ends"), call("buy", item="rum"))
    assert reply.failure == "failed: Shop.fail ended its process, which exited with code 7"


@pytest.mark.parametrize("kind", ["loops", "ends", "raises", "exits", "no text", "gigabyte in the pipe", "both go on"])
def test_a_fault_of_an_environment_is_its_own(started, tmp_path: Path, kind: str) -> None:
    """The others of its process go on as if nothing had happened: they are replayed where it ended."""
    pool, logs = started(), [tmp_path / str(number) for number in range(3)]
    for number, log in enumerate(logs):
        pool.begin(sample(number), task(log=str(log)), number)
    replies(pool)
    assert [act(pool, n, "one").reward for n in (0, 1, 2)] == [0.5] * 3
    for number, text in enumerate(("two", kind, "two")):
        pool.act(sample(number), turn(text))
    given = replies(pool)
    for number in (0, 2):
        assert contents(given[number]) == [f"2 two {random.Random(number).random():.3f}"]
    if kind == "both go on":
        assert contents(given[1]) == ["parent"]
        return
    message = {
        "loops": "ran longer than 0.5 s and was killed",
        "ends": "ended its process, which exited with code 7",
        "raises": "raised ValueError: two\nlines!!!",
        "exits": "raised SystemExit: 3\n  ",
        "no text": "returned an observation of type list, not a text: [1, 2]; turn it into a text",
        "gigabyte in the pipe": "wrote into the pipe of its worker, which was killed",
    }[kind]
    assert given[1].failure.startswith(f"failed: Count.step {message}")
    killed = kind in ("loops", "ends", "gigabyte in the pipe")
    lives = [Counter(line.split()[0] for line in log.read_text().splitlines()) for log in logs]
    assert lives[2] == {"reset": 1 + killed} and lives[1] == ({"reset": 1} if killed else {"reset": 1, "close": 1})
    pool.finish(sample(2))
    assert replies(pool)[2].reward == 2 / 4
    pool.end(sample(1))  # without effect


def test_an_environment_that_differs_under_replay_fails(started) -> None:
    pool = started("Fickle")
    begin(pool, (0, 1, 2))
    act(pool, 0, "one")
    assert act(pool, 2, "ends").failure
    failure = act(pool, 0, "two").failure
    assert "Fickle.step cannot be made: its environment is not deterministic under replay" in failure
    assert "step gave '1 one 0.324 in " in failure and ", not '1 one 0.324 in " in failure
    assert contents(act(pool, 1, "one")), "it has answered nothing that could differ"


def test_a_fault_in_replay_is_that_of_its_environment(started, tmp_path: Path) -> None:
    """What is slow only the second time."""
    pool = started()
    begin(pool, (0, 1))
    (slot,) = pool._dispatcher._slots
    home = pool._live[sample(0)].home
    assert act(pool, 0, "one").reward == 0.5
    message, answer = home.asked[1]
    home.asked[1] = ((*message[:2], "loops"), answer)
    os.kill(slot.pid, signal.SIGKILL)
    failure = act(pool, 0, "two").failure
    assert failure == "failed: Count.step ran longer than 0.5 s and was killed when it was replayed"
    assert contents(act(pool, 1, "one"))[0].startswith("1 one")


def test_a_process_that_is_killed_while_idle_costs_nothing(started) -> None:
    pool = started(workers=2)
    for number in range(4):
        begin(pool, [number])
    first = [contents(act(pool, number, "pid"))[0] for number in range(4)]
    assert sorted(Counter(first).values()) == [2, 2], "they are shared evenly"
    (dead,) = [slot.worker for slot in pool._dispatcher._slots if slot.pid == int(first[0])]
    os.kill(dead.pid, signal.SIGKILL)
    dead._process.wait()
    for number in range(4):
        reply = act(pool, number, "go")
        if first[number] == first[0]:
            assert "not deterministic" in reply.failure, "its process was an answer"
        else:
            assert contents(reply)[0].startswith("2 go")


@pytest.mark.parametrize("deaths", [2, 3])
def test_a_worker_that_ends_before_it_reads_its_call_is_nobodys_fault(started, monkeypatch, deaths: int) -> None:
    pool, made, left = started(), Worker.call, [deaths]
    begin(pool, (0, 1))
    act(pool, 0, "one")

    def killed(self, *given) -> None:
        if left[0]:
            left[0] -= 1
            os.kill(self.pid, signal.SIGSTOP)
            threading.Timer(0.2, os.kill, (self.pid, signal.SIGKILL)).start()
        made(self, *given)

    monkeypatch.setattr(Worker, "call", killed)
    if deaths <= RESTARTS:
        assert contents(act(pool, 0, "two"))[0].startswith("2 two")
        return
    with pytest.raises(EpisodeError, match="SIGKILL.* before it read its call, 3 times in a row"):
        act(pool, 0, "two")


def test_a_file_that_loads_only_once_stops_the_run_in_poll(started, tmp_path: Path) -> None:
    """Not in a call, from which the other ranks would not hear."""
    (tmp_path / "once.py").write_text(
        f"import os\nif os.path.exists('{tmp_path}/x'): raise OSError('gone')\nopen('{tmp_path}/x', 'w')\n"
        "class E:\n    def reset(self): ...\n    def step(self, text): os._exit(1)\n"
    )
    given = {"workers": 1, "timeout": 5, "wait_timeout": 60}
    with EnvironmentPool([], f"{tmp_path}/once.py:E", **given) as pool:
        begin(pool, (0, 1))
        assert act(pool, 0, "x").failure
        pool._dispatcher._slots[0].worker._process.wait()
        pool.act(sample(1), turn("x"))
        with pytest.raises(EpisodeError, match=r"(?s)--rl-environment \S*once.py:E: it raised OSError: gone.*line 2"):
            replies(pool)
        pool.end(sample(0))


def test_the_reward_of_all(started) -> None:
    said = {
        0.5: None,
        True: None,
        None: "returned None of type NoneType, not a number",
        "nan": "returned nan, not a finite number",
        "text": "returned '1' of type str, not a number",
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


def test_a_reset_that_fails(started) -> None:
    pool = started("Count", workers=2)
    for number, kind in enumerate(("raises", "loops", "ends", "no text")):
        pool.begin(sample(number), task(reset=kind), 7)
    given = replies(pool)
    for number, said in enumerate(("raised ValueError", "ran longer", "ended its process", "returned an ob")):
        assert given[number].failure.startswith(f"failed: Count.reset {said}")
    assert begin_once(pool, task(reset="raises"), 1).startswith("failed: Count.reset raised ValueError: two")
    assert begin_once(pool, task(), 1) is None and not pool.pending


def test_episodes_overlap_and_waiting_takes_no_time_of_the_processor(started) -> None:
    pool = started(workers=3, timeout=5.0)
    for number in range(6):
        begin(pool, [number])
    began, worked = time.monotonic(), time.process_time()
    for number in range(6):
        pool.act(sample(number), turn("nap 0.4"))
    assert time.monotonic() - began < 0.3, "calls return at once"
    assert pool.poll(0.0) == [] and pool.pending
    assert len(replies(pool)) == 6
    assert 0.8 <= time.monotonic() - began < 2.0
    assert time.process_time() - worked < 0.2


def test_a_new_episode_waits_for_busy_workers(started) -> None:
    pool = started(timeout=5.0)
    begin(pool, [0])
    pool.act(sample(0), turn("nap 0.3"))
    pool.begin(sample(1), task(), 7)
    assert [reply.id.member for _ in range(2) for reply in pool.poll(5)] == [0, 1]


def test_every_environment_is_closed(started, tmp_path: Path, capsys) -> None:
    """Over, failed, given up, in the middle of a call too, and at the end of all."""
    pool, logs = started(timeout=5.0), [tmp_path / str(number) for number in range(7)]
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
    while pool._dispatcher._slots[0].running is not pool._live[sample(3)].call:
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


def test_one_that_does_not_close_is_told_once_and_one_that_hangs_is_killed(started, tmp_path: Path, capsys) -> None:
    pool = started("BadClose")
    begin(pool, (0, 1))
    for number in (0, 1):
        pool.finish(sample(number))
    assert len(replies(pool)) == 2
    while pool._dispatcher._slots[0].running or pool._dispatcher._slots[0].closing:
        pool.poll(0.1)
    assert capsys.readouterr().out.count("warning: BadClose.close raised OSError: no such sandbox") == 1
    pool, logs = started("SlowClose"), [tmp_path / str(number) for number in range(2)]
    for number in (0, 1):
        pool.begin(sample(number), task(log=str(logs[number])), 7)
    replies(pool)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 3
    assert sum(log.read_text().count("close") for log in logs) == 1


def test_a_call_that_goes_on_at_the_end_is_killed(started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindspeed_rl_plugin.episodes.pool.CLOSE_SECONDS", 0.3)
    pool = started(timeout=20.0)
    begin(pool, [0])
    pool.act(sample(0), turn("nap 100"))
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 3


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


def test_a_real_process_describes_the_tools() -> None:
    with EnvironmentPool([f"{FILE}:multiply"], f"{FILE}:Shop", workers=1, timeout=1, wait_timeout=100) as pool:
        assert pool.tools == schemas(pool)


@pytest.mark.parametrize(
    ("functions", "environment", "message"),
    [
        (["/nowhere/f.py:g"], None, "--rl-tools '/nowhere/f.py:g': there is no file '/nowhere/f.py'"),
        (["multiply"], None, "--rl-tools 'multiply': give path/to/file.py:function"),
        ([FILE], None, "names no function: give .*py:NAME; it has multiply, wait, "),
        ([f"{FILE}:multiply"] * 2, None, "multiply is there twice; rename"),
        ([], FILE, "--rl-environment .*names no class: give .*py:NAME; it has Count, "),
        ([], "gym:CartPole", "--rl-environment 'gym:CartPole': give path/to/file.py:class"),
        ([f"{FILE}:stars"], None, rf"^--rl-tools {FILE}:stars: stars takes \*a; "),
        ([], f"{FILE}:Nothing", rf"^--rl-environment {FILE}:Nothing: Nothing has neither tools"),
        ([], f"{FILE}:Nowhere", "--rl-environment .* has no 'Nowhere'; it has .*Count"),
        ([f"{FILE}:multiply"], f"{FILE}:Same", "Same and --rl-tools both have multiply"),
    ],
)
def test_what_cannot_be_loaded_is_refused(functions, environment, message: str) -> None:
    with pytest.raises(EpisodeError, match=message):
        EnvironmentPool(functions, environment, workers=1, timeout=1, wait_timeout=60)


def test_a_file_that_takes_too_long_to_load_is_named_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(EpisodeError, match=r"more than 0.9 s to load \S*slow.py:f; .* raise --rl-wait-timeout 1,"):
        EnvironmentPool([f"{tmp_path}/slow.py:f"], None, workers=1, timeout=1, wait_timeout=1)


def test_a_field_that_reset_needs_and_some_row_lacks_is_refused(started) -> None:
    pool = started("Asks")
    pool.check_fields({"a.jsonl line 1": frozenset({"level"})})
    with pytest.raises(EpisodeError, match=r"Asks: its reset has .* 'level', but a.jsonl line 2 .*Allowed: seed, "):
        pool.check_fields({"a.jsonl line 1": frozenset({"level"}), "a.jsonl line 2": frozenset()})


def test_workers_start_without_torch() -> None:
    code = "import sys, mindspeed_rl_plugin.episodes.worker; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
