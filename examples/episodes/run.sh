#!/usr/bin/env bash
# A task in which the model acts: data, pretraining, GRPO with the same launch script.
#
#   bash examples/episodes/run.sh calculator [SEED]   # with the tool `multiply`
#   bash examples/episodes/run.sh agent [SEED]        # the same by an agent: a program that calls the model itself
#   bash examples/episodes/run.sh control [SEED]      # the same products without the tool
#   bash examples/episodes/run.sh guess [SEED]        # the environment GuessTheNumber
#
# SEED is of the RL run; all of a task begin with one pretrained model. Further flags go to the RL run:
# FLAGS="--train-iters 4". PRETRAIN_ITERS: of pretraining, above the 20 of its warm-up. With neither of them the
# held-out accuracy before and after RL is held to the claim of docs/learning-results.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

task=${1:?"give a task: calculator, agent, control or guess"}
seed=${2:-0}
case "$task" in
    calculator)
        data=calculator iterations=20 claim=(--before-at-most 0.2 --after-at-least 0.9)
        who=(--rl-tools examples/episodes/calculator.py:multiply --rl-tool-parser hermes --rl-max-turns 3 --rl-reward exact)
        ;;
    agent)
        data=calculator iterations=20 claim=(--before-at-most 0.2 --after-at-least 0.9)
        who=(--rl-agent examples/episodes/agent.py:play --rl-tool-parser hermes --rl-max-turns 3 --rl-reward exact)
        ;;
    control)
        data=calculator iterations=20 claim=(--after-at-most 0.4)
        who=(--rl-reward exact)
        ;;
    guess)
        data=guess iterations=20 claim=(--before-at-most 0.4 --after-at-least 0.9)
        who=(--rl-environment examples/episodes/guess.py:GuessTheNumber --rl-max-turns 5)
        ;;
    *) echo "run.sh: unknown task $task (known: calculator, agent, control, guess)" >&2; exit 2 ;;
esac
bash setup.sh
base=runs/episodes/$data${PRETRAIN_ITERS:+-$PRETRAIN_ITERS}
run=runs/episodes/$task-seed$seed-tuned
unset PYTHONDONTWRITEBYTECODE  # else each process compiles all that it imports
export DATA=$base/data OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore
free_port='import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])'
export MASTER_PORT=${MASTER_PORT:-$(.venv/bin/python -c "$free_port")}
LENGTH=(--seq-length 128 --max-position-embeddings 128)

if [ ! -e "$base/pretrained/latest_checkpointed_iteration.txt" ]; then
    .venv/bin/python examples/episodes/prepare.py --task "$data" --out "$DATA"
    SAVE=$base/pretrained bash examples/launch.sh "${LENGTH[@]}" --train-iters "${PRETRAIN_ITERS:-1500}" \
        >"$base/pretrain.log" 2>&1 || { tail -n 60 "$base/pretrain.log" >&2; exit 1; }
fi
rm -rf "$run"
mkdir -p "$run"
# shellcheck disable=SC2086
SAVE=$run bash examples/launch.sh "${LENGTH[@]}" \
    --load "$base/pretrained" \
    --rl-algorithm grpo \
    --rl-prompt-data "$DATA/prompts.jsonl" \
    --rl-eval-data "$DATA/heldout.jsonl" \
    --rl-apply-chat-template \
    "${who[@]}" \
    --rl-rollout-prompts 16 \
    --rl-samples-per-prompt 16 \
    --rl-max-prompt-length 32 \
    --rl-max-response-length 90 \
    --rl-kv-cache-gb 0.1 \
    --rl-eval-every 10 \
    --rl-dump-dir "$run/rollouts" \
    --global-batch-size 256 \
    --micro-batch-size 32 \
    --train-iters "$iterations" \
    --lr 2.5e-4 \
    --min-lr 0 \
    --lr-decay-style linear \
    --lr-warmup-iters 0 \
    --weight-decay 0 \
    --log-interval 1000 \
    --seed $((1 + seed)) \
    ${FLAGS:-} 2>"$run/tune.err" | tee "$run/tune.log" | grep --line-buffered -E "^(rl |\[rl\])" ||
    { tail -n 60 "$run/tune.err" >&2; exit 1; }
if [ -n "${FLAGS:-}${PRETRAIN_ITERS:-}" ]; then claim=(); fi
.venv/bin/python examples/summarize.py "$run/rl" --out "$run/summary.json" "${claim[@]}"
