"""What a start refuses, by flag and value: one table, and walks over the tables that refusals are made of."""

import argparse
import dataclasses
import importlib.util
import math
import re
import sys
import types
from pathlib import Path

import pytest
from checkouts import checkouts

from mindspeed_rl_plugin.algorithms.estimators import ADVANTAGES
from mindspeed_rl_plugin.checks import flag_checks
from mindspeed_rl_plugin.checks.refused_flags import OWN_RL, ROUTING, RUN, UPSTREAM, WHOLE, model_refusals, refusals
from mindspeed_rl_plugin.config import RLConfig, flag_name, flag_names, limit_problems
from mindspeed_rl_plugin.engine.engine_sizes import engine_problems
from mindspeed_rl_plugin.launch.read_inputs import read_inputs
from mindspeed_rl_plugin.layout.shape import ModelShape

MODELS = Path(__file__).parents[2] / "docs" / "bring-your-model.md"
# A model with experts instead, and one with multi-latent attention besides.
MOE = {
    "num_experts": 8,
    "moe_ffn_hidden_size": 126,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "add_qkv_bias": False,
    "qk_layernorm": True,
}
LATENT = dict(multi_latent_attention=True, q_lora_rank=24, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64)
DEEPSEEK = MOE | LATENT | dict(v_head_dim=128, rope_type="rope", moe_router_score_function="sigmoid")
DEEPSEEK |= dict(moe_shared_expert_intermediate_size=252, moe_router_enable_expert_bias=True)
DPO = {"--rl-algorithm": "dpo", "--rl-reward": None, "--rl-samples-per-prompt": None}
LIMITED = MOE | LATENT | dict(v_head_dim=128, rope_type="rope", moe_shared_expert_intermediate_size=252)
LIMITED |= dict(moe_router_load_balancing_type="group_limited_greedy", moe_router_num_groups=2, moe_router_group_topk=1)
LIMITED |= dict(moe_aux_loss_coeff=0.003, expert_model_parallel_size=2, moe_router_pre_softmax=True)
SPREAD = {"--rl-generate-tp": "4", "--rl-generate-ep": "4"}
PACKED = {"--rl-max-tokens-per-microbatch": "64", "--rl-pack-sequences": ""}
CP2 = {"context_parallel_size": 2, "data_parallel_size": 1, "transformer_impl": "transformer_engine"}
MINDSPEED = CP2 | {"pre_tockens": 65536, "attention_mask_type": "causal", "context_parallel_algo": "megatron_cp_algo"}
ULYSSES, LOCAL = MINDSPEED | {"context_parallel_algo": "ulysses_cp_algo"}, {"transformer_impl": "local"}
LOCAL |= {"use_flash_attn": True}
FLASH = {"pre_tockens": 65536, "use_flash_attn": True}
PADDED = dict(sequence_parallel=True, seq_length=72)
PADDED |= {"--rl-max-tokens-per-microbatch": "67", "--rl-max-response-length": "33"}
ALLTOALL = dict(moe_tp_extend_ep=True, moe_token_dispatcher_type="alltoall", expert_tensor_parallel_size=2)
RANKS8, PP4 = {"world_size": 8, "pipeline_model_parallel_size": 4}, "--pipeline-model-parallel-size 4"
RANKS8 |= {"tensor_model_parallel_size": 1}
LISTED = {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 1}
FOLDED = {"schedules_method": "dualpipev", "pipeline_model_parallel_size": 2, "num_layers": 4}
TP4 = {"--rl-generate-tp": "4"}
PPO = {"--rl-algorithm": "ppo"}
SINGLE = {"--rl-samples-per-prompt": "1"}
ASYNC = {"--rl-schedule": "async", "--rl-generators": "0", "--rl-correction": "truncate"}
DROP = {"--rl-schedule": "streamed", "--rl-oversample-drop": ""}
CARRY = {"--rl-schedule": "streamed", "--rl-carry-unfinished": "", "--rl-correction": "truncate"}

