"""What the config.json of a small model of each family has besides the sizes that all families have."""

EXPERTS = dict(moe_intermediate_size=48, num_experts_per_tok=2)
AS_DEEPSEEK = EXPERTS | dict(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1)
GLM = AS_DEEPSEEK | dict(head_dim=64, attention_bias=True, partial_rotary_factor=0.5)
# vLLM on CPU has latent attention of these sizes only.
# transformers' latent norms have 1e-6 whatever the file says, as all published files do.
LATENT = AS_DEEPSEEK | dict(rms_norm_eps=1e-6, kv_lora_rank=512, q_lora_rank=24)
LATENT |= dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=4096)
YARN |= dict(beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
CONFIGS = {
    "llama": {},
    "mistral": dict(head_dim=48, sliding_window=None),
    "qwen2": {},
    "qwen3": dict(head_dim=16),
    "seed_oss": dict(head_dim=48, attention_bias=True, attention_dropout=0.0, residual_dropout=0.0),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen2_moe": EXPERTS | dict(num_experts=4, shared_expert_intermediate_size=80, use_sliding_window=False),
    "qwen3_moe": EXPERTS | dict(num_experts=4, head_dim=32),
    "glm4_moe": GLM | dict(routed_scaling_factor=1.5),
    "glm4_moe_355b": GLM | dict(use_qk_norm=True, routed_scaling_factor=2.5),
    "bailing_moe": EXPERTS
    | dict(head_dim=64, num_experts=4, num_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1)
    | dict(partial_rotary_factor=0.5, routed_scaling_factor=2.5, norm_topk_prob=True, score_function="sigmoid")
    | dict(moe_router_enable_expert_bias=True, use_qk_norm=True, use_bias=False, use_qkv_bias=False),
    "deepseek_v2": LATENT | dict(topk_method="greedy"),
    "deepseek_v2-lite": LATENT | dict(q_lora_rank=None, topk_method="greedy"),
    "deepseek_v2_236b": LATENT
    | dict(topk_method="group_limited_greedy", n_group=2, topk_group=1, routed_scaling_factor=16.0),
    "deepseek_v3": LATENT,
    "kimi_k2": LATENT | dict(n_group=1, topk_group=1, routed_scaling_factor=2.8, rope_parameters=YARN),
}
