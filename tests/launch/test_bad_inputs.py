"""Bad inputs, as a table: each row is refused, and its message says what, why and how to fix it."""

import argparse
import re
import types

import pytest

from mindspeed_rl_plugin.algorithms.advantages import ADVANTAGES
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.launch import checks
from mindspeed_rl_plugin.launch.refused import REFUSED
from mindspeed_rl_plugin.loop.context import Inputs

# A model with experts instead.
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
SPREAD = {"--rl-generate-tp": ["4"], "--rl-generate-ep": ["4"]}

PACKED = {"--rl-max-tokens-per-microbatch": ["64"], "--rl-pack-sequences": []}
CP2 = {"context_parallel_size": 2, "data_parallel_size": 1, "transformer_impl": "transformer_engine"}
DPO = {"--rl-algorithm": ["dpo"], "--rl-reward": None, "--rl-samples-per-prompt": None}


def test_the_base_is_good(build):
    checks.check_args(build({}))


@pytest.mark.parametrize(
    "flags",
    [
        *({"--rl-algorithm": [name]} for name in ("grpo", "dr-grpo", "rloo", "reinforce++", "gspo", "cispo")),
        {"--rl-algorithm": ["dapo"]},
        PACKED,
        {**DPO, "--rl-dpo-loss": ["ipo"], "--rl-rejected-key": ["worse"], "kv_channels": 16},
        {"--rl-filtration": ["best-worst"]},
        {
            "--rl-algorithm": ["reinforce++"],
            "--rl-filtration": ["pow"],
            "--rl-filtration-whole-batch": [],
            "--rl-samples-per-prompt": ["1"],
        },
        {"--rl-algorithm": ["ppo"], "--rl-advantage": ["reinforce++"]},
        {"--rl-algorithm": ["ppo"], "--rl-critic-lr": ["1e-5"], "--rl-critic-warmup": ["2"]},
        {"--rl-loss": ["sapo"], "--rl-correction": ["truncate"]},
        MOE | {"expert_model_parallel_size": 2},
        MOE | SPREAD,
        CP2 | {"--rl-max-tokens-per-microbatch": ["64"]},
        DEEPSEEK | SPREAD,
        DEEPSEEK | {"mtp_num_layers": 1, "pipeline_model_parallel_size": 2},
    ],
    ids=str,
)
def test_what_the_loop_can_run_is_good(build, flags):
    checks.check_args(build(flags))


