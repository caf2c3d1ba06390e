"""The state of a running episode, and the plan that the first rank of its engine sends to the other ranks."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_rl_plugin.engine.routes import ROUTES, continued, routes_of
from mindspeed_rl_plugin.episodes.environments import Reply, TurnLimits
from mindspeed_rl_plugin.episodes.episode_rows import EPISODE_COUNTS, FORK_COUNTS, episode_row
from mindspeed_rl_plugin.rows import Column, Completion, GenerateRequest, Ragged, SampleId, TurnId

OF_ROOTS, OF_FORKS = 1 << 32, 1 << 33  # numbers in seeds of paths; turns have smaller ones


@dataclass(eq=False)
class Path:
    """Tokens that the model reads and samples one after another. An episode is one path or, if the requests of an agent
    fork, several, which may begin with the same turns."""

    prompt: tuple[int, ...]  # token ids before the first turn
    seeds: tuple[int, ...] = ()  # what makes its seed from that of the response
    common: int = 0  # first tokens that an earlier path has, too
    tokens: list[int] = field(default_factory=list)  # ids after the prompt
    logps: list[float] = field(default_factory=list)
    segments: list[tuple[int, int]] = field(default_factory=list)  # as in `Completion`
    turns: list[tuple[int, int, int]] = field(default_factory=list)  # (first token, end, call) of each, in `tokens`
    routes: Tensor | None = None  # of prompt and tokens (`engine.routes`); tokens between turns have the next turn's
    head: int | None = None  # call of the last turn if nothing was added behind it
    conversation: list[dict[str, Any]] = field(default_factory=list)  # on the first rank

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    def end(self, turns: int) -> int:
        """Where its first turns end, in `tokens`."""
        return self.turns[turns - 1][1] if turns else 0

    def until(self, turns: int, *seeds: int) -> Path:
        """A copy of its first turns."""
        end = self.end(turns)
        calls = [call for *_, call in self.turns[:turns]]
        said = next((i + 1 for i, m in enumerate(self.conversation) if m.get("call") == calls[-1]), 0) if calls else 0
        return Path(
            self.prompt,
            (*self.seeds, *seeds),
            len(self.prompt) + end,
            self.tokens[:end],
            self.logps[:end],
            [(first, version) for first, version in self.segments if first < end],
            self.turns[:turns],
            None if self.routes is None else self.routes[: len(self.prompt) + end],
            calls[-1] if calls else None,
            [dict(message) for message in self.conversation[:said]],
        )

    def sees(self, tokens: Sequence[int]) -> None:
        """Add tokens that the model sees before its next turn."""
        self.head = None
        self.tokens += tokens
        self.logps += [0.0] * len(tokens)

    def spoke(self, call: int, turn: Completion) -> None:
        start = len(self.tokens)
        self.segments = _joined(self.segments, start, turn.segments)
        self.turns.append((start, start + len(turn.tokens), call))
        self.tokens += turn.tokens
        self.logps += turn.logps
        self.head = call
        if (routes := routes_of(turn)) is not None:
            self.routes = continued(self.routes, routes)


class NextTurn(NamedTuple):
    """A turn that the engine is to sample."""

    sample: SampleId
    call: int  # number of the turn in its episode
    parent: int | None  # call of the turn that it continues; None: `tokens` are a whole prompt
    tokens: tuple[int, ...]  # ids behind the parent's turn
    limits: TurnLimits = TurnLimits()
    trained: bool = True  # else the turn is not kept
    common: int = 0  # without a parent: first tokens of the prompt that another path of the episode has, too


@dataclass(eq=False)
class PendingTurn:
    """A turn that the engine samples, or that waits for its place in the order or in an interrupted episode."""

    path: Path
    limits: TurnLimits
    trained: bool
    submitted: bool = False
    partial: Completion | None = None  # its interrupted part, if any


@dataclass(eq=False)
class EpisodeState:
    """A running episode. Every rank of its engine has the fields before `asked`; only the first rank uses the later
    fields."""

    request: GenerateRequest
    agent: bool = False  # whether it may have several paths
    paths: list[Path] = field(default_factory=list)  # in the order of their first turns
    turns: dict[int, tuple[Path, int]] = field(default_factory=dict)  # call -> a path with it, its turns up to it
    pending: dict[int, PendingTurn] = field(default_factory=dict)  # by call
    begun: Counter[int | None] = field(default_factory=Counter)  # call -> turns that continue it; None: whole prompts

    format: Any = None  # `RawFormat` with the tools of this episode
    asked: Sequence[Mapping[str, Any]] = ()  # messages of the data, or its prompt as a user's message
    opening: list[dict[str, Any]] = field(default_factory=list)  # the conversation before the first turn
    rewards: dict[int, float] = field(default_factory=dict)  # of the turns, by call
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EPISODE_COUNTS + FORK_COUNTS, 0))
    tools: dict[str, list[int]] = field(default_factory=dict)  # name -> number of calls, and of failed ones
    failure: str | None = None  # why its environment cannot continue
    finish: str | None = None  # why it ends; with an environment set while only its last reply is due
    last: Reply | None = None  # the last reply of an agent, while the engine still samples turns
    held: list[Reply] | None = None  # replies since it was interrupted; None: it is not interrupted

    @property
    def path(self) -> Path:
        """The path with the turn that ended last."""
        return self.paths[-1]

    @property
    def conversation(self) -> list[dict[str, Any]]:
        return self.path.conversation if self.paths else self.opening

    def begin(self, turn: NextTurn) -> None:
        """Begin a turn. It continues the path of its parent, or a copy if this path continues already."""
        number = self.begun[turn.parent]
        self.begun[turn.parent] += 1
        if turn.parent is None:
            seeds = (OF_ROOTS + number,) if number else ()
            path = Path(turn.tokens, seeds, turn.common, conversation=[dict(message) for message in self.opening])
        else:
            path, count = self.turns[turn.parent]
            if path.head != turn.parent or not turn.trained:
                path = path.until(count, OF_FORKS + (count << 16) + number)
            path.sees(turn.tokens)
        self.pending[turn.call] = PendingTurn(path, turn.limits, turn.trained)

    def spoke(self, turn: Completion) -> Path:
        """Take an ended turn. Returns its path, which is now the last one; that of a turn that is not trained is not
        kept."""
        call = turn.id.call
        pending = self.pending.pop(call)
        path = pending.path
        path.spoke(call, turn)
        if pending.trained:
            if path in self.paths:
                self.paths.remove(path)
            self.paths.append(path)
            self.turns[call] = path, len(path.turns)
        return path

    def unsay(self, call: int) -> None:
        """Take a turn back that nothing continues, with the tokens before it that the model saw only then."""
        path, count = self.turns.pop(call)
        before = path.until(count - 1)
        for name in ("tokens", "logps", "segments", "turns", "routes", "head", "conversation"):
            setattr(path, name, getattr(before, name))
        others = (other for other in self.paths if other is not path and other.turns[: count - 1] == path.turns)
        if (other := next(others, None)) is not None or count == 1:  # nothing is left, or it is the start of another
            self.paths.remove(path)
            self.turns |= {
                call: (other, n) for n, (*_, call) in enumerate(path.turns, 1) if self.turns[call][0] is path
            }
        order = [*self.turns]
        self.paths.sort(key=lambda path: order.index(path.turns[-1][2]))
        self._give_lost(self.rewards.pop(call, 0.0))

    def keep_last(self) -> None:
        """Keep only the last path; it gets the rewards of the others."""
        del self.paths[:-1]
        kept = {call for *_, call in self.path.turns} if self.paths else set()
        self._give_lost(sum(self.rewards.pop(call) for call in [*self.rewards] if call not in kept))

    def _give_lost(self, reward: float) -> None:
        if reward and self.paths:
            self.reward(reward)

    def next_turn(self, call: int, longest: int) -> GenerateRequest:
        """The request for a pending turn, or for the rest of an interrupted one. longest: limit of a turn [tokens]."""
        request, pending = self.request, self.pending[call]
        pending.submitted = True
        path, limits = pending.path, pending.limits
        left = request.sampling.max_tokens - len(path.tokens)
        most, stop = min(longest, left, limits.most or left), request.sampling.stop + limits.stop
        return replace(
            request,
            id=TurnId(*request.id, call),
            prompt_tokens=(*path.prompt, *path.tokens),
            sampling=replace(request.sampling, max_tokens=most, stop=stop),
            seed=turn_seed(reduce(turn_seed, path.seeds, request.seed), len(path.turns)),
            begun=pending.partial,
        )

    def completion(self, finish: str) -> Completion:
        """The response so far, one path after the other, with interrupted turns. finish: why it ends, of `FINISH`."""
        pending = self.pending.values() if finish == "abort" else ()
        paths, parts = [*self.paths], {id(p.path): p.partial for p in pending if p.partial is not None}
        paths += [p.path for p in pending if p.path not in paths]
        tokens, logps, segments = list[int](), list[float](), list[tuple[int, int]]()
        turns, starts = dict[int, tuple[int, int]](), list[tuple[int, int]]()
        prompt = paths[0].prompt if paths else self.request.prompt_tokens
        for path in paths:
            part, at = parts.get(id(path)), len(tokens)
            starts.append((len(prompt) + at if starts else 0, len(path.prompt)))
            if path is not paths[0]:
                tokens += path.prompt
                logps += [0.0] * len(path.prompt)
            start = len(tokens)
            more = [*path.segments] if part is None else _joined(path.segments, len(path.tokens), part.segments)
            segments += [(at if not first else start + first, version) for first, version in more]
            tokens += path.tokens
            logps += path.logps
            for first, end, call in path.turns:
                if call in turns:  # another path trains it
                    logps[start + first : start + end] = [0.0] * (end - first)
                else:
                    turns[call] = start + first, start + end
            if part is not None:
                tokens += part.tokens
                logps += part.logps
        return Completion(
            self.request.id,
            tuple(tokens),
            tuple(logps),
            finish,
            tuple(segments),
            prompt=prompt,
            turns=tuple(turns.values()),
            columns={} if finish == "abort" else self._columns(turns, starts),
            resumable=False,  # no other process has its environment
        )

    # on the first rank

    def _columns(self, turns: Mapping[int, tuple[int, int]], starts: Sequence[tuple[int, int]]) -> dict[str, Column]:
        routes = [path.routes for path in self.paths if path.routes is not None]
        return ({ROUTES: Ragged.from_rows([torch.cat(routes)])} if routes else {}) | episode_row(
            self.paths[0].prompt,
            self.request.prompt_tokens,
            [*turns.values()],
            [self.rewards.get(call, 0.0) for call in turns],
            self._said(turns),
            counts=self.counts,
            tools=[*self.tools.values()],
            failed=self.failure is not None,
            paths=starts if self.agent else None,
        )

    def _said(self, turns: Mapping[int, tuple[int, int]]) -> list[dict[str, Any]]:
        """The messages of all paths; if there are several, each message has the number of its path."""
        out, seen = [], set[int]()
        for number, path in enumerate(self.paths):
            for message in path.conversation:
                call = message.get("call")
                said = {name: value for name, value in message.items() if name != "call"}
                if call is not None and call not in seen:
                    seen.add(call)
                    said |= {"turn": list(turns[call]), "reward": self.rewards.get(call, 0.0)}
                out.append(said | ({"path": number} if len(self.paths) > 1 else {}))
        return out

    def count(self, counts: Mapping[str, int]) -> None:
        for name, value in counts.items():
            self.counts[name] += value

    def hear(self, messages: Sequence[Mapping[str, Any]], seconds: float) -> None:
        """Add the messages of a reply. The seconds of the reply are put in its first message or, if it has none, in the
        message before."""
        conversation = self.conversation
        at = len(conversation) - (not messages)
        conversation += [dict(message) for message in messages]
        if messages or seconds:
            heard = conversation[at]
            heard["seconds"] = round(heard.get("seconds", 0.0) + seconds, 3)

    def reward(self, value: float) -> None:
        """Add to the reward of the last turn; a reward before the first turn is dropped."""
        if self.paths:
            self.rewards[self.path.turns[-1][2]] += value

    def fail(self, why: str) -> None:
        """Record that its environment failed; all its rewards become 0."""
        self.failure, self.rewards = why, dict.fromkeys(self.rewards, 0.0)


@dataclass
class Plan:
    """What all ranks of the engine do next."""

    turns: list[NextTurn] = field(default_factory=list)  # that begin
    due: list[TurnId] = field(default_factory=list)  # turns that are submitted, in this order
    # episodes that have ended, why (of `FINISH`), and calls of turns that reached nobody
    over: list[tuple[SampleId, str, tuple[int, ...]]] = field(default_factory=list)
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
