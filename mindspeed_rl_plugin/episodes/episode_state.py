"""An episode in the making, and what the first rank of its engine tells the others to do."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mindspeed_rl_plugin.episodes.environments import Reply
from mindspeed_rl_plugin.episodes.episode_rows import EPISODE_COUNTS, episode_row
from mindspeed_rl_plugin.rows import Column, Completion, GenerateRequest, SampleId


@dataclass(eq=False)
class EpisodeState:
    """An episode in the making, as every rank of its engine knows it; from `asked` on as only the first one does."""

    request: GenerateRequest
    prompt: tuple[int, ...]  # before the first turn
    waits: bool  # whether its environment is at work
    tokens: list[int] = field(default_factory=list)  # behind the prompt
    logps: list[float] = field(default_factory=list)
    segments: list[tuple[int, int]] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    partial: Completion | None = None  # a turn that was interrupted

    asked: Sequence[Mapping[str, Any]] = ()  # messages of the data
    conversation: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # of the turns
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EPISODE_COUNTS, 0))
    tools: dict[str, list[int]] = field(default_factory=dict)  # name -> calls, and how many of them raised
    failure: str | None = None  # why its environment cannot go on
    finish: str | None = None  # why it ends, while the rest of its reward is due
    held: list[Reply] | None = None  # what its environment said since it was interrupted; None: it was not

    def spoke(self, turn: Completion) -> None:
        start = len(self.tokens)
        self.segments = _joined(self.segments, start, turn.segments)
        self.turns.append((start, start + len(turn.tokens)))
        self.tokens += turn.tokens
        self.logps += turn.logps
        self.partial, self.waits = None, True

    def sees(self, tokens: Sequence[int]) -> None:
        """What the model sees before its next turn."""
        self.tokens += tokens
        self.logps += [0.0] * len(tokens)

    def next_turn(self, longest: int) -> GenerateRequest:
        """The request for the next turn, or for what is left of an interrupted one. longest: turn [tokens]."""
        self.waits, request, left = False, self.request, self.request.sampling.max_tokens - len(self.tokens)
        return replace(
            request,
            prompt_tokens=(*self.prompt, *self.tokens),
            sampling=replace(request.sampling, max_tokens=min(longest, left)),
            seed=turn_seed(request.seed, len(self.turns)),
            begun=self.partial,
        )

    def completion(self, finish: str) -> Completion:
        """All of it, an interrupted turn too."""
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
            resumable=False,  # its environment is in no other process
        )

    # on the first rank

    def _columns(self) -> dict[str, Column]:
        return episode_row(
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
        """What the environment says, and the time that it took: at the first message, or where there is none at what
        was said before."""
        at = len(self.conversation) - (not messages)
        self.conversation += [dict(message) for message in messages]
        if messages or seconds:
            heard = self.conversation[at]
            heard["seconds"] = round(heard.get("seconds", 0.0) + seconds, 3)

    def reward(self, value: float) -> None:
        """Of the last turn; before the first one it is nobody's."""
        if self.rewards:
            self.rewards[-1] += value
            last = next(message for message in reversed(self.conversation) if "turn" in message)
            last["reward"] = self.rewards[-1]

    def fail(self, why: str) -> None:
        """Its environment cannot go on, and it has no rewards of it."""
        self.failure, self.rewards = why, [0.0] * len(self.rewards)
        for message in self.conversation:
            if "turn" in message:
                message["reward"] = 0.0


@dataclass
class Plan:
    """What all ranks of the engine do next."""

    # of episodes that begin otherwise than by the data's prompt
    prompts: list[tuple[SampleId, tuple[int, ...]]] = field(default_factory=list)
    observations: list[tuple[SampleId, tuple[int, ...]]] = field(default_factory=list)  # tokens behind the last turn
    due: list[SampleId] = field(default_factory=list)  # whose next turn is submitted, in this order
    over: list[tuple[SampleId, str]] = field(default_factory=list)  # with why
    expired: bool = False  # whether the time is up
    answered: int = 0  # as `Environments` has it
    error: str | None = None  # why the run stops


def turn_seed(seed: int, turn: int) -> int:
    """63-bit seed of a turn, from 0 on, of the response that has `seed`: the response's own for the first turn, else
    the first 63 bits of BLAKE2b over both."""
    if not turn:
        return seed
    digest = hashlib.blake2b(struct.pack("<2q", seed, turn), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _joined(segments: Sequence[tuple[int, int]], start: int, more: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """With the segments of a turn that begins at token `start`: an entry where the version changes, not at each turn.
    What is between two turns counts to the first of them."""
    joined = list(segments)
    for first, version in more:
        if not joined or joined[-1][1] != version:
            joined.append((start + first if joined else 0, version))
    return joined
