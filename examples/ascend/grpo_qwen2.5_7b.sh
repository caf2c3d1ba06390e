#!/usr/bin/env bash
# GRPO on Qwen2.5-7B with MindSpeed-LLM: one node of 8 NPUs, training TP4 x DP2, generation TP2.
# It is a pretraining launch script of MindSpeed-LLM with two changes: the runner before the script's
# name, and RL_ARGS. Not run here, for want of NPUs; `python -m mindspeed_rl_plugin rehearse THIS_FILE`
# takes it through the real parsers on any machine.
set -euo pipefail

: "${MINDSPEED_LLM:?set it to the checkout that holds pretrain_gpt.py}"
: "${LOAD:?set it to the Megatron checkpoint of Qwen2.5-7B}"
: "${SAVE:?set it to a new directory for the tuned checkpoints}"
: "${HF_MODEL:?set it to the Hugging Face directory (config and tokenizer are read, no weights)}"
: "${PROMPTS:?set it to the prompts: JSONL or Parquet with the fields prompt and answer}"

export CUDA_DEVICE_MAX_CONNECTIONS=1
export HCCL_CONNECT_TIMEOUT=1800

DISTRIBUTED_ARGS=(
    --nproc_per_node 8
    --nnodes "${NNODES:-1}"
    --node_rank "${NODE_RANK:-0}"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "${MASTER_PORT:-6001}"
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 4
    --pipeline-model-parallel-size 1
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
)

GPT_ARGS=(
    --use-mcore-models
    --transformer-impl local
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --num-attention-heads 28
    --group-query-attention
    --num-query-groups 4
    --seq-length 4096
    --max-position-embeddings 32768
    --position-embedding-type rope
    --rotary-base 1000000
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --add-qkv-bias
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --make-vocab-size-divisible-by 1
    --padded-vocab-size 152064
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
)

TRAIN_ARGS=(
    --micro-batch-size 1
    --global-batch-size 256
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
    --rl-kl-loss-coef 0.001
    --rl-dump-dir "$SAVE/rollouts"
)

cd "$MINDSPEED_LLM"
torchrun "${DISTRIBUTED_ARGS[@]}" -m mindspeed_rl_plugin pretrain_gpt.py \
    "${PARALLEL_ARGS[@]}" \
    "${GPT_ARGS[@]}" \
    "${TRAIN_ARGS[@]}" \
    "${OUTPUT_ARGS[@]}" \
    "${RL_ARGS[@]}"
