"""Who answers the model's turns: the Protocol `Environments`, and what goes in and comes out.

An *episode* is one response of several *turns*. After each turn its environment replies: with messages that the model
sees next (*observations*), or with the end. Tools without an environment are an environment whose `begin` has nothing
to say.
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
    """A tool or an environment raised, ran out of time, died, or answered what cannot be used, and the run stops."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote, as it was parsed: well-formed, but neither name nor arguments are checked."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class MalformedCall:
    """An attempt at a call that cannot be read. why: one fixed line for the model, without text of its own."""

    why: str


Attempt = ToolCall | MalformedCall
UNREAD = MalformedCall("the call cannot be read")


@dataclass(frozen=True)
class Unread:
    """Attempts that a user's parser is to find."""

    text: str  # of the turn, special tokens included
    most: int | None  # calls of a turn that the chat template can write, None without a limit


@dataclass(frozen=True)
class Turn:
    """One turn of the model."""

    tokens: tuple[int, ...]  # sampled ids, the one that ended it included
    logps: tuple[float, ...]
    text: str  # as environment and graders see it
    attempts: tuple[Attempt, ...] | Unread = ()  # at calls, in their order, or who is to find them


@dataclass
class Reply:
    """What came of `begin` or of a turn."""

    id: SampleId
    messages: list[ChatMessage] = field(default_factory=list)  # what the model sees next, maybe none
    # token ids of the whole next prompt, of an environment that renders itself, in the place of messages
    prompt: tuple[int, ...] | None = None
    reward: float = 0.0  # of this turn
    done: bool = False  # the episode is over
    failure: str | None = None  # why the environment cannot go on
    calls: dict[str, tuple[int, int]] = field(default_factory=dict)  # tool -> calls, and how many of them raised
    raised: dict[str, str] = field(default_factory=dict)  # tool -> its first error
    counts: Counter[str] = field(default_factory=Counter)  # of `EPISODE_COUNTS`
    seconds: float = 0.0  # that the user's code took


def at_most(attempts: Sequence[Attempt], most: int | None) -> tuple[Attempt, ...]:
    """Those of a turn; of more than its chat template can write, none is made."""
    if most is None or len(attempts) <= most:
        return tuple(attempts)
    return (MalformedCall(f"at most {most} call in a turn"),)


def place(sample: SampleId) -> str:
    """Which episode, for an error."""
    rollout = "the evaluation" if sample.epoch < 0 else f"rollout {sample.epoch}"
    return f"{rollout}, prompt {sample.group}, response {sample.member}"


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of JSON schemas, in their order."""
    return [tool["function"]["name"] for tool in tools]


class Environments(Protocol):
    """The environments of one engine's episodes. All calls return at once, but `poll`. One reply comes for each `act`
    and `finish`, and where `begins` for each `begin`; an episode has one call at a time."""

    tools: Sequence[Mapping[str, Any]]
    """JSON schemas of the tools, as chat templates take them; () where there are none."""
    begins: bool
    """Whether `begin` may have something to say; else no reply comes of it, and the first turn can start at once."""
    pending: bool
    """Whether a reply is due."""
    answered: int
    """Calls of a user's code that are over, one that was made again each time: it goes on as long as they grow."""

    def begin(self, episode: SampleId, task: Mapping[str, Any], seed: int) -> None:
        """A new episode. task: its data row: prompt (text), answer, record (other fields), messages (None where the
        data hold none); seed: of its group, so that all its members begin alike."""

    def act(self, episode: SampleId, turn: Turn) -> None:
        """The model's turn. Its calls are made in their order."""

    def finish(self, episode: SampleId, cut: Turn | None = None) -> None:
        """No further turn comes, a limit was reached: one reply follows, done, with the rest of its reward. cut: a turn
        that the limit has cut, of which no call is made."""

    def end(self, episode: SampleId) -> None:
        """The episode is over, or given up: close its environment. What is in the making for it is dropped. Also called
        after a reply that is done or failed; without effect for an episode that is not known."""

    def poll(self, seconds: float) -> list[Reply]:
        """Replies that are there; waits for one as long as some are due, `seconds` at most. Raises EpisodeError where
        the run stops."""

    def close(self) -> None:
        """End all environments and processes. Idempotent."""

    check_fields: CheckFields
    """Raises ValueError where an episode cannot begin for lack of a field; rows: place in the data -> fields of the
    record."""


def row_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The task of an episode. meta: `text`, `answer`, `record`, `messages` of a `Prompt`."""
    return {**{name: value for name, value in meta.items() if name != "text"}, "prompt": meta["text"]}


def begin_once(environments: Environments, task: Mapping[str, Any], seed: int) -> str | None:
    """Begin an episode, and end it, before the first real one. Returns why that fails, None where it does not."""
    if not environments.begins:
        return None
    sample = SampleId(0, 0, 0)
    environments.begin(sample, task, seed)
    while not (replies := environments.poll(1.0)):
        pass
    environments.end(sample)
    return replies[0].failure
