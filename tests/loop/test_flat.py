"""A long asynchronous job holds no more memory after many rollouts than after a few: the real loop, schedule, plan,
admission, dock and monitor; engine, graders and training are fakes that take no time."""

import gc
import itertools
import sys
import threading
from collections import deque
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace

import numpy as np
import pytest
from stage_context import context_of

from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.config.run_flags import MonitorConfig
from mindspeed_rl_plugin.dock import calls, make_docks
from mindspeed_rl_plugin.loop.arithmetic import Arithmetic
from mindspeed_rl_plugin.loop.loop import Loop
from mindspeed_rl_plugin.loop.placement import Placement
from mindspeed_rl_plugin.loop.rollout_plan import RolloutPlan
from mindspeed_rl_plugin.loop.schedules import apart
from mindspeed_rl_plugin.loop.schedules.admission import Admission
from mindspeed_rl_plugin.loop.schedules.apart import AsyncSchedule
from mindspeed_rl_plugin.loop.schedules.publications import Publications
from mindspeed_rl_plugin.loop.schedules.schedule import Due, Job
from mindspeed_rl_plugin.loop.schedules.waiting import GradeWait
from mindspeed_rl_plugin.loop.topology import Topology
from mindspeed_rl_plugin.monitor.monitor import Monitor
from mindspeed_rl_plugin.prompts import Offers
from mindspeed_rl_plugin.reward import Grade
from mindspeed_rl_plugin.rows import Completion, GenerateRequest, Prompt, Sampling
from mindspeed_rl_plugin.service.job_service import JobService
from mindspeed_rl_plugin.stages import generate, groups, prompts, reward
from mindspeed_rl_plugin.stages.evaluate import EvaluateApart
from mindspeed_rl_plugin.stages.measure import IterationLog, Rollout
from mindspeed_rl_plugin.stages.response_validator import READS, ResponseValidator
from mindspeed_rl_plugin.stages.stage import Stages, columns_of, states_of

GROUPS, MEMBERS, STEPS, STALENESS = 4, 2, 2, 2  # prompts of a rollout, responses of one, optimizer steps of a rollout
TABLE = [prompts.SPEC, generate.SPEC, reward.spec(1, by_group=False)]


class Ranks:
    """One rank."""

    rank, world, deadline = 0, 1, 60.0
    gather, broadcast, barrier = (lambda _, x: [x]), (lambda _, x: x), (lambda _, what: None)


