"""What RL does with each flag of Megatron-LM, MindSpeed and MindSpeed-LLM: the one table, walked by tests/launch.

refused       `config.upstream`: where the result would be wrong, with these values; families: `config.unbuilt`
taken over    leaves the command line (`launch.taken_over`), or is answered by RL's own means, with a line
supported     a test or script uses it, and is named
untested      nothing speaks against it, but nothing shows it: a line at the start
neutral       for the reason that stands beside it; by group of the parser where all of a group are alike
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache

from mindspeed_rl_plugin.config.upstream import UPSTREAM

# What RL does with them -> flags, which leave the command line; FLAG=VALUE: with this value only.
TAKEN_OVER = {
    "a row is one response with its prompt, which has its own positions and a causal mask": """
        --reset-attention-mask --reset-position-ids --fix-sub-seq-length --neat-pack --pack
        --attention-mask-type=general --cp-attention-mask-type=general
    """,
    "no pretraining or fine-tuning data is read, prompts are those of --rl-prompt-data": """
        --data-path --train-data-path --valid-data-path --test-data-path --data-args-path --per-split-data-args-path
        --data-cache-path --mock-data --split --eod-mask-loss --dataloader-type --num-workers --no-shared-storage
        --is-instruction-dataset --is-pairwise-dataset --handler-name --no-shuffle
        --full-shuffle-instruction-dataset --dataset-additional-keys --no-cut-token --cut-max-seqlen
        --pad-to-multiple-of --tokenizer-padding-side --padded-samples --workers --streaming --hf-datasets-params
        --datasets --json-keys --split-sentences --keep-newlines --interleave-probs --mix-strategy --dataset-dir
        --overwrite-cache --max-samples --cache-dir --map-keys --script-data-dir --append-eod --reward-tokens
        --output-prefix --dataset-impl --n-subs --merge-group-keys --phase-transition-iterations
    """,
    "prompts are rendered by the tokenizer's own template under --rl-apply-chat-template, else taken as they are": """
        --prompt-type --prompt-type-path --enable-thinking --reasoning-effort --drop-thinking
    """,
    "off: the engine and RL's own messages need groups over the CPU; checkpoints stay the same": """
        --disable-gloo-group --hccl-slice-size
    """,
    "off: its buffers are as long as --seq-length, and a micro-batch of RL is as long as its longest row": """
        --tp-comm-overlap
    """,
    "off: its schedule takes the loss out of the model's own layers; without it the update is slower": """
        --moe-fb-overlap --moe-unperm2-mem-optim-swap --overlap-moe-expert-parallel-comm --delay-wgrad-compute
        --ep-overlap-early-attn-memory-release --mla-swap-core-attn-out
    """,
}
# MindSpeed serves the second with either of the first two.
BY_EXPERTS, OVERLAPPED, NEED_ONE = "--moe-fb-overlap", "--moe-alltoall-overlap-comm", "--moe-zero-memory"
BATCH_SCHEDULES = ("--step-batch-size-schedule", "--rampup-batch-size")
IN_SAMPLES = ("--train-samples", "--lr-decay-samples", "--lr-warmup-samples", "--lr-wsd-decay-samples")
# These have lines of their own, where the start is decided.
_ANSWERED = {
    "decides where training starts, at the first start alone": "--finetune --no-load-optim --no-load-rng --load",
    "RL state, iteration and schedule resume without": "--no-save-optim --no-save-rng",
    "RL counts optimizer steps": " ".join(IN_SAMPLES),
    "each optimizer step of RL has --global-batch-size sequences": " ".join(BATCH_SCHEDULES),
}

# Where it is used -> flags. A name alone is upstream's launch script, which trained with them: docs/launch-scripts.md.
SUPPORTED = {
    "tests/loop/conftest.py": """
        --num-layers --hidden-size --ffn-hidden-size --num-attention-heads --group-query-attention
        --num-query-groups --kv-channels --max-position-embeddings --seq-length --position-embedding-type
        --normalization --swiglu --disable-bias-linear --add-qkv-bias --qk-layernorm
        --untie-embeddings-and-output-weights --micro-batch-size --global-batch-size --lr --lr-decay-style --save
        --use-distributed-optimizer --tokenizer-type --tokenizer-model --transformer-impl --ckpt-format
        --attention-backend --hidden-dropout --attention-dropout --multi-latent-attention --q-lora-rank
        --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --rotary-scaling-factor --num-experts
        --moe-ffn-hidden-size --moe-router-topk --moe-layer-freq --moe-router-enable-expert-bias
        --moe-router-bias-update-rate --moe-router-group-topk --moe-router-num-groups --moe-router-score-function
        --moe-router-topk-scaling-factor --moe-router-load-balancing-type --moe-shared-expert-intermediate-size
        --moe-token-dispatcher-type
    """,
    "tests/loop/test_grpo_loop.py": """
        --context-parallel-size --sequence-parallel --rotary-base --norm-epsilon --use-rope-scaling
    """,
    "tests/loop/test_moe_loop.py": "--expert-model-parallel-size --expert-tensor-parallel-size --mtp-num-layers",
    "tests/loop/test_megatron_options.py": """
        --num-layers-per-virtual-pipeline-stage --overlap-grad-reduce --overlap-param-gather --bf16
        --pipeline-model-parallel-size --decoder-first-pipeline-num-layers
    """,
    "tests/loop/test_resume_loop.py": "--save-interval --tensorboard-dir",
    "tests/loop/test_trackers.py": "--wandb-project --wandb-exp-name --wandb-save-dir",
    "tests/loop/test_upstream.py": """
        --context-parallel-algo --use-cp-send-recv-overlap --cp-window-size --megatron-cp-in-bnsd --ulysses-degree-in-cp
        --use-flash-attn --reuse-fp32-param --swap-optimizer --swap-optimizer-times --stage --schedules-method
    """,
    "tests/launch/test_start_processes.py": "--train-iters --tensor-model-parallel-size",
    "tests/launch/test_start_decision.py": "--ckpt-step",
    "tests/launch/test_conversion_upstream.py": """
        --enable-hf2mg-convert --enable-mg2hf-convert --model-type-hf --hf-cfg-dir --mg-save-dir
        --mg-cache-dir --only-convert-last-checkpoint
    """,
    "tests/launch/test_launch_order.py": "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
    "tests/update/test_invariance.py": "--calculate-per-token-loss",
    "pretrain_deepseek3_671b_4k_A3_ptd.sh": """
        --mla-mm-split --noop-layers --first-k-dense-replace --padded-vocab-size --vocab-size --rope-scaling-type
        --rope-scaling-factor --rope-scaling-mscale
    """,
    "pretrain_glm45_air_106b_4k_A3_ptd.sh": "--n-shared-experts --rotary-percent",
    "pretrain_llama2_13b_pack_ptd_o2.sh": "--o2-optimizer",
    "tune_qwen25_72b_16k_full_pack.sh": "--num-layer-list",
    "pretrain_ling_flash_100b_4k_ptd_A3.sh": "--moe-tp-extend-ep",
    "tests/loop/test_family_upstream.py": "--shared-expert-gate",
    "tests/loop/test_family_loop.py": "--moe-router-pre-softmax --moe-shared-expert-gate",
    "examples/ascend/grpo_qwen2.5_7b.sh": """
        --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --use-mcore-models
        --use-rotary-position-embeddings --tokenizer-name-or-path --make-vocab-size-divisible-by
    """,
    "examples/ascend/grpo_qwen3_30b_a3b.sh": """
        --spec --norm-topk-prob --moe-grouped-gemm --recompute-granularity --recompute-method --recompute-num-layers
        --moe-aux-loss-coeff
    """,
}

# Reason -> flags alike; `*` stands for anything.
NEUTRAL = {
    "the same numbers, recomputed or kept elsewhere": """
        --recompute-* --checkpoint-activations --distribute-saved-activations --moe-layer-recompute
        --enable-recompute-layers-per-pp-rank --mla-zero-memory --swap-attention
        --swap-modules --no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding
        --empty-unused-memory-level --moe-zero-memory --moe-zero-memory-num-layers --output-layer-slice-num
    """,
    "the same numbers, by another kernel, stream or group": """
        --no-*-fusion --no-persist-layer-norm --no-async-tensor-model-parallel-allreduce
        --moe-use-legacy-grouped-gemm --moe-permute-fusion --moe-router-fusion --moe-shared-expert-overlap
        --moe-permutation-async-comm --moe-alltoall-overlap-comm --moe-allgather-overlap-comm --moe-alltoall-mc2
        --gemm-gradient-accumulation-fusion --mla-fa-without-pad --mla-fa-divide-qk --mla-up-proj-tp-overlap
        --padded-base-length --use-fusion-attn-v2 --jit-compile
        --disable-jit-fuser --attention-softmax-in-fp32 --flash-attention-version --use-fused-ring-attention-update
        --kv-head-repeat-before-uly-alltoall --cp-comm-type --hierarchical-context-parallel-sizes
        --use-fused-moe-token-permute-and-unpermute --use-ascend-* --coc-* --disable-tp-comm-* --aiqos*
        --no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush
        --microbatch-group-size-per-virtual-pipeline-stage --no-scatter-gather-tensors-in-pipeline
        --use-ring-exchange-p2p --pipeline-model-parallel-comm-backend --use-tp-pp-dp-mapping
        --nccl-communicator-config-path --hccl-* --distributed-backend --distributed-timeout-* --ddp-num-buckets
        --ddp-bucket-size --ddp-pad-buckets-for-high-nccl-busbw --suggested-communication-unit-size --no-align-*-*
        --disable-align-grad-reduce --high-priority-stream-groups --create-all-gather-group --use-sharp
        --sharp-enabled-group --wgrad-deferral-limit --symmetric-ar-type
        --use-cpu-initialization --npu-deterministic --deterministic-mode
    """,
    "part of how gradients are reduced and rounded, in Megatron's own step": """
        --accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16 --ddp-average-in-collective
        --ddp-reduce-scatter-with-fp32-accumulation --no-gradient-reduce-div-fusion
        --num-distributed-optimizer-instances --disable-bf16-reduced-precision-matmul
        --no-check-for-nan-in-loss-and-grad --check-for-* --o2-gradient --optimizer
        --optimizer-selection --optimization-level
    """,
    "read with --fp16 only, which is refused": """
        --loss-scale --initial-loss-scale --min-loss-scale --loss-scale-window --hysteresis --fp16-lm-cross-entropy
    """,
    "the loss is RL's own": "--cross-entropy-loss-fusion --cross-entropy-fusion-impl --loss-chunk-size",
    "rows are padded to the longest of a micro-batch": "--no-pad-to-seq-lengths --variable-seq-lengths",
    "the layers for multi-token prediction are frozen": "--mtp-*",
    "sizes of the model, compared with the built one": """
        --init-method-std --embedding-init-method-std --decoder-last-pipeline-num-layers
        --pipeline-model-parallel-layout --pipeline-num-transformer-layers --num-virtual-stages-per-pipeline-rank
        --account-for-* --pipeline-model-parallel-split-rank --rope-type --mscale --mscale-all-dim --beta-*
        --rope-scaling-* --*yarn-* --original-max-position-embeddings
    """,
    "the router's own numbers, in fp32 or not: ties may fall otherwise in the engine": """
        --moe-router-dtype --topk-softmax-in-fp32 --router-gating-in-fp32
        --moe-z-loss-coeff --moe-device-level-aux-loss-coeff --moe-comm-aux-loss-coeff --use-global-aux-loss
        --moe-per-layer-logging
    """,
    "when Megatron saves, logs, collects garbage and ends": """
        --persistent-save-interval --save-retain-interval --exit-* --manual-gc --manual-gc-interval
        --no-manual-gc-eval --disable-manual-gc-eval --train-sync-interval
        --check-weight-hash-across-dp-replicas-interval --gpu-sniff-test-interval --tensorboard-* --log-interval
        --profile* --use-pytorch-profiler --record-memory-history --memory-snapshot-path --flight-recorder-*
        --disable-flight-recorder-* --config-logger-dir --result-rejected-tracker-filename --verify-integrity
        --disable-stream-ckpt-dequant
    """,
    "read where Megatron loads what `launch` decided": """
        --pretrained-checkpoint --exit-on-missing-checkpoint --auto-detect-ckpt-format
        --ckpt-assume-constant-structure --ckpt-fully-parallel-load --ckpt-fully-parallel-save
        --no-ckpt-fully-parallel-save --dist-ckpt-* --use-persistent-ckpt-worker --use-dist-ckpt --no-initialization
        --load-checkpoint-loosely --disable-ckpt-load-validate-sharding-integrity --use-checkpoint-args
        --use-mp-args-from-checkpoint-args --*use-tokenizer-model-from-checkpoint-args
    """,
    "another spelling, which upstream itself maps or refuses": """
        --batch-size --warmup --model-parallel-size --sample-rate --use-mc2 --use-deter-comp --recompute-activations
        --moe-extended-tp --attention-mask-type --no-position-embedding --lazy-mpu-init --local-rank
    """,
    "read only by models that are refused": """
        --encoder-* --decoder-num-layers --decoder-seq-length --relative-attention-* --bert-no-binary-head
        --onnx-safe --retriever-seq-length --mask-prob --short-seq-prob --mrope-section --window-attn-skip-freq
        --alibi-* --square-alibi-mask --fill-neg-inf --linear-* --dsa-* --disable-dsa-* --mamba-* --disable-mamba-*
        --hybrid-* --mup-* --long-* --short-* --longrope-freqs-type --low-freq-factor --high-freq-factor
        --enable-mla-absorb --use-sparse-flash-attn --use-dsa-absorb --use-fused-lightning-indexer*
        --use-fused-sparse-flash-attention
    """,
    "Megatron's own inference, which RL does not use": """
        --inference-* --flash-decode --nccl-all-reduce-for-prefill --mlp-chunks-for-prefill
    """,
    "read only with a flag that is refused": """
        --adaptive-cp-* --attention-mask-on-cpu --*balanced-moe-* --*hot-expert-* --*expert-placement*
        --print-expert-load --ttp-* --layerzero-config --fp8-* --fp4-* --no-fp8-wgrad --disable-fp8-wgrad
        --first-last-layers-bf16 --num-layers-at-*-in-bf16 --keep-fp8-* --fsdp* --megatron-fsdp-* --torch-fsdp2-*
        --data-parallel-sharding-strategy --outer-dp-sharding-strategy --enable-full-sharding-in-hsdp
        --cuda-graph-* --moe-upcycling-granularity --moe-token-drop-policy
        --moe-pad-expert-input-to-capacity --ckpt-convert-* --non-persistent-*
        --disable-symmetric-registration --tensor-parallel-num-weight-shards
        --expert-tensor-parallel-num-weight-shards --disable-strict-fsdp-* --moe-paged-stash*
        --reuse-grad-buf-for-mxfp8-param-ag --logits-*
    """,
}
# Groups whose flags are all neutral, but for those with a row above or in `config.upstream`.
_FAMILIES = "read only by models that are refused"
NEUTRAL_GROUPS = {
    "RL runs Megatron's own optimizer, its schedule and its step": (
        *("regularization", "learning rate", "learning rate and weight decay", "initialization"),
        *("RNG and initialization", "rerun engine", "muon_optimizer"),
    ),
    "no pretraining or fine-tuning data is read": ("data and dataloader", "dataset", "finetune", "sft"),
    "pretraining's evaluation is not run; RL's is --rl-eval-data": ("validation", "evaluation"),
    "names the tokenizer, or is of Megatron's own": ("tokenizer", "tokenizer_type"),
    "logs, profiles or watches": (
        *("logging", "profiling", "straggler", "workload inspector", "one logger", "ft_package", "autoresume"),
        *("config logger", "npu_datadump", "fault injector", "msc", "op_cal_tflops"),
    ),
    "Megatron's own inference, which RL does not use": ("inference",),
    "another training mode": (
        "dpo",
        "lora",
        "lulora",
        "In-process restart",
        "high_availability",
        "u_shaped_split",
        "auto_settings",
    ),
    _FAMILIES: (
        *("biencoder", "vision", "retro", "mamba", "mhc", "dsa_indexer", "DeepSeek-V4 CSA/HCA attention"),
        *("qwen3 next attention", "module_feature", "tp_2d", "experimental_attention_variant"),
    ),
    "another spelling, which upstream itself maps or refuses": (
        "deprecated_args",
        "options",
        "multi head latent attention",
    ),
}
# With values that a check refuses, beside those of `config.upstream`.
_CHECKED = {
    "launch.upstream_checks": """
        --virtual-optimizer --use-nccl-ub --hybrid-context-parallel --context-parallel-algo --seq-aux
        --pre-tockens --next-tockens --sparse-mode --apply-query-key-layer-scaling --defer-embedding-wgrad-compute
    """,
    "launch.hooks": "--yaml-cfg",
    "engine.hf_moe": "--shared-expert-gate-output-dimension",
}
# Nothing in the tests or scripts uses them under RL; FLAG=VALUE: with this value.
UNTESTED = """
    --use-multiparameter-pipeline-model-parallel --param-and-grad-buffer-pad
    --reset-bucket-group-order --swap-layer-input --compress-dense --compress-activation --compress-optimizer
    --smart-swap --ema-decay --virtual-optimizer --quant-* --tp-comm-*
    --optimizer-*offload* --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-*
    --use-precision-aware-optimizer --main-*-dtype --exp-avg-*dtype --no-use-layer-wise-param-layout
    --partial-rotary-factor --optimizer=[!a]* --optimizer=adaptive_muon
    --fp32-residual-connection --qk-clip* --moe-enable-* --moe-flex-* --moe-*deepep* --moe-*hybridep* --moe-ncclep-*
    --moe-revert-* --moe-router-padding-* --moe-router-quantile-* --moe-single-grouped-*
    --moe-pad-experts-* --use-grouped-gemm-for-* --overlap-dispatch-* --high-priority-a2a-comm-stream
    --use-fused-weighted-squared-relu --fused-residual-rmsnorm
    --use-transformer-engine-op-fuser --use-te-activation-func --use-kitchen-attention --kitchen-attention-backend
    --mlp-chunks-* --batch-invariant-mode --cache-mla-latents --cpu-offloading-* --fine-grained-* --offload-modules
    --min-offloaded-* --delay-offload-* --delta-offload-* --activation-offload-* --max-seqlen-per-dp-cp-rank
    --disable-gloo-process-groups --overlap-param-gather-with-optimizer-step --ddp-param-name-patterns-*
    --te-* --no-use-gmm-fp8 --enable-experimental --context-parallel-kv-*
    --context-parallel-cache-* --use-ulysses-allgather-kv --dualpipev-dw-detach --ai-framework --async-*
    --replication* --load-main-params-from-ckpt --override-ckpt-iteration --distrib-optim-*
    --ckpt-fully-parallel-*-* --save-*-interval --dump-param-to-*
    --hf-chat-template --hf-save-dir --save-layer-by-layer --save-lora-to-hf
