"""RLConfig, all groups of flags: adds them to an argparse parser, reads them from Megatron's parsed arguments, and
checks the limits of each flag."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import UnionType
from typing import Any

from mindspeed_rl_plugin.config.algorithm_flags import AlgorithmConfig
from mindspeed_rl_plugin.config.episode_flags import EpisodeConfig
from mindspeed_rl_plugin.config.flag import FLAG_PREFIX, as_given, flag_name, limits_text, value_problems
from mindspeed_rl_plugin.config.run_flags import (
    DataConfig,
    DockConfig,
    ForwardConfig,
    LoraConfig,
    MonitorConfig,
    ReshardConfig,
    RewardConfig,
    RolloutConfig,
)
from mindspeed_rl_plugin.config.schedule_flags import ScheduleConfig


@dataclass(frozen=True)
class RLConfig:
    """All groups of flags. `from_args` builds it."""

    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    episodes: EpisodeConfig = field(default_factory=EpisodeConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    forward: ForwardConfig = field(default_factory=ForwardConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    reshard: ReshardConfig = field(default_factory=ReshardConfig)
    dock: DockConfig = field(default_factory=DockConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)

    @property
    def graders(self) -> tuple[str, ...]:
        """Graders of --rl-reward; if none are given, the reward of the environment, if there is one."""
        return self.reward.reward or (("environment",) if self.episodes.environment or self.episodes.agent else ())

    @property
    def most_paths(self) -> int:
        """Most paths of a row: an agent may fork at each turn."""
        return self.episodes.max_turns if self.episodes.requests else 1

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> RLConfig:
        """The groups from the parsed `rl_*` attributes."""

        def value(f: dataclasses.Field) -> Any:
            value = getattr(args, FLAG_PREFIX + f.name)
            return tuple(value) if isinstance(f.default, tuple) else value

        groups = group_types().items()
        return cls(**{name: kind(**{f.name: value(f) for f in dataclasses.fields(kind)}) for name, kind in groups})


def rl_enabled(args: argparse.Namespace) -> bool:
    """Whether --rl-algorithm is given; without it the plugin changes nothing."""
    return getattr(args, "rl_algorithm", None) is not None


def group_types() -> dict[str, type]:
    """Name -> dataclass of every group."""
    hints = typing.get_type_hints(RLConfig)
    return {f.name: hints[f.name] for f in dataclasses.fields(RLConfig)}


def given(config: RLConfig) -> Iterator[tuple[dataclasses.Field, Any]]:
    """Field and value of every flag whose value is not its default."""
    for group in vars(config).values():
        for f in dataclasses.fields(group):
            if (value := getattr(group, f.name)) != f.default:
                yield f, value


def given_flags(config: RLConfig) -> dict[str, Any]:
    """The flags of `given`: `--rl-*` name -> value."""
    return {flag_name(f.name): value for f, value in given(config)}


def limit_problems(*groups: Any) -> list[str]:
    """One message for each value that is invalid in every run: numbers outside their limits, and unknown words."""
    return [text for g in groups for f in dataclasses.fields(g) for text in value_problems(f, getattr(g, f.name))]


def unread_flags(config: RLConfig, algorithm: Any, preset: Any) -> Iterator[str]:
    """One message for each flag that nothing in this run reads: no flag is ignored without a message.

    algorithm: the run's `Algorithm`; preset: the `Algorithm` of --rl-algorithm alone. A flag with the value that the
    preset gives it is never reported.
    """
    for f, value in given(config):
        reader, sampled_only = f.metadata["reader"], algorithm.from_pairs and not f.metadata["pairs"]
        read = not sampled_only and (reader is None or reader.reads(algorithm, config))
        if not read and value != getattr(preset, f.name, f.default):
            what = "an algorithm that samples responses" if sampled_only else reader.what
            why = f", and {config.algorithm.algorithm} generates nothing" if sampled_only else ""
            yield f"{as_given(f.name, value)} has no meaning in this run: only {what} reads it{why}; remove it"


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add every flag to Megatron's parser, with an argument group for each config group. Idempotent.

    Raises argparse.ArgumentError if the parser already has a flag of the same name.
    """
    if any(hasattr(action, "mindspeed_rl") for action in parser._actions):
        return parser
    for group_name, group in group_types().items():
        section = parser.add_argument_group(f"reinforcement learning: {group_name}", (group.__doc__ or "").strip())
        hints = typing.get_type_hints(group)  # once: each call evaluates the hints of all fields
        for f in dataclasses.fields(group):
            section.add_argument(flag_name(f.name), **_argparse_kwargs(f, hints[f.name])).mindspeed_rl = True
    return parser


def flag_names() -> list[str]:
    """The names of all flags, with the `--no-` forms of switches that have one."""
    return [name for a in add_flags(argparse.ArgumentParser(add_help=False))._actions for name in a.option_strings]


def help_text(f: dataclasses.Field) -> str:
    """What `--help` says of a flag: its meaning, unit, limits and default."""
    text, limits = f.metadata["help"], limits_text(f)
    if f.metadata["unit"]:
        text += f" [{f.metadata['unit']}]"
    if limits:
        text += f"; {limits}"
    if f.default not in (None, ()) and not isinstance(f.default, bool):
        text += f" (default: {' '.join(map(str, f.default)) if isinstance(f.default, tuple) else f.default})"
    return text


def _argparse_kwargs(f: dataclasses.Field, hint: Any) -> dict[str, Any]:
    several = isinstance(f.default, tuple)
    default = list(f.default) if several else f.default
    kwargs: dict[str, Any] = {"help": help_text(f).replace("%", "%%"), "default": default}
    if hint in (bool, bool | None):
        return kwargs | {"action": "store_true" if f.default is False else argparse.BooleanOptionalAction}
    if typing.get_origin(hint) in (UnionType, tuple):  # `int | None`, `tuple[int, ...]`
        hint = typing.get_args(hint)[0]
    if f.metadata["form"]:
        hint = _checked(f.metadata["form"])
    return kwargs | {"type": hint} | ({"nargs": "*"} if several else {"choices": f.metadata["choices"]})


def _checked(form: Callable[[str], Any]) -> Callable[[str], str]:
    """A type for argparse that checks a text and returns it: Megatron saves arguments, so they must be plain values."""

    def checked(text: str) -> str:
        form(text)
        return text

    return checked
