"""Every `--rl-*` flag: its default, unit, limits, and the runs that read it.

A field `samples_per_prompt` becomes the flag `--rl-samples-per-prompt` and the attribute `rl_samples_per_prompt` of
Megatron's parsed arguments, which `RLConfig.from_args` reads. Nothing here changes a value that the user gave: a preset
(`--rl-algorithm`) only sets flags that are None.
"""

from mindspeed_rl_plugin.config.algorithm_flags import AlgorithmConfig
from mindspeed_rl_plugin.config.flag import as_given, flag_name
from mindspeed_rl_plugin.config.rl_config import (
    RLConfig,
    add_flags,
    flag_names,
    given_flags,
    limit_problems,
    rl_enabled,
    unread_flags,
)

__all__ = [
    "AlgorithmConfig",
    "RLConfig",
    "add_flags",
    "as_given",
    "flag_name",
    "flag_names",
    "given_flags",
    "limit_problems",
    "rl_enabled",
    "unread_flags",
]
