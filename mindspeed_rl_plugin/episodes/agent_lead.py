"""The decisions about episodes of agents, whose requests may fork, and several of which may wait at the same time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindspeed_rl_plugin.episodes.agents import AgentEnvironments
from mindspeed_rl_plugin.episodes.chat import TEMPLATE_ERRORS, AgentFormats, ChatFormat
from mindspeed_rl_plugin.episodes.environments import AgentRequest, ChatMessage, Reply, ToolCall, TurnLimits, place
from mindspeed_rl_plugin.episodes.episode_state import EpisodeState, NextTurn, Path, Plan
from mindspeed_rl_plugin.episodes.lead import EpisodeLimits, Lead
from mindspeed_rl_plugin.gateway.agent_messages import AT_A_LIMIT, FORKED, INVALID, RefusedRequest
from mindspeed_rl_plugin.rows import Completion, SampleId, TurnId


@dataclass(frozen=True)
class ForkLimits:
    """What an episode with several paths may be."""

    refused: str = ""  # why requests that fork are refused; "": they are not
    tokens: int | None = None  # most tokens that the model runs for a row; None: those of one path
    shared: bool = False  # whether paths run common first tokens once

    def left(self, state: EpisodeState, added: int, turns: int) -> int:
        """Tokens that each of some turns of a request may have. added: tokens that their prompts add to the row."""
        most = {turn.path: turn.limits.most or 0 for turn in state.pending.values() if turn.trained}
        paths = {path: path.length + most.get(path, 0) for path in (*state.paths, *most)}
        common = sum(path.common for path in paths) if self.shared else 0
        return (self.tokens - sum(paths.values()) + common - added) // turns


@dataclass(frozen=True)
class _Asked:
    """A request whose turn has not ended."""

    format: ChatFormat
    most: int | None  # as in `TurnLimits`
    messages: Sequence[ChatMessage]


class AgentLead(Lead):
    """formats: for the tools of requests; forks: limits of paths. The other arguments are those of `Lead`."""

    who = "agent"
    environments: AgentEnvironments

    def __init__(
        self,
        limits: EpisodeLimits,
        format: ChatFormat,
        formats: AgentFormats,
        environments: AgentEnvironments,
        forks: ForkLimits,
    ) -> None:
        super().__init__(limits, format, formats.parse, environments)
        self._formats, self._forks = formats, forks
        self._asked: dict[TurnId, _Asked] = {}

    def begin(self, state: EpisodeState) -> None:
        super().begin(state)
        state.opening = []  # that of the agent comes with its first request

    def end(self, sample: SampleId) -> None:
        super().end(sample)
        self._forget(sample)

    def turn(self, state: EpisodeState, path: Path, turn: Completion) -> None:
        """See `Lead`. The agent gets the turn."""
        asked = self._asked.pop(turn.id)
        path.conversation += asked.messages
        said = self._spoken(state, path, turn)
        if state.last is not None:
            self._close(state)
            return
        if turn.id.call in state.turns and said.cut and (asked.most is None or len(turn.tokens) < asked.most):
            state.finish = "length"
        attempts = () if said.cut or not asked.format.tools else self._attempts(asked.format, turn.tokens)
        calls = sum(isinstance(attempt, ToolCall) for attempt in attempts)
        state.count({"calls": calls, "malformed": len(attempts) - calls})
        self.environments.act(state.request.id, replace(said, attempts=attempts))

    # inside

    def _take(self, plan: Plan, state: EpisodeState, reply: Reply) -> None:
        self._count(state, reply)
        if state.last is not None:  # its group is killed, and it has asked again before
            return
        if reply.request is not None:
            self._ask(state, reply.request, reply.seconds)
            return
        if state.paths:
            state.hear((), reply.seconds)
        state.last = reply
        if reply.failure is not None:
            self._fail(state, reply.failure)
        else:
            state.finish = state.finish or reply.finish
            state.reward(reply.reward)
            for call, value in reply.rewards.items():
                state.rewards[call] = state.rewards.get(call, 0.0) + value
            self._close(state)

    def _end_failed(self, state: EpisodeState) -> None:
        self._close(state)

    def _close(self, state: EpisodeState) -> None:
        """End an episode whose agent has ended, when the engine samples no turn of it. Turns that reached nobody are
        dropped; if there is no other, the model has one turn, which gets no answer."""
        sample, heard = state.request.id, state.last.heard
        if state.pending:
            return
        unheard = tuple(call for call in state.turns if heard is not None and call not in heard)
        if len(unheard) < len(state.turns):
            self._over.append((sample, state.finish or "stop", unheard))
            self._forget(sample)
            return
        call = 1 + max(state.turns, default=-1)
        state.last = replace(state.last, heard=[call])
        self._asked[TurnId(*sample, call)] = _Asked(self.format, None, state.asked)
        self._give(state, NextTurn(sample, call, None, state.request.prompt_tokens))

    def _forget(self, sample: SampleId) -> None:
        self._asked = {turn: asked for turn, asked in self._asked.items() if turn.sample != sample}

    def _ask(self, state: EpisodeState, request: AgentRequest, seconds: float) -> None:
        """Begin the turns of a request, or refuse it."""
        sample, messages = state.request.id, [dict(message) for message in request.messages]
        try:
            format = self._formats(request.tools)
            if request.parent is not None:
                messages = self._shortened(state, Reply(sample, messages))
            tokens = self._encoded(state, request, format, messages)
            if request.only_count:
                self.environments.counted(sample, request.calls[0], self._before(state, request) + len(tokens))
                return
            turns = self._turns(state, request, tokens)
        except RefusedRequest as refused:
            if refused.code == FORKED:  # the agent may hide it
                self._warn(FORKED, f"a request was refused, for the first time, in {place(sample)}: {refused}")
            self.environments.refuse(sample, request.calls, str(refused), refused.code)
        except ValueError as error:
            self.environments.refuse(sample, request.calls, f"the model cannot see these tools: {error}", INVALID)
        else:
            if seconds:
                messages[0]["seconds"] = round(seconds, 3)
            for turn in turns:
                self._asked[TurnId(*sample, turn.call)] = _Asked(format, request.limits.most, messages)
                self._give(state, turn)

    def _before(self, state: EpisodeState, request: AgentRequest) -> int:
        """Tokens before those of a request's messages."""
        if request.parent is None:
            return 0
        path, count = state.turns[request.parent]
        return len(path.prompt) + path.end(count)

    def _encoded(
        self, state: EpisodeState, request: AgentRequest, format: ChatFormat, messages: Sequence[ChatMessage]
    ) -> tuple[int, ...]:
        """Tokens of a request's messages, up to the start of the model's turn."""
        characters = sum(len(message["content"]) for message in messages)
        if characters > format.longest * (most := self.limits.prompt + state.request.sampling.max_tokens):
            raise RefusedRequest(f"{characters} characters are more than {most} tokens", code=AT_A_LIMIT)
        try:
            if request.parent is None:
                return tuple(format.written(messages))
            path, count = state.turns[request.parent]
            return tuple(format.behind(path.tokens[path.end(count) - 1], messages))
        except TEMPLATE_ERRORS as error:
            raised = f"the chat template raised {type(error).__name__}: {error}"
            raise RefusedRequest(f"these messages cannot become tokens: {raised}") from error

    def _turns(self, state: EpisodeState, request: AgentRequest, tokens: tuple[int, ...]) -> list[NextTurn]:
        """The turns of a request. tokens: of its messages. Raises RefusedRequest for a request beyond a limit."""
        turns, limit, forks = len(request.calls), self.limits.prompt, self._forks
        if state.begun.total() + turns > self.limits.turns:
            state.finish = "turns" if request.trained else state.finish
            raise RefusedRequest(f"an episode has at most --rl-max-turns {self.limits.turns} turns", code=AT_A_LIMIT)
        before, common, root = self._before(state, request), 0, request.parent is None
        response, length = state.request.sampling.max_tokens, before + len(tokens)
        most = min(self.limits.turn, response, limit + response - length)
        if root:
            if all(message["role"] != "assistant" for message in request.messages) and length > limit:
                raise RefusedRequest(
                    f"the prompt has {length} tokens, more than --rl-max-prompt-length {limit}", code=AT_A_LIMIT
                )
            forked = turns - (not state.paths and not any(turn.trained for turn in state.pending.values()))
            common = _common(state, tokens) if forks.shared else 0
        else:
            path, _ = state.turns[request.parent]
            most = min(most, response - length + len(path.prompt))
            forked = turns - (path.head == request.parent)
        if request.trained and forked and forks.refused:
            raise RefusedRequest(f"{request.why or 'the request forks the conversation'}; {forks.refused}", code=FORKED)
        if request.trained and forks.tokens is not None:
            new = (
                len(tokens) * (root or turns) - common
                if forks.shared
                else length * forked + len(tokens) * (turns - forked)
            )
            most = min(most, forks.left(state, new, turns))
        if most < 1:
            state.finish = "length" if request.trained else state.finish
            raise RefusedRequest(
                f"no token is left for a turn behind {length} tokens: a conversation has at most {limit} + "
                f"{response} (--rl-max-prompt-length, --rl-max-response-length)"
                + (f", an episode {forks.tokens} (--rl-max-tokens-per-microbatch)" if forks.tokens else ""),
                code=AT_A_LIMIT,
            )
        if request.trained:
            differs = {f"differ_{request.differs}": 1} if request.differs else {}
            state.count({"roots": int(root), "forks": turns - 1 if root else forked, **differs})
        state.count({"observation_tokens": 0 if root else len(tokens)})
        limits = TurnLimits(min(most, request.limits.most or most), request.limits.stop)
        first = NextTurn(state.request.id, request.calls[0], request.parent, tokens, limits, request.trained, common)
        again = length if root else 0
        return [first, *(first._replace(call=call, common=again) for call in request.calls[1:])]


def _common(state: EpisodeState, tokens: Sequence[int]) -> int:
    """The most first tokens that one of an episode's paths has in common with these."""
    paths = [*state.paths, *(turn.path for turn in state.pending.values())]
    return max((len(os.path.commonprefix([[*path.prompt, *path.tokens], [*tokens]])) for path in paths), default=0)