GOOD = [
    {},
    *({"--rl-algorithm": name} for name in ("grpo", "dapo", "dr-grpo", "rloo", "reinforce++", "gspo", "cispo")),
    PACKED,
    DPO | {"--rl-dpo-loss": "ipo", "--rl-rejected-key": "worse", "kv_channels": 16},
    {"--rl-filtration": "best-worst"},
    {"--rl-filtration": "best-worst", "--rl-schedule": "streamed"},
    ASYNC,
    ASYNC | {"--rl-correction": None, "--rl-max-staleness": "0"},
    CARRY | {"--rl-oversample": "3", "--rl-max-staleness": "2"},
    DROP | {"--rl-algorithm": "dapo"},
    {"--rl-algorithm": "reinforce++", "--rl-filtration": "pow", "--rl-filtration-whole-batch": ""}
    | {"--rl-samples-per-prompt": "1"},
    {"--rl-algorithm": "ppo", "--rl-advantage": "reinforce++"},
    {"--rl-algorithm": "ppo", "--rl-critic-lr": "1e-5", "--rl-critic-warmup": "2"},
    {"--rl-loss": "sapo", "--rl-correction": "truncate"},
    MOE | {"expert_model_parallel_size": 2},
    MOE | SPREAD,
    MOE | {"--rl-generate-ep": "4"},
    MOE | {"seq_aux": True, "moe_aux_loss_coeff": 0.0, "--rl-max-tokens-per-microbatch": "64"},
    CP2 | {"--rl-max-tokens-per-microbatch": "64"},
    CP2 | {"seq_length": 68},
    *(MINDSPEED | {"context_parallel_algo": f"{name}_cp_algo"} for name in ("megatron", "ulysses", "hybrid")),
    {"seq_length": 65, "transformer_impl": "local"} | PACKED,
    DEEPSEEK | SPREAD,
    DEEPSEEK | {"q_lora_rank": None},
    DEEPSEEK | {"mtp_num_layers": 1, "pipeline_model_parallel_size": 2},
    DEEPSEEK | {"mtp_num_layers": 1, "overlap_grad_reduce": True, "pipeline_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2, "overlap_grad_reduce": True},
    {"reuse_fp32_param": True, "ckpt_format": "torch"},
]

# changes -> what the message names: flags and values, with `...` between
BAD = [
    # several of upstream's arguments, or values of them (single flags: below)
    (CP2 | dict(seq_length=68, sequence_parallel=True), "--seq-length 68 ... multiple of 8 ... -parallel-size 2"),
    (CP2 | {"seq_length": 66}, "--seq-length 66 ... multiple of 4"),
    (CP2 | PACKED, "--rl-pack-sequences with --context-parallel-size 2 ... ulysses_cp_algo"),
    (MINDSPEED | PACKED | LOCAL, "--rl-pack-sequences with --context-parallel-size 2 ... ulysses_cp_algo"),
    (ULYSSES | PACKED, "--rl-pack-sequences with --context-parallel-size 2 ... --transformer-impl local"),
    (MINDSPEED | dict(context_parallel_algo="adaptive_cp_algo"), "--context-parallel-algo adaptive_cp_ ... ulysses_cp"),
    (MINDSPEED | dict(context_parallel_algo="hybrid_adaptive_cp_algo"), "--context-parallel-algo hybrid_adaptive_cp_"),
    (MINDSPEED | dict(context_parallel_algo="kvallgather_cp_algo"), "--context-parallel-algo kvallgather_ ... ulys"),
    (MINDSPEED | {"attention_mask_type": "general"}, "--attention-mask-type general with --context-parallel-size 2"),
    (DEEPSEEK | ULYSSES, "--context-parallel-algo ulysses_cp_algo with --multi-latent-attention ... -size 1"),
    (CP2 | {"hybrid_context_parallel": True}, "--hybrid-context-parallel"),
    ({"context_parallel_size": 2}, "--context-parallel-size 2 ... --transformer-impl transformer_engine"),
    (CP2 | PADDED, "--rl-max-tokens-per-microbatch 67 ... = 65 tokens, padded to 72"),
    (dict(recompute_in_bubble=True, calculate_per_token_loss=True), "--recompute-in-bubble ... --calculate-per-token-"),
    ({"reuse_fp32_param": True, "ckpt_format": "torch_dist"}, "--ckpt-format torch_dist with --reuse-fp32-param"),
    ({"virtual_optimizer": "all"}, "--virtual-optimizer ... --rl-swap params grads"),
    ({"use_nccl_ub": True}, "--use-nccl-ub ... --rl-swap none"),
    ({"optimizer_cuda_graph": True}, "--optimizer-cuda-graph: a captured graph keeps addresses that the swap"),
    ({"non_persistent_ckpt_type": "global"}, "--non-persistent-ckpt-type global ... another would be loaded"),
    ({"init_model_with_meta_device": True}, "--init-model-with-meta-device ... as the memory was"),
    (
        dict(mtp_num_layers=1, pipeline_model_parallel_size=2, untie_embeddings_and_output_weights=False),
        "--mtp-num-layers 1 with 2 pipeline stages ... --untie-embeddings-and-output-weights",
    ),
    (DEEPSEEK | {"add_qkv_bias": True}, "add_qkv_bias=True with qk_layernorm=True, experts, multi-latent attention"),
    (MOE | {"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn ... aux_loss"),
    (MOE | {"moe_router_load_balancing_type": "sparsemixer_topk"}, "sparsemixer_topk ... aux_loss"),
    (DEEPSEEK | {"moe_router_load_balancing_type": "softmax_topk"}, "softmax_topk ... sigmoid"),
    (
        MOE | {"seq_aux": True, "moe_aux_loss_coeff": 1e-4, "--rl-max-tokens-per-microbatch": "64"},
        "--rl-max-tokens-per-microbatch 64 with --seq-aux --moe-aux-loss-coeff 0.0001",
    ),
    (MOE | {"moe_router_score_function": "sigmoid"}, "bailing_moe needs sizes ... shared_ffn"),
    (MOE | {"moe_router_enable_expert_bias": True}, "qwen3_moe ... --moe-router-enable-expert-bias"),
    (MOE | {"moe_router_topk_scaling_factor": 2.5}, "--moe-router-topk-scaling-factor 2.5"),
    (MOE | {"moe_router_num_groups": 4}, "--moe-router-num-groups 4"),
    (
        DEEPSEEK | {"q_lora_rank": None, "spec": ["mindspeed_llm"], "tensor_model_parallel_size": 2},
        "--tensor-model-parallel-size 2 without --q-lora-rank",
    ),
    (MOE | {"moe_shared_expert_gate": True}, "qwen3_moe has no gate of shared experts ... --moe-shared-expert-gate"),
    ({"rotary_percent": 0.5}, "--rotary-percent 0.5: family qwen2"),
    (DEEPSEEK | {"moe_router_score_function": "softmax"}, "deepseek_v2 has no bias of the router"),
    ({"noop_layers": {1, 9}}, "--noop-layers 1,9 ... from 0 to 1"),
    ({"noop_layers": "0,x"}, "--noop-layers 0,x ... from 0 to 1"),
    (DEEPSEEK | {"kv_lora_rank": 256}, "320 ... 576"),
    ({"train_iters": None}, "--train-iters is missing"),
    ({"save": None}, "--save is missing"),
    ({"pipeline_model_parallel_size": 2, "num_layers": 3}, "3 layers ... 2 pipeline stages"),
    ({"schedules_method": "dualpipev"}, "--schedules-method dualpipev ... --pipeline-model-parallel-size"),
    (FOLDED | {"num_layers": 6}, "[3, 3] ... 2 virtual stages"),
    (FOLDED | {"num_layer_list": "3,1"}, "--schedules-method dualpipev ... --num-layer-list"),
    (FOLDED | {"--rl-max-tokens-per-microbatch": "64"}, "--rl-max-tokens-per-microbatch 64 with --schedules-method"),
    (FOLDED | {"ckpt_format": "torch_dist"}, "--ckpt-format torch_dist with --schedules-method"),
    ({"moe_tp_extend_ep": True, "expert_tensor_parallel_size": 1}, "--moe-tp-extend-ep ... -parallel-size 1 ... 2"),
    (ALLTOALL, "--moe-tp-extend-ep with --moe-token-dispatcher-type alltoall"),
    ({"stage": "dpo"}, "--stage dpo ... --rl-algorithm dpo"),
    ({"stage": "orm"}, "--stage orm ... --stage sft"),
    ({"loss_compute_mode": "chunk"}, "--loss-compute-mode chunk"),
    ({"rmsnorm_weight_in_fp32": True}, "--rmsnorm-weight-in-fp32"),
    # what upstream's scripts become on another machine, for another model, or with a value left empty
    (MOE | RANKS8 | dict(expert_model_parallel_size=8), f"{PP4} x --expert-model-parallel-size 8 = 32 ... 8 ranks"),
    (RANKS8 | dict(tensor_model_parallel_size=8), "--tensor-model-parallel-size 8 x --pipeline ... = 32 ... 8 ranks"),
    (RANKS8 | dict(context_parallel_size=8), f"{PP4} x --context-parallel-size 8 = 32 ... a multiple of 32"),
    (MOE | RANKS8 | dict(expert_tensor_parallel_size=4), f"{PP4} x --expert-tensor-parallel-size 4 = 16 ... 8 ranks"),
    ({"num_attention_heads": 6}, "--num-attention-heads 6 is not a multiple of --num-query-groups 4"),
    ({"num_attention_heads": 12, "num_query_groups": 6, "tensor_model_parallel_size": 4}, "-groups 6 ... a divisor"),
    ({"num_attention_heads": 5, "num_query_groups": 5}, "--num-attention-heads 5 ... --tensor-model-parallel-size 2"),
    (MOE | {"num_experts": 9, "expert_model_parallel_size": 2}, "--num-experts 9 ... --expert-model-parallel-size 2"),
    (DEEPSEEK | {"moe_router_num_groups": 3, "moe_router_group_topk": 1}, "--num-experts 8 ... -router-num-groups 3"),
    (DEEPSEEK | {"moe_router_num_groups": 4, "moe_router_group_topk": 2}, "--moe-router-group-topk 2 ... half"),
    (MOE | {"moe_router_topk": 9}, "--moe-router-topk 9: there are 8 experts"),
    (MOE | {"moe_router_score_function": "sqrtsoftplus"}, "bailing_moe ... moe_router_score_function='sqrtsoftplus'"),
    (MOE | {"moe_layer_freq": [0, 1, 1]}, "--moe-layer-freq describes 3 layers, the model has 2"),
    (DEEPSEEK | {"moe_layer_freq": [1, 0]}, "--moe-layer-freq with dense layers [1]: family deepseek_v3"),
    (MOE | {"n_shared_experts": 1}, "--moe-shared-expert-intermediate-size 126: family qwen3_moe has no shared"),
    (DEEPSEEK | {"moe_router_enable_expert_bias": False}, "deepseek_v3 needs --moe-router-enable-expert-bias"),
    (DEEPSEEK | {"partial_rotary_factor": 0.25}, "--partial-rotary-factor 0.25: family deepseek_v3"),
    (DEEPSEEK | {"enable_mla_scale_q_lora": True}, "--enable-mla-scale-q-lora"),
    (DEEPSEEK | {"num_zero_experts": 256}, "--num-zero-experts 256"),
    (DEEPSEEK | {"n_hash_layers": 3}, "--n-hash-layers 3"),
    ({"qk_layernorm": True}, "no model family has add_qkv_bias=True with qk_layernorm=True"),
    (FLASH | {"apply_query_key_layer_scaling": True}, "--apply-query-key-layer-scaling ... --use-flash-attn"),
    (DEEPSEEK | FLASH | {"pre_tockens": 32}, "--pre-tockens 32 ... --seq-length 64"),
    ({"shape_order": "TND"}, "--shape-order TND ... SBH"),
    ({"defer_embedding_wgrad_compute": True}, "--defer-embedding-wgrad-compute ... --rl-logprob-chunk-tokens 0"),
    (DEEPSEEK | FLASH | {"sparse_mode": 2}, "--sparse-mode 2"),
    (DEEPSEEK | FLASH | DPO | {"sparse_mode": 2}, "--sparse-mode 2"),
    (DEEPSEEK | FLASH | {"next_tockens": -1}, "--next-tockens -1"),
    (LIMITED | {"moe_aux_loss_coeff": 0}, "--moe-aux-loss-coeff 0 ... group_limited_greedy"),
    (LIMITED | {"micro_batch_size": 2}, "--micro-batch-size 2 ... group_limited_greedy"),
    (LIMITED | {"moe_alltoall_overlap_comm": True}, "--moe-alltoall-overlap-comm ... group_limited_greedy"),
    (LIMITED | {"expert_model_parallel_size": 1}, "--moe-router-group-topk 1 ... --expert-model-parallel-size 1"),
    ({"position_embedding_type": "deepseek4"}, "--position-embedding-type deepseek4: give --position-embedding-type"),
    ({"rope_scaling_type": "dynamic"}, "--rope-scaling-type dynamic ... llama3, yarn"),
    (LISTED | {"num_layer_list": "1,2"}, "--num-layer-list 1,2 ... --num-layers 2"),
    (LISTED | {"num_layer_list": "2"}, "--num-layer-list 2 ... --pipeline-model-parallel-size 2"),
    ({"step_batch_size_schedule": "0:16 12B:1536"}, "--step-batch-size-schedule 0:16 12B:1536 ... --global-batch-size"),
    ({"load": "your model ckpt path"}, "--load your model ckpt path holds no checkpoint ... leave it out"),
    ({"save": ""}, "--save is missing"),
    ({"--rl-generate-tp": "4", "num_attention_heads": 10, "num_query_groups": 2}, "--rl-generate-tp 4 ... -heads 10"),
    # data and tokenizer
    ({"--rl-prompt-data": None}, "--rl-prompt-data is missing"),
    ({"--rl-prompt-data": "nowhere.jsonl"}, "--rl-prompt-data nowhere.jsonl"),
    (DPO | {"--rl-prompt-data": "nowhere.jsonl"}, "--rl-prompt-data nowhere.jsonl"),
    ({"--rl-eval-data": "nowhere.jsonl"}, "--rl-eval-data nowhere.jsonl"),
    ({"--rl-tokenizer": None}, "no tokenizer ... --rl-tokenizer"),
    ({"--rl-tokenizer": "nowhere"}, "--rl-tokenizer nowhere is not a directory"),
    ({"--rl-tokenizer": None, "tokenizer_model": "no"}, "--tokenizer-model no is not a directory"),
    ({"--rl-tokenizer": None, "tokenizer_name_or_path": "no"}, "--tokenizer-name-or-path no is not a directory"),
    ({"--rl-hf-model": "nowhere"}, "--rl-hf-model nowhere ... config.json"),
    # names
    ({"--rl-algorithm": "ppo2"}, "--rl-algorithm 'ppo2' ... ppo, grpo"),
    ({"--rl-reward": "mathematics"}, "reward 'mathematics' ... math"),
    ({"--rl-reward": "nowhere.py:grade"}, "no file 'nowhere.py'"),
    ({"--rl-reward": "regex"}, "--rl-reward-regex"),
    ({"--rl-reward": None}, "no reward"),
    ({"--rl-swap": "params gradients"}, "--rl-swap gradients ... params, grads, optimizer, none"),
    ({"--rl-swap": "params,gradients"}, "--rl-swap gradients ... params, grads, optimizer, none"),
    ({"--rl-swap": "none params"}, "--rl-swap none params"),
    # numbers that only other arguments limit (limits of a flag alone: below)
    ({"--rl-samples-per-prompt": "1"}, "--rl-samples-per-prompt 1 ... 'group-norm'"),
    (PPO | {"--rl-critic-load": "nowhere"}, "--rl-critic-load ... latest_checkpointed_iteration.txt"),
    (PPO | {"--rl-critic-warmup": "10"}, "--rl-critic-warmup 10 ... --train-iters 10"),
    (
        {"--rl-filtration": "pow", "--rl-filtration-whole-batch": "", "--rl-schedule": "streamed"},
        "--rl-schedule streamed ... --rl-filtration-whole-batch ... --rl-schedule sync",
    ),
    (DPO | {"--rl-schedule": "streamed"}, "--rl-schedule streamed has no meaning ... dpo generates nothing; remove it"),
    ({"--rl-schedule": "async", "--rl-correction": "mask"}, "--rl-schedule async ... --rl-generators N"),
    (ASYNC | {"--rl-correction": None}, "--rl-max-staleness 1 (the default): ... --rl-correction truncate"),
    (ASYNC | {"--rl-correction": None, "--rl-max-staleness": "2"}, "--rl-max-staleness 2: ... --rl-correction"),
    (ASYNC | {"--rl-generators": "2"}, "--rl-generators 2 ... -m mindspeed_rl_plugin ... mindspeed_rl_plugin.adaptor"),
    (ASYNC | {"--rl-async-order": "strict"}, "--rl-async-order strict ... --rl-generators N"),
    (ASYNC | {"--rl-reward-model-device": "accelerator"}, "--rl-reward-model-device accelerator ... host"),
    (ASYNC | {"--rl-filtration": "pow", "--rl-filtration-whole-batch": ""}, "async ... --rl-filtration-whole-batch"),
    (ASYNC | {"--rl-stop": "x", "--rl-inflight": "recompute"}, "--rl-stop with --rl-inflight ... --rl-stop-token-ids"),
    (CARRY | {"--rl-stop": "x"}, "--rl-stop with --rl-carry-unfinished ... --rl-stop-token-ids"),
    ({"--rl-max-staleness": "2"}, "--rl-max-staleness ... --rl-schedule async"),
    ({"--rl-schedule": "streamed", "--rl-inflight": "drain"}, "--rl-inflight ... --rl-schedule async"),
    ({"--rl-generators": "1"}, "--rl-generators ... --rl-schedule async"),
    (CARRY | {"--rl-correction": None}, "--rl-carry-unfinished ... --rl-correction truncate"),
    (CARRY | {"--rl-schedule": None}, "--rl-carry-unfinished ... --rl-schedule sync (the default) ... streamed"),
    (ASYNC | {"--rl-carry-unfinished": ""}, "--rl-carry-unfinished ... --rl-schedule async ... --rl-schedule streamed"),
    (CARRY | {"--rl-oversample-drop": ""}, "--rl-carry-unfinished and --rl-oversample-drop ... remove one"),
    (CARRY | {"--rl-max-staleness": "0"}, "--rl-max-staleness 0 ... --rl-carry-unfinished ... 1 or more"),
    (CARRY | {"--rl-oversample": "2.5"}, "--rl-oversample 2.5 ... 1 + --rl-max-staleness 1 (the default)"),
    (CARRY | {"--rl-oversample": "1"}, "--rl-oversample 1 ... 1.25"),
    (CARRY | {"--rl-filtration": "pow", "--rl-filtration-whole-batch": ""}, "streamed ... --rl-filtration-whole-batch"),
    ({"--rl-schedule": "streamed", "--rl-oversample": "2"}, "--rl-oversample 2 ... --rl-carry-unfinished ... -drop"),
    (DROP | {"--rl-max-staleness": "2"}, "--rl-max-staleness ... --rl-schedule async or --rl-carry-unfinished"),
    (DROP | {"--rl-reward-model-device": "accelerator"}, "--rl-reward-model-device accelerator ... host"),
    (DPO | {"--rl-oversample-drop": ""}, "--rl-oversample-drop has no meaning ... dpo"),
    (SINGLE | {"--rl-filtration": "pow"}, "--rl-filtration pow ... -prompt 1 ... --rl-filtration-whole-batch"),
    (
        {"--rl-filtration": "best-random", "--rl-samples-per-prompt": "6", "--rl-rollout-prompts": "8"},
        "--rl-filtration best-random ... --global-batch-size 16 ... --rl-samples-per-prompt 6",
    ),
    (SINGLE | {"--rl-advantage": "reinforce++", "--rl-dynamic-sampling": ""}, "-prompt 1 ... --no-rl-dynamic"),
    ({"--rl-max-tokens-per-microbatch": "63"}, "-microbatch 63 ... -prompt-length 32 ... -response-length 32 ... 64"),
    ({"--rl-pack-sequences": ""}, "--rl-pack-sequences ... --rl-max-tokens-per-microbatch"),
    (PACKED | {"masked_softmax_fusion": True}, "--no-masked-softmax-fusion"),
    (PACKED | {"use_flash_attn": True}, "--use-flash-attn"),
    (PACKED | {"transformer_impl": "inference_optimized"}, "--transformer-impl inference_optimized"),
    (PACKED | dict(use_flash_attn=True, pre_tockens=65536, shape_order="SBH"), "MindSpeed-LLM ... --use-flash-attn"),
    (PACKED | {"position_embedding_type": "mrope"}, "--rl-pack-sequences ... --position-embedding-type mrope"),
    (DPO | {"micro_batch_size": 1}, "--micro-batch-size 1 cuts a pair"),
    (DPO | {"micro_batch_size": 6}, "--global-batch-size 16 ... --micro-batch-size 6 x 2"),
    ({"--rl-overlong-buffer": "33"}, "--rl-overlong-buffer 33 ... --rl-max-response-length 32"),
    ({"--rl-reward-timeout": "0"}, "--rl-reward-timeout 0"),
    ({"--rl-reward-timeout": "nan"}, "--rl-reward-timeout nan"),
    ({"--rl-reward-timeout": "5 6"}, "2 time limits (5 6) for 1 rewards"),
    ({"--rl-reward-timeout": ""}, "0 time limits (none) for 1 rewards"),
    ({"--rl-max-response-length": "33"}, "response-length 33 = 65 tokens ... --seq-length 64; shorten ... or raise"),
    ({"--rl-max-response-length": None}, "32 + --rl-max-response-length 1024 (the default) = 1056 ... or raise"),
    ({"--rl-max-response-length": "64"}, "raise --seq-length (and --max-position-embeddings 64)"),
    ({"max_position_embeddings": 63}, "64 tokens ... --max-position-embeddings 63"),
    ({"--rl-generate-tp": "3"}, "--rl-generate-tp 3 ... 4 ranks"),
    (TP4 | dict(num_attention_heads=6, num_query_groups=2), "--rl-generate-tp 4 ... --num-attention-heads 6"),
    (TP4 | {"ffn_hidden_size": 514}, "--rl-generate-tp 4 does not divide --ffn-hidden-size 514"),
    (TP4 | dict(num_attention_heads=12, num_query_groups=6), "--rl-generate-tp 4 ... 6 query groups"),
    ({"--rl-generate-ep": "2"}, "--rl-generate-ep 2 ... no experts"),
    (MOE | {"--rl-generate-tp": "2", "--rl-generate-ep": "3"}, "--rl-generate-ep 3 with --rl-generate-tp 2 ... of 2"),
    (MOE | SPREAD | {"num_experts": 2}, "--rl-generate-ep 4 ... 2 experts"),
    (MOE | {"--rl-generate-ep": "4", "num_experts": 6}, "--rl-generate-ep 4 ... 6 experts"),
    (MOE | {"--rl-generate-ep": "8"}, "--rl-generate-ep 8 ... 4 ranks"),
    (MOE | TP4, "--rl-generate-tp 4 does not divide --moe-ffn-hidden-size 126"),
    # Qwen2, whose engine takes no head size, and Llama, whose engine takes one.
    ({"kv_channels": 16, "hidden_size": 128}, "attention head size 16 ... no --kv-channels"),
    ({"kv_channels": 16, "add_qkv_bias": False}, "attention head size 16 ... --kv-channels 32"),
    # 2 layers x keys and values x 4 groups x 32 x 4 bytes = 2 KiB a token: 64 tokens need 128 KiB.
    ({"--rl-kv-cache-gb": "0.0001"}, "64 tokens ... 0.000122 GiB ... --rl-kv-cache-gb 0.0001"),
    ({"--rl-kv-cache-gb": "1e6"}, "--rl-kv-cache-gb 1e+06 x 1 ranks ... GiB of memory; lower it"),
    ({"--rl-samples-per-prompt": "3"}, "--global-batch-size 16 ... --rl-samples-per-prompt 3"),
    ({"--rl-rollout-prompts": "6"}, "24 samples (--rl-rollout-prompts 6 x --rl-samples-per-prompt 4)"),
    ({"micro_batch_size": 3}, "--global-batch-size 16 ... --micro-batch-size 3 x 2"),
    # what nothing reads (all of it: test_unread.py)
    ({"--rl-critic-warmup": "3"}, "--rl-critic-warmup 3 has no meaning ... grpo ... --rl-advantage gae"),
    (DPO | {"--rl-max-tokens-per-microbatch": "64"}, "--rl-max-tokens-per-microbatch 64 has no meaning ... dpo"),
    (DPO | {"--rl-reward": "exact"}, "--rl-reward exact has no meaning ... dpo"),
]


SPEC = "mindspeed_llm.tasks.models.spec.{}_spec layer_spec"
GPT3 = dict(position_embedding_type="learned_absolute", normalization="LayerNorm", swiglu=False, add_bias_linear=True)
# What scripts of MindSpeed-LLM and Megatron give for families that are not built -> the family's name.
UNBUILT = [
    ({"spec": SPEC.format("gemma2").split(), "swiglu": False, "post_norm": True}, "gemma2_spec layer_spec: Gemma 2"),
    ({"spec": SPEC.format("phi35_moe").split(), "normalization": "LayerNorm"}, "Phi-3.5-MoE"),
    ({"spec": SPEC.format("plm").split(), "squared_relu": True, "rope_scaling_type": "plm"}, "PLM"),
    ({"rope_scaling_type": "longrope"}, "--rope-scaling-type longrope: Phi-3.5"),
    ({"spec": SPEC.format("longcat").split(), "num_zero_experts": 256}, "LongCat-Flash"),
    ({"spec": SPEC.format("qwen3_next").split(), "full_attention_interval": 4}, "Qwen3-Next"),
    ({"spec": SPEC.format("deepseek4").split(), "enable_mhc": True}, "DeepSeek-V4"),
    ({"spec": SPEC.format("deepseek").split(), "enable_dsa_indexer": True}, "--enable-dsa-indexer: DeepSeek-V3.2"),
    ({"spec": SPEC.format("grok").split()}, "Grok 1"),
    ({"spec": SPEC.format("hunyuan").split(), "cla_share_factor": 2}, "Hunyuan-Large"),
    ({"spec": SPEC.format("minicpm").split(), "scale_emb": 12.0}, "MiniCPM"),
    ({"spec": SPEC.format("mamba").split()}, "Mamba 2"),
    ({"experimental_attention_variant": "gated_delta_net"}, "-variant gated_delta_net: Qwen3-Next"),
    (GPT3, "--position-embedding-type rope ... --swiglu: GPT-3"),
]


def problems_of(build, changes):
    """The lines that a start with these changes is refused with; none where it is fine."""
    args = build({k: v.split() if isinstance(v, str) and k.startswith("--") else v for k, v in changes.items()})
    try:
        flag_checks.check_unvalidated(args)
        flag_checks.check_args(args)
    except ValueError as error:
        head, *lines = str(error).splitlines()
        assert head == "RL cannot run with these arguments:"
        return [line.removeprefix("  - ") for line in lines]
    return []


def names(line, expected):
    """Whether a line holds all pieces of `expected`, in order."""
    return re.search(".*".join(map(re.escape, expected.split(" ... "))), line) is not None


@pytest.mark.parametrize("changes", GOOD, ids=str)
def test_accepted(build, changes):
    assert problems_of(build, changes) == []


@pytest.mark.parametrize(("changes", "expected"), BAD, ids=lambda value: str(value)[:60])
def test_refused(build, changes, expected):
    lines = problems_of(build, changes)
    assert any(names(line, expected) for line in lines), lines
    assert len(set(lines)) == len(lines)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "-size 2 does not divide the 3 ranks that train (3 trainers = 4 ranks - --rl-generators 1); start"),
        ({"tensor_model_parallel_size": 1}, "x 3 data-parallel ranks = 6 (3 trainers = 4 ranks - --rl-generators 1);"),
    ],
)
def test_a_number_of_trainers_that_does_not_divide_is_said_to_be_what_generators_leave(
    build, monkeypatch, changes, expected
):
    monkeypatch.setenv("MINDSPEED_RL_PART", "1")
    changes = ASYNC | {"--rl-generators": "1", "world_size": 3} | changes
    assert any(expected in line for line in problems_of(build, changes)), problems_of(build, changes)