# changes -> part of the message
BAD = [
    # Megatron's and MindSpeed's own arguments
    ({"hidden_dropout": 0.1}, "--hidden-dropout 0.1: dropout makes old and new log-probs differ"),
    ({"attention_dropout": 0.1}, "pass --attention-dropout 0"),
    ({"async_log_allreduce": True}, "--async-log-allreduce: MindSpeed then replaces train_step"),
    ({"reuse_fp32_param": True}, "--reuse-fp32-param: weights and fp32 copies then share memory"),
    ({"iterations_to_skip": [3, 4]}, "--iterations-to-skip 3 4: a skipped iteration would throw rollouts away"),
    ({"inprocess_restart": True}, "let torchrun restart the job"),
    ({"perform_rl_step": True}, "--perform-rl-step: this is Megatron's own RL"),
    ({"grpo_group_size": 16}, "--grpo-group-size 16: an argument of Megatron's own RL, which --rl-algorithm replaces"),
    ({"skip_train": True}, "remove --skip-train"),
    ({"sft": True}, "--sft: this is another training mode"),
    ({"stage": "dpo"}, "--stage dpo: this is another training mode"),
    ({"train_samples": 1000}, "--train-samples 1000: RL counts optimizer steps; give --train-iters"),
    ({"rampup_batch_size": ["16", "8", "100"]}, "--rampup-batch-size 16 8 100: --global-batch-size must stay"),
    ({"reset_attention_mask": True}, "--reset-attention-mask: one RL sequence is one document"),
    ({"context_parallel_size": 2}, "--context-parallel-size 2: Megatron's own attention does not know it; give"),
    (
        {**CP2, "sequence_parallel": True, "seq_length": 72, "--rl-max-tokens-per-microbatch": ["67"]}
        | {"--rl-max-response-length": ["33"]},
        "= 65 tokens, padded to 72; raise it",
    ),
    ({"num_experts": 8}, "no model family has add_qkv_bias=True with qk_layernorm=False, experts"),
    ({"--rl-generate-ep": ["2"]}, "--rl-generate-ep 2: the model has no experts to spread"),
    ({**MOE, "--rl-generate-ep": ["0"]}, "--rl-generate-ep 0: give at least 1"),
    ({**MOE, "--rl-generate-ep": ["2"]}, "--rl-generate-ep 2 with --rl-generate-tp 1: whole experts are spread"),
    ({**MOE, "num_experts": 2, **SPREAD}, "--rl-generate-ep 4: there are 2 experts only"),
    ({**MOE, "--rl-generate-tp": ["4"]}, "--rl-generate-tp 4 does not divide --moe-ffn-hidden-size 126"),
    ({**MOE, "moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor is 1.0: the engine drops no tokens"),
    ({**MOE, "moe_input_jitter_eps": 0.1}, "moe_input_jitter_eps is 0.1: the engine routes without noise"),
    ({**MOE, "moe_router_force_load_balancing": True}, "routing is random with it"),
    ({**MOE, "moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type is 'sinkhorn': the engine"),
    ({**MOE, "moe_router_score_function": "sigmoid"}, "moe_router_score_function is 'sigmoid': family qwen3_moe has"),
    ({**MOE, "moe_router_enable_expert_bias": True}, "family qwen3_moe has no bias of the router; drop --moe-router"),
    ({**MOE, "moe_router_topk_scaling_factor": 2.5}, "moe_router_topk_scaling_factor is 2.5: family qwen3_moe does"),
    ({**MOE, "moe_router_num_groups": 4}, "moe_router_num_groups is 4: family qwen3_moe has no groups of experts"),
    ({"use_torch_fsdp2": True}, "use_torch_fsdp2 is True: parameters must be whole on each rank"),
    ({"use_custom_fsdp": True}, "use --use-distributed-optimizer instead"),
    ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local: a captured graph keeps addresses"),
    ({"fp16": True}, "--fp16: too coarse for a ratio near 1"),
    ({"fp8": "hybrid"}, "--fp8-format hybrid: trainer and engine would round differently"),
    ({"use_legacy_models": True}, "only Megatron core models are supported"),
    ({"multi_latent_attention": True, "q_lora_rank": None}, "--q-lora-rank is not given"),
    (DEEPSEEK | {"moe_router_score_function": "softmax"}, "family deepseek_v3 has sigmoid"),
    (DEEPSEEK | {"kv_lora_rank": 256}, "keeps 320 numbers of a token: vLLM on CPU needs 576"),
    ({"hybrid_override_pattern": "M-M*"}, "--hybrid-override-pattern M-M*: hybrid models are not supported"),
    ({"vision_pretraining": True}, "vision and multimodal models are not supported; only GPT decoders"),
    ({"retro_add_retriever": True}, "retrieval models are not supported"),
    ({"lora_target_modules": ["linear_qkv"]}, "--lora-target-modules linear_qkv: LoRA is not supported yet"),
    ({"virtual_optimizer": "all"}, "--virtual-optimizer keeps the moments in host memory of its own; give --rl-swap"),
    ({**DPO, "use_torch_fsdp2": True}, "use_torch_fsdp2 is True: parameters must be whole on each rank"),
    ({**DPO, "tp_2d": True}, "tp_2d is True: 2-D tensor parallelism is not supported"),
    ({"optimize_send_recv_comm": True}, "keeps the first pass's number of micro-batches for all; remove it"),
    (
        {"recompute_in_bubble": True, "calculate_per_token_loss": True},
        "--recompute-in-bubble with --calculate-per-token-loss scales gradients wrongly; remove one",
    ),
    ({"no_save_optim": True}, "--no-save-optim: a run could not be resumed"),
    ({"non_persistent_save_interval": 5}, "RL state is kept in persistent checkpoints only"),
    ({"train_iters": None}, "--train-iters is missing"),
    ({"save": None}, "--save is missing"),
    # the model
    ({"normalization": "LayerNorm"}, "give --normalization RMSNorm"),
    ({"swiglu": False}, "give --swiglu"),
    ({"position_embedding_type": "learned_absolute"}, "give --position-embedding-type rope"),
    ({"add_bias_linear": True}, "give --disable-bias-linear"),
    # data and tokenizer
    ({"--rl-prompt-data": None}, "--rl-prompt-data is missing: give JSONL"),
    ({"--rl-prompt-data": ["nowhere.jsonl"]}, "--rl-prompt-data nowhere.jsonl: no such file or directory"),
    ({"--rl-eval-data": ["nowhere.jsonl"]}, "--rl-eval-data nowhere.jsonl: no such file or directory"),
    ({"--rl-tokenizer": None}, "no tokenizer: give a Hugging Face tokenizer directory with --rl-tokenizer"),
    ({"--rl-tokenizer": ["nowhere"]}, "the tokenizer nowhere is not a directory"),
    ({"--rl-hf-model": ["nowhere"]}, "--rl-hf-model nowhere: no config.json there"),
    # names
    ({"--rl-algorithm": ["ppo2"]}, "--rl-algorithm 'ppo2' is unknown; known: ppo, grpo"),
    ({"--rl-advantage": ["best"]}, "--rl-advantage 'best' is unknown; known: group-norm"),
    ({"--rl-loss": ["square"]}, "--rl-loss 'square' is unknown; known: clip"),
    ({"--rl-aggregation": ["mean"]}, "--rl-aggregation 'mean' is unknown; known: "),
    ({"--rl-reward": ["mathematics"]}, "reward 'mathematics' is unknown; known: "),
    ({"--rl-reward": ["nowhere.py:grade"]}, "there is no file 'nowhere.py'"),
    ({"--rl-reward": ["regex"]}, "reward 'regex' needs a pattern: --rl-reward-regex"),
    ({"--rl-reward": None}, "no reward: give one or several of "),
    ({"--rl-swap": ["params", "gradients"]}, "--rl-swap gradients is unknown; known: params, grads, optimizer, none"),
    ({"--rl-swap": ["params,gradients"]}, "--rl-swap gradients is unknown; known: params, grads, optimizer, none"),
    ({"--rl-swap": ["none", "params"]}, "--rl-swap none params: 'none' stands alone"),
    # numbers
    ({"--rl-temperature": ["0"]}, "--rl-temperature is 0.0; give a number at least 0.01"),
    ({"--rl-temperature": ["0.005"]}, "--rl-temperature is 0.005; give a number at least 0.01"),
    ({"--rl-temperature": ["nan"]}, "--rl-temperature is nan; give a number at least 0.01"),
    ({"--rl-top-p": ["0"]}, "--rl-top-p is 0.0; give a number above 0 and at most 1"),
    ({"--rl-top-p": ["1.5"]}, "--rl-top-p is 1.5; give a number above 0 and at most 1"),
    ({"--rl-top-k": ["-1"]}, "--rl-top-k is -1; give a number at least 0"),
    ({"--rl-samples-per-prompt": ["0"]}, "--rl-samples-per-prompt is 0; give a number at least 1"),
    ({"--rl-samples-per-prompt": ["1"]}, "--rl-samples-per-prompt 1: the advantage 'group-norm' compares"),
    (
        {"--rl-samples-per-prompt": ["1"], "--rl-algorithm": ["rloo"]},
        "--rl-samples-per-prompt 1: the advantage 'rloo' compares the responses of one prompt",
    ),
    (
        {"--rl-algorithm": ["ppo"], "--rl-critic-load": ["nowhere"]},
        "nowhere holds no checkpoint (latest_checkpointed_iteration.txt is missing); give the directory",
    ),
    (
        {"--rl-algorithm": ["ppo"], "--rl-critic-warmup": ["10"]},
        "--rl-critic-warmup 10 leaves no iteration of --train-iters 10 to train the policy; lower it",
    ),
    ({"--rl-critic-warmup": ["3"]}, "--rl-critic-warmup 3 has no meaning for the advantage 'group-norm'"),
    ({"--rl-filtration-whole-batch": []}, "only a --rl-filtration other than none reads it"),
    (
        {"--rl-filtration": ["pow"], "--rl-samples-per-prompt": ["1"]},
        "--rl-filtration pow: with --rl-samples-per-prompt 1 there is nothing to choose from",
    ),
    (
        {"--rl-filtration": ["best-random"], "--rl-samples-per-prompt": ["6"], "--rl-rollout-prompts": ["8"]},
        "resamples whole groups, and --global-batch-size 16 cuts groups of --rl-samples-per-prompt 6",
    ),
    ({"--rl-dynamic-sampling-rounds": ["0"]}, "--rl-dynamic-sampling-rounds is 0; give a number at least 1"),
    (
        {"--rl-samples-per-prompt": ["1"], "--rl-advantage": ["reinforce++"], "--rl-dynamic-sampling": []},
        "--rl-samples-per-prompt 1: dynamic sampling keeps prompts whose responses earn different rewards",
    ),
    (
        {"--rl-max-tokens-per-microbatch": ["63"]},
        "--rl-max-tokens-per-microbatch 63 is less than one row may have, --rl-max-prompt-length 32 + "
        "--rl-max-response-length 32 = 64 tokens; raise it",
    ),
    ({"--rl-pack-sequences": []}, "packs up to a number of tokens; give it with --rl-max-tokens-per-microbatch"),
    (
        {**PACKED, "masked_softmax_fusion": True},
        "attention that takes a mask of its own, or boundaries: give --no-masked-soft",
    ),
    ({**PACKED, "use_flash_attn": True}, "that takes a mask of its own, or boundaries: give no --use-flash-attn"),
    ({**PACKED, "transformer_impl": "inference_optimized"}, "not tried with --transformer-impl inference_optimized"),
    (
        {**PACKED, "use_flash_attn": True, "pre_tockens": 65536, "shape_order": "SBH"},
        "MindSpeed-LLM's flash attention takes boundaries from its own dataset only; give no --use-flash-attn",
    ),
    ({**PACKED, "position_embedding_type": "mrope"}, "does not know --position-embedding-type mrope"),
    ({**DPO, "--rl-max-tokens-per-microbatch": ["64"]}, "64 has no meaning for --rl-algorithm dpo"),
    ({**DPO, "micro_batch_size": 1}, "--micro-batch-size 1 cuts a pair: it counts sequences"),
    ({**DPO, "micro_batch_size": 6}, "--global-batch-size 16 is not a multiple of --micro-batch-size 6 x 2"),
    ({**DPO, "--rl-reward": ["exact"]}, "--rl-reward exact has no meaning for --rl-algorithm dpo here: only an alg"),
    ({**DPO, "--rl-top-k": ["5"]}, "--rl-top-k 5 has no meaning for --rl-algorithm dpo"),
    ({**DPO, "--rl-loss": ["clip"]}, "--rl-loss clip has no meaning for --rl-algorithm dpo"),
    ({**DPO, "--rl-clip-low": ["0.1"]}, "--rl-clip-low 0.1 has no meaning for --rl-algorithm dpo, which learns from"),
    ({"--rl-correction-high": ["5"]}, "5.0 has no meaning for --rl-algorithm grpo here: only a --rl-correction other"),
    ({**DPO, "--rl-prompt-data": ["no-such-file.jsonl"]}, "--rl-prompt-data no-such-file.jsonl: no such file"),
    ({"--rl-dpo-beta": ["0.2"]}, "--rl-dpo-beta 0.2 has no meaning for --rl-algorithm grpo here: only --rl-algor"),
    ({"--rl-rejected-key": ["bad"]}, "--rl-rejected-key bad has no meaning for --rl-algorithm grpo"),
    (
        {"--rl-overlong-buffer": ["33"]},
        "--rl-overlong-buffer 33 is longer than --rl-max-response-length 32; shorten it",
    ),
    ({"--rl-loss": ["sapo"], "--rl-clip-low": ["0.1"]}, "--rl-clip-low 0.1 has no meaning for the loss 'sapo'"),
    ({"--rl-clip-low": ["-0.1"]}, "--rl-clip-low is -0.1; give a finite number >= 0"),
    ({"--rl-ppo-epochs": ["0"]}, "--rl-ppo-epochs is 0; give at least 1"),
    ({"--rl-reward-timeout": ["0"]}, "--rl-reward-timeout 0: give numbers above 0"),
    ({"--rl-reward-timeout": ["nan"]}, "--rl-reward-timeout nan: give numbers above 0"),
    ({"--rl-reward-timeout": ["5", "6"]}, "2 time limits (5 6) for 1 rewards; give one for all, or one for each"),
    ({"--rl-reward-timeout": []}, "0 time limits (none) for 1 rewards; give one for all"),
    ({"--rl-wait-timeout": ["-1"]}, "--rl-wait-timeout is -1.0; give a number above 0"),
    ({"--rl-eval-every": ["0"]}, "--rl-eval-every is 0; give a number at least 1"),
    # what must fit together
    (
        {"--rl-max-response-length": ["33"]},
        "--rl-max-prompt-length 32 + --rl-max-response-length 33 = 65 tokens, more than --seq-length 64",
    ),
    ({"max_position_embeddings": 63}, "64 tokens together, more than --max-position-embeddings 63; lower"),
    ({"--rl-generate-tp": ["3"]}, "--rl-generate-tp 3 does not divide the world of 4 ranks"),
    (
        {"--rl-generate-tp": ["4"], "num_attention_heads": 6, "num_query_groups": 2},
        "--rl-generate-tp 4 does not divide --num-attention-heads 6",
    ),
    ({"--rl-generate-tp": ["4"], "ffn_hidden_size": 514}, "--rl-generate-tp 4 does not divide --ffn-hidden-size 514"),
    (
        {"--rl-generate-tp": ["4"], "num_attention_heads": 12, "num_query_groups": 6},
        "--rl-generate-tp 4 neither divides nor is a multiple of the 6 query groups",
    ),
    ({"--rl-generate-tp": ["0"]}, "--rl-generate-tp 0: give at least 1"),
    # Qwen2, whose engine takes no head size, and Llama, whose engine takes one.
    ({"kv_channels": 16}, "use fewer heads and no --kv-channels: this family's head size is --hidden-size / --num"),
    ({"kv_channels": 16, "add_qkv_bias": False}, "vLLM on CPU needs at least 32; use fewer heads or --kv-channels 32"),
    (
        # 2 layers x keys and values x 4 groups x 32 x 4 bytes = 2 KiB a token: 64 tokens need 128 KiB.
        {"--rl-kv-cache-gb": ["0.0001"]},
        "64 tokens with its prompt needs 0.000122 GiB of KV cache, more than --rl-kv-cache-gb 0.0001",
    ),
    ({"pipeline_model_parallel_size": 2, "num_layers": 3}, "3 layers do not divide over 2 pipeline stages"),
    ({"schedules_method": "dualpipev"}, "schedules_method is 'dualpipev': this placement of layers is not supported"),
    (
        {"moe_tp_extend_ep": True, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        "--moe-tp-extend-ep with --expert-tensor-parallel-size 1: it spreads whole experts over all 2 tensor parallel",
    ),
    (
        {"moe_tp_extend_ep": True, "tensor_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
        | {"expert_tensor_parallel_size": 2},
        "--moe-tp-extend-ep with --moe-token-dispatcher-type alltoall: MindSpeed spreads experts over tensor parallel",
    ),
    ({"use_nccl_ub": True}, "--use-nccl-ub registers Megatron's buffers for good"),
    ({"--rl-samples-per-prompt": ["3"]}, "--global-batch-size 16 is not a multiple of --rl-samples-per-prompt 3"),
    ({"--rl-rollout-prompts": ["6"]}, "24 samples (--rl-rollout-prompts 6 x --rl-samples-per-prompt 4), not"),
    ({"micro_batch_size": 3}, "--global-batch-size 16 is not a multiple of --micro-batch-size 3 x 2"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=lambda value: str(value)[:60])
def test_refused(build, changes, message):
    with pytest.raises(ValueError) as error:
        checks.check_args(build(changes))
    assert message in str(error.value), str(error.value)


def test_every_problem_is_reported_at_once(build):
    with pytest.raises(ValueError) as error:
        checks.check_args(build({"hidden_dropout": 0.1, "save": None, "--rl-top-p": ["2"]}))
    lines = str(error.value).splitlines()
    assert lines[0] == "RL cannot run with these arguments:"
    assert len(lines) == 4


def test_flags_that_nothing_reads_are_one_list(build):
    """Whoever finds them: where the algorithm is resolved, and where a flag's reader is looked up; none twice."""
    flags = {"--rl-gamma": ["0.9"], "--rl-value-clip": ["0.3"], "--rl-critic-lr": ["1e-3"], "--rl-clip-low": ["-1"]}
    with pytest.raises(ValueError) as error:
        checks.check_args(build({**flags, "--rl-loss": ["sapo"]}))
    found = str(error.value).splitlines()[1:]
    assert sorted(line.split()[1] for line in found) == sorted(flags)
    with pytest.raises(ValueError) as error:
        checks.check_args(build({**DPO, **flags}))
    found = str(error.value).splitlines()[1:]
    assert sorted(line.split()[1] for line in found) == sorted(flags)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_single_response_is_taken_only_where_none_is_compared(build, name):
    args = build({"--rl-advantage": [name], "--rl-samples-per-prompt": ["1"]})
    if name in ("reinforce++", "gae"):
        checks.check_args(args)
        return
    with pytest.raises(ValueError, match=f"--rl-samples-per-prompt 1: the advantage '{re.escape(name)}' compares"):
        checks.check_args(args)


def test_dumps_of_another_run_are_refused_before_anything_is_built(build, tmp_path):
    (tmp_path / "rollout-000000.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match="--rl-dump-dir .* holds 1 rollouts of another run"):
        checks.check_args(build({"--rl-dump-dir": [str(tmp_path)], "save": str(tmp_path / "out")}))


def test_checks_change_nothing(build):
    args = build({})
    before = dict(vars(args))
    checks.check_args(args)
    checks.warnings(args)
    assert vars(args) == before


def test_every_refused_row_has_a_case_or_is_like_one():
    """The table and the cases do not drift apart: at least every kind of reason is exercised."""
    reasons = {row.why for row in REFUSED}
    tried = {row.why for row in REFUSED for changes, _ in BAD if row.name in changes}
    missing = {why for why in reasons - tried if not why.startswith(("dropout", "convert", "upcycle"))}
    assert missing == set()


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_harmless_values_pass(row):
    for value in (None, False, 0):
        assert row.message(types.SimpleNamespace(**{row.name: value})) is None or row.name == "cuda_graph_impl"
    assert row.message(types.SimpleNamespace()) is None


@pytest.mark.parametrize(
    ("attributes", "size", "message"),
    [
        ({"padded_vocab_size": 128}, 129, "the tokenizer has 129 tokens, the model's padded vocabulary only 128"),
        ({"padded_vocab_size": 256, "vocab_size": 200}, 201, "--vocab-size says 200: ids above it would be generated"),
        ({"padded_vocab_size": 128}, 128, None),
        ({"padded_vocab_size": 128, "vocab_size": None}, 100, None),
        ({}, 10**6, None),
    ],
)
def test_vocabulary(attributes, size, message):
    args = types.SimpleNamespace(**attributes)
    if message is None:
        checks.check_vocabulary(args, size)
        return
    with pytest.raises(ValueError, match=message):
        checks.check_vocabulary(args, size)


def test_tokenizer_falls_back(build):
    args = build({"--rl-tokenizer": None, "--rl-hf-model": ["hf"], "tokenizer_model": "tm"})
    assert checks.tokenizer_path(args) == "hf"
    args = build({"--rl-tokenizer": None, "tokenizer_model": "tm"})
    assert checks.tokenizer_path(args) == "tm"
    args = build({"--rl-tokenizer": None, "tokenizer_name_or_path": "npu"})
    assert checks.tokenizer_path(args) == "npu"


def test_warnings(build):
    lines = checks.warnings(build({"--rl-top-p": ["0.9"], "--rl-top-k": ["50"], "--rl-clip-low": ["1"]}))
    assert [line.split(":")[0] for line in lines] == ["--rl-top-p 0.9", "--rl-top-k 50", "--rl-clip-low 1.0"]
    assert checks.warnings(build({"--rl-clip-low": ["0.9"]})) == []
    assert checks.warnings(build({})) == []


def test_an_environment_that_vllm_cannot_use_is_refused_before_anything_is_read(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ValueError, match="VLLM_ENABLE_V1_MULTIPROCESSING=1 cannot be used for rollouts"):
        Inputs.read(argparse.Namespace(), RLConfig())
