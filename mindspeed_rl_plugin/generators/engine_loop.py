"""Loop of an engine that works for a job: gets rows from the dock and weights from the trainers, writes responses."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist

from mindspeed_rl_plugin.dock import Gone
from mindspeed_rl_plugin.dock.peers import GroupPeers, Peers, make_peers
from mindspeed_rl_plugin.engine.rollout_engine import Engine, response_request
from mindspeed_rl_plugin.generators.description import Description
from mindspeed_rl_plugin.generators.engine_state import Action
from mindspeed_rl_plugin.generators.pulling import Weights
from mindspeed_rl_plugin.generators.scheduler import Scheduler
from mindspeed_rl_plugin.monitor.trace import Trace
from mindspeed_rl_plugin.processes import machine
from mindspeed_rl_plugin.rows import Completion, GenerateRequest, SampleId
from mindspeed_rl_plugin.weights.pull import Puller

POLL_SECONDS = 0.2  # most time that the engine runs steps before its first rank looks for rows again
STEPS = 8  # as POLL_SECONDS, but a number of steps, for engines that share experts: all run the same number


class Team(GroupPeers):
    """The ranks of the default group: those of one engine, or of engines that share experts. Collectives use gloo. The
    constructor is collective. deadline: most seconds of a wait."""

    def __init__(self, deadline: float) -> None:
        super().__init__(dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline)))

    @cached_property
    def here(self) -> list[int]:
        """The ranks on this machine. The first use is collective."""
        machines = self.gather(machine())
        return [rank for rank, name in enumerate(machines) if name == machines[self.rank]]

    def of_replica(self, engine: Engine, deadline: float) -> Peers:
        """The ranks of this rank's engine, without those of engines that share its experts. Collective. deadline:
        seconds of a wait."""
        return self if engine.replicas == 1 else make_peers(self, (engine.replica,), self._group, deadline)


@dataclass
class EngineLoop:
    """The loop on the ranks of an engine. It ends when the job ends or the engine leaves."""

    engine: Engine
    puller: Puller
    job: Description
    team: Team
    scheduler: Scheduler | None  # on the first rank; None on the other ranks
    trace: Trace  # of this process

    def run(self) -> None:
        """The first rank chooses the next action, and all ranks do it."""
        self._requests: dict[SampleId, GenerateRequest] = {}  # unfinished requests of this engine
        self.trace.place = self._place
        self._making = 0  # number of unfinished responses, with those of engines that share experts
        first = self.scheduler
        self._weights = Weights(self.puller, first.pull_ended if first else lambda version: None)
        while not (action := self.team.share(first.next() if first else None)).end:
            self._do(action)

    def _do(self, action: Action) -> None:
        if action.pull >= 0:
            self._weights.pull(action.pull)
        if action.apply >= 0:
            self._apply(action.apply)
        if self.job.strict and action.requests:
            self.engine.update_weights(self.engine.version, self.engine.digest)  # drops cached prefixes
        self._submit(tuple(request for replica, request in action.requests if replica == self.engine.replica))
        self._making += len(action.requests)
        if self._making:
            began = time.monotonic()
            finished = self._step()
            self._making -= len(finished)
            if self.scheduler is not None:
                self.scheduler.spend("generate", began)
                self.scheduler.done(finished, self.engine.digest)

    def _place(self) -> str:
        """Weights, and rollouts of the unfinished requests; negative: evaluations."""
        rollouts = ", ".join(map(str, sorted({sample.epoch for sample in list(self._requests)})))
        return f"weights {self.engine.version}" + (f", rollout {rollouts}" if rollouts else "")

    def _step(self) -> list[Completion]:
        """Run some steps. Returns the finished responses of all engines that share experts."""
        engine, alone = self.engine, self.engine.replicas == 1
        with self.trace.stage("generate"):
            finished = engine.poll(POLL_SECONDS) if alone else engine.step_along(STEPS)
        for completion in finished:
            del self._requests[completion.id]
        if alone:
            return finished
        parts = self.team.gather(finished if engine.leader else [])
        return [completion for part in parts for completion in part]

    def _submit(self, requests: tuple[GenerateRequest, ...]) -> None:
        if requests:
            self.engine.submit(requests)
        self._requests |= {request.id: request for request in requests}

    def _apply(self, version: int) -> None:
        """Apply new weights between two steps. If a rank could not pull them because newer weights have overwritten
        them, the first rank will ask for the newer weights."""
        began = time.monotonic()
        errors = [error for error in self.team.gather(self._weights.finish()) if error is not None]
        lost = any(isinstance(error, ConnectionError) for error in errors)
        if lost and self.team.share(self.scheduler.dock.has_left() if self.scheduler else None):
            return  # the job has left; the next action is to end
        if errors:
            if not all(isinstance(error, Gone) for error in errors):
                raise next(error for error in errors if not isinstance(error, Gone))
            if self.scheduler is not None:
                self.scheduler.missed(version, errors[0])
            return
        begun = self.engine.abort() if self.job.inflight == "recompute" and self._requests else []
        applied = self.puller.apply(self.engine.parameters())
        assert applied.version == version, (applied.version, version)
        going_on = bool(self._requests) and not begun
        self.engine.update_weights(version, applied.digest, in_flight=going_on)
        self.trace.begin(version + 1)
        self._submit(tuple(continued(self.job, self._requests[c.id], c) for c in begun))
        costs = self.team.gather(self._weights.take_cost())  # also a barrier until all ranks have the weights
        if self.scheduler is not None:
            self.scheduler.state.applied(version)
            self.scheduler.count("pull", max(seconds for seconds, _ in costs))
            self.scheduler.count("pulled", sum(nbytes for _, nbytes in costs))
            self.scheduler.count("pauses", 1)
            self.scheduler.spend("pause", began)


def continued(job: Description, request: GenerateRequest, begun: Completion) -> GenerateRequest:
    """The request that continues an interrupted response, with a seed for its new part."""
    again = response_request(job.sampling, job.seed, request.id, request.prompt_tokens, begun)
    return replace(again, task=request.task)
