"""`EnvironmentPool`: tools and environments of a user's files, in worker processes, each call within a time limit."""

from __future__ import annotations

import functools
import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from mindspeed_rl_plugin.config.episode_flags import OPENENV
from mindspeed_rl_plugin.environment import say
from mindspeed_rl_plugin.episodes.arguments import fits, takes
from mindspeed_rl_plugin.episodes.protocol import (
    UNREAD,
    Attempt,
    EpisodeError,
    MalformedCall,
    Message,
    Reply,
    ToolCall,
    Turn,
    Unread,
    at_most,
    place,
)
from mindspeed_rl_plugin.episodes.replay import EnvironmentInstance, LostCall, result_of
from mindspeed_rl_plugin.episodes.tools import RESET, Answer, Offer
from mindspeed_rl_plugin.episodes.worker import CLOSE_SECONDS, Source
from mindspeed_rl_plugin.reward.calling import lacking
from mindspeed_rl_plugin.reward.specs import locate
from mindspeed_rl_plugin.rows import SampleId
from mindspeed_rl_plugin.workers.pool import WorkerPool
from mindspeed_rl_plugin.workers.pool_worker import WorkerCall
from mindspeed_rl_plugin.workers.process import LATE, Program

TOGETHER = 256  # most coroutines in the making in a process
KILL_SECONDS = 5.0  # in which the keeper of a worker kills all that a user's code has started
SERVES = Program(
    "mindspeed_rl_plugin.episodes.worker:main",
    Offer | None,
    tuple[int, Answer | str],
    "an environment worker",
    EpisodeError,
    patience=KILL_SECONDS,
    kept=True,
)
DESCRIBES = replace(
    SERVES, main="mindspeed_rl_plugin.episodes.worker:describe_tools", first=list[dict[str, Any]] | None, then=None
)


@dataclass(eq=False)
class OpenEpisode:
    """An episode. home: its environment, None where there are only tools; reply: in the making; left: messages of it,
    and calls from which some come, in their order; turn: the last one, whose calls a user's parser finds; call: in the
    making."""

    id: SampleId
    home: EnvironmentInstance | None
    reply: Reply
    left: deque[Message | tuple] = field(default_factory=deque)
    turn: Turn | None = None
    call: WorkerCall | None = None


