"""What the first rank of an engine decides about its episodes: what the model sees next, and when one is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_rl_plugin.episodes.chat import TEMPLATE_ERRORS, RawFormat
from mindspeed_rl_plugin.episodes.live import Plan, Unfinished
from mindspeed_rl_plugin.episodes.protocol import (
    Attempt,
    Environments,
    EpisodeError,
    Message,
    Reply,
    Turn,
    Unread,
    at_most,
    place,
    row_of,
    tool_names,
)
from mindspeed_rl_plugin.reward.items import opening
from mindspeed_rl_plugin.rows import EPISODE_COUNTS, Completion, Episode, SampleId


@dataclass(frozen=True)
class Limits:
    """turns: most of an episode; observation: longest [tokens]; prompt: longest with what an environment adds to it
    [tokens]; lockstep: turn t + 1 of all episodes begins when turn t of all of them is over, in the order of ids;
    on_error: "stop" | "zero" | "drop", where an environment fails."""

    turns: int
    observation: int
    prompt: int
    lockstep: bool = False
    on_error: str = "stop"


@dataclass
class _Story:
    """What only the first rank knows of an episode. asked: messages of the data; finish: why it ends, while the rest of
    its reward is due."""

    live: Unfinished
    asked: Sequence[Mapping[str, Any]]
    conversation: list[dict[str, Any]]
    tools: list[list[int]]
    rewards: list[float] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    failure: str | None = None
    finish: str | None = None

    def count(self, counts: Mapping[str, int]) -> None:
        for name, value in counts.items():
            self.counts[name] = self.counts.get(name, 0) + value

    def hear(self, messages: Sequence[Mapping[str, Any]], seconds: float) -> None:
        """What the environment says, and the time that it took: at the first message, or where there is none at what
        was said before."""
        at = len(self.conversation) - (not messages)
        self.conversation += [dict(message) for message in messages]
        if messages or seconds:
            heard = self.conversation[at]
            heard["seconds"] = round(heard.get("seconds", 0.0) + seconds, 3)

    def reward(self, value: float) -> None:
        """Of the last turn; before the first one it is nobody's."""
        if self.rewards:
            self.rewards[-1] += value
            last = next(message for message in reversed(self.conversation) if "turn" in message)
            last["reward"] = self.rewards[-1]

    def fail(self, why: str) -> None:
        """Its environment cannot go on, and it has no rewards of it."""
        self.failure, self.rewards = why, [0.0] * len(self.rewards)
        for message in self.conversation:
            if "turn" in message:
                message["reward"] = 0.0


