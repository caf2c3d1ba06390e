"""What a start refuses: rule -> rows of changed arguments, and the flags and values that its message names.

A rule is a function of the package that takes Megatron's arguments and RL's config, and yields messages. Each message
stands once in refusals.txt, which test_refusals.py and test_early.py write again with GOLDEN=write.
"""

import argparse
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from mindspeed_rl_plugin.algorithms import presets
from mindspeed_rl_plugin.checks import early, episode_checks, flag_checks, schedule_checks, upstream_checks
from mindspeed_rl_plugin.checks.refusal import lines_of
from mindspeed_rl_plugin.checks.refused_flags import RUN, WHOLE, refusals
from mindspeed_rl_plugin.checks.unsupported_models import unbuilt_family
from mindspeed_rl_plugin.config import RLConfig, add_flags, limit_problems

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

PARSER = add_flags(argparse.ArgumentParser(allow_abbrev=False))
FLAGS = {
    "--rl-algorithm": ["grpo"],
    "--rl-reward": ["math"],
    "--rl-samples-per-prompt": ["4"],
    "--rl-max-prompt-length": ["32"],
    "--rl-max-response-length": ["32"],
}


def namespace(folder: Path, changes: dict) -> argparse.Namespace:
    """Arguments like Megatron's, from changed flags (`--...`, words or a text of words; None: not given) and changed
    attributes. Tokenizer and prompts are in `folder`."""
    flags = dict(FLAGS)
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


def names(line: str, expected: str) -> bool:
    """Whether a line holds all pieces of `expected`, which ` ... ` parts, in their order."""
    return re.search(".*".join(map(re.escape, expected.split(" ... "))), line) is not None


def said_by(rule: Callable, args: argparse.Namespace) -> list[str]:
    """The lines of one rule."""
    try:
        return list(rule(args, RLConfig.from_args(args)) or ())
    except ValueError as error:
        return lines_of(error)


def name_of(rule: Callable) -> str:
    rule = CALLED.get(rule, rule)
    return f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}"


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


def ranks(args: argparse.Namespace, config: RLConfig) -> Iterator[str]:
    return upstream_checks.ranks(args, config.schedule.trainers_text(args.world_size))


def multiples(args: argparse.Namespace, config: RLConfig) -> Iterator[str]:
    return upstream_checks.multiples(args)


def single_flags(args: argparse.Namespace, config: RLConfig) -> list[str]:
    """Walked whole: test_upstreams_flags_one_by_one."""
    return refusals(args, RUN, WHOLE)


def limits(args: argparse.Namespace, config: RLConfig) -> list[str]:
    """Walked whole: test_numbers_of_our_flags_have_limits."""
    return limit_problems(*vars(config).values())


def unread(args: argparse.Namespace, config: RLConfig) -> list[str]:
    """All of it: test_unread.py."""
    return presets.unread(config)


def unbuilt(args: argparse.Namespace, config: RLConfig) -> list[str]:
    return list(filter(None, [unbuilt_family(args)]))


# What refuses in those of the rules above that only call it.
CALLED = {ranks: upstream_checks.ranks, multiples: upstream_checks.multiples, single_flags: refusals}
CALLED |= {limits: limit_problems, unread: presets.unread, unbuilt: unbuilt_family}


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
TOOLS = {"--rl-tools": "a.py:f", "--rl-tool-parser": "hermes"}
FOREIGN = {"--rl-environment": "verifiers:x", "--rl-apply-chat-template": ""}
GATED = MOE | dict(add_qkv_bias=True, qk_layernorm=False, moe_shared_expert_intermediate_size=126)
YARN = dict(rope_scaling_type="yarn", rope_scaling_original_max_position_embeddings=32, rope_scaling_mscale=0.7)
NO_FACTOR = dict(rope_scaling_mscale_all_dim=0.7, rope_scaling_factor=None)
MIXTRAL = MOE | {"qk_layernorm": False, "moe_ffn_hidden_size": None, "moe_layer_freq": 1}
LITE = DEEPSEEK | dict(q_lora_rank=None, moe_router_score_function=None, moe_router_enable_expert_bias=False)
DENSE_FIRST = LISTED | {"num_layers": 8}
SPEC = "mindspeed_llm.tasks.models.spec.{}_spec layer_spec"
GPT3 = dict(position_embedding_type="learned_absolute", normalization="LayerNorm", swiglu=False, add_bias_linear=True)

