#!/usr/bin/env bash
# The tests. Default: the tier for every change. --full: the long ones too, those on upstream's checkouts included;
# --without-upstream leaves these out. --setup-only: stop after the set-up. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

full=no
upstream=yes
setup_only=no
pass=()
for argument in "$@"; do
    case "$argument" in
        --full) full=yes ;;
        --without-upstream) upstream=no ;;
        --setup-only) setup_only=yes ;;
        *) pass+=("$argument") ;;
    esac
done

bash setup.sh
.venv/bin/python tests/ascend/fetch.py
if [ "$setup_only" = yes ]; then exit 0; fi

.venv/bin/ruff check .
# MindSpeed runs on Python 3.10: the linter's py310 target refuses newer syntax.
.venv/bin/ruff check --quiet --target-version py310 --select E9,F63,F7,F82 mindspeed_rl_plugin

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
marks="not slow and not gpu"
if [ "$full" = yes ]; then marks="not gpu"; fi
if [ -z "${MEGATRON_LM_PATH:-}" ] || [ "$upstream" = no ]; then marks="$marks and not upstream"; fi

left_out=()
if [ "$full" = yes ] && [ "$upstream" = yes ]; then
    [ -n "${MEGATRON_LM_PATH:-}" ] || left_out+=("MEGATRON_LM_PATH is not set: every test on a checkout of Megatron-LM, and all below")
    [ -n "${MINDSPEED_PATH:-}" ] || left_out+=("MINDSPEED_PATH is not set: the tests under MindSpeed")
    [ -n "${MINDSPEED_LLM_PATH:-}" ] || left_out+=("MINDSPEED_LLM_PATH is not set: the rehearsals on MindSpeed-LLM")
fi
say_left_out() {
    if [ ${#left_out[@]} -eq 0 ]; then return; fi
    echo "tests/run.sh --full leaves out:"
    printf '  - %s\n' "${left_out[@]}"
    echo "set them to checkouts (README, Versions), or give --without-upstream"
}

say_left_out
status=0
.venv/bin/python -m pytest -m "$marks" --durations=15 ${pass[@]+"${pass[@]}"} || status=$?
say_left_out
if [ "$status" = 0 ] && [ ${#left_out[@]} -gt 0 ]; then status=1; fi
exit "$status"