"""


@cache
def rows() -> dict[str, tuple[str, str]]:
    """Flag or pattern -> verdict and reason. A flag counts before a pattern, and of patterns the first that fits."""
    tables = {"taken over": TAKEN_OVER | _ANSWERED, "supported": SUPPORTED, "refused": _CHECKED, "neutral": NEUTRAL}
    tables["untested"] = {"nothing shows it under RL": UNTESTED}
    out: dict[str, tuple[str, str]] = {}
    for kind, table in tables.items():
        for reason, flags in table.items():
            for flag in flags.split():
                out.setdefault(flag.partition("=")[0], (kind, reason))
    return out


def verdict(flags: Sequence[str], attribute: str, group: str | None) -> tuple[str, str] | None:
    """Verdict and reason of an argument of upstream's parser; None where the table has none.

    flags: how it is spelt; group: title of its group. What is supported or taken over may be refused with other values.
    """
    table, refused = rows(), next((row for row in UPSTREAM if row.name == attribute), None)
    pattern = next((p for p in (*flags, *table) if p in table and any(fnmatchcase(flag, p) for flag in flags)), None)
    if refused and (pattern is None or table[pattern][0] not in ("taken over", "supported")):
        return "refused", refused.why
    if pattern:
        return table[pattern]
    return next((("neutral", why) for why, titles in NEUTRAL_GROUPS.items() if group in titles), None)


def untested(given: Mapping[str, Sequence[str]]) -> list[str]:
    """Those of these flags, with their values, that nothing shows under RL."""
    by_value = [row for row in UNTESTED.split() if "=" in row]
    out = []
    for flag, values in given.items():
        kind, _ = verdict([flag], "", None) or ("", "")
        if kind == "untested" or any(fnmatchcase("=".join((flag, *values)), row) for row in by_value):
            out.append(flag)
    return out
