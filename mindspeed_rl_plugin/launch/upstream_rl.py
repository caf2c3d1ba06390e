"""Arguments of Megatron's own RL (group `rl` of its parser, from core 0.16 on), which --rl-algorithm replaces: as data.

Beside --rl-algorithm they would have no effect, so a value other than the default is refused.
Source: _add_rl_args of megatron/training/arguments.py in core 0.16.1 and 0.19; --perform-rl-step is in `refused`.
"""

from __future__ import annotations

from typing import Any

from mindspeed_rl_plugin.launch.refused import Refused

# attribute -> Megatron's default, and our flag for the same thing, "" where there is none
ARGUMENTS: dict[str, tuple[Any, str]] = {
    "grpo_clamp_eps_lower": (0.01, "--rl-clip-low"),
    "grpo_clamp_eps_upper": (0.01, "--rl-clip-high"),
    "grpo_entropy_term_weight": (0.0, "--rl-entropy-coef"),
    "grpo_filter_groups_with_same_reward": (False, "--rl-dynamic-sampling"),
    "grpo_group_size": (2, "--rl-samples-per-prompt"),
    "grpo_iterations": (2, "--rl-ppo-epochs"),
    "grpo_kl_beta": (0.001, "--rl-kl-loss-coef"),
    "grpo_prompts_per_step": (32, "--rl-rollout-prompts"),
    "langrl_env_config": (None, "--rl-prompt-data and --rl-reward"),
    "langrl_external_server": (False, ""),
    "langrl_inference_server_conversation_template": (None, "--rl-apply-chat-template"),
    "langrl_inference_server_type": ("inplace_megatron", ""),
    "refit_method": ("gloo", ""),
    "rl_consumption_granularity": ("B", ""),
    "rl_default_temperature": (1.0, "--rl-temperature"),
    "rl_default_top_k": (-1, "--rl-top-k"),
    "rl_default_top_p": (0, "--rl-top-p"),
    "rl_generation_lag": (0, ""),
    "rl_importance_sampling_truncation_coef": (None, "--rl-correction truncate --rl-correction-high"),
    "rl_inference_expert_model_parallel_size": (None, ""),
    "rl_inference_expert_tensor_model_parallel_size": (None, ""),
    "rl_inference_logprobs_is_correction": (False, "--rl-correction"),
    "rl_inference_model_unified_memory_level": (0, ""),
    "rl_inference_parsers": ([], ""),
    "rl_inference_pipeline_model_parallel_size": (None, ""),
    "rl_inference_tensor_model_parallel_size": (None, "--rl-generate-tp"),
    "rl_kv_cache_management_mode": ("persist", ""),
    "rl_offload_inference_model_weights_when_idle": (False, ""),
    "rl_offload_kv_cache_during_training": (False, ""),
    "rl_offload_optimizer_during_inference": (False, "--rl-swap optimizer"),
    "rl_parallel_generation_tasks": (512, "--rl-max-running"),
    "rl_partial_rollouts": (False, ""),
    "rl_persist_cuda_graphs": (False, ""),
    "rl_profile": (False, ""),
    "rl_profile_dir": (None, "--rl-run-dir"),
    "rl_prompts_per_eval": (32, "--rl-eval-prompts"),
    "rl_remove_kv_cache_during_training": (False, ""),
    "rl_reset_cuda_graphs": (False, ""),
    "rl_sequence_packing_algo": ("fifo", ""),
    "rl_sequence_packing_max_sequences_per_bin": (50, ""),
    "rl_skip_bos_token": (False, ""),
    "rl_submission_granularity": ("B", ""),
    "rl_training_cuda_graphs": (False, ""),
    "rl_use_sequence_packing": (False, ""),
    "rl_verify_model_weights_swap": (False, "--rl-verify-weights"),
}


def _row(name: str, default: Any, ours: str) -> Refused:
    fix = f"give {ours} instead" if ours else "remove it"
    why = f"an argument of Megatron's own RL, which --rl-algorithm replaces, so it would have no effect; {fix}"
    return Refused(name, lambda value: value != default, why)


UPSTREAM_RL: tuple[Refused, ...] = tuple(_row(name, *row) for name, row in ARGUMENTS.items())
