"""What a start refuses: rule -> rows of changed arguments.

A rule takes Megatron's arguments and RL's config, and yields messages. Each message stands once in refusals.txt, in the
order of the rows; test_refusals.py and test_early.py write it again with GOLDEN=write.
"""

import argparse
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import torch

from mindspeed_rl_plugin.algorithms import presets
from mindspeed_rl_plugin.checks import flag_checks, upstream_checks
from mindspeed_rl_plugin.checks.refused_flags import RUN, WHOLE, refusals
from mindspeed_rl_plugin.checks.unsupported_models import MODEL_FLAGS, SPECS, unbuilt_family
from mindspeed_rl_plugin.config import add_flags, limit_problems

GOLDEN = Path(__file__).with_name("refusals.txt")

# What Megatron's validation leaves behind for a small model that RL can train.
VALIDATED = dict(
    **dict(train_iters=10, save="out", save_interval=5, global_batch_size=16, micro_batch_size=2, seq_length=64),
    **dict(data_parallel_size=2, world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=1),
    **dict(context_parallel_size=1, expert_model_parallel_size=1, expert_tensor_parallel_size=None),
    **dict(use_tp_pp_dp_mapping=False, decoder_first_pipeline_num_layers=None, decoder_last_pipeline_num_layers=None),
    **dict(account_for_embedding_in_pipeline_split=False, account_for_loss_in_pipeline_split=False),
    **dict(num_layers=2, hidden_size=256, ffn_hidden_size=512, num_attention_heads=8, kv_channels=32),
    **dict(group_query_attention=True, num_query_groups=4, max_position_embeddings=64, params_dtype=torch.float32),
    **dict(make_vocab_size_divisible_by=16, normalization="RMSNorm", swiglu=True, add_bias_linear=False),
    **dict(add_qkv_bias=True, qk_layernorm=False, position_embedding_type="rope", hidden_dropout=0.0),
    **dict(untie_embeddings_and_output_weights=True, attention_dropout=0.0, tokenizer_model=None),
)

PROFILED_STEPS = dict(profile_ranks=[0], profile_step_start=10, profile_step_end=12)

PARSER = add_flags(argparse.ArgumentParser(allow_abbrev=False))
GIVEN = {
    "--rl-algorithm": ["grpo"],
    "--rl-reward": ["math"],
    "--rl-samples-per-prompt": ["4"],
    "--rl-max-prompt-length": ["32"],
    "--rl-max-response-length": ["32"],
}


def namespace(folder: Path, changes: dict) -> argparse.Namespace:
    """Arguments like Megatron's, from changed flags (`--...`, words or a text of words; None: not given) and changed
    attributes. Tokenizer and prompts are in `folder`."""
    flags = dict(GIVEN)
    flags["--rl-tokenizer"] = [str(folder / "tokenizer")]
    flags["--rl-prompt-data"] = [str(folder / "prompts.jsonl")]
    attributes = dict(VALIDATED)
    for name, value in changes.items():
        (flags if name.startswith("--") else attributes)[name] = value
    given = {flag: value.split() if isinstance(value, str) else value for flag, value in flags.items()}
    words = [word for flag, values in given.items() if values is not None for word in (flag, *values)]
    return argparse.Namespace(**attributes, **vars(PARSER.parse_args(words)))


def problems_of(build: Callable, changes: dict) -> list[str]:
    """The lines that a start with these changes is refused with; none where it is fine."""
    args = build(changes)
    try:
        flag_checks.check_unvalidated(args)
        flag_checks.check_args(args)
    except ValueError as error:
        head, *lines = str(error).splitlines()
        assert head == "RL cannot run with these arguments:"
        return [line.removeprefix("  - ") for line in lines]
    return []


def sections() -> dict[str, list[str]]:
    """The messages of refusals.txt by their headings."""
    parts = (part.splitlines() for part in GOLDEN.read_text().split("## ")[1:])
    return {heading: [line for line in lines if line] for heading, *lines in parts}


def check_golden(heading: str, lines: Iterable[str], **places: object) -> None:
    """The lines are those under a heading of refusals.txt. places: names for what differs between machines."""
    lines = list(dict.fromkeys(lines))
    for name, place in places.items():
        lines = [line.replace(str(place), name) for line in lines]
    if os.environ.get("GOLDEN") == "write":
        text = {**(sections() if GOLDEN.exists() else {}), heading: lines}
        GOLDEN.write_text("\n".join("\n".join((f"## {name}", "", *text[name], "")) for name in text))
    assert sections().get(heading) == lines, "where this is meant, run this test with GOLDEN=write"


