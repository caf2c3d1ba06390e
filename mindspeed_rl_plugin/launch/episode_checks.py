"""What episodes cannot do under the other flags is refused here: one message a problem, with value, limit and fix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from mindspeed_rl_plugin.config import RLConfig, flag_name
from mindspeed_rl_plugin.reward.specs import ENVIRONMENT, SHARE_OF_WAIT


def problems(args: Any, config: RLConfig) -> Iterator[str]:
    """Of the flags of episodes, and of those that they need."""
    flags = config.episodes
    if not flags.on:
        yield from _unread(config)
        return
    yield from _lengths(config)
    yield from _format(config)
    if flags.foreign and flags.tools:
        yield f"--rl-tools with --rl-environment {flags.environment}: it brings its own tools; remove --rl-tools"
    if flags.environment_python and not flags.foreign:
        yield (
            f"--rl-environment-python {flags.environment_python}: only --rl-environment verifiers:ID runs in another "
            "interpreter; remove it"
        )
    if config.rollout.ignore_eos:
        yield "--rl-ignore-eos: a turn would never end, and nobody could answer it; remove it"
    if flags.environment_timeout > (most := SHARE_OF_WAIT * config.monitor.wait_timeout):
        yield (
            f"--rl-environment-timeout {flags.environment_timeout:g}: other ranks wait {config.monitor.wait_timeout:g} "
            f"s (--rl-wait-timeout); give at most {most:g}, or raise the latter"
        )


def _unread(config: RLConfig) -> Iterator[str]:
    for f in fields(config.episodes):
        if getattr(config.episodes, f.name) != f.default:
            yield f"{flag_name(f.name)} has no meaning without --rl-tools or --rl-environment; give one, or remove it"
    if any(text.partition("=")[0] == ENVIRONMENT for text in config.reward.reward):
        yield f"--rl-reward {ENVIRONMENT}: there is none; give --rl-environment, or another reward"


def _lengths(config: RLConfig) -> Iterator[str]:
    flags, response = config.episodes, config.rollout.max_response_length
    if flags.max_turn_length is not None and flags.max_turn_length > response:
        yield (
            f"--rl-max-turn-length {flags.max_turn_length} is longer than the whole episode, --rl-max-response-length "
            f"{response}, observations included; lower it, or raise the latter"
        )
    if (longest := flags.longest_observation(response)) >= response:
        yield (
            f"--rl-max-observation-length {longest}: one observation could fill the whole episode, "
            f"--rl-max-response-length {response}; lower it, or raise the latter"
        )


def _format(config: RLConfig) -> Iterator[str]:
    flags, chat = config.episodes, config.data.apply_chat_template
    if flags.observation == "chat" and not chat:
        yield "--rl-observation chat: prompts are not rendered by a chat template; give --rl-apply-chat-template too"
    elif flags.observation == "raw" and chat:
        yield (
            "--rl-observation raw with --rl-apply-chat-template: observations would stand outside of the template that "
            "the prompt has; remove one of them"
        )
    elif not chat and flags.tools and flags.tool_parser == "auto":
        yield (
            "--rl-tool-parser auto reads the chat template, and prompts have none; give hermes, llama3, deepseek, "
            "path/to/file.py:function, or --rl-apply-chat-template"
        )