class Made:
    """An evaluation every 25 iterations, a checkpoint every 7, an offered prompt every 3."""

    def __init__(self, folder: Path, rollouts: int) -> None:
        self.args = SimpleNamespace(curr_iteration=0, train_iters=rollouts * STEPS)
        (self.dock,) = make_docks(columns_of(TABLE), states_of(TABLE), [(0, 1)])
        sizes = Arithmetic(GROUPS, MEMBERS, GROUPS * MEMBERS // STEPS, 1, 1, 1, 1, self.args.train_iters)
        self.plan = RolloutPlan(sizes, Placement((0,), (0,), (0,)), near=True)
        self.monitor = Monitor(folder, 0, 1, is_terminal=False, stream=SimpleNamespace(write=len, flush=int))
        rows, offered = itertools.cycle(range(50)), itertools.count()
        self.data = SimpleNamespace(
            next=lambda count: [Prompt((5, 6), "p", "a", next(rows)) for _ in range(count)],
            read_rows=lambda what, given: [Prompt((7, 8), "p", "a", next(offered)) for _ in given],
        )
        graders = SimpleNamespace(weights=[1.0], take_failures=dict, take_seconds=lambda: (0.0, 0.0))
        given = {"ranks": Ranks(), "data": self.data, "members": MEMBERS, "monitor": self.monitor, "decode": str}
        config = RLConfig(monitor=MonitorConfig(eval_pass_k=1))
        context = context_of(self.dock, graders=graders, config=config, **given)
        self.reward = reward.Reward(TABLE[2], context)
        measure = SimpleNamespace(dock=self.dock, run=lambda *_: Rollout({}, 1))
        judge, stage = groups.Groups(groups.SPEC, context), prompts.Prompts(prompts.SPEC, context)
        stages = Stages({"prompts": stage, "reward": self.reward, "groups": judge, "measure": measure})
        self.job = Job(
            self.plan,
            Topology(0, 1, 0, 1, True, True, 0, 1),
            Ranks(),
            self.monitor,
            self.dock,
            Due(True, 25, self.args.train_iters),
        )
        self.validator = ResponseValidator(100, 8)
        self.offers = Offers(self.data, lambda fields: None, GROUPS)
        trainer = SimpleNamespace(publish=lambda done: SimpleNamespace(nbytes=0), refuse_broken=lambda: None)
        held_out = [Prompt((9,), "p", "a", row) for row in range(3)]
        self.schedule = AsyncSchedule(
            self.job,
            stages,
            4,
            service=JobService(self.dock),
            publications=Publications(trainer, Admission(GROUPS, STALENESS, rollouts), 2, self.validator.published),
            evaluate=EvaluateApart(self.reward, held_out),
            strict=False,
            whole=False,
            external_engines=None,
            offers=self.offers,
        )
        self.schedule.grader = SimpleNamespace(start=lambda: None, check=lambda: None, stop=lambda: None)
        wait = GradeWait(Ranks(), self.reward, self.schedule.grader, self.work)
        self.schedule._wait = self.schedule.evaluations.wait = wait
        update = SimpleNamespace(run=lambda *_, **__: ((), {}))
        self.loop = Loop(self.args, self.job, self.schedule, update, IterationLog(self.monitor, Ranks(), self.dock))
        self.sampled = 0

    def train(self, iterations: int) -> None:
        for _ in range(iterations):
            self.loop.train_step(None)
            self.args.curr_iteration += 1
            if not self.args.curr_iteration % 7:
                self.schedule.settle(), self.schedule.state(), self.plan.state(), self.dock.snapshot()
            if not self.args.curr_iteration % 3:
                self.offers.add(["{}"], 0.0)

    def work(self) -> None:
        """Engine and graders: whatever is ready."""
        self.schedule._look_at_engines()
        while len(lease := self.dock.lease("generate", max_rows=6, deadline=0)):
            beside = self.dock.read(lease.rows.ids, READS)
            requests, answers = [], []
            for i in lease.rows.ids:
                self.sampled += 1
                oldest = self.dock.version_bound(i.epoch).oldest
                length, turn = self.sampled * 7 % 5 + 1, max(oldest, min(self.validator.published))
                requests.append(GenerateRequest(i, tuple(beside["prompt"].row(len(requests)).tolist()), Sampling(8), 0))
                answers.append(Completion(i, (11,) * length, (-1.0,) * length, "stop", ((0, turn),)))
            rows = generate.completion_rows(requests, answers)
            for number in {i.epoch for i in rows.ids}:
                mine = [k for k, i in enumerate(rows.ids) if i.epoch == number]
                of_epoch = rows.with_columns(**beside.columns).take(mine)
                self.validator.check(of_epoch, self.dock.version_bound(number))
            self.dock.commit(lease, rows)
        while len(lease := self.dock.lease("reward", max_rows=8, deadline=0)):
            grades = [Grade(g := float(i.member and (i.epoch + i.group) % 3), (g,)) for i in lease.rows.ids]
            self.dock.commit(lease, reward.grade_rows(lease.rows.ids, grades))


def held(*roots: object) -> int:
    """Entries of all containers and arrays that are reachable, but for memory that files lend."""
    waiting, seen, count = deque(roots), set(), 0
    while waiting:
        value = waiting.popleft()
        if id(value) in seen or isinstance(value, (type, ModuleType, FunctionType, BuiltinFunctionType)):
            continue
        seen.add(id(value))
        if isinstance(value, (dict, list, set, tuple, deque)):
            count += len(value)
        elif isinstance(value, np.ndarray) and value.base is None:
            count += value.size
        waiting.extend(gc.get_referents(value))
    return count


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rollouts", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_long_job_holds_what_a_short_one_holds(tmp_path, monkeypatch, rollouts: int) -> None:
    monkeypatch.setattr(calls, "KEPT", 8)
    made, seen = Made(tmp_path, rollouts), []
    for iterations in (50, rollouts * STEPS - 150):  # then 50, in which everything comes that comes again
        made.train(iterations)
        most = 0
        for _ in range(50):
            made.train(1)
            most = max(most, held(made.loop, made.validator, made.offers))
        gc.collect()
        seen.append((most, sys.getallocatedblocks()))
    made.monitor.close()
    (entries, blocks), (later, then) = seen
    print(f"entries of containers: {entries}, then {later}; blocks of memory: {blocks}, then {then}")
    assert later <= entries + 40 and then <= blocks + 2000
    assert made.schedule.admission.dropped >= rollouts and made.validator.published
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) > rollouts * STEPS, "of evaluations too"


@pytest.mark.parametrize("warmup", [0, 2])
def test_the_policy_is_trained_once_the_critic_has_warmed_up(tmp_path, warmup: int) -> None:
    """From then on checkpoints hold its optimizer."""
    made, seen = Made(tmp_path, 10), []
    made.loop.warmup = warmup
    for _ in range(4):
        seen.append(made.loop.trained)
        made.train(1)
    assert seen == [done > warmup for done in range(4)]


def test_a_grader_that_fails_waits_for_a_checkpoint_and_not_for_one_that_is_written(tmp_path, monkeypatch) -> None:
    """In the middle of a rollout too, whose next step collects nothing."""
    made, ended = Made(tmp_path, 20), threading.Event()
    monkeypatch.setattr(apart, "RAISE_SECONDS", 0.01)
    monkeypatch.setattr(apart, "os", SimpleNamespace(_exit=lambda code: ended.set()))
    made.train(1)
    made.schedule.settle()
    failing = threading.Thread(target=made.schedule._end, args=(KeyError("lost"),))
    failing.start()
    assert not ended.wait(0.3)
    made.train(1)
    assert ended.wait(5)
    failing.join()
    made.monitor.close()