# By module and name: the checks that are walked, and what else refuses.
RULES: dict[str, Callable] = {
    f"{check.__module__.rpartition('.')[2]}.{check.__name__}": check
    for check in (*flag_checks.CHECKS, *flag_checks.GENERATION_CHECKS)
} | {
    "upstream_checks.ranks": lambda a, c: upstream_checks.ranks(a, c.schedule.trainers_text(a.world_size)),
    "upstream_checks.multiples": lambda a, _: upstream_checks.multiples(a),
    "refused_flags.refusals": lambda a, _: refusals(a, RUN, WHOLE),  # whole: test_upstreams_flags_one_by_one
    "rl_config.limit_problems": lambda _, c: limit_problems(*vars(c).values()),
    "presets.unread": lambda _, c: presets.unread(c),  # whole: test_unread.py
    "unsupported_models.unbuilt_family": lambda a, _: filter(None, [unbuilt_family(a)]),
}
# Rules that need other files or directories than those of `namespace` -> where they are tested.
ELSEWHERE = {
    "disk.problems": "test_endings.py",
    "flag_checks._code_of_rewards": "tests/tools/test_own_code.py",
    "flag_checks._dumps": "test_refusals.py",
}

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
REPLAY = {"--rl-router-replay": "rollout"}
LORA = {"--rl-lora-rank": "8"}
PAI = {"moe_router_load_balancing_type": "pai_megatron_aux_loss"}
UNFUSED = SimpleNamespace(name="unfused")
SHARED = {"--rl-max-tokens-per-microbatch": "64", "--rl-share-prompts": ""}
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
TOOLS = {"--rl-tools": "a.py:f", "--rl-tool-parser": "hermes"}
AGENT = {"--rl-agent": "a.py:f", "--rl-apply-chat-template": ""}
FOREIGN = {"--rl-environment": "verifiers:x", "--rl-apply-chat-template": ""}
GATED = MOE | dict(add_qkv_bias=True, qk_layernorm=False, moe_shared_expert_intermediate_size=126)
YARN = dict(rope_scaling_type="yarn", rope_scaling_original_max_position_embeddings=32, rope_scaling_mscale=0.7)
NO_FACTOR = dict(rope_scaling_mscale_all_dim=0.7, rope_scaling_factor=None)
MIXTRAL = MOE | {"qk_layernorm": False, "moe_ffn_hidden_size": None, "moe_layer_freq": 1}
LITE = DEEPSEEK | dict(q_lora_rank=None, moe_router_score_function=None, moe_router_enable_expert_bias=False)
DENSE_FIRST = LISTED | {"num_layers": 8}