@pytest.mark.parametrize(("changes", "expected"), UNBUILT, ids=lambda value: str(value)[-40:])
def test_a_family_that_is_not_built_answers_first_and_alone(build, changes, expected):
    """Before ranks and batch, which do not divide here. DPO generates nothing, so it trains what Megatron builds."""
    args = build({**changes, "micro_batch_size": 7, "world_size": 3})
    with pytest.raises(ValueError) as error:
        flag_checks.check_unvalidated(args)
    _, line = str(error.value).splitlines()
    assert names(line, expected) and "docs/bring-your-model.md" in line
    assert f"| {line.partition(': ')[2].partition(' is no')[0]} |" in MODELS.read_text(), "docs say what it would take"
    flag_checks.check_unvalidated(build({**changes, **{k: v and v.split() for k, v in DPO.items()}}))
    flag_checks.check_unvalidated(build({"spec": SPEC.format("qwen3").split()}))


@pytest.mark.parametrize("row", UPSTREAM, ids=lambda row: row.name)
def test_upstreams_flags_one_by_one(row):
    """Each row refuses another value, by flag, value and fix, and takes its own fine ones and a Megatron without it."""
    other = next(v for v in (True, False, 7, "other") if v not in row.fine)
    shown = {True: row.spelt, False: f"without {row.spelt}"}.get(other, f"{row.spelt} {other}")
    (message,) = refusals(types.SimpleNamespace(**{row.name: other}), row.about)
    assert message == f"{shown}: {row.why}" and row.why
    assert all(row.message(types.SimpleNamespace(**{row.name: value})) is None for value in row.fine)
    assert row.message(types.SimpleNamespace()) is None


