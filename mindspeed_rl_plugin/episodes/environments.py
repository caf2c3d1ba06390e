"""The Protocol `Environments`, which answers the model's turns, and the types of its inputs and results.

An *episode* is one response of several *turns*. After each turn its environment replies: with messages that the model
sees next (*observations*), or with the end. Tools without an environment count as an environment whose `begin` has no
message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from mindspeed_rl_plugin.rows import SampleId

ChatMessage = Mapping[str, Any]
"""A chat message: role ("user" or "tool"), content, and for a tool its name."""

CheckFields = Callable[[Mapping[str, Set[str]]], None]


class EpisodeError(ValueError):
    """The run stops: a tool or an environment raised an error, ran out of time, died, or gave an invalid answer."""


@dataclass(frozen=True)
class ToolCall:
    """A parsed call of the model: well-formed, but name and arguments are not checked yet."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class MalformedCall:
    """An attempt at a call that cannot be parsed. why: a fixed line for the model, without any text that the model
    wrote."""

    why: str


Attempt = ToolCall | MalformedCall
UNREAD = MalformedCall("the call cannot be read")


@dataclass(frozen=True)
class Unread:
    """A turn in which a user's parser will find the attempts."""

    text: str  # of the turn, special tokens included
    most: int | None  # most calls of a turn in the chat template, None: no limit


@dataclass(frozen=True)
class Turn:
    """One turn of the model."""

    tokens: tuple[int, ...]  # sampled ids, with the one that ended it
    logps: tuple[float, ...]
    text: str  # for environment and graders
    attempts: tuple[Attempt, ...] | Unread = ()  # attempts at calls, in order, or `Unread`


@dataclass
class Reply:
    """The reply to `begin` or to a turn."""

    id: SampleId
    messages: list[ChatMessage] = field(default_factory=list)  # what the model sees next, maybe none
    # token ids of the complete next prompt, instead of messages, from an environment that renders itself
    prompt: tuple[int, ...] | None = None
    reward: float = 0.0  # of this turn
    done: bool = False  # the episode is over
    failure: str | None = None  # why the environment cannot continue
    calls: dict[str, tuple[int, int]] = field(default_factory=dict)  # tool -> calls, and how many of them failed
    raised: dict[str, str] = field(default_factory=dict)  # tool -> its first error
    counts: Counter[str] = field(default_factory=Counter)  # of `EPISODE_COUNTS`
    seconds: float = 0.0  # that the user's code needed


def at_most(attempts: Sequence[Attempt], most: int | None) -> tuple[Attempt, ...]:
    """The attempts of a turn, or one error if they are more than the chat template can write."""
    if most is None or len(attempts) <= most:
        return tuple(attempts)
    return (MalformedCall(f"at most {most} call in a turn"),)


def place(sample: SampleId) -> str:
    """The name of an episode, for an error."""
    rollout = "the evaluation" if sample.epoch < 0 else f"rollout {sample.epoch}"
    return f"{rollout}, prompt {sample.group}, response {sample.member}"


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the tools of JSON schemas, in order."""
    return [tool["function"]["name"] for tool in tools]


class Environments(Protocol):
    """The environments of one engine's episodes. All calls except `poll` return at once. There is one reply for each
    `act` and `finish` and, where `begins`, for each `begin`. An episode has one call at a time."""

    tools: Sequence[Mapping[str, Any]]
    """JSON schemas of the tools, as chat templates take them; () where there are none."""
    begins: bool
    """Whether `begin` may have something to say; else no reply comes of it, and the first turn can start at once."""
    pending: bool
    """Whether a reply is due."""
    answered: int
    """Number of calls of a user's code that have ended; a repeated call counts each time. As long as the number rises,
    the environments make progress."""

    def begin(self, episode: SampleId, task: Mapping[str, Any], seed: int) -> None:
        """Begin an episode. task: its data row: prompt (text), answer, record (other fields), messages (or None); seed:
        of its group, so that all members begin in the same way."""

    def act(self, episode: SampleId, turn: Turn) -> None:
        """Answer the model's turn. Its calls are made in order."""

    def finish(self, episode: SampleId, cut: Turn | None = None) -> None:
        """A limit was reached, and no further turn comes. The last reply follows, with the rest of the reward. cut: a
        turn that the limit has cut; its calls are not made."""

    def end(self, episode: SampleId) -> None:
        """The episode has ended or was given up: close its environment, and drop its running call. Also called after a
        reply that is done or failed; an unknown episode has no effect."""

    def poll(self, seconds: float) -> list[Reply]:
        """Replies so far; if some are due, waits for one, at most `seconds`. Raises EpisodeError if the run stops."""

    def close(self) -> None:
        """End all environments and processes. Idempotent."""

    check_fields: CheckFields
    """Raises ValueError where an episode cannot begin for lack of a field; rows: place in the data -> fields of the
    record."""


def row_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The task of an episode. meta: `text`, `answer`, `record`, `messages` of a `Prompt`."""
    return {**{name: value for name, value in meta.items() if name != "text"}, "prompt": meta["text"]}


def begin_once(environments: Environments, task: Mapping[str, Any], seed: int) -> str | None:
    """Begin and end an episode before the first real one. Returns why that failed, or None."""
    if not environments.begins:
        return None
    sample = SampleId(0, 0, 0)
    environments.begin(sample, task, seed)
    while not (replies := environments.poll(1.0)):
        pass
    environments.end(sample)
    return replies[0].failure