# rule -> changes of arguments that it refuses
REFUSED: dict[str, list[dict]] = {
    "upstream_checks.ranks": [
        MOE | RANKS8 | dict(expert_model_parallel_size=8),
        RANKS8 | dict(tensor_model_parallel_size=8),
        RANKS8 | dict(context_parallel_size=8),
        MOE | RANKS8 | dict(expert_tensor_parallel_size=4),
    ],
    "upstream_checks.multiples": [
        {"num_attention_heads": 6},
        {"num_attention_heads": 12, "num_query_groups": 6, "tensor_model_parallel_size": 4},
        {"num_attention_heads": 5, "num_query_groups": 5},
        MOE | {"num_experts": 9, "expert_model_parallel_size": 2},
        DEEPSEEK | {"moe_router_num_groups": 3, "moe_router_group_topk": 1},
    ],
    "refused_flags.refusals": [
        {"optimizer_cuda_graph": True},
        {"non_persistent_ckpt_type": "global"},
        {"init_model_with_meta_device": True},
        {"stage": "dpo"},
        {"stage": "orm"},
        {"loss_compute_mode": "chunk"},
        {"shape_order": "TND"},
        {"step_batch_size_schedule": "0:16 12B:1536"},
    ],
    "flag_checks._run_length": [{"train_iters": None}, {"save": None}, {"save": ""}],
    "flag_checks._start": [{"load": "your model ckpt path"}],
    "flag_checks._algorithm": [
        {"--rl-algorithm": "ppo2"},
        {"--rl-samples-per-prompt": "1"},
        SINGLE | {"--rl-filtration": "pow"},
        {"--rl-filtration": "best-random", "--rl-samples-per-prompt": "6", "--rl-rollout-prompts": "8"},
        SINGLE | {"--rl-advantage": "reinforce++", "--rl-dynamic-sampling": ""},
        {"--rl-overlong-buffer": "33"},
        ASYNC | {"--rl-correction-low": "2"},
        DPO | {"--rl-dpo-loss": "ipo", "--rl-dpo-label-smoothing": "0.1"},
    ],
    "flag_checks._critic": [PPO | {"--rl-critic-load": "nowhere"}, PPO | {"--rl-critic-warmup": "10"}],
    "flag_checks._batch_arithmetic": [
        DPO | {"micro_batch_size": 1},
        DPO | {"micro_batch_size": 6},
        {"--rl-samples-per-prompt": "3"},
        {"--rl-samples-per-prompt": None, "global_batch_size": 12},
        {"--rl-samples-per-prompt": None, "--rl-rollout-prompts": "1"},
        {"--rl-rollout-prompts": "6"},
        {"micro_batch_size": 3},
    ],
    "early.prompt_data": [
        {"--rl-prompt-data": None},
        {"--rl-prompt-data": "nowhere.jsonl"},
        DPO | {"--rl-prompt-data": "nowhere.jsonl"},
        {"--rl-eval-data": "nowhere.jsonl"},
    ],
    "early.lengths": [
        {"--rl-max-response-length": "33"},
        {"--rl-max-response-length": None},
        {"--rl-max-response-length": "64"},
    ],
    "early.rewards": [
        {"--rl-reward": "mathematics"},
        {"--rl-reward": "nowhere.py:grade"},
        {"--rl-reward": "regex"},
        {"--rl-reward": None},
        {"--rl-reward-timeout": "0"},
        {"--rl-reward-timeout": "nan"},
        {"--rl-reward-timeout": "5 6"},
        {"--rl-reward-timeout": ""},
        {"--rl-reward-timeout": "1e6"},
    ],
    "flag_checks._tokenizer": [
        {"--rl-tokenizer": None},
        {"--rl-tokenizer": "nowhere"},
        {"--rl-tokenizer": None, "tokenizer_model": "no"},
        {"--rl-tokenizer": None, "tokenizer_name_or_path": "no"},
        {"--rl-hf-model": "nowhere"},
    ],
    "flag_checks.token_budget": [
        CP2 | PADDED,
        {"--rl-max-tokens-per-microbatch": "63"},
        {"--rl-pack-sequences": ""},
        PACKED | {"masked_softmax_fusion": True},
        PACKED | {"use_flash_attn": True},
        PACKED | {"transformer_impl": "inference_optimized"},
        PACKED | dict(use_flash_attn=True, pre_tockens=65536, shape_order="SBH"),
        PACKED | {"position_embedding_type": "mrope"},
        {"--rl-share-prompts": ""},
        DPO | {"--rl-max-tokens-per-microbatch": "128"},
        DPO | PACKED,
        DPO | SHARED,
        SHARED | {"masked_softmax_fusion": True},
        SHARED | {"position_embedding_type": "mrope"},
    ],
    "flag_checks._one_profiler": [
        {"--rl-trace": "12-13", "use_pytorch_profiler": True, "profile": True, **PROFILED_STEPS},
    ],
    "flag_checks._model": [
        DEEPSEEK | {"add_qkv_bias": True},
        MOE | {"moe_router_load_balancing_type": "sinkhorn"},
        MOE | {"moe_router_load_balancing_type": "sparsemixer_topk"},
        DEEPSEEK | {"moe_router_load_balancing_type": "softmax_topk"},
        MOE | {"moe_router_score_function": "sigmoid"},
        MOE | {"moe_router_enable_expert_bias": True},
        MOE | {"moe_router_topk_scaling_factor": 2.5},
        MOE | {"moe_router_num_groups": 4},
        MOE | {"moe_shared_expert_gate": True},
        {"rotary_percent": 0.5},
        DEEPSEEK | {"moe_router_score_function": "softmax"},
        {"noop_layers": {1, 9}},
        {"noop_layers": "0,x"},
        DEEPSEEK | {"kv_lora_rank": 256},
        {"pipeline_model_parallel_size": 2, "num_layers": 3},
        {"schedules_method": "dualpipev"},
        FOLDED | {"num_layers": 6},
        FOLDED | {"num_layer_list": "3,1"},
        {"moe_tp_extend_ep": True, "expert_tensor_parallel_size": 1},
        ALLTOALL,
        {"rmsnorm_weight_in_fp32": True},
        DEEPSEEK | {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
        MOE | {"moe_router_topk": 9},
        MOE | {"moe_router_score_function": "sqrtsoftplus"},
        MOE | {"moe_layer_freq": [0, 1, 1]},
        DEEPSEEK | {"moe_layer_freq": [1, 0]},
        MOE | {"n_shared_experts": 1},
        DEEPSEEK | {"moe_router_enable_expert_bias": False},
        DEEPSEEK | {"partial_rotary_factor": 0.25},
        DEEPSEEK | {"enable_mla_scale_q_lora": True},
        DEEPSEEK | {"num_zero_experts": 256},
        DEEPSEEK | {"n_hash_layers": 3},
        {"qk_layernorm": True},
        LIMITED | {"moe_aux_loss_coeff": 0},
        LIMITED | {"micro_batch_size": 2},
        LIMITED | {"moe_alltoall_overlap_comm": True},
        LIMITED | {"expert_model_parallel_size": 1},
        {"position_embedding_type": "deepseek4"},
        {"rope_scaling_type": "dynamic"},
        LISTED | {"num_layer_list": "1,2"},
        LISTED | {"num_layer_list": "2"},
        {"--rl-generate-tp": "4", "num_attention_heads": 10, "num_query_groups": 2},
        {"max_position_embeddings": 63},
        {"--rl-generate-tp": "3"},
        TP4 | dict(num_attention_heads=6, num_query_groups=2),
        TP4 | {"ffn_hidden_size": 514},
        TP4 | dict(num_attention_heads=12, num_query_groups=6),
        {"--rl-generate-ep": "2"},
        MOE | {"--rl-generate-tp": "2", "--rl-generate-ep": "3"},
        MOE | SPREAD | {"num_experts": 2},
        MOE | {"--rl-generate-ep": "4", "num_experts": 6},
        MOE | {"--rl-generate-ep": "8"},
        MOE | TP4,
        {"kv_channels": 16, "hidden_size": 128},
        {"kv_channels": 16, "add_qkv_bias": False},
        {"--rl-kv-cache-gb": "0.0001"},
        {"--rl-kv-cache-gb": "1e6"},
        DEEPSEEK | {"moe_router_topk": 1},
        DEEPSEEK | {"rotary_scaling_factor": 2.0, "mscale_all_dim": 1.0},
        DEEPSEEK | {"moe_shared_expert_intermediate_size": 200},
        GATED | {"moe_shared_expert_gate": True, "shared_expert_gate_output_dimension": 2},
        YARN | {"rope_scaling_mscale_all_dim": 0.0},
        FOLDED | {"schedules_method": "other"},
        MOE | {"shared_expert_gate": True},
        GATED | {"moe_shared_expert_gate": False},
        MIXTRAL | {"moe_layer_freq": [1, 0]},
        MIXTRAL | {"moe_router_pre_softmax": True},
        LITE | {"moe_router_pre_softmax": False},
        DEEPSEEK | PAI,
        DEEPSEEK | {"moe_tp_extend_ep": True, "moe_router_load_balancing_type": "none"},
        DEEPSEEK | {"num_experts": None},
        YARN | {"rope_scaling_original_max_position_embeddings": None},
        DEEPSEEK | YARN | NO_FACTOR,
        LISTED | {"num_layer_list": "1,x"},
        LISTED | {"num_layer_list": "1,1", "virtual_pipeline_model_parallel_size": 2},
        DENSE_FIRST | {"num_layer_list": "1,7", "first_k_dense_replace": 3},
        DENSE_FIRST | {"num_layer_list": "3,5", "first_k_dense_replace": 1, "moe_layer_freq": 2},
        FOLDED | {"decoder_first_pipeline_num_layers": 1},
        FOLDED | {"virtual_pipeline_model_parallel_size": 2},
    ],
    "upstream_checks.context_parallel": [
        CP2 | dict(seq_length=68, sequence_parallel=True),
        CP2 | {"seq_length": 66},
        CP2 | PACKED,
        MINDSPEED | PACKED | LOCAL,
        ULYSSES | PACKED,
        MINDSPEED | dict(context_parallel_algo="adaptive_cp_algo"),
        MINDSPEED | dict(context_parallel_algo="hybrid_adaptive_cp_algo"),
        MINDSPEED | dict(context_parallel_algo="kvallgather_cp_algo"),
        MINDSPEED | {"attention_mask_type": "general"},
        DEEPSEEK | ULYSSES,
        CP2 | {"hybrid_context_parallel": True},
        {"context_parallel_size": 2},
    ],
    "upstream_checks.packed_rows": [
        ULYSSES | SHARED | {"transformer_impl": "local"},
        SHARED | {"window_size": (128, 0)},
        SHARED | {"hybrid_layer_pattern": "M*-"},
        SHARED | {"softmax_type": "learnable"},
        SHARED | {"moe_fb_overlap": True},
        SHARED | DPO | MOE | {"moe_expert_capacity_factor": 1.0, "--rl-max-tokens-per-microbatch": "96"},
        SHARED | MOE | {"swap_attention": True},
        SHARED | MOE | {"moe_alltoall_overlap_comm": True, "moe_layer_recompute": True},
        PACKED | DPO | {"softmax_type": "learnable"},
        PACKED | DPO | {"hybrid_layer_pattern": "M*-", "transformer_impl": "transformer_engine"},
        PACKED | MOE | {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-3},
        PACKED | {"pre_tockens": 65536, "transformer_impl": "transformer_engine"},
        DEEPSEEK | SHARED | dict(rope_type="yarn", rotary_scaling_factor=1.0, apply_rope_fusion=True),
        SHARED | dict(transformer_impl="transformer_engine", attention_backend=UNFUSED),
        PACKED | MOE | REPLAY | dict(transformer_impl="transformer_engine", attention_backend=UNFUSED),
        PACKED | MOE | REPLAY | dict(pre_tockens=65536, transformer_impl="transformer_engine", use_flash_attn=True),
    ],
    "upstream_checks.router_replay": [
        REPLAY,
        REPLAY | MOE | CP2,
        REPLAY | MOE | {"moe_router_fusion": True},
        REPLAY | MOE | {"moe_fb_overlap": True},
        REPLAY | MOE | {"swap_attention": True},
        REPLAY | MOE | PAI | dict(moe_token_dispatcher_type="allgather", moe_permutation_async_comm=True),
    ],
    "lora_checks.problems": [
        LORA | {"--rl-advantage": "gae"},
        LORA | MOE | {"moe_zero_memory": "level0"},
        LORA | MOE | {"moe_alltoall_overlap_comm": True},
        LORA | {"reuse_fp32_param": True},
        LORA | FOLDED,
        LORA | {"--rl-lora-targets": "q_proj,qkv"},
        LORA | MOE | {"--rl-lora-targets": "experts.down_proj", "expert_model_parallel_size": 2},
        {"--rl-lora-rank": "300"},
        LORA | {"tensor_model_parallel_size": 8, "world_size": 8},
        LORA | {"enable_mg2hf_convert": True},
    ],
    "upstream_checks.gradients": [
        dict(recompute_in_bubble=True, calculate_per_token_loss=True),
        dict(mtp_num_layers=1, pipeline_model_parallel_size=2, untie_embeddings_and_output_weights=False),
        {"defer_embedding_wgrad_compute": True},
    ],
    "upstream_checks.shared_memory": [{"reuse_fp32_param": True, "ckpt_format": "torch_dist"}],
    "upstream_checks.swapped_memory": [
        {"virtual_optimizer": "all"},
        {"use_nccl_ub": True},
        {"--rl-swap": "none params"},
    ],
    "upstream_checks.sequence_balance": [
        MOE | {"seq_aux": True, "moe_aux_loss_coeff": 1e-4, "--rl-max-tokens-per-microbatch": "64"}
    ],
    "upstream_checks.latent_attention": [
        DEEPSEEK | {"q_lora_rank": None, "spec": ["mindspeed_llm"], "tensor_model_parallel_size": 2}
    ],
    "upstream_checks.folded_pipeline": [
        FOLDED | {"--rl-max-tokens-per-microbatch": "64"},
        FOLDED | {"ckpt_format": "torch_dist"},
    ],
    "upstream_checks.flash_attention": [
        FLASH | {"apply_query_key_layer_scaling": True},
        DEEPSEEK | FLASH | {"pre_tockens": 32},
        DEEPSEEK | FLASH | {"sparse_mode": 2},
        DEEPSEEK | FLASH | DPO | {"sparse_mode": 2},
        DEEPSEEK | FLASH | {"next_tockens": -1},
    ],
    "schedule_checks.problems": [
        {"--rl-filtration": "pow", "--rl-filtration-whole-batch": "", "--rl-schedule": "streamed"},
        {"--rl-schedule": "async", "--rl-correction": "mask"},
        ASYNC | {"--rl-correction": None},
        ASYNC | {"--rl-correction": None, "--rl-max-staleness": "2"},
        ASYNC | {"--rl-generators": "2"},
        ASYNC | {"--rl-async-order": "strict"},
        ASYNC | {"--rl-reward-model-device": "accelerator"},
        ASYNC | {"--rl-filtration": "pow", "--rl-filtration-whole-batch": ""},
        ASYNC | {"--rl-stop": "x", "--rl-inflight": "recompute"},
        CARRY | {"--rl-stop": "x"},
        CARRY | {"--rl-correction": None},
        CARRY | {"--rl-oversample-drop": ""},
        CARRY | {"--rl-max-staleness": "0"},
        CARRY | {"--rl-oversample": "2.5"},
        CARRY | {"--rl-oversample": "1"},
        CARRY | {"--rl-filtration": "pow", "--rl-filtration-whole-batch": ""},
        {"--rl-schedule": "streamed", "--rl-oversample": "2"},
        DROP | {"--rl-reward-model-device": "accelerator"},
    ],
    "episode_checks.problems": [
        {"--rl-reward": "environment"},
        TOOLS | {"--rl-max-turns": "1"},
        TOOLS | {"--rl-environment-python": "python3"},
        TOOLS | {"--rl-ignore-eos": ""},
        TOOLS | {"--rl-environment-timeout": "1e6"},
        TOOLS | {"--rl-max-turn-length": "99"},
        TOOLS | {"--rl-max-observation-length": "40"},
        TOOLS | {"--rl-observation": "chat"},
        TOOLS | {"--rl-observation": "raw", "--rl-apply-chat-template": ""},
        TOOLS | {"--rl-tool-parser": None},
        AGENT | {"--rl-tools": "a.py:f"},
        AGENT | {"--rl-environment": "a.py:A"},
        AGENT | {"--rl-apply-chat-template": None},
        AGENT | {"--rl-tool-parser": "a.py:f"},
        AGENT | {"--rl-agent": "no-such-program"},
        AGENT | {"--rl-agent": "it's"},
        FOREIGN | {"--rl-tools": "a.py:f"},
        FOREIGN | {"--rl-tool-parser": "a.py:f"},
        FOREIGN | {"--rl-apply-chat-template": None},
        FOREIGN | {"--rl-apply-chat-template": None, "--rl-observation": "chat"},
    ],
    "rl_config.limit_problems": [{"--rl-swap": "params gradients"}, {"--rl-swap": "params,gradients"}],
    "presets.unread": [
        {"--rl-max-staleness": "2"},
        {"--rl-schedule": "streamed", "--rl-inflight": "drain"},
        {"--rl-generators": "1"},
        CARRY | {"--rl-schedule": None},
        ASYNC | {"--rl-carry-unfinished": ""},
        DROP | {"--rl-max-staleness": "2"},
        {"--rl-max-turns": "3"},
        AGENT | {"--rl-agent-memory": "2"},
        DPO | {"--rl-schedule": "streamed"},
        DPO | {"--rl-oversample-drop": ""},
        {"--rl-critic-warmup": "3"},
        DPO | {"--rl-old-logprobs": "pass"},
        DPO | {"--rl-reward": "exact"},
    ],
    "unsupported_models.unbuilt_family": [
        *({"spec": [f"mindspeed_llm.tasks.models.spec.{module}", "layer_spec"]} for module in SPECS),
        *({name: value} for name, families in MODEL_FLAGS.items() for value in families),
        dict(position_embedding_type="learned_absolute", normalization="LayerNorm", swiglu=False, add_bias_linear=True),
    ],
}
ROWS = [(rule, changes) for rule, rows in REFUSED.items() for changes in rows]