def test_lists_are_shown_as_they_were_given():
    args = types.SimpleNamespace(rampup_batch_size=["16", "8", "100"], cuda_graph_impl="local", fp8="hybrid")
    assert [m.partition(":")[0] for m in refusals(args, RUN)] == [
        *("--rampup-batch-size 16 8 100", "--cuda-graph-impl local", "--fp8-format hybrid")
    ]


def test_the_table_of_upstreams_flags_names_each_once_and_is_walked_whole(build):
    assert len({row.name for row in UPSTREAM}) == len(UPSTREAM)
    tried = {RUN: {}, WHOLE: {}, "model": {}, "experts": MOE, "latent": DEEPSEEK, ROUTING: MOE}
    for about, base in tried.items():
        row = next(row for row in UPSTREAM if row.about == about)
        lines = problems_of(build, base | {row.name: 1.5})
        assert any(f"{row.spelt} 1.5: {row.why}" in line for line in lines), (row, lines)
    assert {row.about for row in UPSTREAM} == set(tried)
    row = next(row for row in UPSTREAM if row.about == WHOLE)
    assert any(line.startswith(row.spelt) for line in problems_of(build, DPO | {row.name: True}))
    assert model_refusals(types.SimpleNamespace(moe_latent_size=1, enable_dsa_indexer=True)) == []


