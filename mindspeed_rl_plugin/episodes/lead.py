"""The decisions of an engine's first rank about its episodes: what the model sees next, and when an episode ends.

`agent_lead` has those for agents."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_rl_plugin.environment import tell
from mindspeed_rl_plugin.episodes.chat import TEMPLATE_ERRORS, RawFormat
from mindspeed_rl_plugin.episodes.environments import (
    Attempt,
    ChatMessage,
    Environments,
    EpisodeError,
    Reply,
    Turn,
    Unread,
    as_declared,
    at_most,
    place,
    row_of,
    tool_names,
)
from mindspeed_rl_plugin.episodes.episode_state import EpisodeState, NextTurn, Path, Plan
from mindspeed_rl_plugin.reward.items import opening
from mindspeed_rl_plugin.rows import Completion, SampleId, TurnId

MOST_WARNED = 16  # kinds of failures that are printed
KIND = 24  # first characters of a text about a failure; failures that differ in them are of different kinds


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of episodes."""

    turns: int  # most turns of an episode
    observation: int  # longest observation [tokens]
    prompt: int  # longest prompt, with the environment's first messages [tokens]
    turn: int = 1 << 62  # longest turn [tokens]
    lockstep: bool = False  # begin turn t + 1 of all episodes, by rising id, after all replies to turn t
    on_error: str = "stop"  # or "zero", "drop": what to do if an environment fails


