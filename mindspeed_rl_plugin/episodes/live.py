"""An episode in the making as every rank of its engine knows it, and what the first rank tells the others to do."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from mindspeed_rl_plugin.rows import Completion, Episode, GenerateRequest, SampleId


@dataclass
class Unfinished:
    """An episode in the making, as every rank of the engine knows it. prompt: before the first turn; tokens, logps:
    behind it; partial: a turn that was interrupted; waits: whether its environment is at work."""

    request: GenerateRequest
    prompt: tuple[int, ...]
    waits: bool
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    segments: list[tuple[int, int]] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    partial: Completion | None = None

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

    def completion(self, finish: str, episode: Episode) -> Completion:
        """All of it, an interrupted turn too."""
        part, start = self.partial, len(self.tokens)
        tokens, logps, segments = self.tokens, self.logps, self.segments
        if part is not None:
            tokens, logps = [*tokens, *part.tokens], [*logps, *part.logps]
            segments = _joined(segments, start, part.segments)
        return Completion(self.request.id, tuple(tokens), tuple(logps), finish, tuple(segments), episode)


@dataclass
class Plan:
    """What all ranks of the engine do next. prompts: of episodes that begin otherwise than by the data's prompt;
    observations: tokens behind the last turn; due: whose next turn is submitted, in this order; over: with why;
    expired: whether the time is up; answered: as `Environments` has it; error: why the run stops."""

    prompts: list[tuple[SampleId, tuple[int, ...]]] = field(default_factory=list)
    observations: list[tuple[SampleId, tuple[int, ...]]] = field(default_factory=list)
    due: list[SampleId] = field(default_factory=list)
    over: list[tuple[SampleId, str]] = field(default_factory=list)
    expired: bool = False
    answered: int = 0
    error: str | None = None


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