def test_defaults_of_megatrons_own_rl_pass_together_and_what_is_named_instead_is_ours():
    assert refusals(types.SimpleNamespace(**{row.name: row.fine[0] for row in OWN_RL}), RUN) == []
    fixes = {row.name: row.why.rpartition("; ")[2] for row in OWN_RL}
    assert fixes["grpo_group_size"] == "give --rl-samples-per-prompt instead"
    assert fixes["rl_use_sequence_packing"] == "remove it"
    assert {word for fix in fixes.values() for word in fix.split() if word.startswith("--")} <= set(flag_names())


def megatrons_parsers():
    """The installed Megatron's arguments.py, and those of the checkouts in MEGATRON_LM_PATH."""
    installed = Path(importlib.util.find_spec("megatron.core").origin).parents[1] / "training" / "arguments.py"
    return [installed, *(checkout / "megatron" / "training" / "arguments.py" for checkout in checkouts())]


def group_of(source):
    """Attribute -> default of `_add_rl_args` in this file, executed alone; nothing where it has none."""
    head, separator, tail = source.read_text().partition("def _add_rl_args(parser):")
    if not separator:
        return {}
    body = tail.partition("\ndef ")[0]
    space = {"argparse": argparse}
    exec(separator + body, space)
    parser = space["_add_rl_args"](argparse.ArgumentParser())
    return {a.dest: a.default for a in parser._actions if a.dest not in ("help", "perform_rl_step")}