class Lead:
    """format: how messages become tokens; parse: a turn's text -> attempts at calls, None where the environments find
    them, by a user's parser; environments: of this engine's episodes."""

    def __init__(
        self,
        limits: Limits,
        format: RawFormat,
        parse: Callable[[str], Sequence[Attempt]] | None,
        environments: Environments,
    ) -> None:
        self.limits, self.format, self.parse, self.environments = limits, format, parse, environments
        self._names = tool_names(environments)
        self._stories: dict[SampleId, _Story] = {}
        self._paused: dict[SampleId, list[Reply]] = {}  # with what their environments said meanwhile
        self._replies: list[Reply] = []  # of episodes that go on
        self._due: list[SampleId] = []  # whose next turn can begin
        self._over: list[tuple[SampleId, str]] = []
        self._said: set[str] = set()  # of which tools, and "" of the environment, the first failure was printed

    def begin(self, live: Unfinished) -> None:
        sample, task = live.request.id, live.request.task
        assert task is not None, f"{sample} has no task"
        fields = row_of(task.fields)
        said = opening(fields.get("messages"), fields["prompt"])
        self._stories[sample] = _Story(live, fields.get("messages") or [*said], said, [[0, 0] for _ in self._names])
        self.environments.begin(sample, fields, task.seed)

    def pause(self, sample: SampleId) -> None:
        """It is interrupted: what its environment says is kept."""
        self._paused[sample] = []

    def resume(self, sample: SampleId) -> None:
        self._replies += self._paused.pop(sample)

    def end(self, sample: SampleId) -> None:
        self.environments.end(sample)
        for kept in (self._stories, self._paused):
            kept.pop(sample, None)
        self._due = [other for other in self._due if other != sample]

    def close(self) -> None:
        self.environments.close()

    def turn(self, live: Unfinished, turn: Completion) -> None:
        """The model's turn is over, and is in `live` already."""
        sample, story = live.request.id, self._stories[live.request.id]
        text = self.format.text(turn.tokens)
        story.rewards.append(0.0)
        story.conversation.append({"role": "assistant", "content": text, "turn": list(live.turns[-1]), "reward": 0.0})
        if story.failure is not None:  # of its beginning: nobody answers
            self._over.append((sample, turn.finish))
        elif turn.finish == "stop":
            self.environments.act(sample, Turn(turn.tokens, turn.logps, text, self._attempts(turn.tokens)))
        else:
            self._finish(sample, "length", Turn(turn.tokens, turn.logps, text))

    def plan(self, seconds: float, end: float, sampling: bool) -> Plan:
        """What comes next, of episodes whose environments have replied; waits for a reply, `seconds` at most.

        end: when the time is up, on the monotonic clock; sampling: whether the engine samples turns.
        """
        plan = Plan()
        replies, self._replies = self._replies, []
        ready = replies or self._over or (self._due and not self.limits.lockstep)
        try:
            for reply in (*replies, *self.environments.poll(0.0 if ready else seconds)):
                if reply.id in self._paused:
                    self._paused[reply.id].append(reply)
                elif reply.id in self._stories:
                    self._take(plan, reply)
        except EpisodeError as error:
            plan.error = str(error)
        self._give_turns(plan, sampling)
        plan.over, self._over = self._over, []
        plan.expired = time.monotonic() >= end
        return plan

    def record(self, live: Unfinished) -> Episode:
        """All about an episode that is over."""
        story = self._stories.pop(live.request.id)
        return Episode(
            prompt=live.prompt,
            turns=tuple(live.turns),
            rewards=tuple(story.rewards),
            conversation=tuple(story.conversation),
            counts={name: story.counts.get(name, 0) for name in EPISODE_COUNTS},
            tools=tuple((made, raised) for made, raised in story.tools),
            failure=story.failure,
        )

    # inside

    def _attempts(self, tokens: Sequence[int]) -> tuple[Attempt, ...] | Unread:
        """At calls, in a turn that is whole."""
        text, most = self.format.raw_text(tokens), self.format.most_calls
        return Unread(text, most) if self.parse is None else at_most(self.parse(text), most)

    def _take(self, plan: Plan, reply: Reply) -> None:
        story = self._stories[reply.id]
        story.count({**reply.counts, "milliseconds": round(1000 * reply.seconds)})
        for name, counts in reply.calls.items():
            place_of = self._names.index(name)
            story.tools[place_of] = [a + b for a, b in zip(story.tools[place_of], counts, strict=True)]
        for name, error in reply.raised.items():
            self._warn(name, f"the tool {name!r} raised, for the first time, in {place(reply.id)}: {error}")
        story.reward(reply.reward)
        messages = self._shortened(story, reply) if reply.prompt is None else reply.messages
        story.hear(messages if story.rewards else (), reply.seconds)
        if reply.failure is not None:
            self._fail(reply.id, reply.failure)
        elif reply.done or story.finish is not None:
            self._over.append((reply.id, story.finish or "stop"))
        elif len(story.rewards) >= self.limits.turns:
            self._finish(reply.id, "turns")
        elif story.rewards:
            self._observe(plan, story, reply, messages)
        else:
            self._open(plan, story, reply, messages)

    def _finish(self, sample: SampleId, why: str, cut: Turn | None = None) -> None:
        """No further turn comes; the environment says the rest of its reward. cut: by the limit."""
        self._stories[sample].finish = why
        self.environments.finish(sample, cut)

    def _fail(self, sample: SampleId, why: str) -> None:
        """The environment cannot go on. Where it could not begin, the model has one turn that nobody answers, for a
        response has a token. Raises EpisodeError where the run stops."""
        if self.limits.on_error == "stop":
            raise EpisodeError(
                f"the environment of {place(sample)} {why}\n  (--rl-environment-on-error zero or drop: the run goes on "
                "and counts such episodes)"
            )
        self._warn("", f"an environment failed, for the first time, in {place(sample)}: it {why}")
        story = self._stories[sample]
        story.fail(why)
        self.environments.end(sample)
        if story.rewards:
            self._over.append((sample, story.finish or "stop"))
        else:
            self._due.append(sample)

    def _warn(self, of: str, text: str) -> None:
        """Print the first failure of each."""
        if of not in self._said:
            print(f"[rl] warning: {text}", flush=True)  # from whichever rank leads an engine
        self._said.add(of)

    def _open(self, plan: Plan, story: _Story, reply: Reply, messages: Sequence[Message]) -> None:
        """The first turn follows. What the environment says first stands behind the prompt's last message."""
        sample, prompt = reply.id, reply.prompt
        said = "".join(message["content"] for message in messages)
        if said:
            *before, last = story.asked
            content = story.conversation[-1]["content"] = last["content"] + said
            prompt = self._tokens(sample, self.format.prompt, [*before, {**last, "content": content}], len(said))
        if prompt is not None and len(prompt) > self.limits.prompt:
            self._fail(
                sample,
                f"makes the prompt {len(prompt)} tokens long with what it says first; --rl-max-prompt-length is "
                f"{self.limits.prompt}: let it say less, or raise that",
            )
            return
        if prompt is not None:
            plan.prompts.append((sample, prompt))
        self._due.append(sample)

    def _observe(self, plan: Plan, story: _Story, reply: Reply, messages: Sequence[Message]) -> None:
        """The next turn follows, if there is space for one token of it."""
        sample, live = reply.id, story.live
        if reply.prompt is None:
            tokens = self._tokens(sample, self.format.behind, live.tokens[-1], messages)
        else:
            held = (*live.prompt, *live.tokens)
            tokens = reply.prompt[len(held) :]
            if reply.prompt[: len(held)] != held:
                self._fail(sample, _no_extension(held, reply.prompt))
                return
        if len(tokens) >= live.request.sampling.max_tokens - len(live.tokens):
            self._finish(sample, "length")
            return
        story.count({"observation_tokens": len(tokens)})
        plan.observations.append((sample, tokens))
        self._due.append(sample)

    def _tokens(self, sample: SampleId, form: Callable[..., Sequence[int]], *arguments: Any) -> tuple[int, ...]:
        """Of messages. Raises EpisodeError where the chat template cannot write them."""
        try:
            return tuple(form(*arguments))
        except TEMPLATE_ERRORS as error:
            raise EpisodeError(
                f"the chat template raised {type(error).__name__}: {error}\n  for what the environment of "
                f"{place(sample)} said; let it give one text at a time, or give a tokenizer whose template fits"
            ) from error

    def _shortened(self, story: _Story, reply: Reply) -> list[dict[str, Any]]:
        """The messages of a reply, none longer than an observation may be: what comes first has the prompt's limit."""
        messages = []
        for message in reply.messages:
            content, cut = message["content"], False
            if story.rewards:
                content, cut = self.format.shortened(content, self.limits.observation)
            story.count({"cut": int(cut), "special": int(self.format.holds_special(content))})
            messages.append({**message, "content": content})
        return messages

    def _give_turns(self, plan: Plan, sampling: bool) -> None:
        """Those that are due are submitted; in lockstep when no other is in the making."""
        if self.limits.lockstep:
            if sampling or self.environments.pending:
                return
            self._due.sort()
        plan.due = [sample for sample in self._due if sample not in self._paused]
        self._due = [sample for sample in self._due if sample in self._paused]


def _no_extension(held: Sequence[int], prompt: Sequence[int]) -> str:
    pairs = enumerate(zip(held, prompt, strict=False))
    same = next((i for i, (one, other) in pairs if one != other), min(len(held), len(prompt)))
    return (
        f"asks for a prompt of {len(prompt)} tokens that is no extension of the {len(held)} tokens held so far (they "
        f"differ at token {same}); what was sampled is never encoded anew: its template or renderer must only append"
    )