class EnvironmentPool:
    """`Environments` of a user's files, in `workers` processes, see `replay`. For one thread at a time.

    tools, environment: as --rl-tools and --rl-environment have them; parser: as --rl-tool-parser has one of the user's;
    see `tools`. timeout: seconds of one call; wait_timeout: seconds that other ranks wait for this one.

    Raises EpisodeError for what cannot be loaded.
    """

    def __init__(
        self,
        tools: Sequence[str],
        environment: str | None,
        parser: str | None = None,
        *,
        workers: int,
        timeout: float,
        wait_timeout: float,
    ) -> None:
        self._sources = [_source("--rl-tools", given, "function") for given in tools]
        self._environment = None if environment is None else _source("--rl-environment", environment, "class")
        self._parser = None if parser is None else _source("--rl-tool-parser", parser, "function")
        names = [source.name for source in self._sources]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise EpisodeError(f"--rl-tools {' '.join(tools)}: {', '.join(twice)} is there twice; rename one of them")
        self._timeout, self._wait_timeout = timeout, wait_timeout
        self._opened: dict[SampleId, OpenEpisode] = {}
        self._replies: list[Reply] = []
        self._error: EpisodeError | None = None  # for `poll`
        self._warned = self._closed = False
        self.answered, self.begins = 0, environment is not None
        self._pool = self._load(SERVES, workers)
        self._offer: Offer = self._pool.loaded
        self.check_fields = functools.partial(_check_fields, environment, self._offer.fields)
        try:
            self._try_parser()
            self.tools: Sequence[Mapping[str, Any]] = ()
            if self._offer.tools or self._offer.methods:
                self.tools = self._describe()
        except BaseException:
            self.close()
            raise
        self._parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}

    # of the protocol `Environments`

    @property
    def pending(self) -> bool:
        return bool(self._replies) or any(opened.call is not None for opened in self._opened.values())

    def begin(self, episode: SampleId, task: Mapping[str, Any], seed: int) -> None:
        home = EnvironmentInstance() if self.begins else None
        opened = self._opened[episode] = OpenEpisode(episode, home, Reply(episode))
        if home is not None:
            opened.left.append(("reset", home.key, dict(task), seed, "{}/{}/{}".format(*episode)))
            self._go_on(opened)
            self._give()

    def act(self, episode: SampleId, turn: Turn) -> None:
        """See `Environments`. A turn that calls tools is answered by these; another one by the environment's `step`, or
        it is the last."""
        opened = self._opened[episode]
        if isinstance(turn.attempts, Unread):
            opened.turn = turn
            opened.left.append(("parse", turn.attempts.text))
        else:
            self._answer_turn(opened, turn.text, turn.attempts)
        self._go_on(opened)
        self._give()

    def finish(self, episode: SampleId, cut: Turn | None = None) -> None:
        opened = self._opened[episode]
        self._conclude(opened)
        self._go_on(opened)
        self._give()

    def end(self, episode: SampleId) -> None:
        self._replies = [reply for reply in self._replies if reply.id != episode]
        opened = self._opened.pop(episode, None)
        if opened is None:
            return
        if opened.call is None or self._pool.withdraw(opened.call):  # else when it is over, see `_result`
            self._leave(opened)
        self._give()

    def poll(self, seconds: float) -> list[Reply]:
        end = time.monotonic() + seconds
        while True:
            if self._closed:
                raise EpisodeError("the environments are closed")
            self._give()
            self._pool.wait(time.monotonic() if self._replies or not self.pending else end)
            self._take()
            self._give()
            if self._error is not None:
                raise self._error
            if self._replies or not self.pending or time.monotonic() >= end:
                break
        replies, self._replies = self._replies, []
        return replies

    def close(self) -> None:
        """See `Environments`. Those that do not close themselves in time are killed."""
        if not self._closed:
            self._closed = True
            self._pool.close(min(CLOSE_SECONDS, self._timeout))

    # inside

    def _load(self, program: Program, count: int) -> WorkerPool:
        """Processes of a program. Raises EpisodeError where they cannot load."""
        setup = self._sources, self._environment, self._parser, self._timeout
        sources = (*self._sources, self._environment, self._parser)
        loads = ", ".join(source.given for source in sources if source is not None)
        return WorkerPool(program, setup, loads, count, self._wait_timeout, self._timeout)

    def _try_parser(self) -> None:
        """On an empty turn. Raises EpisodeError where it goes wrong already there."""
        if self._parser is not None:
            self._pool.put(self._call(("parse", ""), self))
            while not (made := [*self._pool.take()]):
                self._pool.give()
                self._pool.wait(math.inf)
            result = result_of(*made[0])
            if isinstance(result, LostCall) or result.error is not None:
                raise self._parser_error(result, "the empty turn, on which it is tried")

    def _parser_error(self, result: Answer | LostCall, where: str) -> EpisodeError:
        why = _readable(result.why if isinstance(result, LostCall) else result.error)
        return EpisodeError(f"--rl-tool-parser {self._parser.given} {why}\n  on {where}")

    def _describe(self) -> Sequence[Mapping[str, Any]]:
        """The schemas of the tools, from a process that may import what that takes, and ends then."""
        pool = self._load(DESCRIBES, 1)
        pool.close()
        return pool.loaded

    def _answer_turn(self, opened: OpenEpisode, text: str, attempts: Sequence[Attempt]) -> None:
        opened.left += [self._attempt(opened, attempt) for attempt in attempts]
        if not attempts and self._offer.steps:
            opened.left.append(("step", opened.home.key, text))
        elif not attempts:
            self._conclude(opened)

    def _attempt(self, opened: OpenEpisode, attempt: Attempt) -> Message | tuple:
        """The call that a model wants, or what it sees in the place of its result."""
        if isinstance(attempt, MalformedCall):
            opened.reply.counts["malformed"] += 1
            return {"role": "tool", "name": "unknown", "content": f"error: {attempt.why}"}
        name, parameters = attempt.name, self._parameters.get(attempt.name)
        if parameters is None:
            opened.reply.counts["unknown"] += 1
            content = f"error: no such tool; there are: {', '.join(self._parameters) or 'none'}"
        elif not fits(dict(attempt.arguments), {"type": "object", "properties": {}, **parameters}):
            opened.reply.counts["arguments"] += 1
            content = f"error: wrong arguments; {name} takes {takes(parameters)}"
        elif name in self._offer.tools:
            return "tool", name, dict(attempt.arguments)
        else:
            return "method", opened.home.key, name, dict(attempt.arguments)
        return {"role": "tool", "name": name, "content": content}

    def _conclude(self, opened: OpenEpisode) -> None:
        """The reply in the making is the last."""
        opened.reply.done = True
        if self._offer.rewards:
            opened.left.append(("get_reward", opened.home.key))

    def _go_on(self, opened: OpenEpisode) -> None:
        """Make the next call of a reply, or give it."""
        while opened.left and not isinstance(opened.left[0], tuple):
            opened.reply.messages.append(opened.left.popleft())
        if opened.left:
            message = opened.left.popleft()
            opened.call = self._call(message, opened, None if message[0] in ("parse", "tool") else opened.home)
            self._pool.put(opened.call)
        else:
            self._reply(opened)

    def _call(self, message: tuple, owner: Any, home: EnvironmentInstance | None = None) -> WorkerCall:
        """message: kind and arguments, as `worker.Desk` takes them."""
        kind, *arguments = message
        name = f"{kind} {arguments[-2]}" if kind in ("tool", "method") else kind
        return WorkerCall(message, self._timeout, name in self._offer.concurrent, TOGETHER, owner, home)

    def _reply(self, opened: OpenEpisode, failure: str | None = None) -> None:
        reply, opened.reply = opened.reply, Reply(opened.id)
        reply.failure = failure
        self._replies.append(reply)
        if failure is not None or reply.done:
            del self._opened[opened.id]
            self._leave(opened)

    def _leave(self, opened: OpenEpisode) -> None:
        if opened.home is not None:
            self._pool.end(opened.home)

    def _give(self) -> None:
        try:
            self._pool.give()
        except EpisodeError as error:
            self._error = error

    def _take(self) -> None:
        """What was answered."""
        for call, answer in self._pool.take():
            self.answered += 1
            result = result_of(call, answer)
            if result is None:
                self._pool.put_again(call)
            else:
                self._result(call, result)

    def _result(self, call: WorkerCall, result: Answer | LostCall) -> None:
        opened, error = call.owner, result.why if isinstance(result, LostCall) else result.error
        if opened is None:
            self._warn(error)
            return
        opened.call = None
        if self._opened.get(opened.id) is not opened:
            self._leave(opened)
            return
        opened.reply.seconds += result.seconds
        kind = call.message[0]
        if kind == "parse":
            self._parsed(opened, call.message[1], result)
        elif kind in ("tool", "method") and not (isinstance(result, LostCall) and result.unmade):
            self._tool_result(opened, call.message[-2], result)
        elif isinstance(result, Answer) and error is None:
            opened.reply.reward += result.reward
            opened.reply.messages += [{"role": "user", "content": text} for text in result.texts]
            if kind == "step" and result.done:
                self._conclude(opened)
        else:
            name = call.message[2] if kind == "method" else kind
            limit = " (--rl-environment-timeout)" if str(error).startswith(LATE) else ""
            self._reply(opened, f"failed: {self._environment.name}.{name} {_readable(error)}{limit}")
            return
        self._go_on(opened)

    def _parsed(self, opened: OpenEpisode, text: str, result: Answer | LostCall) -> None:
        """What a user's parser has found in a turn. The run stops where it went wrong, which is not the model's."""
        if isinstance(result, LostCall) or result.error is not None:
            self._error = self._parser_error(result, f"the turn {text!r:.300} of {place(opened.id)}")
            return
        found = [UNREAD if call is None else ToolCall(*call) for call in json.loads(result.texts[0])]
        self._answer_turn(opened, opened.turn.text, at_most(found, opened.turn.attempts.most))

    def _tool_result(self, opened: OpenEpisode, name: str, result: Answer | LostCall) -> None:
        reply, lost, error = opened.reply, isinstance(result, LostCall), None
        if lost or result.error is not None:
            error = result.why if lost else result.error
            reply.raised.setdefault(name, error)
            reply.counts["raised"] += 1
            content = f"error: the tool {error}" if lost else f"error: {result.brief}"
        else:
            content = result.texts[0]
        reply.counts["calls"] += 1
        made, failed = reply.calls.get(name, (0, 0))
        reply.calls[name] = (made + 1, failed + (error is not None))
        reply.messages.append({"role": "tool", "name": name, "content": content})

    def _warn(self, error: str | None) -> None:
        """Of the first environment that does not close."""
        if error is not None and not self._warned:
            self._warned = True
            say(f"warning: {self._environment.name}.close {error}; the run goes on, and what it holds may stay open")


def _readable(error: str | None) -> str:
    """An error without its head where it was raised by what reads an answer, not on a line of the user's."""
    return str(error) if "\n" in str(error) else str(error).removeprefix("raised ValueError: it ")


def _check_fields(environment: str, fields: Sequence[str], rows: Mapping[str, Set[str]]) -> None:
    """See `Environments`. fields: that its `reset` cannot do without."""
    if problem := lacking(fields, rows, RESET):
        raise EpisodeError(f"--rl-environment {environment}: its reset {problem}")


def _source(flag: str, given: str, kind: str) -> Source:
    """Where a user's code is. Raises EpisodeError for no such file."""
    if given.startswith(OPENENV):
        return Source(given, "", given)
    try:
        found = locate(given, flag, kind)
    except ValueError as error:
        raise EpisodeError(str(error)) from None
    if found is None:
        raise EpisodeError(f"{flag} {given!r}: give path/to/file.py:{kind}")
    return Source(given, *found)