def test_the_table_of_megatrons_own_rl_holds_every_argument_with_its_default():
    table = {row.name: row.fine for row in OWN_RL}
    groups = [group_of(source) for source in megatrons_parsers()]
    assert any(groups), "no Megatron here has the group"
    for group in groups:
        assert {name: default for name, default in group.items() if default not in table.get(name, ())} == {}


def limited():
    for group in dataclasses.fields(RLConfig):
        for field in dataclasses.fields(getattr(RLConfig(), group.name)):
            if field.metadata["limits"]:
                yield group.name, field


@pytest.mark.parametrize(("group", "field"), limited(), ids=lambda value: getattr(value, "name", value))
def test_numbers_of_our_flags_have_limits(group, field):
    def problems(value):
        return limit_problems(dataclasses.replace(getattr(RLConfig(), group), **{field.name: value}))

    limits = field.metadata["limits"]
    for kind, limit in limits.items():
        outside = {"least": limit - 1, "above": limit, "most": limit + 1, "below": limit}[kind]
        (line,) = problems(outside)
        assert line.startswith(f"{flag_name(field.name)} is {outside}; give a number ") and f"{limit:g}" in line
        inside = {"least": limit, "above": limit + 0.1, "most": limit, "below": limit - 0.1}[kind]
        assert problems(inside) == []
    for value in (math.nan, math.inf):
        assert len(problems(value)) == 1
    assert problems(None) == [] and problems(field.default) == []


