"""Flags of episodes: responses of several turns, between which tools or an environment answer the model."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from mindspeed_rl_plugin.config.flag import FlagReader, flag

EXTERNAL = "external"  # --rl-agent of programs that the job does not start
VERIFIERS, OPENENV = "verifiers:", "openenv:"  # prefixes of environments that are no class in a user's file
FUNCTION = re.compile(r"\S+\.py:\w+")  # --rl-agent that is a function; anything else is a command
_of_episodes = functools.partial(
    flag, reader=FlagReader("--rl-tools, --rl-environment or --rl-agent", lambda _, c: c.episodes.on)
)
_of_commands = functools.partial(
    flag,
    reader=FlagReader("--rl-agent with a command", lambda _, c: c.episodes.runs_commands),
)
_of_agents = functools.partial(flag, reader=FlagReader("--rl-agent", lambda _, c: bool(c.episodes.agent)))
_of_requests = functools.partial(
    flag, reader=FlagReader("--rl-agent or --rl-environment verifiers:ID", lambda _, c: c.episodes.requests)
)


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
    agent: str | None = flag(
        None,
        "agent that requests the model's turns itself: a command, path/to/file.py:function, or external: programs of "
        "yours take episodes (docs/agents.md)",
    )
    agent_processes: int = _of_commands(
        16, "commands of --rl-agent that an engine runs at a time", unit="processes", least=1
    )
    agent_memory: float = _of_commands(
        4.0, "most memory of a command of --rl-agent and its children; above it is killed", unit="GiB", above=0
    )
    agent_variables: tuple[str, ...] = _of_commands(
        (), "names of environment variables that commands of --rl-agent get, beside PATH, HOME and a few others"
    )
    agent_host: str = _of_agents(
        "127.0.0.1",
        "address on which the gateway listens for agents; 0.0.0.0: the one from which each machine reaches MASTER_ADDR",
    )
    agent_sampling: bool = _of_requests(
        False,
        "ignore the temperature and other sampling fields of agents' requests; without it, requests that ask for other "
        "sampling than the job's get an error",
    )
    agent_branches: str = _of_agents(
        "all",
        "what is trained of an agent's requests that fork: all: each token once; last: only the conversation on which "
        "it ended, which favours what is seldom forked",
        choices=("all", "last"),
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
        "how tool calls are found in a turn: hermes (Qwen), qwen3_coder, glm45, llama3, deepseek, "
        "path/to/file.py:function, or auto (the chat template decides)",
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
    def runs_commands(self) -> bool:
        """Whether each episode runs a command."""
        return bool(self.agent) and self.agent != EXTERNAL and not FUNCTION.fullmatch(self.agent)

    @property
    def on(self) -> bool:
        """Whether responses are episodes."""
        return bool(self.tools or self.environment or self.agent)

    @property
    def foreign(self) -> bool:
        """Whether the environment is one of verifiers."""
        return bool(self.environment and self.environment.startswith(VERIFIERS))

    @property
    def requests(self) -> bool:
        """Whether programs request the model's turns at the gateway."""
        return bool(self.agent) or self.foreign
