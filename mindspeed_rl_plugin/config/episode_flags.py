"""Flags of episodes: responses of several turns, between which tools or an environment answer the model."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from mindspeed_rl_plugin.config.flag import FlagReader, flag

VERIFIERS, OPENENV = "verifiers:", "openenv:"  # prefixes of environments that are no class in a user's file
_of_episodes = functools.partial(flag, reader=FlagReader("--rl-tools or --rl-environment", lambda _, c: c.episodes.on))


@dataclass(frozen=True)
class EpisodeConfig:
    """Episodes: what answers the model, how long they are, and where a user's code runs."""

    tools: tuple[str, ...] = flag(
        (), "functions that the model may call, each path/to/file.py:function (docs/episodes.md)"
    )
    environment: str | None = flag(
        None,
        "environment that answers the model: path/to/file.py:Class, verifiers:ID or openenv:URL (docs/episodes.md); "
        "the grader `environment` of --rl-reward gives its reward",
    )
    max_turns: int = _of_episodes(8, "largest number of turns of the model in one episode", unit="turns", least=1)
    max_turn_length: int | None = _of_episodes(
        None, "longest turn of the model (default: --rl-max-response-length)", unit="tokens", least=1
    )
    max_observation_length: int | None = _of_episodes(
        None,
        "longest observation (a message with which tools or an environment answer a turn); longer observations are cut "
        "(default: a quarter of --rl-max-response-length)",
        unit="tokens",
        least=1,
    )
    observation: str | None = _of_episodes(
        None,
        "how observations become tokens: chat: by the tokenizer's chat template; raw: unchanged, for models that know "
        "no template (default: chat if --rl-apply-chat-template is given, else raw)",
        choices=("chat", "raw"),
    )
    tool_parser: str = _of_episodes(
        "auto",
        "how tool calls are found in a turn: hermes (Qwen), llama3, deepseek, path/to/file.py:function, or auto (the "
        "chat template decides)",
    )
    environment_workers: int = _of_episodes(
        2, "processes in which an engine runs its tools and environments", unit="processes", least=1
    )
    environment_timeout: float = _of_episodes(
        30.0,
        "time limit of a tool's or environment's call; then it is cancelled, or its process killed",
        unit="seconds",
        above=0,
    )
    environment_on_error: str = _of_episodes(
        "stop",
        "if an environment fails: stop the run, count its reward as zero, or drop the group",
        choices=("stop", "zero", "drop"),
    )
    environment_python: str | None = _of_episodes(
        None, "Python interpreter with verifiers, for --rl-environment verifiers:ID (default: that of the job)"
    )
    environment_lockstep: bool = _of_episodes(
        False,
        "begin turn t + 1 of all episodes when turn t of all has ended: runs repeat bit for bit, but are slower",
    )

    def longest_turn(self, response: int) -> int:
        """Tokens of the longest turn. response: --rl-max-response-length."""
        return self.max_turn_length or response

    def longest_observation(self, response: int) -> int:
        """Tokens of the longest observation. response: --rl-max-response-length."""
        return self.max_observation_length or max(response // 4, 1)

    @property
    def on(self) -> bool:
        """Whether responses are episodes."""
        return bool(self.tools or self.environment)

    @property
    def foreign(self) -> bool:
        """Whether the environment renders its prompts itself."""
        return bool(self.environment and self.environment.startswith(VERIFIERS))
