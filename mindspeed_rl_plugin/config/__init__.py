"""What may be given: every `--rl-*` flag with its default, unit, limits and readers, and upstream's flags under RL.

A field `samples_per_prompt` becomes the flag `--rl-samples-per-prompt` and the attribute
`args.rl_samples_per_prompt` of Megatron's own parser. `RLConfig.from_args` reads them back; nothing
here changes a value that the user gave. A preset (`--rl-algorithm`) fills only flags left at None.
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
