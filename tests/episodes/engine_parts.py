"""A scripted engine and scripted environments, for the tests of `EpisodeEngine` and its `Lead`."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from mindspeed_rl_plugin.dock.peers import Peers
from mindspeed_rl_plugin.engine.rollout_engine import response_request
from mindspeed_rl_plugin.episodes.environments import Reply, Turn
from mindspeed_rl_plugin.episodes.episode_engine import EpisodeEngine
from mindspeed_rl_plugin.episodes.episode_rows import EPISODE_COUNTS, FORK_COUNTS
from mindspeed_rl_plugin.episodes.lead import EpisodeLimits, Lead
from mindspeed_rl_plugin.rows import Completion, GenerateRequest, SampleId, Sampling, unpack_json

CLOSE, PROMPT = 99, (7, 8, 9)
LIMITS = EpisodeLimits(turns=4, observation=6, prompt=5)
SAYS = Reply(SampleId(0, 0, 0), [{"role": "user", "content": "!"}])
FIELDS = {"text": "p", "answer": "a", "record": {}, "messages": None}
COUNTED = ("calls", "malformed", "unknown", "arguments", "raised")


class Engine:
    """Samples tokens by seed and place, one of each response a step; ends a turn with CLOSE."""

    replica, replicas, leader, shares_experts = 0, 1, True, False

    def __init__(self) -> None:
        self.version, self.progress, self.seen = 0, 0.0, []
        self.queue: dict[SampleId, tuple[GenerateRequest, list[int], list[tuple[int, int]]]] = {}

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        for r in requests:
            assert r.id not in self.queue
            self.seen.append(r)
            begun = r.begun
            self.queue[r.id] = r, [*begun.tokens] if begun else [], [*begun.segments] if begun else []

    def poll(self, timeout: float) -> list[Completion]:
        return self.step_along(1)

    def step_along(self, steps: int) -> list[Completion]:
        done = []
        for _ in range(steps):
            for sample, (request, tokens, segments) in [*self.queue.items()]:
                if not segments or segments[-1][1] != self.version:
                    segments.append((len(tokens), self.version))
                place = len(request.prompt_tokens) + len(tokens)
                tokens.append(CLOSE if random.Random(request.seed + place).random() < 0.3 else 10 + place % 50)
                if tokens[-1] == CLOSE or len(tokens) == request.sampling.max_tokens:
                    done.append(self._take(sample, "stop" if tokens[-1] == CLOSE else "length"))
        return done

    def abort(self) -> list[Completion]:
        return [self._take(sample, "abort") for sample in [*self.queue]]

    def keep_step(self) -> None:
        assert not self.queue

    def shutdown(self) -> None: ...

    def _take(self, sample: SampleId, finish: str) -> Completion:
        _, tokens, segments = self.queue.pop(sample)
        return Completion(sample, tuple(tokens), tuple(-t / 100 for t in tokens), finish, tuple(segments))


class Format:
    """A token is a letter."""

    most_calls: int | None = None
    tools: Sequence[Mapping[str, Any]] = ()

    def prompt(self, messages: Sequence[Mapping[str, Any]], said: int = 0) -> list[int]:
        return [ord(letter) for message in messages for letter in message["content"]]

    def behind(self, last: int, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return ([] if last == CLOSE else [CLOSE]) + self.prompt(messages)

    def text(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    raw_text = text

    def shortened(self, text: str, limit: int) -> tuple[str, bool]:
        return text[:limit], len(text) > limit

    def holds_special(self, text: str) -> bool:
        return chr(CLOSE) in text


class World:
    """Replies some polls later, by `answer(sample, turn, number)`; keeps what it was told."""

    def __init__(self, answer: Any, tools: Sequence[str] = (), opening: Any = None, slow: int = 0) -> None:
        self.tools = [{"type": "function", "function": {"name": name}} for name in tools]
        self.answer, self.opening, self.begins, self.slow = answer, opening, opening is not None, slow
        self.log: list[tuple] = []
        self.turns: dict[SampleId, int] = {}
        self.answered = 0
        self.due: list[tuple[int, Reply]] = []
        self.closed = False

    @property
    def pending(self) -> bool:
        return bool(self.due)

    def begin(self, episode: SampleId, task: Mapping[str, Any], seed: int) -> None:
        self.log.append(("begin", episode, seed))
        self.turns[episode] = 0
        if self.begins:
            self._later(episode, self.opening)

    def act(self, episode: SampleId, turn: Turn) -> None:
        self.log.append(("act", episode, turn))
        self.turns[episode] += 1
        self._later(episode, self.answer(episode, turn, self.turns[episode]))

    def finish(self, episode: SampleId, cut: Turn | None = None) -> None:
        self.log.append(("finish", episode, cut))
        self._later(episode, Reply(episode, done=True, reward=0.25))

    def end(self, episode: SampleId) -> None:
        self.log.append(("end", episode))
        self.turns.pop(episode, None)
        self.due = [(when, reply) for when, reply in self.due if reply.id != episode]

    def poll(self, seconds: float) -> list[Reply]:
        self.due = [(when - 1, reply) for when, reply in self.due]
        there = [reply for when, reply in self.due if when < 0]
        self.due = [(when, reply) for when, reply in self.due if when >= 0]
        return there

    def close(self) -> None:
        self.closed = True

    def _later(self, episode: SampleId, reply: Reply) -> None:
        self.due.append((random.Random(str(episode)).randint(0, self.slow), replace(reply, id=episode)))

    def named(self, name: str) -> list[tuple]:
        return [entry for entry in self.log if entry[0] == name]


def requests_of(groups: int, members: int = 2, most: int = 40) -> list[GenerateRequest]:
    ids = [SampleId(0, group, member) for group in range(groups) for member in range(members)]
    return [response_request(Sampling(most), 3, sample, PROMPT, fields=FIELDS) for sample in ids]


def over(
    world: World, limits: EpisodeLimits = LIMITS, longest: int = 10, parse: Any = lambda text: ()
) -> EpisodeEngine:
    return EpisodeEngine(Engine(), longest, world.begins, Lead(limits, Format(), parse, world), Peers())


def echo(episode: SampleId, turn: Turn, number: int) -> Reply:
    """Two turns, then the end."""
    if number > 1:
        return Reply(episode, done=True, reward=1.0)
    return Reply(episode, [{"role": "user", "content": "xyz"}], reward=0.5, counts=dict.fromkeys(COUNTED, 1))


def whole(completion: Completion) -> tuple[int, ...]:
    return (*completion.prompt, *completion.tokens)


def told(completion: Completion) -> SimpleNamespace:
    """What its columns say of an episode."""
    columns = completion.columns
    return SimpleNamespace(
        rewards=columns["turn_reward"].row(0).tolist(),
        conversation=unpack_json(columns["conversation"])[0],
        counts=dict(zip(EPISODE_COUNTS, columns["episode_counts"][0].tolist(), strict=True))
        | (dict(zip(FORK_COUNTS, columns["fork_counts"][0].tolist(), strict=True)) if "paths" in columns else {}),
        tools=columns["tool_calls"][0].tolist() if "tool_calls" in columns else [],
        failed=bool(columns["environment_failed"][0]),
    )
