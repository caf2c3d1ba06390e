"""Refuses flags that do not work with episodes: for each problem one message, with value, limit and fix."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from typing import Any

from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.reward.reward_model import MODEL_PREFIX
from mindspeed_rl_plugin.reward.specs import BUILTIN, ENVIRONMENT, SHARE_OF_WAIT


def problems(args: Any, config: RLConfig) -> Iterator[str]:
    """Problems of the flags of episodes, and of other flags that episodes need."""
    flags = config.episodes
    if not (flags.environment or flags.agent) and ENVIRONMENT in _named(config):
        yield f"--rl-reward {ENVIRONMENT}: there is no environment; give --rl-environment, or another reward"
    if not flags.on:
        return
    yield from _lengths(config)
    yield from _format(config)
    yield from _requests(config)
    yield from _agent(config)
    if flags.tools and flags.max_turns == 1:
        yield "--rl-max-turns 1 with --rl-tools: the model would never see the result of a tool; give 2 or more"
    if flags.environment_python and not flags.foreign:
        yield (
            f"--rl-environment-python {flags.environment_python}: only --rl-environment verifiers:ID runs in another "
            "interpreter; remove this flag"
        )
    if config.rollout.ignore_eos:
        yield "--rl-ignore-eos: a turn of the model would never end, so nothing could answer it; remove this flag"
    if flags.environment_timeout > (most := SHARE_OF_WAIT * config.monitor.wait_timeout):
        yield (
            f"--rl-environment-timeout {flags.environment_timeout:g} is more than {SHARE_OF_WAIT} of --rl-wait-timeout "
            f"{config.monitor.wait_timeout:g}; give at most {most:g}, or raise the wait timeout"
        )


def notes(config: RLConfig) -> Iterator[str]:
    """Notes on valid flags, one line each."""
    environment, named = config.episodes.environment, _named(config)
    if environment and ENVIRONMENT not in named:
        own = any(name not in BUILTIN and not name.startswith(MODEL_PREFIX) for name in named)
        yield (
            f"--rl-reward {' '.join(config.graders)} lacks the reward of --rl-environment {environment}, so the "
            "environment's reward trains nothing"
            f"{f', unless a function of yours reads `{ENVIRONMENT}`' if own else ''}; add "
            f"{ENVIRONMENT} to --rl-reward, or {ENVIRONMENT}=0 to only log it"
        )
    flags, schedule = config.episodes, config.schedule
    if flags.runs_commands and flags.environment_lockstep:
        yield "--rl-environment-lockstep: all commands of --rl-agent run at once; --rl-agent-processes is not used"
    if flags.agent and schedule.carry_unfinished and not schedule.apart:
        yield (
            "--rl-carry-unfinished: a request of an agent waits while the engine sleeps. Most clients end it after "
            "600 s and send it twice again; if training takes longer, give them a longer timeout"
        )


def _named(config: RLConfig) -> set[str]:
    return {text.partition("=")[0] for text in config.graders}


def _requests(config: RLConfig) -> Iterator[str]:
    """Flags that do not go with the gateway, and flags that it needs."""
    flags = config.episodes
    if not flags.requests:
        return
    who = f"--rl-agent {flags.agent}" if flags.agent else f"--rl-environment {flags.environment}"
    if flags.tools:
        yield f"--rl-tools {' '.join(flags.tools)} with {who}: it has its own tools; remove --rl-tools"
    if not config.data.apply_chat_template and flags.observation != "chat":  # `_format` reports "chat"
        yield f"{who}: the chat template makes tokens of messages; give --rl-apply-chat-template too"
    if ":" in flags.tool_parser:
        yield (
            f"--rl-tool-parser {flags.tool_parser} with {who}: calls are read by a parser of this package; give "
            "hermes, qwen3_coder, glm45, llama3, deepseek or auto"
        )


def _agent(config: RLConfig) -> Iterator[str]:
    """Problems of --rl-agent alone."""
    flags = config.episodes
    if not flags.agent:
        return
    if flags.environment:
        yield f"--rl-agent {flags.agent} with --rl-environment {flags.environment}: remove one of the two flags"
    try:
        program = shlex.split(flags.agent)[:1]
    except ValueError as error:
        yield f"--rl-agent {flags.agent} is no command: {error}; quote it as for a shell"
        return
    if flags.runs_commands and not (program and shutil.which(program[0])):
        yield (
            f"--rl-agent {flags.agent}: there is no program {' '.join(program)!r} here that can be run; give a "
            "command, or path/to/file.py:function"
        )


def _lengths(config: RLConfig) -> Iterator[str]:
    flags, response = config.episodes, config.rollout.max_response_length
    if flags.max_turn_length is not None and flags.max_turn_length > response:
        yield (
            f"--rl-max-turn-length {flags.max_turn_length} is more than the limit of a complete episode, "
            f"--rl-max-response-length {response}; lower the length of a turn, or raise that of a response"
        )
    if (longest := flags.longest_observation(response)) >= response:
        yield (
            f"--rl-max-observation-length {longest}: one observation could fill the episode (--rl-max-response-length "
            f"{response}); lower the length of an observation, or raise that of a response"
        )


def _format(config: RLConfig) -> Iterator[str]:
    flags, chat = config.episodes, config.data.apply_chat_template
    if flags.observation == "chat" and not chat:
        yield "--rl-observation chat: prompts are not rendered by a chat template; give --rl-apply-chat-template too"
    elif flags.observation == "raw" and chat:
        yield (
            "--rl-observation raw with --rl-apply-chat-template: prompts would be in the chat template, and "
            "observations not; remove one of the two flags"
        )
    elif not chat and flags.tools and flags.tool_parser == "auto":
        yield (
            "--rl-tool-parser auto needs a chat template, and prompts have none; give hermes, qwen3_coder, glm45, "
            "llama3, deepseek, path/to/file.py:function, or --rl-apply-chat-template"
        )
