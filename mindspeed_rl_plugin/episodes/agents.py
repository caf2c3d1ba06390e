"""Agents: programs of users that request the model's turns at the gateway, in processes of `gateway.agent_process`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_rl_plugin.episodes.environments import EpisodeError, ToolCall, Turn
from mindspeed_rl_plugin.episodes.parsers import before_calls
from mindspeed_rl_plugin.episodes.rollout_bridge import END_SECONDS, RolloutEnvironments, RolloutReport
from mindspeed_rl_plugin.gateway.agent_process import AgentSetup
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


class AgentEnvironments(RolloutEnvironments):
    """setup: of the processes; the other arguments are those of `RolloutEnvironments`."""

    def __init__(self, setup: AgentSetup, workers: int, timeout: float, wait: float, together: int | None) -> None:
        super().__init__(AGENTS_PROGRAM, setup, f"--rl-agent {setup.agent}", workers, timeout, wait, together)

    def refuse(self, episode: SampleId, calls: Sequence[int], why: str, code: str) -> None:
        """Answer a request for turns with an error."""
        self._answer(episode, len(calls), "refuse", calls, why, code)

    def counted(self, episode: SampleId, call: int, tokens: int) -> None:
        """Answer a request for the number of tokens of a prompt."""
        self._answer(episode, 1, "counted", call, tokens)

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
