"""One engine at work for a job: rows from the dock, weights from the trainers, responses into the dock."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from mindspeed_rl_plugin.dock import Gone
from mindspeed_rl_plugin.engine.protocol import Engine
from mindspeed_rl_plugin.engine.seeds import response_request
from mindspeed_rl_plugin.generators.description import Description
from mindspeed_rl_plugin.generators.pulling import Weights
from mindspeed_rl_plugin.generators.scheduler import Scheduler, Turn
from mindspeed_rl_plugin.generators.team import Team
from mindspeed_rl_plugin.rows import Completion, GenerateRequest, SampleId
from mindspeed_rl_plugin.weights.pull import Puller

POLL_SECONDS = 0.2  # of the engine's steps, at most, before its first rank looks for rows again
STEPS = 8  # the same, of engines that share experts: all take as many


@dataclass
class EngineLoop:
    """lead: of the first rank of the engine, None on the others."""

    engine: Engine
    puller: Puller
    job: Description
    team: Team
    lead: Scheduler | None

    def run(self) -> None:
        """Work until the job leaves, or until this engine is to leave."""
        self._requests: dict[SampleId, GenerateRequest] = {}  # in the making here
        self._making = 0  # responses in the making, those of engines that share experts with this one too
        self._weights = Weights(self.puller, self.lead.pull_ended if self.lead else lambda version: None)
        while not (turn := self.team.share(self.lead.next() if self.lead else None)).end:
            self._take(turn)

    def _take(self, turn: Turn) -> None:
        if turn.pull >= 0:
            self._weights.pull(turn.pull)
        if turn.apply >= 0:
            self._apply(turn.apply)
        if self.job.strict and turn.requests:
            self.engine.update_weights(self.engine.version, self.engine.digest)  # no prefix of what came before is left
        self._submit(tuple(request for replica, request in turn.requests if replica == self.engine.replica))
        self._making += len(turn.requests)
        if self._making:
            began = time.monotonic()
            finished = self._step()
            self._making -= len(finished)
            if self.lead is not None:
                self.lead.spend("generate", began)
                self.lead.done(finished, self.engine.digest)

    def _step(self) -> list[Completion]:
        """Work for a while; what all replicas have finished."""
        engine, alone = self.engine, self.engine.replicas == 1
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
        """New weights between two steps. Where a rank could not pull them, because newer ones took their place, the
        first one asks for those."""
        began = time.monotonic()
        errors = [error for error in self.team.gather(self._weights.finish()) if error is not None]
        lost = any(isinstance(error, ConnectionError) for error in errors)
        if lost and self.team.share(self.lead.dock.has_left() if self.lead else None):
            return  # the job has left, and the next turn says so
        if errors:
            if not all(isinstance(error, Gone) for error in errors):
                raise next(error for error in errors if not isinstance(error, Gone))
            if self.lead is not None:
                self.lead.missed(version, errors[0])
            return
        begun = self.engine.abort() if self.job.inflight == "recompute" and self._requests else []
        applied = self.puller.apply(self.engine.parameters())
        assert applied.version == version, (applied.version, version)
        going_on = bool(self._requests) and not begun
        self.engine.update_weights(version, applied.digest, in_flight=going_on)
        self._submit(tuple(continued(self.job, self._requests[c.id], c) for c in begun))
        costs = self.team.gather(self._weights.take_cost())  # also: no rank steps before all have the weights
        if self.lead is not None:
            self.lead.applied(version)
            self.lead.count("pull", max(seconds for seconds, _ in costs))
            self.lead.count("pulled", sum(nbytes for _, nbytes in costs))
            self.lead.count("pauses", 1)
            self.lead.spend("pause", began)


def continued(job: Description, request: GenerateRequest, begun: Completion) -> GenerateRequest:
    """The request by which an interrupted response goes on, with a seed of that part."""
    again = response_request(job.sampling, job.seed, request.id, request.prompt_tokens, begun)
    return replace(again, task=request.task)
