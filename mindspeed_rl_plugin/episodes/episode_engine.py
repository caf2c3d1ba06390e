"""`EpisodeEngine`: an `Engine` whose responses are episodes, on top of an engine that samples one turn.

Callers need not know of episodes: they submit a row and get its complete response, with the observations between the
turns. On the first rank of the engine a `Lead` decides what follows each turn, and tells the other ranks. No token is
decoded and encoded again: the prompt of a turn is the previous prompt, the tokens sampled after it, and the tokens of
the observation.

**Interrupted** episodes (`abort`) keep their environments. They continue when they are submitted again, in the middle
of a turn or between two turns. An interrupted episode ends, with its environment, if it is not among the next requests
of a rollout.
"""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from typing import Any

from mindspeed_rl_plugin.dock.peers import Peers
from mindspeed_rl_plugin.engine.rollout_engine import Engine
from mindspeed_rl_plugin.episodes.environments import EpisodeError
from mindspeed_rl_plugin.episodes.episode_state import EpisodeState, NextTurn, Plan
from mindspeed_rl_plugin.episodes.lead import Lead
from mindspeed_rl_plugin.rows import Completion, GenerateRequest, SampleId, TurnId

BETWEEN_SECONDS = 0.005  # time of the engine's steps between two checks for replies of environments
ENVIRONMENT_SECONDS = 1.0  # longest single wait of the first rank for environments; other ranks wait meanwhile


