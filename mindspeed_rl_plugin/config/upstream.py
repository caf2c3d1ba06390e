"""What flags of Megatron-LM, MindSpeed and MindSpeed-LLM mean for RL: the one table of them.

A flag that is not here is neutral as far as is known. Conditions over several flags are functions of
`launch.upstream_checks`; how a model is laid out and routed is checked by `reshard.shape` and `engine.hf_moe`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SUPPORTED, NEUTRAL, TAKEN_OVER, REFUSED = "supported", "neutral", "taken over", "refused"  # verdicts

# What a row is about: any RL run; what any model that RL trains or exports must be; what no model family of the engine
# expresses, the same for models with experts and with multi-latent attention; where experts send a token.
RUN, WHOLE, MODEL, EXPERTS, LATENT, ROUTING = "run", "whole", "model", "experts", "latent", "routing"

OFF = (False, None, 0, "", [], ())


@dataclass(frozen=True)
class UpstreamFlag:
    """One flag.

    name: attribute of the parsed arguments, absent in versions that lack the flag; why: the reason and the fix; fine:
    values that RL has nothing against; about: one of the scopes above; flag: where it is not spelt like the
    attribute; versions: upstream versions that the row is for, empty for all that have the flag.
    """

    name: str
    why: str
    fine: tuple[Any, ...] = OFF
    about: str = RUN
    verdict: str = REFUSED
    flag: str = ""
    versions: str = ""

    @property
    def spelt(self) -> str:
        """The flag as a user gives it."""
        return self.flag or "--" + self.name.replace("_", "-")

    def message(self, args: Any) -> str | None:
        """The error for these arguments, or None when they are fine."""
        value = getattr(args, self.name, self.fine[0])
        if self.verdict != REFUSED or value in self.fine:
            return None
        if isinstance(value, bool):
            return f"{self.spelt if value else 'without ' + self.spelt}: {self.why}"
        return f"{self.spelt} {' '.join(map(str, value)) if isinstance(value, list | tuple) else value}: {self.why}"


def refusals(args: Any, *about: str) -> list[str]:
    """One message for each argument that these scopes refuse."""
    return [text for row in UPSTREAM if row.about in about and (text := row.message(args)) is not None]


def model_refusals(args: Any) -> list[str]:
    """One message for each argument that no model family of the engine expresses."""
    about = [WHOLE, MODEL]
    about += [EXPERTS] if getattr(args, "num_experts", None) else []
    about += [LATENT] if getattr(args, "multi_latent_attention", None) else []
    return refusals(args, *about)


def _rows(about: str, why: str, *names: str, fine: tuple[Any, ...] = OFF) -> list[UpstreamFlag]:
    return [UpstreamFlag(name, why, fine, about) for name in names]


def _replaced(name: str, default: Any, ours: str = "") -> UpstreamFlag:
    """A flag of Megatron's own RL (group `rl` of its parser), which would have no effect beside ours.

    Source: _add_rl_args of megatron/training/arguments.py in core 0.16.1 and 0.19.
    """
    fix = f"give {ours} instead" if ours else "remove it"
    why = f"an argument of Megatron's own RL, which --rl-algorithm replaces, so it would have no effect; {fix}"
    return UpstreamFlag(name, why, (default,), versions="core 0.16 and newer")


_DROPOUT = "dropout makes old and new log-probs differ before any update, so the ratio is not 1; give 0"
_GPT = "only GPT decoders can be generated from; use the plain pretrain_gpt.py entry script"
_LOOP = "this is another training mode of the script, with its own batches or loss; remove it to use RL"
_RESUME = "a run could not be resumed from its own checkpoints; remove it"
_COARSE = "trainer and engine would round differently and disagree on log-probs; use --bf16"
_NONE = "the model families of the engine have no such thing; leave it out"
_GATED = "the model families of the engine have a gated SiLU MLP; leave it out"
_PLAIN = "the model families of the engine have plain attention; leave it out"
_HYBRID = "hybrid models are not supported; " + _GPT
_WHOLE = "parameters must be whole on each rank; use --use-distributed-optimizer instead"

OWN_RL = (
    _replaced("grpo_clamp_eps_lower", 0.01, "--rl-clip-low"),
    _replaced("grpo_clamp_eps_upper", 0.01, "--rl-clip-high"),
    _replaced("grpo_entropy_term_weight", 0.0, "--rl-entropy-coef"),
    _replaced("grpo_filter_groups_with_same_reward", False, "--rl-dynamic-sampling"),
    _replaced("grpo_group_size", 2, "--rl-samples-per-prompt"),
    _replaced("grpo_iterations", 2, "--rl-ppo-epochs"),
    _replaced("grpo_kl_beta", 0.001, "--rl-kl-loss-coef"),
    _replaced("grpo_prompts_per_step", 32, "--rl-rollout-prompts"),
    _replaced("langrl_env_config", None, "--rl-prompt-data and --rl-reward"),
    _replaced("langrl_external_server", False),
    _replaced("langrl_inference_server_conversation_template", None, "--rl-apply-chat-template"),
    _replaced("langrl_inference_server_type", "inplace_megatron"),
    _replaced("refit_method", "gloo"),
    _replaced("rl_consumption_granularity", "B"),
    _replaced("rl_default_temperature", 1.0, "--rl-temperature"),
    _replaced("rl_default_top_k", -1, "--rl-top-k"),
    _replaced("rl_default_top_p", 0, "--rl-top-p"),
    _replaced("rl_generation_lag", 0),
    _replaced("rl_importance_sampling_truncation_coef", None, "--rl-correction truncate --rl-correction-high"),
    _replaced("rl_inference_expert_model_parallel_size", None),
    _replaced("rl_inference_expert_tensor_model_parallel_size", None),
    _replaced("rl_inference_logprobs_is_correction", False, "--rl-correction"),
    _replaced("rl_inference_model_unified_memory_level", 0),
    _replaced("rl_inference_parsers", []),
    _replaced("rl_inference_pipeline_model_parallel_size", None),
    _replaced("rl_inference_tensor_model_parallel_size", None, "--rl-generate-tp"),
    _replaced("rl_kv_cache_management_mode", "persist"),
    _replaced("rl_offload_inference_model_weights_when_idle", False),
    _replaced("rl_offload_kv_cache_during_training", False),
    _replaced("rl_offload_optimizer_during_inference", False, "--rl-swap optimizer"),
    _replaced("rl_parallel_generation_tasks", 512, "--rl-max-running"),
    _replaced("rl_partial_rollouts", False),
    _replaced("rl_persist_cuda_graphs", False),
    _replaced("rl_profile", False),
    _replaced("rl_profile_dir", None, "--rl-run-dir"),
    _replaced("rl_prompts_per_eval", 32, "--rl-eval-prompts"),
    _replaced("rl_remove_kv_cache_during_training", False),
    _replaced("rl_reset_cuda_graphs", False),
    _replaced("rl_sequence_packing_algo", "fifo"),
    _replaced("rl_sequence_packing_max_sequences_per_bin", 50),
    _replaced("rl_skip_bos_token", False),
    _replaced("rl_submission_granularity", "B"),
    _replaced("rl_training_cuda_graphs", False),
    _replaced("rl_use_sequence_packing", False),
    _replaced("rl_verify_model_weights_swap", False, "--rl-verify-weights"),
)

UPSTREAM: tuple[UpstreamFlag, ...] = (
    *_rows(RUN, _DROPOUT, "hidden_dropout", "attention_dropout", "lora_dropout"),
    # What replaces parts of the training loop that the plugin relies on.
    *_rows(RUN, "MindSpeed then replaces train_step by one of its own; remove it", "async_log_allreduce"),
    *_rows(RUN, "weights and fp32 copies then share memory, swap cannot follow; remove it", "reuse_fp32_param"),
    *_rows(RUN, "it keeps the first pass's number of micro-batches for all; remove it", "optimize_send_recv_comm"),
    *_rows(RUN, "a skipped iteration would throw rollouts away; remove it", "iterations_to_skip"),
    *_rows(RUN, "the engine does not survive it; let torchrun restart the job", "inprocess_restart"),
    *_rows(RUN, "this is Megatron's own RL; use either that or --rl-algorithm", "perform_rl_step"),
    *_rows(RUN, "RL is training; remove it", "skip_train"),
    *_rows(RUN, _LOOP, "sft", "stage", "enable_high_availability"),
    *OWN_RL,
    # Batch sizes and lengths of the run.
    *_rows(RUN, "RL counts optimizer steps; give --train-iters instead", "train_samples"),
    *_rows(
        RUN,
        "--global-batch-size must stay sequences per optimizer step; remove it",
        *("rampup_batch_size", "decrease_batch_size_if_needed", "step_batch_size_schedule"),
        "phase_transition_iterations",
    ),
    *_rows(
        RUN,
        "one RL sequence is one document, there is nothing to reset at an end-of-document token; remove it",
        *("reset_position_ids", "reset_attention_mask"),
    ),
    # Parallelism and precision.
    *_rows(
        RUN,
        "weights move to the engine through Megatron's DDP buffers; use --use-distributed-optimizer instead",
        *("use_custom_fsdp", "layerzero"),
    ),
    *_rows(
        RUN,
        "a captured graph keeps addresses that the swap to host memory frees; remove it",
        *("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl"),
        fine=(*OFF, "none"),
    ),
    *_rows(RUN, "too coarse for a ratio near 1, and loss scaling skips steps; use --bf16", "fp16"),
    UpstreamFlag("fp8", _COARSE, flag="--fp8-format"),
    UpstreamFlag("fp4", _COARSE, flag="--fp4-format"),
    # Models.
    *_rows(RUN, "retrieval models are not supported; " + _GPT, "retro_add_retriever"),
    *_rows(RUN, "vision and multimodal models are not supported; " + _GPT, "vision_pretraining"),
    *_rows(RUN, "LoRA is not supported yet; train the whole model", "lora_target_modules"),
    # Checkpoints.
    *_rows(RUN, _RESUME, "no_save_optim", "no_save_rng"),
    *_rows(RUN, "RL state is kept in persistent checkpoints only; remove it", "non_persistent_save_interval"),
    *_rows(RUN, "convert checkpoints before RL, in a run without --rl-algorithm", "ckpt_convert_format"),
    *_rows(RUN, "upcycle before RL, in a run without --rl-algorithm", "moe_use_upcycling"),
    # Weights that are not whole on a rank, or lie in other groups of ranks; models that are no GPT.
    *_rows(WHOLE, "only Megatron core models are supported; leave it out", "use_legacy_models"),
    *_rows(WHOLE, _WHOLE, "use_megatron_fsdp", "use_torch_fsdp2"),
    UpstreamFlag("gtp_weight_remat_size", _WHOLE, (1, None), WHOLE, flag="--tensor-parallel-num-weight-shards"),
    *_rows(WHOLE, "2-D tensor parallelism is not supported; leave it out", "tp_2d"),
    *_rows(WHOLE, _HYBRID, "hybrid_override_pattern"),
    # What no model family of the engine expresses.
    *_rows(MODEL, "give --normalization RMSNorm", "normalization", fine=("RMSNorm",)),
    *_rows(MODEL, "give it; the model families of the engine have a gated SiLU MLP", "swiglu", fine=(True,)),
    UpstreamFlag("add_bias_linear", "give it", (False,), MODEL, flag="without --disable-bias-linear"),
    *_rows(MODEL, "give --position-embedding-type rope", "position_embedding_type", fine=("rope",)),
    *_rows(MODEL, "the model families of the engine rotate halves; leave it out", "rotary_interleaved", "use_glm_rope"),
    *_rows(
        MODEL, "the model families of the engine rotate the whole head; leave it out", "rotary_percent", fine=(1.0,)
    ),
    *_rows(
        MODEL,
        "the model families of the engine rotate the whole head; leave it out",
        "partial_rotary_factor",
        fine=(0.0,),
    ),
    *_rows(MODEL, "the model families of the engine rotate in every layer; leave it out", "no_rope_freq"),
    *_rows(MODEL, "norm weights are stored minus one; leave it out", "apply_layernorm_1p"),
    UpstreamFlag(
        "layernorm_zero_centered_gamma",
        "norm weights are stored minus one; leave it out",
        about=MODEL,
        flag="--apply-layernorm-1p",
    ),
    *_rows(MODEL, _GATED, "squared_relu", "quick_geglu", "openai_gelu", "geglu", "gelu_tanh"),
    *_rows(MODEL, _PLAIN, "qk_l2_norm", "attention_output_gate", "experimental_attention_variant"),
    *_rows(MODEL, _PLAIN, "full_attention_interval", "attn_logit_softcapping"),
    *_rows(MODEL, _PLAIN, "sliding_window", "interleave_sliding_window", "window_size", fine=(None,)),
    *_rows(MODEL, _PLAIN, "softmax_scale", "query_pre_attn_scalar", fine=(None,)),
    *_rows(MODEL, _PLAIN, "softmax_type", fine=("vanilla", None)),
    *_rows(MODEL, _HYBRID, "is_hybrid_model", "hybrid_layer_pattern"),
    *_rows(
        MODEL,
        "all layers must be alike; leave it out",
        *("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
    ),
    *_rows(MODEL, _NONE, "apply_residual_connection_post_layernorm", "use_mup"),
    *_rows(MODEL, _NONE, "glu_linear_offset", fine=(0.0,)),
    *_rows(MODEL, _NONE, "activation_func_clamp_value", "fc_type", fine=(None,)),
    *_rows(MODEL, _NONE, "rotary_seq_len_interpolation_factor", fine=(None, 1)),
    # The same, of MindSpeed and MindSpeed-LLM.
    *_rows(MODEL, "layers that do nothing are not supported; leave it out", "noop_layers"),
    *_rows(MODEL, "N-D matmul is not supported; leave it out", "use_nd_matmul"),
    *_rows(MODEL, _NONE, "post_norm", "no_post_layer_norm", "add_dense_bias", "add_output_layer_bias"),
    *_rows(MODEL, _NONE, "input_embeds_norm", "output_logit_softcapping", "scale_depth", "dim_model_base"),
    *_rows(MODEL, _NONE, "add_rmsnorm_offset", "share_kvstates"),
    *_rows(MODEL, _NONE, "embedding_multiplier_scale", "output_multiplier_scale", fine=(1.0, None)),
    *_rows(MODEL, _NONE, "scale_emb", fine=(None,)),
    *_rows(MODEL, _NONE, "cla_share_factor", fine=(1,)),
    *_rows(MODEL, _NONE, "dynamic_factor", fine=(1.0,)),
    *_rows(EXPERTS, "shared experts have no gate; leave it out", "moe_shared_expert_gate", "use_shared_expert_gate"),
    *_rows(EXPERTS, "experts work on the whole hidden state; leave it out", "moe_latent_size"),
    *_rows(LATENT, "up projections that are split are not supported; leave it out", "mla_mm_split"),
    *_rows(LATENT, _PLAIN, "enable_dsa_indexer"),
    # With which trainer and engine would send tokens to different experts, or weigh them differently.
    *_rows(ROUTING, "the engine drops no tokens; leave it out", "moe_expert_capacity_factor", fine=(None,)),
    *_rows(ROUTING, "the engine routes without noise; leave it out", "moe_input_jitter_eps", fine=(None, 0.0)),
    *_rows(ROUTING, "routing is random with it; leave it out", "moe_router_force_load_balancing", fine=(False, None)),
    *_rows(ROUTING, "routing is random with it; leave it out", "moe_router_force_biased", fine=(None,)),
    *_rows(
        ROUTING,
        "the engine weighs the outputs of experts; leave it out",
        "moe_apply_probs_on_input",
        fine=(False, None),
    ),
    # Set aside on a resume, as of the first start: `launch.start` says so.
    *(
        UpstreamFlag(name, "governs the first start only: a resume loads everything from --save", verdict=TAKEN_OVER)
        for name in ("finetune", "no_load_optim", "no_load_rng", "load", "pretrained_checkpoint", "ckpt_step")
    ),
)
