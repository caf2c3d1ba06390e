"""The flags of Megatron-LM, MindSpeed and MindSpeed-LLM that RL refuses, some of them only with certain values.

All other flags are in `checks.taken_over` and docs/upstream-flags.toml. Conditions over several flags are functions of
`checks.upstream_checks`. `layout.shape` and `engine.hf_moe` check the sizes and the routing of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_rl_plugin.config.flag import spelt

# Scopes: when a flag is refused. RUN: in every RL run; WHOLE: for every model that RL trains or exports; MODEL: for a
# model of the engine; MOE: if it has experts; LATENT: if it has latent attention; ROUTING: as MOE, but `engine.hf_moe`
# refuses the flag.
RUN, WHOLE, MODEL, MOE, LATENT, ROUTING = "run", "whole", "model", "experts", "latent", "routing"

OFF = (False, None, 0, "", [], ())
# Attribute -> flag, if their names differ.
_OTHER_SPELLING = {
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "gtp_weight_remat_size": "--tensor-parallel-num-weight-shards",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "add_bias_linear": "without --disable-bias-linear",
}


@dataclass(frozen=True)
class UpstreamFlag:
    """A flag that RL refuses, of Megatron-LM, MindSpeed or MindSpeed-LLM."""

    name: str  # attribute of the parsed arguments; versions without the flag do not have it
    why: str  # why it is refused, and the fix
    fine: tuple[Any, ...] = OFF  # values that RL accepts
    about: str = RUN  # one of the scopes above

    @property
    def spelt(self) -> str:
        return _OTHER_SPELLING.get(self.name) or spelt(self.name)

    def message(self, args: Any) -> str | None:
        """The message if these arguments are refused, else None."""
        value = getattr(args, self.name, self.fine[0])
        if value in self.fine:
            return None
        if isinstance(value, bool):
            return f"{self.spelt if value else 'without ' + self.spelt}: {self.why}"
        return f"{self.spelt} {' '.join(map(str, value)) if isinstance(value, list | tuple) else value}: {self.why}"


def refusals(args: Any, *about: str) -> list[str]:
    """One message for each refused argument. about: scopes."""
    return [text for row in UPSTREAM if row.about in about and (text := row.message(args)) is not None]


def model_refusals(args: Any) -> list[str]:
    """One message for each argument with which the model would be of no family of the engine."""
    about = [WHOLE, MODEL]
    about += [MOE] if getattr(args, "num_experts", None) else []
    about += [LATENT] if getattr(args, "multi_latent_attention", None) else []
    return refusals(args, *about)


def _rows(about: str, *groups: tuple) -> list[UpstreamFlag]:
    """Rows of a scope. groups: (reason, names of attributes, accepted values; if these are not given: OFF)."""
    return [UpstreamFlag(name, why, *fine, about=about) for why, names, *fine in groups for name in names.split()]


def _own(default: Any, names: str, ours: str = "") -> list[UpstreamFlag]:
    """Flags of Megatron's own RL (group `rl` of its parser), refused unless they are `default` or None (not given).
    ours: what to give instead. Source: _add_rl_args of megatron/training/arguments.py in core 0.16.1, 0.18 and 0.19.
    """
    fix = f"give {ours} instead" if ours else "remove it"
    why = f"an argument of Megatron's own RL, which --rl-algorithm replaces, so it has no effect; {fix}"
    return _rows(RUN, (why, names, (default, None)))


_DROPOUT = "dropout makes old and new log-probs differ before any update, so the ratio is not 1; give 0"
_GPT = "RL only generates with GPT decoders; use the plain pretrain_gpt.py entry script"
_LOOP = "this is another training mode of the script, with its own batches or loss; remove it to use RL"
_COARSE = "trainer and engine would round differently and disagree on log-probs; use --bf16"
_NO_SUCH_THING = "no model family of the engine has it; leave it out"
_GATED = "all model families of the engine have a gated SiLU MLP; leave it out"
_PLAIN = "no model family of the engine has it in its attention; leave it out"
_HYBRID = "hybrid models are not supported; " + _GPT
_SHARDED = "parameters must be complete on each data parallel rank; use --use-distributed-optimizer instead"
_EQUAL_STEPS = "all optimizer steps of RL have the same number of sequences; give --global-batch-size instead"
_DOCUMENT = "each sequence of RL is one document, so nothing is reset at an end-of-document token; remove it"
_BUFFERS = "weights move to the engine through Megatron's DDP buffers; use --use-distributed-optimizer instead"
_GRAPH = "a captured graph keeps addresses that the swap to host memory frees; remove it"
_PERSISTENT = "such checkpoints have no RL state, and would be loaded instead of persistent ones; remove it"
_MOVING = ("enable_expert_placement balanced_moe_experts",)
_STAGE = ("stage", (None, "sft"))
_UNPACKED = ("SBH", "BSH", "BSND", "BNSD", None)
_EQUAL_LAYERS = "all layers must be alike; leave it out"

OWN_RL = (
    *_own(0.01, "grpo_clamp_eps_lower", "--rl-clip-low"),
    *_own(0.01, "grpo_clamp_eps_upper", "--rl-clip-high"),
    *_own(0.0, "grpo_entropy_term_weight", "--rl-entropy-coef"),
    *_own(False, "grpo_filter_groups_with_same_reward", "--rl-dynamic-sampling"),
    *_own(2, "grpo_group_size", "--rl-samples-per-prompt"),
    *_own(2, "grpo_iterations", "--rl-ppo-epochs"),
    *_own(0.001, "grpo_kl_beta", "--rl-kl-loss-coef"),
    *_own(32, "grpo_prompts_per_step", "--rl-rollout-prompts"),
    *_own(None, "langrl_env_config", "--rl-prompt-data and --rl-reward"),
    *_own(None, "langrl_inference_server_conversation_template", "--rl-apply-chat-template"),
    *_own(1.0, "rl_default_temperature", "--rl-temperature"),
    *_own(-1, "rl_default_top_k", "--rl-top-k"),
    *_own(0, "rl_default_top_p", "--rl-top-p"),
    *_own(None, "rl_importance_sampling_truncation_coef", "--rl-correction truncate --rl-correction-high"),
    *_own(False, "rl_inference_logprobs_is_correction", "--rl-correction"),
    *_own(None, "rl_inference_tensor_model_parallel_size", "--rl-generate-tp"),
    *_own(False, "rl_offload_optimizer_during_inference", "--rl-swap optimizer"),
    *_own(512, "rl_parallel_generation_tasks rl_num_parallel_generations", "--rl-max-running"),
    *_own(None, "rl_profile_dir", "--rl-run-dir"),
    *_own(32, "rl_prompts_per_eval", "--rl-eval-prompts"),
    *_own(False, "rl_verify_model_weights_swap", "--rl-verify-weights"),
    *_own(
        False,
        "langrl_external_server rl_offload_inference_model_weights_when_idle rl_offload_kv_cache_during_training "
        "rl_partial_rollouts rl_persist_cuda_graphs rl_profile rl_remove_kv_cache_during_training "
        "rl_reset_cuda_graphs rl_skip_bos_token rl_training_cuda_graphs rl_use_sequence_packing",
    ),
    *_own("inplace_megatron", "langrl_inference_server_type"),
    *_own("gloo", "refit_method"),
    *_own("B", "rl_consumption_granularity rl_submission_granularity"),
    *_own(0, "rl_generation_lag rl_inference_model_unified_memory_level"),
    *_own(
        None,
        "rl_generation_batch_size rl_num_parallel_generation_batches "
        "rl_inference_expert_model_parallel_size rl_inference_expert_tensor_model_parallel_size "
        "rl_inference_pipeline_model_parallel_size",
    ),
    *_own([], "rl_inference_parsers"),
    *_own("persist", "rl_kv_cache_management_mode"),
    *_own("fifo", "rl_sequence_packing_algo"),
    *_own(50, "rl_sequence_packing_max_sequences_per_bin"),
)

UPSTREAM: tuple[UpstreamFlag, ...] = (
    *_rows(
        RUN,
        (_DROPOUT, "hidden_dropout attention_dropout"),
        # Flags that replace or skip parts of the training loop that the plugin uses.
        ("with it MindSpeed replaces train_step by its own; remove it", "async_log_allreduce"),
        ("it takes the first pass's number of micro-batches for all passes; remove it", "optimize_send_recv_comm"),
        ("a skipped iteration would lose rollouts; remove it", "iterations_to_skip"),
        ("the engine does not survive it; let torchrun restart the job", "inprocess_restart"),
        ("this is Megatron's own RL; use either this flag or --rl-algorithm", "perform_rl_step"),
        ("RL cannot run without training; remove it", "skip_train"),
        (_LOOP, "logits_save_dir logits_load_dir"),
        ("no weight would be trained; remove it", "freeze_all_layers"),
        ("with it ranks do not communicate; remove it", "fake_process_group"),
        (_LOOP, "sft enable_high_availability layerwise_disaggregated_training auto_settings dist_train"),
        ("the checkpoint that it saves at a failure has no RL state; remove it", "ttp_enabled"),
        ("it moves experts between ranks, so the engine would get wrong experts; remove it", *_MOVING),
        ("this is MindSpeed-LLM's own training; give --stage sft, or none, and for DPO --rl-algorithm dpo", *_STAGE),
        ("RL has its own loss, which has no such mode; leave it out", "loss_compute_mode", ("default", None)),
        # Batch sizes and lengths of the run.
        ("RL counts optimizer steps; give --train-iters instead", "train_samples"),
        (_EQUAL_STEPS, "rampup_batch_size step_batch_size_schedule decrease_batch_size_if_needed"),
        (_DOCUMENT, "reset_position_ids reset_attention_mask"),
        ("its kernel needs the ends of packed rows, which RL does not pass; give SBH", "shape_order", _UNPACKED),
        # Parallelism and precision.
        (_BUFFERS, "use_custom_fsdp layerzero"),
        (_GRAPH, "enable_cuda_graph external_cuda_graph optimizer_cuda_graph"),
        (_GRAPH, "cuda_graph_impl", (*OFF, "none")),
        ("fp16 is too coarse for a ratio near 1, and loss scaling skips steps; use --bf16", "fp16"),
        (_COARSE, "fp8 fp4"),
        ("training would round weights, and the engine would not; leave it out", "qat_scheme", (None,)),
        # Models.
        ("retrieval models are not supported; " + _GPT, "retro_add_retriever"),
        ("vision and multimodal models are not supported; " + _GPT, "vision_pretraining"),
        # Spelt in full, it is taken over.
        ("peft's adapters are not used; give --rl-lora-rank and --rl-lora-targets instead", "lora_target_modules"),
        ("peft's adapters are not continued; merge them by MindSpeed-LLM's converter, and remove it", "lora_load"),
        ("MindSpeed-LLM does not read it, and RL trains adapters alone; remove it", "lora_modules_to_save"),
        ("adapters have one learning rate in RL, and no other rule; remove it", "lu_lora_final_layer_index", (None,)),
        ("the engine would not round weights to 4 bits; remove it, and give --load in --bf16", "qlora"),
        ("its converter does not know RL's adapters; use `python -m mindspeed_rl_plugin export`", "save_lora_to_hf"),
        # Checkpoints.
        (_PERSISTENT, "non_persistent_save_interval non_persistent_ckpt_type"),
        ("values that no checkpoint has would stay uninitialised; remove it", "init_model_with_meta_device"),
        ("convert checkpoints before RL, in a run without --rl-algorithm", "ckpt_convert_format"),
        ("upcycle before RL, in a run without --rl-algorithm", "moe_use_upcycling"),
    ),
    *OWN_RL,
    # Weights that are incomplete on a rank, or spread over other groups of ranks; models other than GPT.
    *_rows(
        WHOLE,
        ("only Megatron core models are supported; leave it out", "use_legacy_models"),
        (_SHARDED, "use_megatron_fsdp use_torch_fsdp2"),
        (_SHARDED, "gtp_weight_remat_size", (1, None)),
        ("2-D tensor parallelism is not supported; leave it out", "tp_2d"),
        ("RL needs weights in equal parts on all ranks; leave it out", "unaligned_linear"),
        (_HYBRID, "hybrid_override_pattern"),
    ),
    # Models that no family of the engine has.
    *_rows(
        MODEL,
        ("give --normalization RMSNorm", "normalization", ("RMSNorm",)),
        ("give it; all model families of the engine have a gated SiLU MLP", "swiglu", (True,)),
        ("give it", "add_bias_linear", (False,)),
        ("give --position-embedding-type rope", "position_embedding_type", ("rope",)),
        ("the engine rotates halves of a head, not neighbours; leave it out", "rotary_interleaved use_glm_rope"),
        ("the engine has rotary embeddings in every layer; leave it out", "no_rope_freq"),
        ("with it norm weights are stored minus one; leave it out", "apply_layernorm_1p layernorm_zero_centered_gamma"),
        (_GATED, "squared_relu quick_geglu openai_gelu geglu gelu_tanh"),
        (_PLAIN, "qk_l2_norm attention_output_gate experimental_attention_variant full_attention_interval"),
        (
            "the engine keeps norms in the model's dtype; leave it out",
            "rmsnorm_weight_in_fp32 init_norm_weight_in_fp32",
        ),
        (_PLAIN, "attn_logit_softcapping"),
        (_PLAIN, "sliding_window interleave_sliding_window window_size query_pre_attn_scalar", (None,)),
        (_PLAIN, "softmax_type", ("vanilla", None)),
        (_HYBRID, "is_hybrid_model hybrid_layer_pattern"),
        (_EQUAL_LAYERS, "heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json"),
        (_NO_SUCH_THING, "apply_residual_connection_post_layernorm use_mup"),
        (_NO_SUCH_THING, "glu_linear_offset", (0.0,)),
        (_NO_SUCH_THING, "activation_func_clamp_value fc_type", (None,)),
        (_NO_SUCH_THING, "rotary_seq_len_interpolation_factor", (None, 1)),
        # The same, for flags of MindSpeed and MindSpeed-LLM.
        (_NO_SUCH_THING, "post_norm no_post_layer_norm add_dense_bias add_output_layer_bias input_embeds_norm"),
        (_NO_SUCH_THING, "output_logit_softcapping scale_depth dim_model_base add_rmsnorm_offset share_kvstates"),
        (_NO_SUCH_THING, "embedding_multiplier_scale output_multiplier_scale", (1.0, None)),
        (_NO_SUCH_THING, "scale_emb", (None,)),
        (_NO_SUCH_THING, "enable_mhc no_enable_linear_qkv"),
        ("the engine does not limit the two factors in its MLP; leave it out", "swiglu_limit", (0, None)),
        (_NO_SUCH_THING, "cla_share_factor", (1,)),
        (_NO_SUCH_THING, "dynamic_factor", (1.0,)),
    ),
    *_rows(
        MOE,
        ("the engine's experts get the complete hidden state; leave it out", "moe_latent_size"),
        ("the engine has no experts without weights; leave it out", "num_zero_experts"),
        ("the engine's router chooses experts by hidden states, not by token ids; leave it out", "n_hash_layers"),
        (
            "it interleaves gate and up weights, but the engine has them one after the other; leave it out",
            "moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size",
            (None,),
        ),
    ),
    *_rows(
        LATENT,
        (_PLAIN, "enable_dsa_indexer"),
        (
            "the engine does not scale compressed queries, keys and values; leave it out",
            "enable_mla_scale_q_lora enable_mla_scale_kv_lora",
        ),
        ("the engine has separate down projections; leave it out", "mla_down_proj_fusion"),
    ),
    # Flags with which trainer and engine would route tokens to different experts, or weight experts differently.
    *_rows(
        ROUTING,
        (
            "the engine drops no tokens; leave it out",
            "moe_expert_capacity_factor moe_expert_rank_capacity_factor",
            (None,),
        ),
        ("the engine routes without noise; leave it out", "moe_input_jitter_eps", (None, 0.0)),
        ("routing is random with it; leave it out", "moe_router_force_load_balancing", (False, None)),
        ("routing is random with it; leave it out", "moe_router_force_biased", (None,)),
        ("it replaces the router's choice of experts; leave it out", "fix_router"),
        ("the engine scales experts' outputs, not inputs; leave it out", "moe_apply_probs_on_input", (False, None)),
    ),
)
