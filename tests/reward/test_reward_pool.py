"""RewardPool: calling conventions, time limits, failures that are never silent, workers that never stay."""

import heapq
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import gone, until

from mindspeed_rl_plugin.reward import GradeItem, RewardError, RewardPool
from mindspeed_rl_plugin.reward.batch import Batch
from mindspeed_rl_plugin.reward.calling import lacking
from mindspeed_rl_plugin.reward.grader_process import Kind
from mindspeed_rl_plugin.reward.reward_pool import MAX_ASYNC_CALLS
from mindspeed_rl_plugin.reward.specs import parse_specs
from mindspeed_rl_plugin.rows import Prompt, SampleId
from mindspeed_rl_plugin.workers.pool_worker import RESTARTS
from mindspeed_rl_plugin.workers.process import Worker

FILE = Path(__file__).with_name("graders_for_tests.py")


def own(name: str) -> str:
    return f"{FILE}:{name}"


def items(*responses: str, prompt="the prompt", answer="a", members: int = 2, **record) -> list[GradeItem]:
    return [
        GradeItem(prompt, r, answer, record, SampleId(0, i // members, i % members)) for i, r in enumerate(responses)
    ]


def grade(spec, batch: list[GradeItem], **options) -> list:
    specs = [spec] if isinstance(spec, str) else spec
    with closing(RewardPool(specs, **{"workers": 1, **options})) as pool:
        return pool.grade(batch)


def test_what_a_built_in_grader_cannot_grade_in_time_is_wrong_and_said_once() -> None:
    """Whatever is to happen where a user's grader fails, and whatever its worker dies of."""
    hangs, once = items("\\boxed{9^{9^{9^{9}}}}", answer="\\frac{1}{7}"), items("1", answer="1")
    with closing(RewardPool(["math", own("length")], workers=1, timeout=1.5)) as pool:
        wrong, fine = pool.grade(hangs + once)
        assert "reward 'math' ran longer than 1.5 s" in wrong.error and "reward/errors counts the error" in wrong.error
        assert (wrong.parts, wrong.dropped) == ((0.0, 21.0), False)
        assert fine.parts == (1.0, 1.0) and fine.error is None
        assert list(pool.take_failures()) == ["math"]
        assert pool.grade(hangs)[0].error and not pool.take_failures()
        with pytest.raises(RewardError):  # the trial is no model's response
            pool.try_once(Prompt((1,), "p", "NaN", 0, {}, None), "a.jsonl line 1", 2)


KINDS = {"dict": "{0: 1.0, 1: 1.0} of type dict", "set": "{0, 1} of type set", "text": "'11' of type str"}
KINDS |= {"generator": "of type generator", "tuple": None, "array": None}


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_grader_returns_a_list(kind: str) -> None:
    if KINDS[kind] is None:
        assert grade(own(f"batch_{kind}"), items("a", "b"))[1].total == 1.0
        return
    with pytest.raises(RewardError, match=f"returned .*{KINDS[kind]}; give a list.* one number for each response"):
        grade(own(f"batch_{kind}"), items("a", "b"))


def test_a_grader_may_start_processes_that_import_its_file() -> None:
    assert [g.total for g in grade(own("spawns"), items("a", "abc"), timeout=60)] == [1.0, 3.0]


def test_weights_sum_and_parts_stay_raw() -> None:
    with closing(RewardPool([own("length") + "=0.5", "exact=-2", own("judge")], workers=2)) as pool:
        assert pool.names == ("length", "exact", "judge")
        result = pool.grade(items("a", "abc"))
    assert [(g.total, g.parts, g.error, g.dropped) for g in result] == [
        (0.5 - 2 + 7, (1.0, 1.0, 7.0), None, False),
        (1.5 + 7, (3.0, 0.0, 7.0), None, False),
    ]


def test_calling_conventions() -> None:
    names = ("all_names", "field", "whole_record", "from_import", "none", "prints")
    with closing(RewardPool([own(name) for name in names], workers=1)) as pool:
        (grade,) = pool.grade(items("rr", prompt="p", answer="aaa", level=4))
        assert grade.parts == (1 + 20 + 300 + 4000, 4.5, 1.0, 4.0, 1.0, 1.0)
        with pytest.raises(RewardError, match=r"\['level'\]; .* \['depth'\]"):
            pool.grade(items("r", depth=1))


@pytest.mark.parametrize("workers", [1, 3])
def test_a_batch_grader_gets_whole_groups_however_many_workers(workers: int) -> None:
    batch = items("a", "aaa", "aa", "b", "bb", members=3)
    grades = grade([own("batch_rank"), own("async_batch")], [batch[i] for i in (4, 0, 2, 1, 3)], workers=workers)
    assert [g.parts for g in grades] == [(21.0, 2.0), (30.0, 1.0), (31.0, 2.0), (32.0, 3.0), (20.0, 1.0)]


def test_one_event_loop_a_process() -> None:
    """What a file makes for a loop when it is imported serves all calls, of samples and of groups, of many batches."""
    with closing(RewardPool([own("async_limited"), own("async_groups"), "exact"], workers=1)) as pool:
        for _ in range(3):
            assert {g.parts for g in pool.grade(items(*"aaaaaaaa"))} == {(1.0, 1.0, 1.0)}


def test_order_is_kept_and_exact_is_fast() -> None:
    with closing(RewardPool(["exact", own("length")], workers=2)) as pool:
        begin = time.monotonic()
        result = pool.grade(items(*[str(i) * (i % 7) for i in range(1000)], answer="8"))
        assert time.monotonic() - begin < 20  # two graders; alone on the machine 0.1 s
    assert [g.parts[1] for g in result] == [float(len(str(i) * (i % 7))) for i in range(1000)]
    assert [i for i, g in enumerate(result) if g.parts[0]] == [8], "eight, once"


FAILURES = [
    ("raises", "raised KeyError: 'the key'", 5),
    ("leaves", "raised SystemExit: 3", 5),
    ("nan", "returned nan", 5),
    ("none", "None of type NoneType", 5),
    ("batch_one_bad", "it returned None of type NoneType", 5),
    ("loop", "longer than 1.2 s", 1.2),
    ("sleep", "longer than 1.7 s", 1.7),
    ("stubborn", "longer than 1.2 s", 1.2),
    ("async_wait", "ran longer than 1.2 s and was cancelled (--rl-reward-timeout)", 1.2),
    ("async_block", "longer than 1.2 s", 1.2),
    ("crash", "exited with code 7", 5),
]


def test_each_failure_is_counted_and_hits_only_its_sample() -> None:
    names, messages, timeouts = zip(*FAILURES, strict=True)
    batch = items("ok", "fine", "bad", "good", "well", members=1)
    with closing(RewardPool([own(name) for name in names], workers=3, timeout=timeouts, on_error="drop")) as pool:
        result = pool.grade(batch)
        failures = pool.take_failures()
        assert not pool.take_failures()
    assert [g.parts for g in result] == [(float(at != 2),) * len(names) for at in range(5)]
    assert [(g.dropped, g.error is not None) for g in result] == [(at == 2,) * 2 for at in range(5)]
    for name, message in zip(names, messages, strict=True):
        where = "on rollout 0, prompt 2, response 0: prompt 'the prompt', response 'bad'"
        for part in (f"reward '{name}'", message, where):
            assert part in failures[name], failures[name]
        assert failures[name] in result[2].error


@pytest.mark.parametrize("name", ["raises", "loop", "crash"])
def test_a_failure_stops_and_the_pool_is_usable_afterwards(name: str) -> None:
    """An answer, a kill and an end: by default each raises, and nothing of the batch is left in a worker."""
    batch = items("ok", "fine", "bad", "good", "well", members=1)
    message = next(message for grader, message, _ in FAILURES if grader == name)
    with closing(RewardPool([own(name), own("length")], workers=1, timeout=1.2)) as pool:
        begin = time.monotonic()
        with pytest.raises(RewardError) as caught:
            pool.grade(batch)
        assert time.monotonic() - begin < 60
        assert message in str(caught.value) and "--rl-reward-on-error" in str(caught.value)
        assert [g.parts for g in pool.grade(batch[:2])] == [(1.0, 2.0), (1.0, 4.0)]


def naps(*seconds: float, group: int = 0) -> list[GradeItem]:
    """Responses on which the grader `nap` sleeps so long."""
    return [GradeItem("p", str(s), "a", {}, SampleId(0, group, i)) for i, s in enumerate(seconds)]


def test_a_slow_batch_holds_no_other_up() -> None:
    """Both workers are at it; what was submitted later is given back first, each batch once."""
    with closing(RewardPool([own("nap")], workers=2)) as pool:
        slow, quick = pool.submit(naps(1.5, 0.0)), pool.submit(naps(0.1, 0.2, 0.0, group=1))
        assert pool.poll(20) == [quick] and slow.left == 1
        assert [g.total for g in quick.grades()] == [0.1, 0.2, 0.0]
        assert [g.total for g in pool.grade(naps(0.3))] == [0.3], "beside what is submitted"
        assert pool.poll(0.05) == [] and pool.poll(20) == [slow] and pool.poll(0) == []
        assert [g.total for g in slow.grades()] == [1.5, 0.0]


@pytest.mark.parametrize(
    ("graders", "at_once"),
    [
        (["nap"], (1, 1)),
        (["async_sleep"], (64, 64)),
        (["length", "async_sleep"], (1.001, 63.999)),  # each by its own share, however long it takes
        (["batch_rank"], (4, 4)),
    ],
)
def test_the_time_of_a_response_is_that_of_its_calls(graders: list[str], at_once: tuple[int, int]) -> None:
    """However many are made at once, or graded by one, and whatever the batch waits for."""
    with closing(RewardPool([own(grader) for grader in graders], workers=2)) as pool:
        begin = time.monotonic()
        pool.grade(items("0.2", "0.2", "0.2", "0.6", members=4))
        calls, worker = pool.take_seconds()
        took = time.monotonic() - begin
        assert calls < len(graders) * took, "not the time of the batch, beside which graders work side by side"
        assert calls >= 0.3 or graders == ["batch_rank"]
        assert at_once[0] <= round(calls / worker, 6) <= at_once[1]
        assert pool.take_seconds() is None


def test_who_shares_work_takes_no_more_than_keeps_workers_busy() -> None:
    with closing(RewardPool([own("nap"), own("batch_rank")], workers=2)) as pool:
        assert pool.wanted == 2 and pool.by_group
        pool.submit(naps(0.0))
        assert pool.wanted == 0, "a call of one response, and one of the group"
        pool.poll(20)
        assert pool.wanted == 2
    with closing(RewardPool([own("async_sleep")], workers=1)) as pool:
        for group in range(8):
            assert pool.wanted == 64 - 4 * group and not pool.by_group, "one call takes many items"
            pool.submit(naps(*[0.0] * 4, group=group))


@pytest.mark.parametrize("seed", range(50))
def test_most_responses_are_graded_in_time_though_every_call_runs_into_its_limit(seed: int) -> None:
    """Against workers that take one call after the other, each at its limit and with a new process behind it."""
    rng = random.Random(seed)
    count, members, load = rng.randint(1, 4), rng.randint(1, 8), rng.choice([0.0, 1.0])
    kinds = [Kind(rng.random() < 0.3, rng.random() < 0.3, ()) for _ in range(rng.randint(1, 3))]
    times, limit = [float(rng.randint(1, 20)) for _ in kinds], 400.0
    pool = SimpleNamespace(_timeouts=times, _kinds=kinds, _loading=load, _limit=limit, _batches={})
    pool._pool = SimpleNamespace(workers=[0] * count)
    most = RewardPool.most(pool, members)
    groups = most // members
    assert groups
    ends = [0.0] * count
    for kind, seconds in zip(kinds, times, strict=True):
        together = members if kind.batch else MAX_ASYNC_CALLS if kind.asynchronous else 1
        for _ in range(-(-groups * members // together)):
            heapq.heapreplace(ends, ends[0] + seconds + load)
    assert max(ends) <= limit
    pool = SimpleNamespace(_timeouts=[10.0], _kinds=[Kind(False, False, ())], _loading=1.0, _limit=100.0)
    pool._pool = SimpleNamespace(workers="ab")
    assert [RewardPool.most(SimpleNamespace(_batches=b, **vars(pool)), 4) for b in ({}, {1: 1})] == [16, 12]


def test_a_batch_that_takes_too_long_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time runs from when it was submitted, not that of the first."""
    with closing(RewardPool([own("nap")], workers=2, timeout=1.7, wait_timeout=2)) as pool:
        pids = {worker.pid for worker in pool._pool.workers}
        for group in range(3):
            pool.submit(naps(0.65, 0.65, group=group))
            assert pool.poll(20)
        pool.submit(naps(*[0.9] * 12, group=3))
        with pytest.raises(RewardError, match="grading took longer than 1.8 s, with .* of 12 .*prompt 3"):
            while not pool.poll(1):
                pass
        until(lambda: any(gone([pid], 0) for pid in pids))
        assert pool.wanted == 2 and pool.poll(0) == []
        assert [g.total for g in pool.grade(naps(0.1))] == [0.1]


def test_asynchronous_calls_of_many_batches_are_made_together() -> None:
    """The first takes what is there, the second all others, each of which takes 0.3 s."""
    with closing(RewardPool([own("async_sleep")], workers=1)) as pool:
        begin = time.monotonic()
        left = {pool.submit(naps(*[0.0] * 4, group=group)) for group in range(40)}
        while left:
            left -= {*pool.poll(20)}
        assert time.monotonic() - begin < 6, "one after the other: 12 s"


def test_all_grading_together_has_a_limit_that_names_what_is_left() -> None:
    """Each call is in time, but there are too many for the other ranks to wait: also where failures only count."""
    batch = items(*["a"] * 40, prompt="slow one", members=4)
    with closing(RewardPool(["exact", own("dawdle")], workers=1, timeout=1.8, wait_timeout=2, on_error="zero")) as pool:
        begin = time.monotonic()
        with pytest.raises(RewardError) as caught:
            pool.grade(batch)
        assert 1.8 <= time.monotonic() - begin < 60
        message = str(caught.value)
        for part in (
            "grading took longer than 1.8 s, with ", " of 40 responses left",
            "one missing grade: reward 'dawdle' on rollout 0, ", "prompt 'slow one'", "0.9 of --rl-wait-timeout 2",
            "add --rl-reward-workers", "--rl-reward-timeout 1.8",
        ):  # fmt: skip
            assert part in message, message
        assert 0 < int(message.split("with ")[1].split(" of")[0]) <= 40
        assert not pool.take_failures(), "what was cut off is nobody's failure"


def test_graders_that_do_not_load_in_time_are_named_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\ndef f(response): return 1\n")
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"1.8 s .* --rl-wait-timeout 2"):
        RewardPool([f"{tmp_path / 'slow.py'}:f"], workers=1, timeout=1, wait_timeout=2)
    assert time.monotonic() - begin < 40, "and not the 60 s of its load"


def test_zero_counts_without_dropping_and_keeps_the_other_parts() -> None:
    batch = items("x" * 300 + " bad ", "bad")
    with closing(RewardPool([own("raises"), own("length")], workers=2, on_error="zero")) as pool:
        result = pool.grade(batch)
        assert [(g.total, g.dropped) for g in result] == [(306.0, False), (3.0, False)]
        assert result[0].error is None and "graders_for_tests.py" in result[1].error
        assert pool.take_failures() == {"raises": result[1].error}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_sample_that_one_grader_drops_stays_dropped(order: tuple[int, int]) -> None:
    """A grader of one's own fails under drop, a built-in one, whose failures are its response's, under zero."""
    batch = Batch(items("bad"), ["own", "math"], [1.0, 1.0], ["drop", "zero"], {})
    for grader in order:
        batch.record(0, grader, None, "raised ValueError")
    assert batch.grades()[0].dropped


def test_a_failing_batch_is_blamed_as_a_whole() -> None:
    batch = items("ok", "bad", "fine", "good")
    with closing(RewardPool([own("batch_loop")], workers=2, timeout=1.2, on_error="zero")) as pool:
        assert [g.error is None for g in pool.grade(batch)] == [False, False, True, True]
    held_out = [replace(item, id=item.id._replace(epoch=-1)) for item in batch]
    with pytest.raises(RewardError, match="(?s)1 values for 2 samples.* evaluation, prompt 0, "):
        grade(own("batch_short"), held_out)


def test_a_kill_reaches_what_the_grader_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_TEST_PID_FILE", str(tmp_path / "pid"))
    with pytest.raises(RewardError, match="longer than 1 s"):
        grade(own("child"), items("bad"), timeout=1.0)
    assert gone([int((tmp_path / "pid").read_text())])


def test_close_ends_the_workers_and_an_idle_death_is_survived() -> None:
    pool = RewardPool(["exact"], workers=2)
    pids = [w.pid for w in pool._pool.workers]
    os.kill(pids[0], 9)
    assert gone(pids[:1])
    assert [g.total for g in pool.grade(items("a", "b"))] == [1.0, 0.0]
    pids += [w.pid for w in pool._pool.workers]
    pool.close()
    pool.close()
    assert gone(pids)
    with pytest.raises(RewardError, match="closed"):
        pool.grade(items("a"))


@pytest.mark.parametrize(("deaths", "size"), [(2, 1), (3, 1), (2, 1 << 20)])
def test_a_worker_that_ends_before_it_reads_its_call_is_nobodys_fault(monkeypatch, deaths: int, size: int) -> None:
    """Killed with the call in its pipe, or with a part of a large one: the call is made again, some times."""
    call, left = Worker.call, [deaths]

    def killed(self, *given) -> None:
        if left[0]:
            left[0] -= 1
            os.kill(self.pid, signal.SIGSTOP)
            threading.Timer(0.3, os.kill, (self.pid, signal.SIGKILL)).start()
        call(self, *given)

    monkeypatch.setattr(Worker, "call", killed)
    with closing(RewardPool([own("length")], workers=1, on_error="zero")) as pool:
        if deaths <= RESTARTS:
            assert [(g.total, g.error) for g in pool.grade(items("a" * size))] == [(size, None)]
            return
        with pytest.raises(RewardError, match="SIGKILL.*3 times"):
            pool.grade(items("a"))
        assert not pool.take_failures()


def test_workers_do_not_outlive_a_killed_parent() -> None:
    """The parent is killed while a worker holds the interpreter for ever, and another one sleeps."""
    code = (
        "import sys, threading\n"
        "from collections import namedtuple\n"
        "from mindspeed_rl_plugin.reward import GradeItem, RewardPool\n"
        "pool = RewardPool(sys.argv[1:], workers=2, timeout=100)\n"
        "sample = namedtuple('SampleId', 'epoch group member')(0, 0, 0)\n"
        "threading.Timer(1.0, lambda: print(*(w.pid for w in pool._pool.workers), flush=True)).start()\n"
        "pool.grade([GradeItem('', 'bad', '', {}, sample)])\n"
    )
    command = [sys.executable, "-c", code, own("stubborn"), own("sleep")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(p) for p in parent.stdout.readline().split()]
        assert len(pids) == 2 and not any(gone([p], 0) for p in pids)
        parent.kill()
    assert gone(pids)


def test_a_rank_with_many_open_files_grades() -> None:
    """Descriptors from 1024 on, which `select.select` does not take, at both ends of every pipe."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2048:
        pytest.skip("this process may not open so many files")
    with ExitStack() as files:
        for _ in range(1024):
            files.enter_context(open(os.devnull))
        assert [g.total for g in grade("exact", items("a", "b"), workers=2)] == [1.0, 0.0]


def test_workers_start_without_torch() -> None:
    code = "import sys, mindspeed_rl_plugin.reward.grader_process; assert not {'torch', 'sympy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


BAD = [
    (["exact=0", own("length") + "=-0.5"], {}, "exact=0, length=-0.5"),
    (["exact=x"], {}, "weight 'x'"),
    (["exact="], {}, "weight ''"),
    (["exact", "exact=2"], {}, r"rewards \['exact'\] are given twice"),
    (["regex"], {"regex": "("}, r"--rl-reward-regex '\(' is no regular expression"),
    (["/nowhere/f.py:g"], {}, "there is no file '/nowhere/f.py'"),
    ([own("nope")], {}, r"loaded: /\S*py has no 'nope'; it has .*length"),
    ([own("NOT_CALLABLE")], {}, "'NOT_CALLABLE' of /.* is .* of type .*, no function"),
    ([str(FILE)], {}, "reward '.*graders_for_tests.py' names no function: give .*py:NAME; it has .*length"),
    ([own("a b")], {}, "'a b' is no name of a function"),
    ([own("positional_only")], {}, "none may be positional-only"),
    ([own("takes_nothing")], {}, "takes none of prompt, response, answer"),
    ([own("batch_strange")], {}, "prompts, responses, answers, records, not other"),
    ([own("verls")], {}, "takes none of .*; extra_info is record .*, ground_truth is answer .*, solution_str is resp"),
    ([own("trls")], {}, "completions is responses"),
    (["exact", own("length")], {"timeout": (1, 20), "wait_timeout": 20}, "one grading call may take 20 s .* 18 s"),
    (["exact"], {"timeout": 10, "wait_timeout": 11}, r"one grading call may take 10 s .* the 9.9 s for all grading"),
]


@pytest.mark.parametrize(("specs", "options", "message"), BAD)
def test_bad_settings_are_refused_at_once(specs, options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardPool(specs, **{"workers": 1, **options})


def test_a_grader_that_asks_for_a_field_of_no_row_is_refused_before_anything_is_sampled() -> None:
    """Whatever row lacks it; what has a default, or a batch grader, asks for none."""
    rows = {"a.jsonl line 1": frozenset({"level", "x"}), "a.jsonl line 4": frozenset({"x"})}
    names = ("whole_record", "field", "batch_rank", "verls_with_rest")
    with closing(RewardPool([own(name) for name in names], workers=1)) as pool:
        with pytest.raises(ValueError, match=r"'level', but a.jsonl line 4 .* fields: prompt, answer, x\). Allowed: "):
            pool.check_fields(rows)
        with pytest.raises(ValueError, match="'solution_str', but .* did you mean response\\?"):
            pool.check_fields({"a.jsonl line 1": rows["a.jsonl line 1"]})
        pool.check_fields({"a.jsonl line 1": frozenset({"level", "solution_str"})})
    assert "did you mean response? Allowed: prompt, response" in lacking(("respones",), {"a.jsonl line 1": frozenset()})


TRIED = [
    ("none", "it returned None of type NoneType"),
    ("crash", "exited with code 7"),
    ("batch_one_bad", "it returned None"),
    ("batch_short", "it returned 3 values for 4 samples"),
]


def test_each_grader_is_tried_on_a_data_row() -> None:
    bad, fine = (Prompt((1,), "the prompt", response, 0, {}, None) for response in ("bad", "fine"))
    names, messages = zip(*TRIED, strict=True)
    with closing(RewardPool([own(n) for n in ("length", *names)], workers=3, timeout=1.2, on_error="drop")) as pool:
        warnings = pool.try_once(bad, "a.jsonl line 1", 4)
        assert len(warnings) == len(TRIED) and not pool.take_failures(), "these are of no rollout"
        for name, message in zip(names, messages, strict=True):
            (said,) = [text for text in warnings if f"reward '{FILE}:{name}'" in text]
            assert all(part in said for part in (message, "a.jsonl line 1", "response 'bad'")), said
        assert [f"{FILE}:batch_short" in said for said in pool.try_once(fine, "a.jsonl line 2", 4)] == [True]
        pool._on_error = "stop"
        with pytest.raises(ValueError, match="on a.jsonl line 1: .*(?s:.)*--rl-reward-on-error"):
            pool.try_once(bad, "a.jsonl line 1", 4)


def test_the_functions_of_a_file_are_named_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import nothing_like_this\ndef one(): pass\nasync def two(): pass\ndef _no(): 1\n")
    with pytest.raises(ValueError, match=r"a.py:NAME; it has one, two$"):
        parse_specs([str(tmp_path / "a.py")], None)


def test_a_file_that_does_not_load_is_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_like_this\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    (tmp_path / "dies.py").write_text("import os\nos._exit(9)\n")
    for name, message in {
        "broken": r"(?s)/broken.py:f' cannot be loaded: it raised ModuleNotFoundError: .*broken.py\", line 1",
        "syntax": rf"SyntaxError: .* in {tmp_path}/syntax.py, line 1: def f\(:$",
        "dies": "which exited with code 9 while it loaded f",
    }.items():
        with pytest.raises(ValueError, match=message):
            RewardPool([f"{tmp_path / name}.py:f"], workers=1)
    with pytest.raises(ValueError) as error:
        RewardPool([f"{tmp_path}/syntax.py:f"], workers=1)
    assert "frozen" not in str(error.value) and len(str(error.value).splitlines()) == 1
