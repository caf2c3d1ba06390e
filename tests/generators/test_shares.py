"""Engines under a strict order, against a real dock: each samples its share of a rollout by the one version."""

import threading
from types import SimpleNamespace

from commands import until
from dock_help import SMALL, make_members

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.dock import VersionBound
from mindspeed_rl_plugin.generators.scheduler import Scheduler
from mindspeed_rl_plugin.rows import Completion, Prompt, Sampling
from mindspeed_rl_plugin.service.guest_dock import GuestDock
from mindspeed_rl_plugin.service.job_service import JobService
from mindspeed_rl_plugin.stages.prompts import prompt_rows
from mindspeed_rl_plugin.stages.stage import columns_of, states_of
from mindspeed_rl_plugin.stages.table import stage_table

PROMPTS = [Prompt((7, 7), "question", "answer", row) for row in range(3)]
JOB = SimpleNamespace(sampling=Sampling(4), seed=0, inflight="keep", strict=True, deadline=20.0)


def serve(dock: GuestDock, number: int, leaving: threading.Event, begun: list) -> None:
    """Engine `number` of two, whose responses are ready at once."""
    scheduler = Scheduler(dock, JOB, 2, 1, (number, 2), leaving)
    while not (action := scheduler.next()).end:
        if action.pull >= 0:
            scheduler.pull_ended(action.pull)
        if action.apply >= 0:
            scheduler.state.applied(action.apply)
        if action.requests:
            begun.append((number, scheduler.state.version, [tuple(request.id) for _, request in action.requests]))
        running = [*scheduler.state.running]
        scheduler.done([Completion(i, (7,), (-1.0,), "stop", ((0, scheduler.state.version),)) for i in running], None)
    dock.close()


def test_each_engine_samples_its_half_of_a_rollout_whole_and_by_its_version(tmp_path) -> None:
    """Two rollouts of version 0, then an evaluation and a rollout of version 4; three prompts, two rows each."""
    table = stage_table(resolve(AlgorithmConfig(algorithm="grpo")), 1, by_group=False)
    (member,) = make_members(columns_of(table), states_of(table), ["a"], limits=SMALL)
    dock, leaving, begun = member.dock(deadline=20), threading.Event(), []
    service = JobService(dock)
    address = service.invite(tmp_path / "secret", "127.0.0.1", "{}")
    docks = [GuestDock.join(address, tmp_path / "secret") for _ in range(2)]
    threads = [threading.Thread(target=serve, args=(docks[n], n, leaving, begun)) for n in range(2)]
    for thread in threads:
        thread.start()
    for version, epochs in ((0, (0, 1)), (4, (-1, 2))):
        for epoch in epochs:
            dock.open(epoch, 3, 2, VersionBound(version, version))
            dock.put(prompt_rows(epoch, PROMPTS))
        service.announce(version)
        until(lambda: not dock.remaining("generate"), 60)
    leaving.set()
    for thread in threads:
        thread.join()
    halves = [(0, 0), (0, 1), (1, 0)], [(1, 1), (2, 0), (2, 1)]
    assert sorted(begun) == [
        (n, version, [(epoch, *row) for row in halves[n]])
        for n in range(2)
        for version, epoch in ((0, 0), (0, 1), (4, -1), (4, 2))
    ]
    dock.close()
