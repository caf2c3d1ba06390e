"""RLConfig: all groups of flags, read back from Megatron's parsed arguments, and the checks that walk over them."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mindspeed_rl_plugin.config.algorithm_flags import AlgorithmConfig
from mindspeed_rl_plugin.config.episode_flags import EpisodeConfig
from mindspeed_rl_plugin.config.flag import PREFIX, as_given, flag_name, value_problems
from mindspeed_rl_plugin.config.run_flags import (
    DataConfig,
    DockConfig,
    ForwardConfig,
    MonitorConfig,
    ReshardConfig,
    RewardConfig,
    RolloutConfig,
)
from mindspeed_rl_plugin.config.schedule_flags import ScheduleConfig


@dataclass(frozen=True)
class RLConfig:
    """All groups. Built by `from_args`, never mutated."""

    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    episodes: EpisodeConfig = field(default_factory=EpisodeConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    forward: ForwardConfig = field(default_factory=ForwardConfig)
    reshard: ReshardConfig = field(default_factory=ReshardConfig)
    dock: DockConfig = field(default_factory=DockConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)

    @property
    def graders(self) -> tuple[str, ...]:
        """Of --rl-reward; without it an environment's own reward."""
        return self.reward.reward or (("environment",) if self.episodes.environment else ())

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> RLConfig:
        """Read the parsed `rl_*` attributes back into the groups."""

        def value(f: dataclasses.Field) -> Any:
            value = getattr(args, PREFIX + f.name)
            return tuple(value) if isinstance(f.default, tuple) else value

        groups = group_types().items()
        return cls(**{name: kind(**{f.name: value(f) for f in dataclasses.fields(kind)}) for name, kind in groups})


def rl_enabled(args: argparse.Namespace) -> bool:
    """Whether the user asked for RL at all; without it the plugin changes nothing."""
    return getattr(args, "rl_algorithm", None) is not None


def group_types() -> dict[str, type]:
    """Name -> dataclass of every group."""
    hints = typing.get_type_hints(RLConfig)
    return {f.name: hints[f.name] for f in dataclasses.fields(RLConfig)}


def given(config: RLConfig) -> Iterator[tuple[dataclasses.Field, Any]]:
    """Field and value of every flag that has another value than its default."""
    for group in vars(config).values():
        for f in dataclasses.fields(group):
            if (value := getattr(group, f.name)) != f.default:
                yield f, value


def given_flags(config: RLConfig) -> dict[str, Any]:
    """`--rl-*` flag -> value, of `given`."""
    return {flag_name(f.name): value for f, value in given(config)}


def limit_problems(*groups: Any) -> list[str]:
    """One message for each value of some groups that no run takes: numbers outside their limits, unknown words."""
    return [text for g in groups for f in dataclasses.fields(g) for text in value_problems(f, getattr(g, f.name))]


def unread_flags(config: RLConfig, algorithm: Any, preset: Any) -> Iterator[str]:
    """One message for each flag that nothing in this run would read: it must not be ignored without a word.

    algorithm: the run's `Algorithm`; preset: that of `--rl-algorithm` alone, whose values may be given everywhere.
    """
    name = f"--rl-algorithm {config.algorithm.algorithm}"
    why = f", and {config.algorithm.algorithm} generates nothing" if algorithm.from_pairs else ""
    for f, value in given(config):
        reader, pairs = f.metadata["reader"], f.metadata["pairs"]
        if algorithm.from_pairs:
            read, what = pairs, "an algorithm that samples responses"
        else:
            read, what = reader is None or reader.reads(algorithm), reader and reader.what
        if not read and value != getattr(preset, f.name, f.default):
            yield f"{as_given(f.name, value)} has no meaning for {name} here: only {what} reads it{why}; remove it"
