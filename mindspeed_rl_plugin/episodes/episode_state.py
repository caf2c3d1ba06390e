"""The state of a running episode, and the plan that the first rank of its engine sends to the other ranks."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from mindspeed_rl_plugin.engine.routes import ROUTES, continued, routes_of
from mindspeed_rl_plugin.episodes.environments import Reply, TurnLimits
from mindspeed_rl_plugin.episodes.episode_rows import EPISODE_COUNTS, episode_row
from mindspeed_rl_plugin.rows import Column, Completion, GenerateRequest, Ragged, SampleId


@dataclass(eq=False)
class EpisodeState:
    """A running episode. Every rank of its engine has the fields before `asked`; only the first rank uses the later
    fields."""

    request: GenerateRequest
    prompt: tuple[int, ...]  # token ids before the first turn
    waits: bool  # whether a reply of its environment is due
    tokens: list[int] = field(default_factory=list)  # ids after the prompt
    logps: list[float] = field(default_factory=list)
    segments: list[tuple[int, int]] = field(default_factory=list)  # as in `Completion`
    turns: list[tuple[int, int]] = field(default_factory=list)  # as in `Completion`
    partial: Completion | None = None  # the interrupted turn, if any
    limits: TurnLimits = TurnLimits()  # of the next turn
    routes: Tensor | None = None  # of prompt and tokens (`engine.routes`); tokens between turns have the next turn's

    format: Any = None  # `RawFormat` with the tools of this episode
    asked: Sequence[Mapping[str, Any]] = ()  # messages of the data, or its prompt as a user's message
    conversation: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # of the turns
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EPISODE_COUNTS, 0))
    tools: dict[str, list[int]] = field(default_factory=dict)  # name -> number of calls, and of failed ones
    failure: str | None = None  # why its environment cannot continue
    finish: str | None = None  # why it ends; set while only its last reply is due
    held: list[Reply] | None = None  # replies since it was interrupted; None: it is not interrupted

    def spoke(self, turn: Completion) -> None:
        start = len(self.tokens)
        self.segments = _joined(self.segments, start, turn.segments)
        self.turns.append((start, start + len(turn.tokens)))
        self.tokens += turn.tokens
        self.logps += turn.logps
        if (routes := routes_of(turn)) is not None:
            self.routes = continued(self.routes, routes)
        self.partial, self.waits = None, True

    def sees(self, tokens: Sequence[int]) -> None:
        """Add tokens that the model sees before its next turn."""
        self.tokens += tokens
        self.logps += [0.0] * len(tokens)

    def unsay(self) -> None:
        """Take the last turn back, with the tokens before it that the model saw only then."""
        self.turns.pop()
        end = self.turns[-1][1] if self.turns else 0
        self.tokens, self.logps = self.tokens[:end], self.logps[:end]
        self.segments = [(first, version) for first, version in self.segments if first < end]
        if self.routes is not None:
            self.routes = self.routes[: max(len(self.prompt) + end - 1, 0)]
        if self.rewards:  # on the first rank
            lost = self.rewards.pop()
            del self.conversation[next(i for i, m in enumerate(self.conversation) if m.get("turn", [-1])[0] >= end) :]
            self.reward(lost)

    def next_turn(self, longest: int) -> GenerateRequest:
        """The request for the next turn, or for the rest of an interrupted one. longest: limit of a turn [tokens]."""
        self.waits, request, left = False, self.request, self.request.sampling.max_tokens - len(self.tokens)
        most, stop = min(longest, left, self.limits.most or left), request.sampling.stop + self.limits.stop
        return replace(
            request,
            prompt_tokens=(*self.prompt, *self.tokens),
            sampling=replace(request.sampling, max_tokens=most, stop=stop),
            seed=turn_seed(request.seed, len(self.turns)),
            begun=self.partial,
        )

    def completion(self, finish: str) -> Completion:
        """The response so far, with the interrupted turn if there is one. finish: why it ends, of `FINISH`."""
        part, start = self.partial, len(self.tokens)
        tokens, logps, segments = self.tokens, self.logps, self.segments
        if part is not None:
            tokens, logps = [*tokens, *part.tokens], [*logps, *part.logps]
            segments = _joined(segments, start, part.segments)
        return Completion(
            self.request.id,
            tuple(tokens),
            tuple(logps),
            finish,
            tuple(segments),
            prompt=self.prompt,
            turns=tuple(self.turns),
            columns={} if finish == "abort" else self._columns(),
            resumable=False,  # no other process has its environment
        )

    # on the first rank

    def _columns(self) -> dict[str, Column]:
        routes = {} if self.routes is None else {ROUTES: Ragged.from_rows([self.routes])}
        return routes | episode_row(
            self.prompt,
            self.request.prompt_tokens,
            self.turns,
            self.rewards,
            self.conversation,
            counts=self.counts,
            tools=[*self.tools.values()],
            failed=self.failure is not None,
        )

    def count(self, counts: Mapping[str, int]) -> None:
        for name, value in counts.items():
            self.counts[name] += value

    def hear(self, messages: Sequence[Mapping[str, Any]], seconds: float) -> None:
        """Add the messages of a reply. The seconds of the reply are put in its first message or, if it has none, in the
        message before."""
        at = len(self.conversation) - (not messages)
        self.conversation += [dict(message) for message in messages]
        if messages or seconds:
            heard = self.conversation[at]
            heard["seconds"] = round(heard.get("seconds", 0.0) + seconds, 3)

    def reward(self, value: float) -> None:
        """Add to the reward of the last turn; a reward before the first turn is dropped."""
        if self.rewards:
            self.rewards[-1] += value
            last = next(message for message in reversed(self.conversation) if "turn" in message)
            last["reward"] = self.rewards[-1]

    def fail(self, why: str) -> None:
        """Record that its environment failed; all its rewards become 0."""
        self.failure, self.rewards = why, [0.0] * len(self.rewards)
        for message in self.conversation:
            if "turn" in message:
                message["reward"] = 0.0


@dataclass
class Plan:
    """What all ranks of the engine do next."""

    # (episode, token ids of its prompt), if the environment has written or extended the prompt of the data
    prompts: list[tuple[SampleId, tuple[int, ...]]] = field(default_factory=list)
    limits: list[tuple[SampleId, TurnLimits]] = field(default_factory=list)  # of next turns
    unheard: list[SampleId] = field(default_factory=list)  # episodes whose last turn reached nobody
    observations: list[tuple[SampleId, tuple[int, ...]]] = field(default_factory=list)  # tokens after the last turn
    due: list[SampleId] = field(default_factory=list)  # episodes whose next turn is submitted, in this order
    over: list[tuple[SampleId, str]] = field(default_factory=list)  # episodes that have ended, and why (of `FINISH`)
    expired: bool = False  # whether the deadline of `poll` has passed
    answered: int = 0  # as in `Environments`
    error: str | None = None  # why the run stops


def turn_seed(seed: int, turn: int) -> int:
    """63-bit seed of a turn. seed: of the response, and so of its first turn; turn: number, from 0 on. A later turn has
    the first 63 bits of BLAKE2b over both numbers."""
    if not turn:
        return seed
    digest = hashlib.blake2b(struct.pack("<2q", seed, turn), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _joined(segments: Sequence[tuple[int, int]], start: int, more: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Append the segments (first token, version) of a turn that begins at response token `start`. Only a change of the
    version adds an entry, so tokens between two turns have the version of the token before them."""
    joined = list(segments)
    for first, version in more:
        if not joined or joined[-1][1] != version:
            joined.append((start + first if joined else 0, version))
    return joined
