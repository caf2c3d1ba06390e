"""The decisions of an engine's first rank about its episodes: what the model sees next, and when an episode ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from mindspeed_rl_plugin.episodes.episode_state import EpisodeState, Plan
from mindspeed_rl_plugin.reward.items import opening
from mindspeed_rl_plugin.rows import Completion, SampleId


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of episodes."""

    turns: int  # most turns of an episode
    observation: int  # longest observation [tokens]
    prompt: int  # longest prompt, with the environment's first messages [tokens]
    lockstep: bool = False  # begin turn t + 1 of all episodes, by rising id, after all replies to turn t
    on_error: str = "stop"  # or "zero", "drop": what to do if an environment fails


class Lead:
    """format: encodes messages; parse: finds calls in a turn's text, None: `environments` do this by a user's parser;
    environments: those of this engine's episodes; with_tools: the format for the tools of an agent, which raises
    ValueError if there is none."""

    def __init__(
        self,
        limits: EpisodeLimits,
        format: RawFormat,
        parse: Callable[[str], Sequence[Attempt]] | None,
        environments: Environments,
        with_tools: Callable[[Sequence[Mapping[str, Any]]], RawFormat] | None = None,
    ) -> None:
        self.limits, self.format, self.parse, self.environments = limits, format, parse, environments
        self._with_tools = with_tools
        self._states: dict[SampleId, EpisodeState] = {}
        self._replies: list[Reply] = []  # kept replies of interrupted episodes that now continue
        self._due: list[SampleId] = []  # episodes whose next turn can begin
        self._over: list[tuple[SampleId, str]] = []
        self._said: set[str] = set()  # tools ("": environments) whose first failure was printed

    def begin(self, state: EpisodeState) -> None:
        sample, task = state.request.id, state.request.task
        assert task is not None, f"{sample} has no task"
        fields = row_of(task.fields)
        state.conversation = opening(fields.get("messages"), fields["prompt"])
        state.asked = fields.get("messages") or [*state.conversation]
        state.format = self.format
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
        self._due = [other for other in self._due if other != sample]

    def close(self) -> None:
        self.environments.close()

    def turn(self, state: EpisodeState, turn: Completion) -> None:
        """Take an ended turn of the model; `state` already has its tokens."""
        sample, text = state.request.id, self.format.text(turn.tokens)
        state.rewards.append(0.0)
        state.conversation.append({"role": "assistant", "content": text, "turn": list(state.turns[-1]), "reward": 0.0})
        before, cut = len(state.prompt) + len(state.tokens) - len(turn.tokens), turn.finish != "stop"
        most = state.limits.most
        if state.failure is not None:  # the environment could not begin, so nothing answers the turn
            self._over.append((sample, turn.finish))
        elif not cut or (most is not None and len(turn.tokens) >= most):
            attempts = () if cut else self._attempts(state.format, turn.tokens)
            self.environments.act(sample, Turn(turn.tokens, text, attempts, before, cut))
        else:
            self._finish(state, "length", Turn(turn.tokens, text, (), before, cut))

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
        self._give_turns(plan, sampling)
        plan.over, self._over = self._over, []
        for sample, _ in plan.over:
            del self._states[sample]
        plan.expired, plan.answered = time.monotonic() >= end, self.environments.answered
        return plan

    # inside

    def _attempts(self, format: RawFormat, tokens: Sequence[int]) -> tuple[Attempt, ...] | Unread:
        """Attempts at calls in a complete turn; () if an agent gave no tools."""
        if self._with_tools is not None and not format.tools:
            return ()
        text, most = format.raw_text(tokens), format.most_calls
        if self.parse is None:
            return Unread(text, most)
        return at_most([as_declared(attempt, format.tools) for attempt in self.parse(text)], most)

    def _take(self, plan: Plan, state: EpisodeState, reply: Reply) -> None:
        state.count({**reply.counts, "milliseconds": round(1000 * reply.seconds)})
        for name, counts in reply.calls.items():
            state.tools[name] = [a + b for a, b in zip(state.tools[name], counts, strict=True)]
        for name, error in reply.raised.items():
            self._warn(name, f"the tool {name!r} raised, for the first time, in {place(reply.id)}: {error}")
        state.reward(reply.reward)
        if reply.limits != state.limits:
            plan.limits.append((reply.id, reply.limits))
        if reply.opening is not None:
            state.asked, state.conversation = reply.opening.messages, [dict(m) for m in reply.opening.messages]
        messages = self._shortened(state, reply)
        state.hear(messages if state.rewards else (), reply.seconds)
        if reply.failure is not None:
            self._fail(state, reply.failure)
        elif reply.done or state.finish is not None:
            if reply.heard is not None and reply.heard < len(state.turns):
                plan.unheard.append(reply.id)
            self._over.append((reply.id, state.finish or reply.finish or "stop"))
        elif len(state.rewards) >= self.limits.turns:
            self._finish(state, "turns")
        elif state.rewards:
            self._observe(plan, state, reply, messages)
        else:
            self._open(plan, state, reply, messages)

    def _finish(self, state: EpisodeState, why: str, cut: Turn | None = None) -> None:
        """Ask the environment for the last reply, because no further turn comes. cut: a turn that the limit has cut."""
        state.finish = why
        self.environments.finish(state.request.id, cut)

    def _fail(self, state: EpisodeState, why: str) -> None:
        """End the episode after a failure. A response needs a token: if the environment could not begin, the model has
        one turn, which gets no answer. Raises EpisodeError if the run stops."""
        sample = state.request.id
        who = "environment" if self._with_tools is None else "agent"
        if self.limits.on_error == "stop":
            raise EpisodeError(
                f"the {who} of {place(sample)} {why}\n  (with --rl-environment-on-error zero or drop, the run "
                "continues and counts such episodes)"
            )
        self._warn("", f"an {who} failed, for the first time, in {place(sample)}: it {why}")
        state.fail(why)
        self.environments.end(sample)
        if state.rewards:
            self._over.append((sample, state.finish or "stop"))
        else:
            self._due.append(sample)

    def _warn(self, of: str, text: str) -> None:
        """Print the first failure of each tool, and of environments (of: "")."""
        if of not in self._said:
            print(f"[rl] warning: {text}", flush=True)  # printed by the first rank of each engine
        self._said.add(of)

    def _open(self, plan: Plan, state: EpisodeState, reply: Reply, messages: Sequence[ChatMessage]) -> None:
        """Plan the first turn. First messages of the environment are appended to the prompt's last message."""
        sample, prompt = reply.id, None
        said = "".join(message["content"] for message in messages)
        if reply.opening is not None:
            try:
                state.format = self._with_tools(reply.opening.tools)
            except ValueError as error:
                self._fail(state, f"gives tools that the model cannot see: {error}")
                return
            if (prompt := self._tokens(state, state.format.written, state.asked)) is None:
                return
        elif said:
            *before, last = state.asked
            content = state.conversation[-1]["content"] = last["content"] + said
            prompt = self._tokens(state, self.format.prompt, [*before, {**last, "content": content}], len(said))
        if prompt is not None and len(prompt) > self.limits.prompt:
            self._fail(
                state,
                f"makes the prompt {len(prompt)} tokens long by its first messages; --rl-max-prompt-length is "
                f"{self.limits.prompt}: shorten the messages, or raise the limit",
            )
            return
        if prompt is not None:
            plan.prompts.append((sample, prompt))
        self._due.append(sample)

    def _observe(self, plan: Plan, state: EpisodeState, reply: Reply, messages: Sequence[ChatMessage]) -> None:
        """Plan the next turn; if no token is left for it, finish the episode."""
        sample = reply.id
        if (tokens := self._tokens(state, state.format.behind, state.tokens[-1], messages)) is None:
            return
        if len(tokens) >= state.request.sampling.max_tokens - len(state.tokens):
            self._finish(state, "length")
            return
        state.count({"observation_tokens": len(tokens)})
        plan.observations.append((sample, tokens))
        self._due.append(sample)

    def _tokens(
        self, state: EpisodeState, form: Callable[..., Sequence[int]], *arguments: Any
    ) -> tuple[int, ...] | None:
        """Tokens of messages. If the chat template cannot write them, the episode of an agent fails, and None is
        returned; with an environment raises EpisodeError."""
        try:
            return tuple(form(*arguments))
        except TEMPLATE_ERRORS as error:
            raised = f"the chat template raised {type(error).__name__}: {error}"
            if self._with_tools is not None:
                self._fail(state, f"sent messages that cannot become tokens: {raised}")
                return None
            raise EpisodeError(
                f"{raised}\n  in {place(state.request.id)}, for messages of the "
                "environment; let the environment return one message a turn, or give a tokenizer whose template fits"
            ) from error

    def _shortened(self, state: EpisodeState, reply: Reply) -> list[dict[str, Any]]:
        """The messages of a reply. Observations are cut to their limit; first messages are not cut (see `_open`)."""
        messages = []
        for message in reply.messages:
            content, cut = message["content"], False
            if state.rewards:
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
        plan.due = [sample for sample in self._due if self._states[sample].held is None]
        self._due = [sample for sample in self._due if self._states[sample].held is not None]