class Lead:
    """format: encodes messages; parse: finds calls in a turn's text, None: `environments` do this by a user's parser;
    environments: those of this engine's episodes."""

    who = "environment"

    def __init__(
        self,
        limits: EpisodeLimits,
        format: RawFormat,
        parse: Callable[[str], Sequence[Attempt]] | None,
        environments: Environments,
    ) -> None:
        self.limits, self.format, self.parse, self.environments = limits, format, parse, environments
        self._states: dict[SampleId, EpisodeState] = {}
        self._replies: list[Reply] = []  # kept replies of interrupted episodes that now continue
        self._begun: list[NextTurn] = []  # turns that other ranks do not know yet
        self._due: list[TurnId] = []  # turns that can be submitted
        self._over: list[tuple[SampleId, str, tuple[int, ...]]] = []  # as in `Plan`
        self._said: set[str] = set()  # kinds of failures: of which tool, or how the text about an environment begins

    def begin(self, state: EpisodeState) -> None:
        sample, task = state.request.id, state.request.task
        assert task is not None, f"{sample} has no task"
        fields = row_of(task.fields)
        state.opening = opening(fields.get("messages"), fields["prompt"])
        state.asked = fields.get("messages") or [*state.opening]
        state.tools = {name: [0, 0] for name in tool_names(self.environments.tools)}
        self._states[sample] = state
        self.environments.begin(sample, fields, task.seed)

    def pause(self, sample: SampleId) -> None:
        """Interrupt an episode; replies of its environment are kept until it continues."""
        self._states[sample].held = []

    def resume(self, sample: SampleId) -> None:
        state = self._states[sample]
        self._replies += state.held
        state.held = None

    def end(self, sample: SampleId) -> None:
        self.environments.end(sample)
        self._states.pop(sample, None)
        self._due = [turn for turn in self._due if turn.sample != sample]

    def close(self) -> None:
        self.environments.close()

    def turn(self, state: EpisodeState, path: Path, turn: Completion) -> None:
        """Take an ended turn of the model; `path` already has its tokens."""
        sample, said = state.request.id, self._spoken(state, path, turn)
        if state.failure is not None:  # the environment could not begin, so nothing answers the turn
            self._over.append((sample, turn.finish, ()))
        elif not said.cut:
            attempts = self._attempts(self.format, turn.tokens)
            self.environments.act(sample, replace(said, attempts=attempts))
        else:
            self._finish(state, "length", said)

    def plan(self, seconds: float, end: float, sampling: bool) -> Plan:
        """The plan for episodes whose environments have replied; waits at most `seconds` for a reply.

        end: deadline of the engine's `poll`, on the monotonic clock; sampling: whether the engine samples turns.
        """
        plan = Plan()
        replies, self._replies = self._replies, []
        ready = replies or self._over or (self._due and not self.limits.lockstep)
        try:
            for reply in (*replies, *self.environments.poll(0.0 if ready else seconds)):
                state = self._states.get(reply.id)
                if state is not None and state.held is not None:
                    state.held.append(reply)
                elif state is not None:
                    self._take(plan, state, reply)
        except EpisodeError as error:
            plan.error = str(error)
        plan.turns, self._begun = self._begun, []
        self._give_turns(plan, sampling)
        plan.over, self._over = self._over, []
        for sample, *_ in plan.over:
            del self._states[sample]
        plan.expired, plan.answered = time.monotonic() >= end, self.environments.answered
        return plan

    # inside

    def _spoken(self, state: EpisodeState, path: Path, turn: Completion) -> Turn:
        """Note a turn in the conversation."""
        call, text = turn.id.call, self.format.text(turn.tokens)
        path.conversation.append({"role": "assistant", "content": text, "call": call})
        state.rewards[call] = 0.0
        before, cut = path.length - len(turn.tokens), turn.finish != "stop"
        return Turn(turn.tokens, text, (), call, before, cut)

    def _attempts(self, format: RawFormat, tokens: Sequence[int]) -> tuple[Attempt, ...] | Unread:
        """Attempts at calls in a complete turn."""
        text, most = format.raw_text(tokens), format.most_calls
        if self.parse is None:
            return Unread(text, most)
        return at_most([as_declared(attempt, format.tools) for attempt in self.parse(text)], most)

    def _take(self, plan: Plan, state: EpisodeState, reply: Reply) -> None:
        self._count(state, reply)
        state.reward(reply.reward)
        messages = self._shortened(state, reply)
        state.hear(messages if state.turns else (), reply.seconds)
        if reply.failure is not None:
            self._fail(state, reply.failure)
        elif reply.done or state.finish is not None:
            self._over.append((reply.id, state.finish or reply.finish or "stop", ()))
        elif len(state.turns) >= self.limits.turns:
            self._finish(state, "turns")
        elif state.turns:
            self._observe(state, messages)
        else:
            self._open(state, messages)

    def _count(self, state: EpisodeState, reply: Reply) -> None:
        state.count({**reply.counts, "milliseconds": round(1000 * reply.seconds)})
        for name, counts in reply.calls.items():
            state.tools[name] = [a + b for a, b in zip(state.tools[name], counts, strict=True)]
        for name, error in reply.raised.items():
            self._warn(name, f"the tool {name!r} raised, for the first time, in {place(reply.id)}: {error}")

    def _finish(self, state: EpisodeState, why: str, cut: Turn | None = None) -> None:
        """Ask the environment for the last reply, because no further turn comes. cut: a turn that the limit has cut."""
        state.finish = why
        self.environments.finish(state.request.id, cut)

    def _fail(self, state: EpisodeState, why: str) -> None:
        """End the episode after a failure. A response needs a token: if the environment could not begin, the model has
        one turn, which gets no answer. Raises EpisodeError if the run stops."""
        sample, who = state.request.id, self.who
        if self.limits.on_error == "stop":
            raise EpisodeError(
                f"the {who} of {place(sample)} {why}\n  (with --rl-environment-on-error zero or drop, the run "
                "continues and counts such episodes)"
            )
        self._warn(why[:KIND], f"an {who} failed, for the first time, in {place(sample)}: it {why}")
        state.fail(why)
        self.environments.end(sample)
        self._end_failed(state)

    def _end_failed(self, state: EpisodeState) -> None:
        sample = state.request.id
        if state.turns:
            self._over.append((sample, state.finish or "stop", ()))
        else:
            self._give(state, NextTurn(sample, 0, None, state.request.prompt_tokens))

    def _warn(self, of: str, text: str) -> None:
        """Print the first failure of each kind, at most MOST_WARNED, on the first rank of each engine."""
        if of not in self._said and len(self._said) < MOST_WARNED:
            tell(f"warning: {text}")
        self._said.add(of)

    def _open(self, state: EpisodeState, messages: Sequence[ChatMessage]) -> None:
        """Plan the first turn. First messages of the environment are appended to the prompt's last message."""
        prompt = state.request.prompt_tokens
        if said := "".join(message["content"] for message in messages):
            *before, last = state.asked
            content = state.opening[-1]["content"] = last["content"] + said
            prompt = self._tokens(state, self.format.prompt, [*before, {**last, "content": content}], len(said))
        if len(prompt) > self.limits.prompt:
            self._fail(
                state,
                f"makes the prompt {len(prompt)} tokens long by its first messages; --rl-max-prompt-length is "
                f"{self.limits.prompt}: shorten the messages, or raise the limit",
            )
            return
        self._give(state, NextTurn(state.request.id, 0, None, prompt))

    def _observe(self, state: EpisodeState, messages: Sequence[ChatMessage]) -> None:
        """Plan the next turn; if no token is left for it, finish the episode."""
        last, path = len(state.turns) - 1, state.path
        tokens = self._tokens(state, self.format.behind, path.tokens[-1], messages)
        if len(tokens) >= state.request.sampling.max_tokens - len(path.tokens):
            self._finish(state, "length")
            return
        state.count({"observation_tokens": len(tokens)})
        self._give(state, NextTurn(state.request.id, last + 1, last, tokens))

    def _give(self, state: EpisodeState, turn: NextTurn) -> None:
        """Begin a turn; it is submitted when its time comes."""
        state.begin(turn)
        self._begun.append(turn)
        self._due.append(TurnId(*turn.sample, turn.call))

    def _tokens(self, state: EpisodeState, form: Callable[..., Sequence[int]], *arguments: Any) -> tuple[int, ...]:
        """Tokens of messages. Raises EpisodeError if the chat template cannot write them."""
        try:
            return tuple(form(*arguments))
        except TEMPLATE_ERRORS as error:
            raise EpisodeError(
                f"the chat template raised {type(error).__name__}: {error}\n  in {place(state.request.id)}, for "
                "messages of the environment; let the environment return one message a turn, or give a tokenizer whose "
                "template fits"
            ) from error

    def _shortened(self, state: EpisodeState, reply: Reply) -> list[dict[str, Any]]:
        """The messages of a reply. Observations are cut to their limit; first messages are not cut (see `_open`)."""
        messages = []
        for message in reply.messages:
            content, cut = message["content"], False
            if state.turns:
                content, cut = self.format.shortened(content, self.limits.observation)
            state.count({"cut": int(cut), "special": int(self.format.holds_special(content))})
            messages.append({**message, "content": content})
        return messages

    def _give_turns(self, plan: Plan, sampling: bool) -> None:
        """Add due turns to the plan; in lockstep only if the engine samples no turn and no reply is due."""
        if self.limits.lockstep:
            if sampling or self.environments.pending:
                return
            self._due.sort()
        plan.due = [turn for turn in self._due if self._states[turn.sample].held is None]
        self._due = [turn for turn in self._due if self._states[turn.sample].held is not None]
