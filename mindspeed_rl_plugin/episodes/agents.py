"""Agents: programs of users that request the model's turns at the gateway, in processes of `gateway.agent_process`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl_plugin.episodes.environments import EpisodeError, Reply, ToolCall, Turn
from mindspeed_rl_plugin.episodes.parsers import before_calls
from mindspeed_rl_plugin.episodes.rollout_bridge import (
    END_SECONDS,
    RolloutEnvironments,
    RolloutRecord,
    RolloutReport,
)
from mindspeed_rl_plugin.rows import SampleId
from mindspeed_rl_plugin.workers.process import Program

AGENTS_PROGRAM = Program(
    "mindspeed_rl_plugin.gateway.agent_process:main",
    str | None,
    RolloutReport,
    "an agents' process",
    EpisodeError,
    patience=END_SECONDS,
)
AT_A_LIMIT = "the job samples no further turn: this conversation has reached a limit of its tokens or turns"


class AgentEnvironments(RolloutEnvironments):
    """forgives: whether an agent is graded that is killed because it is late, if it had a turn; the other arguments are
    those of `RolloutEnvironments`."""

    def __init__(self, *arguments: Any, forgives: bool = True) -> None:
        super().__init__(*arguments)
        self._forgives = forgives

    def finish(self, episode: SampleId, cut: Turn | None = None) -> None:
        """See `Environments`. The agent gets the turn that a limit has cut, and no other."""
        self._answer(episode, "finish", AT_A_LIMIT, cut and self._spoken(cut))

    def _data(self, episode: SampleId, task: Mapping[str, Any]) -> tuple[Any, ...]:
        row = {**task["record"], **{name: task[name] for name in ("prompt", "answer")}}
        return (
            {**row, **({"messages": task["messages"]} if task.get("messages") else {})},
            "/".join(map(str, episode)),
        )

    def _spoken(self, turn: Turn) -> tuple[Any, ...]:
        calls = [(call.name, dict(call.arguments)) for call in turn.attempts if isinstance(call, ToolCall)]
        whole = len(calls) == len(turn.attempts)  # else the agent gets the text, in which it can see what is wrong
        text = before_calls(turn.text) if calls and whole else turn.text
        return text, calls if whole else [], (turn.before, len(turn.tokens), turn.cut)

    def _late(self, rollout: RolloutRecord) -> Reply:
        if not (rollout.spoke and self._forgives):
            why = f"made no request within {self._timeout:g} s (--rl-environment-timeout)"
            return Reply(rollout.sample, failure=why)
        return Reply(rollout.sample, done=True, finish="time")