def test_every_problem_is_reported_at_once_and_once(build):
    lines = problems_of(build, {"hidden_dropout": 0.1, "save": None, "--rl-top-p": "2", "--rl-clip-low": "-1"})
    assert len(lines) == 4
    flags = {"--rl-gamma": "0.9", "--rl-value-clip": "0.3", "--rl-critic-lr": "1e-3", "--rl-clip-low": "0.1"}
    for base in ({"--rl-loss": "sapo"}, DPO):
        assert sorted(line.split()[0] for line in problems_of(build, base | flags)) == sorted(flags)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_single_response_is_taken_only_where_none_is_compared(build, name):
    lines = problems_of(build, {"--rl-advantage": name, "--rl-samples-per-prompt": "1"})
    assert [names(line, f"--rl-samples-per-prompt 1 ... {name!r}") for line in lines] == [True] * (
        name not in ("reinforce++", "gae")
    )


def test_local_attention_knows_context_parallelism_where_it_is_mindspeeds(build, monkeypatch):
    """MindSpeed's is a class of its own in the place of Megatron's."""
    name = "megatron.core.transformer.dot_product_attention"
    for where, refused in ((name, True), ("mindspeed.core.context_parallel.adaptor", False)):
        init = types.FunctionType((lambda self: None).__code__, {"__name__": where})
        module = types.ModuleType(name)
        module.DotProductAttention = type("DotProductAttention", (), {"__init__": init})
        monkeypatch.setitem(sys.modules, name, module)
        lines = problems_of(build, CP2 | {"transformer_impl": "local"})
        assert [names(line, "--transformer-impl transformer_engine") for line in lines] == [True] * refused


