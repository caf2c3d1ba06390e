"""Flags of episodes: responses of several turns; tools or an environment answer the model between them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from mindspeed_rl_plugin.config.flag import FlagReader, flag

VERIFIERS, OPENENV = "verifiers:", "openenv:"  # prefixes of environments that are not a class in a file of the user's
_of_episodes = functools.partial(flag, reader=FlagReader("--rl-tools or --rl-environment", lambda _, c: c.episodes.on))


@dataclass(frozen=True)
class EpisodeConfig:
    """Episodes: who answers the model, how long they are, and where a user's code runs."""

    tools: tuple[str, ...] = flag(
        (), "functions that the model may call, each path/to/file.py:function (docs/episodes.md)"
    )
    environment: str | None = flag(
        None,
        "what answers the model: path/to/file.py:Class, verifiers:ID or openenv:URL (docs/episodes.md); its reward is "
        "the grader `environment` of --rl-reward",
    )
    max_turns: int = _of_episodes(8, "most turns of the model in one episode", unit="turns", least=1)
    max_turn_length: int | None = _of_episodes(
        None, "longest turn of the model (default: --rl-max-response-length)", unit="tokens", least=1
    )
    max_observation_length: int | None = _of_episodes(
        None,
        "longest text that a tool or an environment gives the model at once; longer ones are cut (default: a quarter "
        "of --rl-max-response-length)",
        unit="tokens",
        least=1,
    )
    observation: str | None = _of_episodes(
        None,
        "how observations become tokens: chat, by the tokenizer's chat template, or raw, as they are, for models that "
        "know no template (default: chat with --rl-apply-chat-template, else raw)",
        choices=("chat", "raw"),
    )
    tool_parser: str = _of_episodes(
        "auto",
        "how calls are read in a turn: hermes (Qwen), llama3, deepseek, path/to/file.py:function, or auto, by the chat "
        "template",
    )
    environment_workers: int = _of_episodes(
        2, "processes of each engine in which tools and environments run", unit="processes", least=1
    )
    environment_timeout: float = _of_episodes(
        30.0, "limit of one call of a tool or an environment; then its process is killed", unit="seconds", above=0
    )
    environment_on_error: str = _of_episodes(
        "stop",
        "if an environment fails: stop the run, count its reward as zero, or drop the group",
        choices=("stop", "zero", "drop"),
    )
    environment_python: str | None = _of_episodes(
        None, "interpreter that has verifiers, for --rl-environment verifiers:ID (default: this one)"
    )
    environment_lockstep: bool = _of_episodes(
        False,
        "turn t + 1 of all episodes begins when turn t of all is over, so that a run repeats bit by bit; slower",
    )

    def longest_turn(self, response: int) -> int:
        """[tokens]. response: --rl-max-response-length."""
        return self.max_turn_length or response

    def longest_observation(self, response: int) -> int:
        """[tokens]. response: --rl-max-response-length."""
        return self.max_observation_length or max(response // 4, 1)

    @property
    def on(self) -> bool:
        """Whether responses are episodes."""
        return bool(self.tools or self.environment)

    @property
    def foreign(self) -> bool:
        """Whether the environment renders its prompts itself."""
        return bool(self.environment and self.environment.startswith(VERIFIERS))
