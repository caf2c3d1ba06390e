"""Flags of generation that are given to an algorithm that learns from given pairs, and flags of pairs to the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_rl_plugin.algorithms.presets import learns_from_pairs
from mindspeed_rl_plugin.config import RLConfig, flag_name

# Config groups and their fields that nothing reads where nothing is drawn.
OF_GENERATION = {
    "rollout": (
        *("rollout_prompts", "samples_per_prompt", "top_p", "top_k", "stop", "stop_token_ids", "ignore_eos"),
        *("rollout_seed", "generate_tp"),
    ),
    "reward": ("reward", "reward_regex"),
    "algorithm": ("ppo_epochs", "kl_loss_coef", "kl_reward_coef", "entropy_coef", "correction"),
    "forward": ("max_tokens_per_microbatch", "pack_sequences"),
    "monitor": ("dump_dir", "eval_pass_k"),
}
OF_PAIRS = {
    "data": ("chosen_key", "rejected_key"),
    "algorithm": ("dpo_loss", "dpo_beta", "dpo_label_smoothing", "dpo_length_norm", "dpo_reference_cache"),
}


def refused(args: Any, config: RLConfig) -> Iterator[str]:
    """One message for each flag that would be ignored without a word."""
    from_pairs = learns_from_pairs(config.algorithm.algorithm)
    why = "which draws no responses" if from_pairs else "which learns from no pairs"
    default = RLConfig()
    for group, names in (OF_GENERATION if from_pairs else OF_PAIRS).items():
        for name in names:
            value = getattr(getattr(config, group), name)
            if value != getattr(getattr(default, group), name):
                shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
                yield (
                    f"{flag_name(name)} {shown} has no meaning for --rl-algorithm {config.algorithm.algorithm}, {why}; "
                    "remove it"
                )