# rule -> (changes, what its message names: flags and values, with `...` between)
REFUSED = {
    ranks: [
        (MOE | RANKS8 | dict(expert_model_parallel_size=8), "--pipeline-model-parallel-size 4"),
        (RANKS8 | dict(tensor_model_parallel_size=8), "--tensor-model-parallel-size 8"),
        (RANKS8 | dict(context_parallel_size=8), "--pipeline-model-parallel-size 4 ... --context-parallel-size 8 = 32"),
        (MOE | RANKS8 | dict(expert_tensor_parallel_size=4), "--pipeline-model-parallel-size 4"),
    ],
    multiples: [
        ({"num_attention_heads": 6}, "--num-attention-heads 6 ... --num-query-groups 4"),
        ({"num_attention_heads": 12, "num_query_groups": 6, "tensor_model_parallel_size": 4}, "--num-query-groups 6"),
        ({"num_attention_heads": 5, "num_query_groups": 5}, "--num-attention-heads 5"),
        (MOE | {"num_experts": 9, "expert_model_parallel_size": 2}, "--num-experts 9"),
        (DEEPSEEK | {"moe_router_num_groups": 3, "moe_router_group_topk": 1}, "--num-experts 8"),
    ],
    single_flags: [
        ({"optimizer_cuda_graph": True}, "--optimizer-cuda-graph"),
        ({"non_persistent_ckpt_type": "global"}, "--non-persistent-ckpt-type global"),
        ({"init_model_with_meta_device": True}, "--init-model-with-meta-device"),
        ({"stage": "dpo"}, "--stage dpo ... --rl-algorithm dpo"),
        ({"stage": "orm"}, "--stage orm ... --stage sft"),
        ({"loss_compute_mode": "chunk"}, "--loss-compute-mode chunk"),
        ({"shape_order": "TND"}, "--shape-order TND"),
        ({"step_batch_size_schedule": "0:16 12B:1536"}, "--step-batch-size-schedule 0:16 12B:1536"),
    ],
    flag_checks._run_length: [
        ({"train_iters": None}, "--train-iters"),
        ({"save": None}, "--save"),
        ({"save": ""}, "--save"),
    ],
    flag_checks._start: [
        ({"load": "your model ckpt path"}, "--load your"),
    ],
    flag_checks._algorithm: [
        ({"--rl-algorithm": "ppo2"}, "--rl-algorithm 'ppo2'"),
        ({"--rl-samples-per-prompt": "1"}, "--rl-samples-per-prompt 1 ... 'group-norm'"),
        (SINGLE | {"--rl-filtration": "pow"}, "--rl-filtration pow ... --rl-samples-per-prompt 1"),
        (
            {"--rl-filtration": "best-random", "--rl-samples-per-prompt": "6", "--rl-rollout-prompts": "8"},
            "--rl-filtration best-random",
        ),
        (SINGLE | {"--rl-advantage": "reinforce++", "--rl-dynamic-sampling": ""}, "--rl-samples-per-prompt 1"),
        ({"--rl-overlong-buffer": "33"}, "--rl-overlong-buffer 33 ... --rl-max-response-length 32"),
        (ASYNC | {"--rl-correction-low": "2"}, "--rl-correction-low 2.0 ... --rl-correction-high 2.0"),
        (DPO | {"--rl-dpo-loss": "ipo", "--rl-dpo-label-smoothing": "0.1"}, "--rl-dpo-label-smoothing"),
    ],
    flag_checks._critic: [
        (PPO | {"--rl-critic-load": "nowhere"}, "--rl-critic-load ... latest_checkpointed_iteration.txt"),
        (PPO | {"--rl-critic-warmup": "10"}, "--rl-critic-warmup 10 ... --train-iters 10"),
    ],
    flag_checks._batch_arithmetic: [
        (DPO | {"micro_batch_size": 1}, "--micro-batch-size 1"),
        (DPO | {"micro_batch_size": 6}, "--global-batch-size 16 ... --micro-batch-size 6 ... 2"),
        ({"--rl-samples-per-prompt": "3"}, "--global-batch-size 16 ... --rl-samples-per-prompt 3"),
        ({"--rl-rollout-prompts": "6"}, "24 ... --rl-rollout-prompts 6 ... --rl-samples-per-prompt 4"),
        ({"micro_batch_size": 3}, "--global-batch-size 16 ... --micro-batch-size 3 ... 2"),
    ],
    early.prompt_data: [
        ({"--rl-prompt-data": None}, "--rl-prompt-data"),
        ({"--rl-prompt-data": "nowhere.jsonl"}, "--rl-prompt-data nowhere.jsonl"),
        (DPO | {"--rl-prompt-data": "nowhere.jsonl"}, "--rl-prompt-data nowhere.jsonl"),
        ({"--rl-eval-data": "nowhere.jsonl"}, "--rl-eval-data nowhere.jsonl"),
    ],
    early.lengths: [
        ({"--rl-max-response-length": "33"}, "--rl-max-response-length 33 = 65 ... --seq-length 64"),
        ({"--rl-max-response-length": None}, "32 ... --rl-max-response-length 1024 ... = 1056"),
        ({"--rl-max-response-length": "64"}, "--seq-length ... --max-position-embeddings 64"),
    ],
    early.rewards: [
        ({"--rl-reward": "mathematics"}, "'mathematics'"),
        ({"--rl-reward": "nowhere.py:grade"}, "'nowhere.py'"),
        ({"--rl-reward": "regex"}, "--rl-reward-regex"),
        ({"--rl-reward": None}, "no reward"),
        ({"--rl-reward-timeout": "0"}, "--rl-reward-timeout 0"),
        ({"--rl-reward-timeout": "nan"}, "--rl-reward-timeout nan"),
        ({"--rl-reward-timeout": "5 6"}, "2 ... 5 6 ... 1"),
        ({"--rl-reward-timeout": ""}, "0 ... 1"),
        ({"--rl-reward-timeout": "1e6"}, "1e+06 ... --rl-reward-timeout ... 1620 ... 0.9 ... --rl-wait-timeout 1800"),
    ],
    flag_checks._tokenizer: [
        ({"--rl-tokenizer": None}, "--rl-tokenizer"),
        ({"--rl-tokenizer": "nowhere"}, "--rl-tokenizer nowhere"),
        ({"--rl-tokenizer": None, "tokenizer_model": "no"}, "--tokenizer-model no"),
        ({"--rl-tokenizer": None, "tokenizer_name_or_path": "no"}, "--tokenizer-name-or-path no"),
        ({"--rl-hf-model": "nowhere"}, "--rl-hf-model nowhere"),
    ],
    flag_checks._token_budget: [
        (CP2 | PADDED, "--rl-max-tokens-per-microbatch 67 ... = 65 ... 72"),
        ({"--rl-max-tokens-per-microbatch": "63"}, "--rl-max-tokens-per-microbatch 63 ... --rl-max-prompt-length 32"),
        ({"--rl-pack-sequences": ""}, "--rl-pack-sequences ... --rl-max-tokens-per-microbatch"),
        (PACKED | {"masked_softmax_fusion": True}, "--no-masked-softmax-fusion"),
        (PACKED | {"use_flash_attn": True}, "--use-flash-attn"),
        (PACKED | {"transformer_impl": "inference_optimized"}, "--transformer-impl inference_optimized"),
        (PACKED | dict(use_flash_attn=True, pre_tockens=65536, shape_order="SBH"), "MindSpeed-LLM's"),
        (PACKED | {"position_embedding_type": "mrope"}, "--rl-pack-sequences ... --position-embedding-type mrope"),
    ],
    flag_checks._model: [
        (DEEPSEEK | {"add_qkv_bias": True}, "add_qkv_bias=True ... qk_layernorm=True"),
        (MOE | {"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn ... aux_loss"),
        (MOE | {"moe_router_load_balancing_type": "sparsemixer_topk"}, "sparsemixer_topk ... aux_loss"),
        (DEEPSEEK | {"moe_router_load_balancing_type": "softmax_topk"}, "softmax_topk ... sigmoid"),
        (MOE | {"moe_router_score_function": "sigmoid"}, "bailing_moe ... shared_ffn"),
        (MOE | {"moe_router_enable_expert_bias": True}, "qwen3_moe ... --moe-router-enable-expert-bias"),
        (MOE | {"moe_router_topk_scaling_factor": 2.5}, "--moe-router-topk-scaling-factor 2.5"),
        (MOE | {"moe_router_num_groups": 4}, "--moe-router-num-groups 4"),
        (MOE | {"moe_shared_expert_gate": True}, "qwen3_moe ... --moe-shared-expert-gate"),
        ({"rotary_percent": 0.5}, "--rotary-percent 0.5 ... qwen2"),
        (DEEPSEEK | {"moe_router_score_function": "softmax"}, "deepseek_v2"),
        ({"noop_layers": {1, 9}}, "--noop-layers 1,9 ... 0 ... 1"),
        ({"noop_layers": "0,x"}, "--noop-layers 0,x ... 0 ... 1"),
        (DEEPSEEK | {"kv_lora_rank": 256}, "320 ... 576"),
        ({"pipeline_model_parallel_size": 2, "num_layers": 3}, "3 ... 2"),
        ({"schedules_method": "dualpipev"}, "--schedules-method dualpipev ... --pipeline-model-parallel-size"),
        (FOLDED | {"num_layers": 6}, "[3, 3] ... 2"),
        (FOLDED | {"num_layer_list": "3,1"}, "--schedules-method dualpipev ... --num-layer-list"),
        ({"moe_tp_extend_ep": True, "expert_tensor_parallel_size": 1}, "--moe-tp-extend-ep"),
        (ALLTOALL, "--moe-tp-extend-ep ... --moe-token-dispatcher-type alltoall"),
        ({"rmsnorm_weight_in_fp32": True}, "--rmsnorm-weight-in-fp32"),
        (DEEPSEEK | {"moe_router_num_groups": 4, "moe_router_group_topk": 2}, "--moe-router-group-topk 2"),
        (MOE | {"moe_router_topk": 9}, "--moe-router-topk 9 ... 8"),
        (MOE | {"moe_router_score_function": "sqrtsoftplus"}, "bailing_moe"),
        (MOE | {"moe_layer_freq": [0, 1, 1]}, "--moe-layer-freq ... 3 ... 2"),
        (DEEPSEEK | {"moe_layer_freq": [1, 0]}, "--moe-layer-freq ... [1] ... deepseek_v3"),
        (MOE | {"n_shared_experts": 1}, "--moe-shared-expert-intermediate-size 126 ... qwen3_moe"),
        (DEEPSEEK | {"moe_router_enable_expert_bias": False}, "deepseek_v3 ... --moe-router-enable-expert-bias"),
        (DEEPSEEK | {"partial_rotary_factor": 0.25}, "--partial-rotary-factor 0.25 ... deepseek_v3"),
        (DEEPSEEK | {"enable_mla_scale_q_lora": True}, "--enable-mla-scale-q-lora"),
        (DEEPSEEK | {"num_zero_experts": 256}, "--num-zero-experts 256"),
        (DEEPSEEK | {"n_hash_layers": 3}, "--n-hash-layers 3"),
        ({"qk_layernorm": True}, "add_qkv_bias=True ... qk_layernorm=True"),
        (LIMITED | {"moe_aux_loss_coeff": 0}, "--moe-aux-loss-coeff 0 ... group_limited_greedy"),
        (LIMITED | {"micro_batch_size": 2}, "--micro-batch-size 2 ... group_limited_greedy"),
        (LIMITED | {"moe_alltoall_overlap_comm": True}, "--moe-alltoall-overlap-comm ... group_limited_greedy"),
        (LIMITED | {"expert_model_parallel_size": 1}, "--moe-router-group-topk 1 ... --expert-model-parallel-size 1"),
        ({"position_embedding_type": "deepseek4"}, "--position-embedding-type deepseek4 ... --position-embedding-type"),
        ({"rope_scaling_type": "dynamic"}, "--rope-scaling-type dynamic ... llama3"),
        (LISTED | {"num_layer_list": "1,2"}, "--num-layer-list 1,2 ... --num-layers 2"),
        (LISTED | {"num_layer_list": "2"}, "--num-layer-list 2 ... --pipeline-model-parallel-size 2"),
        ({"--rl-generate-tp": "4", "num_attention_heads": 10, "num_query_groups": 2}, "--rl-generate-tp 4"),
        ({"max_position_embeddings": 63}, "64 ... --max-position-embeddings 63"),
        ({"--rl-generate-tp": "3"}, "--rl-generate-tp 3 ... 4"),
        (TP4 | dict(num_attention_heads=6, num_query_groups=2), "--rl-generate-tp 4 ... --num-attention-heads 6"),
        (TP4 | {"ffn_hidden_size": 514}, "--rl-generate-tp 4 ... --ffn-hidden-size 514"),
        (TP4 | dict(num_attention_heads=12, num_query_groups=6), "--rl-generate-tp 4 ... 6"),
        ({"--rl-generate-ep": "2"}, "--rl-generate-ep 2"),
        (MOE | {"--rl-generate-tp": "2", "--rl-generate-ep": "3"}, "--rl-generate-ep 3 ... --rl-generate-tp 2 ... 2"),
        (MOE | SPREAD | {"num_experts": 2}, "--rl-generate-ep 4 ... 2"),
        (MOE | {"--rl-generate-ep": "4", "num_experts": 6}, "--rl-generate-ep 4 ... 6"),
        (MOE | {"--rl-generate-ep": "8"}, "--rl-generate-ep 8 ... 4"),
        (MOE | TP4, "--rl-generate-tp 4 ... --moe-ffn-hidden-size 126"),
        ({"kv_channels": 16, "hidden_size": 128}, "16 ... --kv-channels"),
        ({"kv_channels": 16, "add_qkv_bias": False}, "16 ... --kv-channels 32"),
        ({"--rl-kv-cache-gb": "0.0001"}, "64 ... 0.000122 ... --rl-kv-cache-gb 0.0001"),
        ({"--rl-kv-cache-gb": "1e6"}, "--rl-kv-cache-gb 1e+06 ... 1"),
        (DEEPSEEK | {"moe_router_topk": 1}, "--moe-router-topk 1"),
        (DEEPSEEK | {"rotary_scaling_factor": 2.0, "mscale_all_dim": 1.0}, "--rotary-scaling-factor 2.0"),
        (DEEPSEEK | {"moe_shared_expert_intermediate_size": 200}, "--moe-shared-expert-intermediate-size 200"),
        (
            GATED | {"moe_shared_expert_gate": True, "shared_expert_gate_output_dimension": 2},
            "--shared-expert-gate-output-dimension 2",
        ),
        (YARN | {"rope_scaling_mscale_all_dim": 0.0}, "--rope-scaling-mscale 0.7 --rope-scaling-mscale-all-dim 0.0"),
        (FOLDED | {"schedules_method": "other"}, "--schedules-method other"),
        (MOE | {"shared_expert_gate": True}, "qwen3_moe ... --shared-expert-gate"),
        (GATED | {"moe_shared_expert_gate": False}, "qwen2_moe ... --moe-shared-expert-gate"),
        (MIXTRAL | {"moe_layer_freq": [1, 0]}, "--moe-layer-freq ... [1] ... mixtral"),
        (MIXTRAL | {"moe_router_pre_softmax": True}, "mixtral"),
        (LITE | {"moe_router_pre_softmax": False}, "deepseek_v2"),
        (DEEPSEEK | {"moe_router_load_balancing_type": "pai_megatron_aux_loss"}, "--moe-router-score-function"),
        (DEEPSEEK | {"num_experts": None}, "multi-latent attention"),
        (
            YARN | {"rope_scaling_original_max_position_embeddings": None},
            "--rope-scaling-original-max-position-embeddings",
        ),
        (DEEPSEEK | YARN | NO_FACTOR, "--rope-scaling-factor"),
        (LISTED | {"num_layer_list": "1,x"}, "--num-layer-list 1,x"),
        (LISTED | {"num_layer_list": "1,1", "virtual_pipeline_model_parallel_size": 2}, "--num-layer-list 1,1"),
        (DENSE_FIRST | {"num_layer_list": "1,7", "first_k_dense_replace": 3}, "--num-layer-list 1,7 ... 1 ... 4"),
        (
            DENSE_FIRST | {"num_layer_list": "3,5", "first_k_dense_replace": 1, "moe_layer_freq": 2},
            "--num-layer-list 3,5",
        ),
        (FOLDED | {"decoder_first_pipeline_num_layers": 1}, "--decoder-first-pipeline-num-layers"),
        (FOLDED | {"virtual_pipeline_model_parallel_size": 2}, "--num-layers-per-virtual-pipeline-stage"),
    ],
    upstream_checks.context_parallel: [
        (CP2 | dict(seq_length=68, sequence_parallel=True), "--seq-length 68 ... 8 ... --context-parallel-size 2"),
        (CP2 | {"seq_length": 66}, "--seq-length 66 ... 4"),
        (CP2 | PACKED, "--rl-pack-sequences ... --context-parallel-size 2 ... ulysses_cp_algo"),
        (MINDSPEED | PACKED | LOCAL, "--rl-pack-sequences ... --context-parallel-size 2 ... ulysses_cp_algo"),
        (ULYSSES | PACKED, "--rl-pack-sequences ... --context-parallel-size 2 ... --transformer-impl local"),
        (MINDSPEED | dict(context_parallel_algo="adaptive_cp_algo"), "--context-parallel-algo adaptive_cp_algo"),
        (
            MINDSPEED | dict(context_parallel_algo="hybrid_adaptive_cp_algo"),
            "--context-parallel-algo hybrid_adaptive_cp_algo",
        ),
        (MINDSPEED | dict(context_parallel_algo="kvallgather_cp_algo"), "--context-parallel-algo kvallgather_cp_algo"),
        (MINDSPEED | {"attention_mask_type": "general"}, "--attention-mask-type general ... --context-parallel-size 2"),
        (DEEPSEEK | ULYSSES, "--context-parallel-algo ulysses_cp_algo ... --multi-latent-attention"),
        (CP2 | {"hybrid_context_parallel": True}, "--hybrid-context-parallel"),
        ({"context_parallel_size": 2}, "--context-parallel-size 2 ... --transformer-impl transformer_engine"),
    ],
    upstream_checks.gradients: [
        (dict(recompute_in_bubble=True, calculate_per_token_loss=True), "--recompute-in-bubble"),
        (
            dict(mtp_num_layers=1, pipeline_model_parallel_size=2, untie_embeddings_and_output_weights=False),
            "--mtp-num-layers 1",
        ),
        ({"defer_embedding_wgrad_compute": True}, "--defer-embedding-wgrad-compute ... --rl-logprob-chunk-tokens 0"),
    ],
    upstream_checks.shared_memory: [
        ({"reuse_fp32_param": True, "ckpt_format": "torch_dist"}, "--ckpt-format torch_dist ... --reuse-fp32-param"),
    ],
    upstream_checks.swapped_memory: [
        ({"virtual_optimizer": "all"}, "--virtual-optimizer ... --rl-swap params"),
        ({"use_nccl_ub": True}, "--use-nccl-ub ... --rl-swap none"),
        ({"--rl-swap": "none params"}, "--rl-swap none"),
    ],
    upstream_checks.sequence_balance: [
        (
            MOE | {"seq_aux": True, "moe_aux_loss_coeff": 1e-4, "--rl-max-tokens-per-microbatch": "64"},
            "--rl-max-tokens-per-microbatch 64",
        ),
    ],
    upstream_checks.latent_attention: [
        (
            DEEPSEEK | {"q_lora_rank": None, "spec": ["mindspeed_llm"], "tensor_model_parallel_size": 2},
            "--tensor-model-parallel-size 2",
        ),
    ],
    upstream_checks.folded_pipeline: [
        (FOLDED | {"--rl-max-tokens-per-microbatch": "64"}, "--rl-max-tokens-per-microbatch 64 ... --schedules-method"),
        (FOLDED | {"ckpt_format": "torch_dist"}, "--ckpt-format torch_dist ... --schedules-method"),
    ],
    upstream_checks.flash_attention: [
        (FLASH | {"apply_query_key_layer_scaling": True}, "--apply-query-key-layer-scaling ... --use-flash-attn"),
        (DEEPSEEK | FLASH | {"pre_tockens": 32}, "--pre-tockens 32 ... --seq-length 64"),
        (DEEPSEEK | FLASH | {"sparse_mode": 2}, "--sparse-mode 2"),
        (DEEPSEEK | FLASH | DPO | {"sparse_mode": 2}, "--sparse-mode 2"),
        (DEEPSEEK | FLASH | {"next_tockens": -1}, "--next-tockens -1"),
    ],
    schedule_checks.problems: [
        (
            {"--rl-filtration": "pow", "--rl-filtration-whole-batch": "", "--rl-schedule": "streamed"},
            "--rl-schedule streamed",
        ),
        ({"--rl-schedule": "async", "--rl-correction": "mask"}, "--rl-schedule async ... --rl-generators N"),
        (ASYNC | {"--rl-correction": None}, "--rl-max-staleness 1 ... --rl-correction truncate"),
        (ASYNC | {"--rl-correction": None, "--rl-max-staleness": "2"}, "--rl-max-staleness 2 ... --rl-correction"),
        (ASYNC | {"--rl-generators": "2"}, "--rl-generators 2 ... mindspeed_rl_plugin ... mindspeed_rl_plugin.adaptor"),
        (ASYNC | {"--rl-async-order": "strict"}, "--rl-async-order strict ... --rl-generators N"),
        (ASYNC | {"--rl-reward-model-device": "accelerator"}, "--rl-reward-model-device accelerator"),
        (ASYNC | {"--rl-filtration": "pow", "--rl-filtration-whole-batch": ""}, "async"),
        (ASYNC | {"--rl-stop": "x", "--rl-inflight": "recompute"}, "--rl-stop ... --rl-inflight"),
        (CARRY | {"--rl-stop": "x"}, "--rl-stop ... --rl-carry-unfinished ... --rl-stop-token-ids"),
        ({"--rl-max-staleness": "2"}, "--rl-max-staleness ... --rl-schedule async"),
        ({"--rl-schedule": "streamed", "--rl-inflight": "drain"}, "--rl-inflight ... --rl-schedule async"),
        ({"--rl-generators": "1"}, "--rl-generators ... --rl-schedule async"),
        (CARRY | {"--rl-correction": None}, "--rl-carry-unfinished ... --rl-correction truncate"),
        (CARRY | {"--rl-schedule": None}, "--rl-carry-unfinished ... --rl-schedule sync ... streamed"),
        (ASYNC | {"--rl-carry-unfinished": ""}, "--rl-carry-unfinished ... --rl-schedule async"),
        (CARRY | {"--rl-oversample-drop": ""}, "--rl-carry-unfinished ... --rl-oversample-drop"),
        (CARRY | {"--rl-max-staleness": "0"}, "--rl-max-staleness 0 ... --rl-carry-unfinished ... 1"),
        (CARRY | {"--rl-oversample": "2.5"}, "--rl-oversample 2.5 ... 1 ... --rl-max-staleness 1"),
        (CARRY | {"--rl-oversample": "1"}, "--rl-oversample 1 ... 1.25"),
        (CARRY | {"--rl-filtration": "pow", "--rl-filtration-whole-batch": ""}, "streamed"),
        ({"--rl-schedule": "streamed", "--rl-oversample": "2"}, "--rl-oversample 2 ... --rl-carry-unfinished"),
        (DROP | {"--rl-max-staleness": "2"}, "--rl-max-staleness ... --rl-schedule async ... --rl-carry-unfinished"),
        (DROP | {"--rl-reward-model-device": "accelerator"}, "--rl-reward-model-device accelerator"),
    ],
    episode_checks.problems: [
        ({"--rl-max-turns": "3"}, "--rl-max-turns ... --rl-tools ... --rl-environment"),
        ({"--rl-reward": "environment"}, "--rl-reward environment"),
        (TOOLS | {"--rl-max-turns": "1"}, "--rl-max-turns 1 ... --rl-tools"),
        (TOOLS | {"--rl-environment-python": "python3"}, "--rl-environment-python python3"),
        (TOOLS | {"--rl-ignore-eos": ""}, "--rl-ignore-eos"),
        (TOOLS | {"--rl-environment-timeout": "1e6"}, "--rl-environment-timeout 1e+06"),
        (TOOLS | {"--rl-max-turn-length": "99"}, "--rl-max-turn-length 99 ... --rl-max-response-length 32"),
        (TOOLS | {"--rl-max-observation-length": "40"}, "--rl-max-observation-length 40"),
        (TOOLS | {"--rl-observation": "chat"}, "--rl-observation chat"),
        (TOOLS | {"--rl-observation": "raw", "--rl-apply-chat-template": ""}, "--rl-observation raw"),
        (TOOLS | {"--rl-tool-parser": None}, "--rl-tool-parser auto"),
        (FOREIGN | {"--rl-tools": "a.py:f"}, "--rl-tools ... --rl-environment verifiers:x"),
        (FOREIGN | {"--rl-tool-parser": "hermes"}, "--rl-tool-parser hermes ... --rl-environment verifiers:x"),
        (FOREIGN | {"--rl-max-observation-length": "9"}, "--rl-max-observation-length 9"),
        (FOREIGN | {"--rl-apply-chat-template": None}, "--rl-environment verifiers:x"),
    ],
    limits: [
        ({"--rl-swap": "params gradients"}, "--rl-swap gradients"),
        ({"--rl-swap": "params,gradients"}, "--rl-swap gradients"),
    ],
    unread: [
        (DPO | {"--rl-schedule": "streamed"}, "--rl-schedule streamed"),
        (DPO | {"--rl-oversample-drop": ""}, "--rl-oversample-drop ... dpo"),
        ({"--rl-critic-warmup": "3"}, "--rl-critic-warmup 3 ... grpo ... --rl-advantage gae"),
        (DPO | {"--rl-max-tokens-per-microbatch": "64"}, "--rl-max-tokens-per-microbatch 64 ... dpo"),
        (DPO | {"--rl-reward": "exact"}, "--rl-reward exact ... dpo"),
    ],
    unbuilt: [
        (
            {"spec": SPEC.format("gemma2").split(), "swiglu": False, "post_norm": True},
            "gemma2_spec layer_spec: Gemma 2",
        ),
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
    ],
}
ROWS = [(rule, changes, named) for rule, rows in REFUSED.items() for changes, named in rows]
