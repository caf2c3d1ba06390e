#!/usr/bin/env bash
# GRPO on Qwen3-30B-A3B with MindSpeed-LLM: two nodes of 8 NPUs, training PP2 x EP8, generation TP2.
set -euo pipefail

: "${MINDSPEED_LLM:?set it to the checkout that holds pretrain_gpt.py}"
: "${LOAD:?set it to the Megatron checkpoint of Qwen3-30B-A3B}"
: "${SAVE:?set it to a new directory for the tuned checkpoints}"
: "${HF_MODEL:?set it to the Hugging Face directory (config and tokenizer are read, no weights)}"
: "${PROMPTS:?set it to the prompts: JSONL or Parquet with the fields prompt and answer}"

export CUDA_DEVICE_MAX_CONNECTIONS=1
export HCCL_CONNECT_TIMEOUT=3600
export HCCL_EXEC_TIMEOUT=3600

DISTRIBUTED_ARGS=(
    --nproc_per_node 8
    --nnodes "${NNODES:-2}"
    --node_rank "${NODE_RANK:-0}"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "${MASTER_PORT:-6000}"
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 2
    --expert-model-parallel-size 8
    --use-distributed-optimizer
)

# The auxiliary loss is per micro-batch and no part of the RL objective: its weight is 0.
MOE_ARGS=(
    --num-experts 128
    --moe-router-topk 8
    --moe-ffn-hidden-size 768
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall_seq
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 0
    --moe-layer-freq -1
    --first-k-dense-replace -1
    --norm-topk-prob
)

GPT_ARGS=(
    --use-mcore-models
    --transformer-impl local
    --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec
    --num-layers 48
    --hidden-size 2048
    --ffn-hidden-size 6144
    --num-attention-heads 32
    --kv-channels 128
    --group-query-attention
    --num-query-groups 4
    --qk-layernorm
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --rotary-base 1000000
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --make-vocab-size-divisible-by 1
    --padded-vocab-size 151936
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --tokenizer-type PretrainedFromHF
    --tokenizer-name-or-path "$HF_MODEL"
    --bf16
    --use-flash-attn
    --use-fused-rotary-pos-emb
    --use-rotary-position-embeddings
    --use-fused-swiglu
    --use-fused-rmsnorm
    --no-masked-softmax-fusion
    --attention-softmax-in-fp32
    --no-gradient-accumulation-fusion
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)

TRAIN_ARGS=(
    --micro-batch-size 1
    --global-batch-size 512
    --train-iters 400
    --lr 1e-6
    --min-lr 1e-6
    --lr-decay-style constant
    --lr-warmup-iters 5
    --weight-decay 0.01
    --clip-grad 1.0
    --adam-beta1 0.9
    --adam-beta2 0.95
    --seed 42
)

OUTPUT_ARGS=(
    --load "$LOAD"
    --save "$SAVE"
    --save-interval 20
    --ckpt-format torch
    --log-interval 1
    --eval-interval 1000000
    --eval-iters 0
    --no-load-optim
    --no-load-rng
    --distributed-backend nccl
)

# 128 sequences of 4096 tokens take 24 GiB of KV cache a rank, beside 28 GiB of the engine's weights.
RL_ARGS=(
    --rl-algorithm grpo
    --rl-hf-model "$HF_MODEL"
    --rl-prompt-data "$PROMPTS"
    --rl-apply-chat-template
    --rl-reward math
    --rl-rollout-prompts 64
    --rl-samples-per-prompt 16
    --rl-max-prompt-length 1024
    --rl-max-response-length 3072
    --rl-generate-tp 2
    --rl-max-running 128
    --rl-kl-loss-coef 0.001
    --rl-dump-dir "$SAVE/rollouts"
)

cd "$MINDSPEED_LLM"
torchrun "${DISTRIBUTED_ARGS[@]}" -m mindspeed_rl_plugin pretrain_gpt.py \
    "${PARALLEL_ARGS[@]}" \
    "${MOE_ARGS[@]}" \
    "${GPT_ARGS[@]}" \
    "${TRAIN_ARGS[@]}" \
    "${OUTPUT_ARGS[@]}" \
    "${RL_ARGS[@]}"