def test_fewer_groups_than_tensor_parallel_ranks_need_a_megatron_that_repeats_them(build, monkeypatch):
    fewer = {"num_query_groups": 2, "tensor_model_parallel_size": 4, "data_parallel_size": 1}
    for minor, refused in ((12, True), (16, False)):
        monkeypatch.setitem(sys.modules, "megatron.core.package_info", types.SimpleNamespace(MINOR=minor))
        assert [names(line, "--num-query-groups 2 is not a multiple of") for line in problems_of(build, fewer)] == (
            [True] * refused
        )


def test_dumps_of_another_run_are_refused_before_anything_is_built(build, tmp_path):
    (tmp_path / "rollout-000000.parquet").write_bytes(b"")
    (line,) = problems_of(build, {"--rl-dump-dir": str(tmp_path), "save": str(tmp_path / "out")})
    assert line.startswith(f"--rl-dump-dir {tmp_path} holds 1 rollouts")


def test_checks_change_nothing(build):
    args = build({})
    before = dict(vars(args))
    flag_checks.check_args(args)
    flag_checks.warnings(args)
    assert vars(args) == before


def test_warnings(build, tmp_path):
    lines = flag_checks.warnings(build({"--rl-top-p": ["0.9"], "--rl-top-k": ["50"], "--rl-clip-low": ["1"]}))
    assert [line.split(":")[0] for line in lines] == ["--rl-top-p 0.9", "--rl-top-k 50", "--rl-clip-low 1.0"]
    assert flag_checks.warnings(build({"--rl-clip-low": ["0.9"]})) == flag_checks.warnings(build({})) == []
    for algorithm in ("grpo", "dpo"):
        args = build(
            {"--rl-dock": ["anything"]} | ({k: v and v.split() for k, v in DPO.items()} if algorithm == "dpo" else {})
        )
        flag_checks.check_args(args)
        assert [line.split(":")[0] for line in flag_checks.warnings(args)] == ["--rl-dock anything is ignored"]
    colocated = {"--rl-swap": ["none"], "--rl-reshard": ["allgather"], "--rl-reshard-bucket-mb": ["64"]}
    (line,) = flag_checks.warnings(build({"--rl-schedule": ["async"], **colocated}))
    assert names(
        line, "--rl-reshard allgather, --rl-swap none, --rl-reshard-bucket-mb 64: ... under --rl-schedule async"
    )
    assert flag_checks.warnings(build(colocated)) == flag_checks.warnings(build({"--rl-schedule": ["async"]})) == []
    (line,) = flag_checks.warnings(build({"swap_optimizer": True}))
    assert names(line, "--swap-optimizer ... --rl-swap optimizer")
    assert flag_checks.warnings(build({"swap_optimizer": True, "--rl-swap": ["params,grads"]})) == []
    experts = {"num_experts": 8, "moe_aux_loss_coeff": [0.0, 0.01], "moe_z_loss_coeff": 1e-3}
    (line,) = flag_checks.warnings(build(experts))
    assert names(line, "--moe-aux-loss-coeff 0.0 0.01 --moe-z-loss-coeff 0.001")
    (line,) = flag_checks.warnings(build(experts | {"moe_router_load_balancing_type": ["none"]}))
    assert line.startswith("--moe-z-loss-coeff 0.001:")
    assert flag_checks.warnings(build({"num_experts": 8, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None})) == []
    # Two tokenizers of one size.
    for name, vocab in (("tokenizer", '{"a": 0, "b": 1}'), ("same", '{"a": 0, "b": 1}'), ("other", '{"b": 0, "a": 1}')):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "tokenizer.json").write_text(f'{{"model": {{"vocab": {vocab}}}}}')
    assert flag_checks.warnings(build({"tokenizer_model": str(tmp_path / "same")})) == []
    assert flag_checks.warnings(build({"tokenizer_model": "a sentencepiece file"})) == []
    for flag, given in (("--tokenizer-model", "tokenizer_model"), ("--rl-hf-model", "--rl-hf-model")):
        other = str(tmp_path / "other")
        (line,) = flag_checks.warnings(build({given: [other] if given.startswith("-") else other}))
        assert names(line, f"--rl-tokenizer {tmp_path / 'tokenizer'} ... {flag} {other}")


def test_an_environment_that_vllm_cannot_use_is_refused_before_anything_is_read(build, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ValueError, match="VLLM_ENABLE_V1_MULTIPROCESSING=1"):
        read_inputs(build({}))


@pytest.mark.parametrize("folder, refused", [("ops/fused_moe", True), ("ops/moe", False)])
def test_an_engine_that_ranks_groups_of_experts_otherwise_is_refused(build, monkeypatch, folder, refused):
    files = [Path("vllm_ascend", folder, "experts_selector.py")]
    monkeypatch.setattr("importlib.metadata.files", lambda name: files if name == "vllm-ascend" else None)
    args = build(LIMITED)
    sizes = dict(world=8, max_positions=64, itemsize=2)
    shape, config = ModelShape.from_megatron_args(args, 100), RLConfig.from_args(args)
    lines = [*engine_problems(shape, config, kind="npu", **sizes)]
    assert [line for line in lines if "group_limited_greedy on NPUs" in line] == lines and bool(lines) == refused
    assert not [*engine_problems(shape, config, kind="cuda", **sizes)]
