"""The Protocol `Environments`, which answers the model's turns, and the types of its inputs and results.

An *episode* is one response of several *turns*. After each turn its environment replies: with messages that the model
sees next (*observations*), or with the end of the episode. If there are only tools, they count as an environment
without first messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mindspeed_rl_plugin.rows import SampleId

ChatMessage = Mapping[str, Any]
"""A chat message: `role`, `content`; if the role is "tool", also `name`, the tool's name."""

CheckFields = Callable[[Mapping[str, Set[str]]], None]


class EpisodeError(ValueError):
    """Stops the run: tools, environments, a parser or a template cannot be loaded, or they fail."""


@dataclass(frozen=True)
class ToolCall:
    """A parsed call of the model; name and arguments are not checked yet."""

    name: str
    arguments: Mapping[str, Any]
    texts: Mapping[str, str] = field(default_factory=dict, compare=False)  # as written, where they are no JSON objects


@dataclass(frozen=True)
class MalformedCall:
    """A call that cannot be parsed. why: a fixed line for the model, without any text that the model wrote."""

    why: str


Attempt = ToolCall | MalformedCall
UNREAD = MalformedCall("the call cannot be read")


@dataclass(frozen=True)
class Unread:
    """A turn in which a user's parser must still find the calls."""

    text: str  # of the turn, with special tokens except the one that ended it
    most: int | None  # how many calls the chat template can write in one turn, None: no limit


@dataclass(frozen=True)
class TurnLimits:
    """What an agent asks of a turn, beside the job's own limits."""

    most: int | None = None  # longest turn [tokens]
    stop: tuple[str, ...] = ()  # texts that end it


@dataclass(frozen=True)
class AgentRequest:
    """A request of an agent for turns."""

    calls: list[int]  # numbers of the turns; equal draws have one request
    messages: list[ChatMessage]  # the whole conversation, or those behind the parent's turn
    parent: int | None = None  # call of the turn that it continues
    tools: list[Mapping[str, Any]] = field(default_factory=list)  # JSON schemas
    limits: TurnLimits = TurnLimits()
    trained: bool = True
    only_count: bool = False  # the answer is the number of tokens of its prompt, and not a turn
    differs: str = ""  # the first field in which a conversation that continues none differs from the longest one
    why: str = ""  # the place of this field, as a sentence


@dataclass(frozen=True)
class Turn:
    """One turn of the model."""

    tokens: tuple[int, ...]  # sampled ids, the end token included
    text: str  # for the environment and graders
    attempts: tuple[Attempt, ...] | Unread = ()  # calls, malformed ones too, in order; or `Unread`
    call: int = 0  # number of the turn in its episode
    before: int = 0  # tokens before it
    cut: bool = False  # whether a limit has cut it


@dataclass
class Reply:
    """The reply to `begin`, `act` or `finish`."""

    id: SampleId
    messages: list[ChatMessage] = field(default_factory=list)  # what the model sees next, maybe none
    request: AgentRequest | None = None  # of an agent, instead of messages
    reward: float = 0.0  # added to the reward of the last turn
    rewards: dict[int, float] = field(default_factory=dict)  # added to those of turns, by call
    done: bool = False  # whether the episode is over
    finish: str | None = None  # why it is over, of `FINISH`; None: "stop", or the limit that it has reached
    heard: list[int] | None = None  # calls of the turns that reached an agent; others are not trained; None: all
    failure: str | None = None  # why the environment cannot continue
    calls: dict[str, tuple[int, int]] = field(default_factory=dict)  # tool -> number of calls, and of failed ones
    raised: dict[str, str] = field(default_factory=dict)  # tool -> its first error
    counts: Counter[str] = field(default_factory=Counter)  # by the names in `EPISODE_COUNTS`
    seconds: float = 0.0  # time of the user's code


def at_most(attempts: Sequence[Attempt], most: int | None) -> tuple[Attempt, ...]:
    """The calls of a turn, or one error if there are more than the chat template can write."""
    if most is None or len(attempts) <= most:
        return tuple(attempts)
    return (MalformedCall(f"at most {most} call in a turn"),)


