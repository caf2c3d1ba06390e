"""`EnvironmentPool`: tools and environments of a user's files, in worker processes; each call has a time limit."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Generator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from mindspeed_rl_plugin.config.episode_flags import OPENENV
from mindspeed_rl_plugin.environment import say
from mindspeed_rl_plugin.episodes.environment_process import CLOSE_SECONDS, UserCode
from mindspeed_rl_plugin.episodes.environments import (
    UNREAD,
    Attempt,
    EpisodeError,
    MalformedCall,
    Reply,
    ToolCall,
    Turn,
    Unread,
    at_most,
    place,
)
from mindspeed_rl_plugin.episodes.replay import EnvironmentInstance, Making, result_of
from mindspeed_rl_plugin.episodes.tools import RESET, Answer, Offer, fits, takes
from mindspeed_rl_plugin.reward.calling import lacking
from mindspeed_rl_plugin.reward.specs import locate
from mindspeed_rl_plugin.rows import SampleId
from mindspeed_rl_plugin.workers.pool import WorkerPool
from mindspeed_rl_plugin.workers.pool_worker import GRACE, WorkerCall
from mindspeed_rl_plugin.workers.process import LATE, Program

MAX_COROUTINES = 256  # most unfinished coroutines in a process
KILL_SECONDS = 5.0  # for a worker's keeper (its parent process) to kill all processes of a user's code
SERVES = Program(
    "mindspeed_rl_plugin.episodes.environment_process:main",
    Offer | None,
    tuple[int, Answer | str],
    "an environment worker",
    EpisodeError,
    patience=KILL_SECONDS,
    kept=True,
)
DESCRIBES = replace(
    SERVES,
    main="mindspeed_rl_plugin.episodes.environment_process:describe_tools",
    first=list[dict[str, Any]] | None,
    then=None,
)


class _EnvironmentFailed(Exception):
    """The environment of an episode cannot continue; the text says why."""


class EnvironmentPool:
    """`Environments` of a user's files, in `workers` processes. If a process ends, see `replay`. Not thread-safe.

    tools, environment: values of --rl-tools and --rl-environment; parser: a user's function in --rl-tool-parser, or
    None; timeout: limit of one call [seconds]; wait_timeout: how long other ranks wait for this rank [seconds].

    Raises EpisodeError for code that cannot be loaded.
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
            raise EpisodeError(f"--rl-tools {' '.join(tools)}: two functions are named {', '.join(twice)}; rename one")
        self._timeout, self._wait_timeout = timeout, wait_timeout
        self._opened: dict[SampleId, EnvironmentInstance] = {}
        self._replies: list[Reply] = []
        self._error: EpisodeError | None = None  # raised by `poll`
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
        opened = self._opened[episode] = EnvironmentInstance(episode)
        if self.begins:
            self._start(opened, self._reset(opened, task, seed))

    def act(self, episode: SampleId, turn: Turn) -> None:
        opened = self._opened[episode]
        self._start(opened, self._turn(opened, turn))

    def finish(self, episode: SampleId, cut: Turn | None = None) -> None:
        opened = self._opened[episode]
        self._start(opened, self._conclude(opened))

    def end(self, episode: SampleId) -> None:
        self._replies = [reply for reply in self._replies if reply.id != episode]
        opened = self._opened.pop(episode, None)
        if opened is None:
            return
        # `_take` ends the environment of a running call, after the call
        if opened.call is None or self._pool.withdraw(opened.call):
            self._pool.end(opened)
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
        """See `Environments`. Environments that do not close in time are killed."""
        if not self._closed:
            self._closed = True
            self._pool.close(min(CLOSE_SECONDS, self._timeout))

    # inside

    def _load(self, program: Program, count: int) -> WorkerPool:
        """Start `count` processes of a program. Raises EpisodeError if they cannot load the user's code."""
        setup = self._sources, self._environment, self._parser, self._timeout
        sources = (*self._sources, self._environment, self._parser)
        loads = ", ".join(source.given for source in sources if source is not None)
        return WorkerPool(program, setup, loads, count, self._wait_timeout, self._timeout)

    def _try_parser(self) -> None:
        """Call the parser with an empty turn. Raises EpisodeError if that fails."""
        if self._parser is not None:
            self._pool.put(self._call(("parse", ""), self))
            while not (made := [*self._pool.take()]):
                self._pool.give()
                self._pool.wait(math.inf)
            self._check_parsed(result_of(*made[0]), "an empty turn, as a trial at the start")

    def _check_parsed(self, result: Answer, where: str) -> None:
        """Raises EpisodeError if the user's parser failed; the model is not the cause."""
        if result.error is not None:
            raise EpisodeError(f"--rl-tool-parser {self._parser.given} {_readable(result.error)}\n  on {where}")

    def _describe(self) -> Sequence[Mapping[str, Any]]:
        """The schemas of the tools, from a process that imports transformers and ends after this."""
        pool = self._load(DESCRIBES, 1)
        pool.close()
        return pool.loaded

    # how a reply is made

    def _reset(self, opened: EnvironmentInstance, task: Mapping[str, Any], seed: int) -> Making:
        yield from self._ask(opened, "reset", dict(task), seed, "{}/{}/{}".format(*opened.id))

    def _turn(self, opened: EnvironmentInstance, turn: Turn) -> Making:
        """Answer a turn: by tools if it has calls, else by the environment's `step`. Without `step` a turn that has no
        calls is the last one. Raises EpisodeError if a user's parser fails."""
        attempts = turn.attempts
        if isinstance(attempts, Unread):
            parsed = yield "parse", attempts.text
            self._check_parsed(parsed, f"the turn {attempts.text!r:.300} of {place(opened.id)}")
            found = [UNREAD if call is None else ToolCall(*call) for call in json.loads(parsed.texts[0])]
            attempts = at_most(found, attempts.most)
        refused = [self._refused(opened.reply, attempt) for attempt in attempts]
        for attempt, content in zip(attempts, refused, strict=True):
            if content is None:
                content = yield from self._use_tool(opened, attempt)
            name = "unknown" if isinstance(attempt, MalformedCall) else attempt.name
            opened.reply.messages.append({"role": "tool", "name": name, "content": content})
        if attempts:
            return
        if not self._offer.steps or (yield from self._ask(opened, "step", turn.text)).done:
            yield from self._conclude(opened)

    def _conclude(self, opened: EnvironmentInstance) -> Making:
        """End the episode with this reply."""
        opened.reply.done = True
        if self._offer.rewards:
            yield from self._ask(opened, "get_reward")

    def _ask(self, opened: EnvironmentInstance, kind: str, *arguments: Any) -> Generator[tuple, Answer, Answer]:
        """Call a method of the environment. Raises _EnvironmentFailed if the call fails."""
        result = yield kind, opened.key, *arguments
        if result.error is not None:
            raise self._failure(kind, result.error)
        opened.reply.reward += result.reward
        opened.reply.messages += [{"role": "user", "content": text} for text in result.texts]
        return result

    def _refused(self, reply: Reply, attempt: Attempt) -> str | None:
        """Why a call is not made, as the text that the model sees instead of a result; None: it can be made."""
        if isinstance(attempt, MalformedCall):
            reply.counts["malformed"] += 1
            return f"error: {attempt.why}"
        parameters = self._parameters.get(attempt.name)
        if parameters is None:
            reply.counts["unknown"] += 1
            return f"error: no such tool; there are: {', '.join(self._parameters) or 'none'}"
        if not fits(dict(attempt.arguments), {"type": "object", "properties": {}, **parameters}):
            reply.counts["arguments"] += 1
            return f"error: wrong arguments; {attempt.name} takes {takes(parameters)}"
        return None

    def _use_tool(self, opened: EnvironmentInstance, call: ToolCall) -> Generator[tuple, Answer, str]:
        """Call a tool. Returns the text for the model. Raises _EnvironmentFailed if a lost environment cannot be made
        again."""
        name, arguments, reply = call.name, dict(call.arguments), opened.reply
        if name in self._offer.tools:
            result = yield "tool", name, arguments
        else:
            result = yield "method", opened.key, name, arguments
        error = result.error
        if result.unmade:
            raise self._failure(name, error)
        made, failed = reply.calls.get(name, (0, 0))
        reply.calls[name] = made + 1, failed + (error is not None)
        reply.counts["calls"] += 1
        if error is None:
            return result.texts[0]
        reply.raised.setdefault(name, error)
        reply.counts["raised"] += 1
        return f"error: the tool {error}" if result.brief is None else f"error: {result.brief}"

    def _failure(self, name: str, error: str) -> _EnvironmentFailed:
        limit = " (--rl-environment-timeout)" if error.startswith(LATE) else ""
        return _EnvironmentFailed(f"failed: {self._environment.name}.{name} {_readable(error)}{limit}")

    # calls and replies

    def _start(self, opened: EnvironmentInstance, making: Making) -> None:
        opened.reply, opened.making = Reply(opened.id), making
        self._go_on(opened, None)
        self._give()

    def _go_on(self, opened: EnvironmentInstance, result: Answer | None) -> None:
        """Make a reply's next call; if there is none, the reply is finished. result: of the former call, or None."""
        reply = opened.reply
        try:
            message = opened.making.send(result)
        except StopIteration:
            pass
        except _EnvironmentFailed as failed:
            reply.failure = str(failed)
        else:
            opened.call = self._call(message, opened)
            self._pool.put(opened.call)
            return
        self._replies.append(reply)
        if reply.failure is not None or reply.done:
            del self._opened[opened.id]
            self._pool.end(opened)

    def _call(self, message: tuple, owner: Any) -> WorkerCall:
        kind, *arguments = message
        name = f"{kind} {arguments[-2]}" if kind in ("tool", "method") else kind
        session = None if kind in ("parse", "tool") else owner
        return WorkerCall(message, self._timeout, name in self._offer.concurrent, MAX_COROUTINES, owner, session, GRACE)

    def _give(self) -> None:
        try:
            self._pool.give()
        except EpisodeError as error:
            self._error = error

    def _take(self) -> None:
        """Handle answers of the workers. Raises EpisodeError if the run stops."""
        for call, answer in self._pool.take():
            self.answered += 1
            opened, result = call.owner, result_of(call, answer)
            if result is None:
                self._pool.put_again(call)
            elif opened is None:
                self._warn(result.error)
            elif self._opened.get(opened.id) is not opened:  # the episode was given up
                self._pool.end(opened)
            else:
                opened.call = None
                opened.reply.seconds += result.seconds
                self._go_on(opened, result)

    def _warn(self, error: str | None) -> None:
        """Warn of the first environment that does not close."""
        if error is not None and not self._warned:
            self._warned = True
            say(f"warning: {self._environment.name}.close {error}; the run continues, but some resources may stay open")


def _readable(error: str) -> str:
    """The text of an error; if a check of this package raised it, only the reason."""
    return error if "\n" in error else error.removeprefix("raised ValueError: it ")


def _check_fields(environment: str, fields: Sequence[str], rows: Mapping[str, Set[str]]) -> None:
    """See `Environments`. fields: those of a row that the environment's `reset` requires."""
    if problem := lacking(fields, rows, RESET):
        raise EpisodeError(f"--rl-environment {environment}: its reset {problem}")


def _source(flag: str, given: str, kind: str) -> UserCode:
    """Where a user's code is. Raises EpisodeError for a missing file."""
    if given.startswith(OPENENV):
        return UserCode(given, "", given)
    try:
        found = locate(given, flag, kind)
    except ValueError as error:
        raise EpisodeError(str(error)) from None
    if found is None:
        raise EpisodeError(f"{flag} {given!r}: give path/to/file.py:{kind}")
    return UserCode(given, *found)
