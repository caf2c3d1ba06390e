#!/usr/bin/env bash
# An ordinary Megatron launch script: it pretrains the small Qwen2-shaped model of the quickstart.
# There is no word of RL in it. Flags on the command line come last and win, so the quickstart
# fine-tunes with this very file, by adding its RL_ARGS:  bash examples/launch.sh "${RL_ARGS[@]}"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

DATA=${DATA:-runs/quickstart/data}
SAVE=${SAVE:-runs/quickstart/pretrained}
NPROC=${NPROC:-2}

DISTRIBUTED_ARGS=(
    --nproc-per-node "$NPROC"
    --nnodes 1
    --master-addr localhost
    --master-port "${MASTER_PORT:-29400}"
)

GPT_ARGS=(
    --transformer-impl local
    --num-layers 2
    --hidden-size 128
    --ffn-hidden-size 384
    --num-attention-heads 4
    --group-query-attention
    --num-query-groups 2
    --kv-channels 32
    --max-position-embeddings 64
    --seq-length 64
    --position-embedding-type rope
    --rotary-base 10000
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --add-qkv-bias
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --make-vocab-size-divisible-by 64
    --attention-dropout 0
    --hidden-dropout 0
    --no-rope-fusion
    --no-masked-softmax-fusion
    --no-bias-swiglu-fusion
    --no-persist-layer-norm
    --no-gradient-accumulation-fusion
)

TRAIN_ARGS=(
    --micro-batch-size 16
    --global-batch-size 32
    --train-iters 1200
    --lr 3e-3
    --min-lr 1e-4
    --lr-decay-style cosine
    --lr-warmup-iters 20
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --init-method-std 0.02
    --use-distributed-optimizer
    --seed 1234
)

DATA_ARGS=(
    --data-path "$DATA/corpus"
    --split 100,0,0
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$DATA/tokenizer"
    --num-workers 0
)

OUTPUT_ARGS=(
    --save "$SAVE"
    --save-interval 100000
    --ckpt-format torch
    --log-interval 100
    --eval-interval 100000
    --eval-iters 0
    --distributed-backend gloo
)

"${TORCHRUN:-.venv/bin/torchrun}" "${DISTRIBUTED_ARGS[@]}" -m mindspeed_rl_plugin examples/pretrain_gpt.py \
    "${GPT_ARGS[@]}" \
    "${TRAIN_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${OUTPUT_ARGS[@]}" \
    "$@"