def as_declared(attempt: Attempt, tools: Sequence[Mapping[str, Any]]) -> Attempt:
    """A call in which an argument is the text that was written, and no number, if its tool declares it as a string.
    tools: JSON schemas, maybe of an agent."""
    if isinstance(attempt, MalformedCall) or not attempt.texts:
        return attempt
    schema = next((tool["function"] for tool in tools if tool["function"]["name"] == attempt.name), {})
    for key in ("parameters", "properties"):
        schema = schema.get(key) if isinstance(schema, Mapping) else None
    kinds = schema.items() if isinstance(schema, Mapping) else ()
    strings = [name for name, kind in kinds if isinstance(kind, Mapping) and kind.get("type") == "string"]
    texts = {name: attempt.texts[name] for name in strings if name in attempt.texts}
    return replace(attempt, arguments={**attempt.arguments, **texts})


def place(sample: SampleId) -> str:
    """The name of an episode, for an error."""
    rollout = "the evaluation" if sample.epoch < 0 else f"rollout {sample.epoch}"
    return f"{rollout}, prompt {sample.group}, response {sample.member}"


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the tools of JSON schemas, in order."""
    return [tool["function"]["name"] for tool in tools]


class Environments(Protocol):
    """The environments of one engine's episodes. Only `poll` and `close` wait. There is one reply to each `act`, to
    each `finish` and, if `begins`, to each `begin`. An episode waits for at most one reply at a time."""

    tools: Sequence[Mapping[str, Any]]
    """JSON schemas of the tools, as chat templates take them; () if there are none."""
    begins: bool
    """Whether there is a reply to `begin`, maybe with messages; if not, the first turn need not wait."""
    pending: bool
    """Whether replies are due that `poll` has not returned yet."""
    answered: int
    """Number of finished calls of a user's code, repeated calls included. If it rises, there is progress."""

    def begin(self, episode: SampleId, task: Mapping[str, Any], seed: int) -> None:
        """Begin an episode. task: its data row: prompt (text), answer, record (other fields), messages (or None); seed:
        the same for all members of a group, so that they begin in the same way."""

    def act(self, episode: SampleId, turn: Turn) -> None:
        """Answer the model's turn. The calls in the turn are made one after another, in order."""

    def finish(self, episode: SampleId, cut: Turn | None = None) -> None:
        """A limit was reached, so no further turn comes. The last reply has the rest of the reward. cut: a turn that
        the limit has cut; its calls are not made."""

    def end(self, episode: SampleId) -> None:
        """The episode has ended or was given up: close its environment, and drop its replies. May be called again, or
        for an unknown episode; then it does nothing."""

    def poll(self, seconds: float) -> list[Reply]:
        """The finished replies. If there are none yet, but some are due, waits for one, at most `seconds`. Raises
        EpisodeError to stop the run."""

    def close(self) -> None:
        """End all environments and processes. Idempotent."""

    check_fields: CheckFields
    """Raises ValueError if a row lacks a field that an episode needs; rows: place in the data -> fields of the
    record."""


def row_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The `task` of `Environments.begin`. meta: `text`, `answer`, `record`, `messages` of a `Prompt`."""
    return {**{name: value for name, value in meta.items() if name != "text"}, "prompt": meta["text"]}


def begin_once(
    environments: Environments, task: Mapping[str, Any], seed: int, see: Callable[[Sequence[Any]], Any] | None = None
) -> str | None:
    """Begin and end an episode as a trial. see: raises ValueError for tools of a request that the model cannot see.
    Returns why it failed, or None."""
    if not environments.begins:
        return None
    sample = SampleId(0, 0, 0)
    environments.begin(sample, task, seed)
    while not (replies := environments.poll(1.0)):
        pass
    environments.end(sample)
    if see is not None and replies[0].request is not None:
        try:
            see(replies[0].request.tools)
        except ValueError as error:
            return f"asks with tools that the model cannot see: {error}"
    return replies[0].failure