class EpisodeEngine:
    """`Engine` on top of an engine that samples turns. longest: limit of a turn [tokens]; begins: whether a new episode
    waits for a reply of its environment; agents: whether replies come while the engine samples turns of the same
    episode; last: whether only the last path of an episode is kept; lead: None except on the engine's first rank;
    peers: the engine's ranks."""

    def __init__(
        self,
        engine: Engine,
        longest: int,
        begins: bool,
        lead: Lead | None,
        peers: Peers,
        agents: bool = False,
        last: bool = False,
    ) -> None:
        self._engine, self._longest, self._begins, self._lead, self._peers = engine, longest, begins, lead, peers
        self._agents, self._last = agents, last
        self._live: dict[SampleId, EpisodeState] = {}
        self._sampling: set[TurnId] = set()  # turns that the engine samples
        self._cut: list[TurnId] = []  # interrupted turns of episodes that are not interrupted
        self._paused: dict[SampleId, EpisodeState] = {}
        self._progress, self._answered = time.monotonic(), 0

    def __getattr__(self, name: str) -> Any:
        """All other attributes are those of the engine that samples turns."""
        return getattr(self._engine, name)

    @property
    def progress(self) -> float:
        """When the last turn, or the last call of a user's code, ended; see `Engine`."""
        return max(self._progress, self._engine.progress)

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Submit new episodes, and interrupted ones that continue; see `Engine`."""
        self._end_others({request.id for request in requests})
        due = []
        for request in requests:
            live = self._paused.pop(request.id, None)
            if live is None:
                live = EpisodeState(request, self._agents)
                if self._lead is not None:
                    self._lead.begin(live)
                if not self._begins:
                    live.begin(NextTurn(request.id, 0, None, request.prompt_tokens))
                    due.append(TurnId(*request.id, 0))
            else:
                live.request = request
                if self._lead is not None:
                    self._lead.resume(request.id)
                due += [TurnId(*request.id, call) for call, turn in live.pending.items() if turn.submitted]
            self._live[request.id] = live
        self._sample(due)

    def poll(self, timeout: float) -> list[Completion]:
        """Work until an episode has ended; see `Engine`."""
        end, done = time.monotonic() + timeout, list[Completion]()
        self._go_on()
        while self._live:
            if self._sampling or not self.shares_experts:
                turns = self._engine.poll(BETWEEN_SECONDS if self._waiting else max(end - time.monotonic(), 0.0))
            else:
                turns = self._engine.step_along(1)
            plan = self._after(turns, end)
            done += self._follow(plan)
            if done or plan.expired:
                break
        return done

    def step_along(self, steps: int) -> list[Completion]:
        """Run `steps` steps of the engine; see `Engine`. If all episodes wait for environments, and the engine shares
        no experts, each step waits at most BETWEEN_SECONDS for a reply."""
        done = []
        self._go_on()
        for _ in range(steps):
            done += self._follow(self._after(self._engine.step_along(1), time.monotonic() + BETWEEN_SECONDS))
        return done

    def abort(self) -> list[Completion]:
        """Interrupt episodes; see `Engine`, and the module's docstring."""
        for turn in self._engine.abort():
            self._live[turn.id.sample].pending[turn.id.call].partial = turn if turn.tokens else None
            self._sampling.remove(turn.id)
            self._cut.append(turn.id)
        # A server may have just finished a turn: the next poll returns it, and its episode is not interrupted.
        live = {turn.sample for turn in self._sampling}
        self._cut = [turn for turn in self._cut if turn.sample in live]
        return [self._pause(sample) for sample in [*self._live] if sample not in live]

    def update_weights(self, version: int, digest: str | None = None, *, in_flight: bool = False) -> None:
        """See `Engine`. Episodes that wait for their environments continue with the new weights."""
        self._engine.update_weights(version, digest, in_flight=in_flight and bool(self._sampling))

    def shutdown(self) -> None:
        """End the environments, and the engine; see `Engine`."""
        if self._lead is not None:
            self._lead.close()
        self._engine.shutdown()

    # inside

    @property
    def _waiting(self) -> bool:
        """Whether an episode waits for its environment or, in lockstep, for other episodes; one with an agent may."""
        return self._agents or len({turn.sample for turn in self._sampling}) < len(self._live)

    def _go_on(self) -> None:
        """Submit the interrupted turns of episodes that are not interrupted."""
        cut, self._cut = self._cut, []
        self._sample(cut)

    def _sample(self, due: Sequence[TurnId]) -> None:
        requests = [self._live[turn.sample].next_turn(turn.call, self._longest) for turn in due]
        self._sampling |= {*due}
        self._engine.submit(requests)

    def _after(self, turns: Sequence[Completion], end: float) -> Plan:
        """The plan of the first rank after finished turns and replies of environments. end: deadline of a `poll`."""
        for turn in turns:
            self._sampling.remove(turn.id)
            live = self._live[turn.id.sample]
            path = live.spoke(turn)
            if self._lead is not None:
                self._lead.turn(live, path, turn)
        plan = None
        if self._lead is not None:
            now = time.monotonic()
            left = 0.0 if self._sampling or self.shares_experts else min(max(end - now, 0.0), ENVIRONMENT_SECONDS)
            plan = self._lead.plan(left, end, bool(self._sampling))
        return self._peers.share(plan)

    def _follow(self, plan: Plan) -> list[Completion]:
        """Submit the turns of a plan. Returns the episodes that have ended. Raises EpisodeError if the run stops."""
        if plan.error is not None:
            raise EpisodeError(plan.error)
        for turn in plan.turns if self._lead is None else ():  # the lead has begun them
            self._live[turn.sample].begin(turn)
        for sample, _, unheard in plan.over:
            for call in sorted(unheard, reverse=True):
                self._live[sample].unsay(call)
            if self._last:
                self._live[sample].keep_last()
        if plan.due or plan.over or plan.answered > self._answered:
            self._progress, self._answered = time.monotonic(), plan.answered
        self._sample(plan.due)
        return [self._live.pop(sample).completion(finish) for sample, finish, _ in plan.over]

    def _pause(self, sample: SampleId) -> Completion:
        live = self._paused[sample] = self._live.pop(sample)
        if self._lead is not None:
            self._lead.pause(sample)
        return live.completion("abort")

    def _end_others(self, known: Set[SampleId]) -> None:
        """End interrupted episodes that are not in `known`, the ids of the next requests. Requests of an evaluation,
        which may come before the next rollout's, end no episode."""
        if all(sample.epoch < 0 for sample in known):
            return
        for sample in [sample for sample in self._paused if sample not in known]:
            del self._paused[sample]
            if self._lead is not None:
                self._lead.end(sample)
