#!/usr/bin/env bash
# The main job: pretrain a small Qwen2-shaped model on arithmetic, then improve it by GRPO with the very
# same launch script, then the report. Two ranks on CPU, no accelerator.
#
#   bash examples/quickstart.sh [--smoke] [--seed N] [FLAGS OF THE RL JOB]
#
# --smoke: the same steps, fewer of each, no claim about accuracy. Leaves runs/quickstart*/summary.json.
# With adapters only: bash examples/quickstart.sh --rl-lora-rank 8 --rl-lora-alpha 16 --lr 1e-3
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seed=0
smoke=no
while [ $# -gt 0 ]; do
    case "$1" in
        --smoke) smoke=yes; shift ;;
        --seed)
            seed=${2:?"--seed needs a number"}
            shift 2
            ;;
        --*) break ;;
        *) echo "quickstart: unknown argument $1 (known: --smoke, --seed N, then flags of the RL job)" >&2; exit 2 ;;
    esac
done

run=runs/quickstart
if [ "$smoke" = yes ]; then run=$run-smoke; fi
if [ "$seed" != 0 ]; then run=$run-seed$seed; fi

# Two runs in one directory would mix their checkpoints: the second would resume from the first.
mkdir -p runs
exec 9>"$run.lock"
flock --nonblock 9 || { echo "quickstart: another one is running in $run; wait for it, or take another --seed" >&2; exit 1; }

bash setup.sh
python=.venv/bin/python
rm -rf "$run"
mkdir -p "$run"
unset PYTHONDONTWRITEBYTECODE  # else each process compiles all that it imports
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore
export DATA=$run/data
free_port='import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])'
export MASTER_PORT=${MASTER_PORT:-$($python -c "$free_port")}
begin=$SECONDS

echo "== 1/4 data"
$python examples/arithmetic/prepare.py --out "$DATA" --seed "$seed"

PRETRAIN_ARGS=(--seed $((1234 + seed)))
RL_ARGS=(
    --load "$run/pretrained"
    --rl-algorithm grpo
    --rl-prompt-data "$DATA/prompts.jsonl"
    --rl-reward exact
    --rl-rollout-prompts 32
    --rl-samples-per-prompt 16
    --rl-max-prompt-length 16
    --rl-max-response-length 8
    --rl-kv-cache-gb 0.1
    --rl-eval-data "$DATA/heldout.jsonl"
    --rl-eval-every 20
    --rl-eval-pass-k 8
    --rl-dump-dir "$run/tuned/rollouts"
    --global-batch-size 256
    --micro-batch-size 32
    --train-iters 60
    --lr 1.5e-4
    --min-lr 0
    --lr-decay-style linear
    --lr-warmup-iters 0
    --weight-decay 0
    --log-interval 1000
    --seed $((1 + seed))
    "$@"
)
# Float32 rounding in a trained model, and far less than stale or coarser weights make: docs/quickstart-results.md.
agreement=(--difference-at-most 2e-4)
claim=(--before-at-most 0.60 --after-at-least 0.80)
if [ "$smoke" = yes ]; then
    PRETRAIN_ARGS+=(--train-iters 150)
    RL_ARGS+=(--train-iters 4 --rl-eval-every 4 --rl-eval-prompts 32 "$@")
    claim=()
fi

echo "== 2/4 pretraining (log: $run/pretrain.log)"
SAVE=$run/pretrained bash examples/launch.sh "${PRETRAIN_ARGS[@]}" 2>&1 | tee "$run/pretrain.log" |
    sed -un 's/.*\(iteration *[0-9]*\/ *[0-9]*\).*\(lm loss: [^|]*\).*/\1 | \2/p' ||
    { tail -n 60 "$run/pretrain.log" >&2; exit 1; }

echo "== 3/4 GRPO: the same launch script with RL_ARGS (log: $run/tune.log)"
SAVE=$run/tuned bash examples/launch.sh "${RL_ARGS[@]}" 2>"$run/tune.err" | tee "$run/tune.log" |
    grep --line-buffered -E "^(rl |\[rl\])" ||
    { tail -n 60 "$run/tune.err" >&2; exit 1; }

echo "== 4/4 report"
$python -m mindspeed_rl_plugin report "$run/tuned/rl" --out "$run/report.html"
$python examples/summarize.py "$run/tuned/rl" --out "$run/summary.json" --seconds $((SECONDS - begin)) \
    "${agreement[@]}" ${claim[@]+"${claim[@]}"}
if [ "$smoke" = yes ]; then
    echo "quickstart: --smoke shows that every step runs; 4 iterations on 32 prompts make no claim about accuracy"
fi
