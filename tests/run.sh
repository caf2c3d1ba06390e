#!/usr/bin/env bash
# The tests. Default: the tier for every change. --full: the long ones too. --setup-only: stop after the set-up.
# Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

full=no
setup_only=no
pass=()
for argument in "$@"; do
    case "$argument" in
        --full) full=yes ;;
        --setup-only) setup_only=yes ;;
        *) pass+=("$argument") ;;
    esac
done

bash setup.sh
.venv/bin/python tests/ascend/fetch.py
if [ "$setup_only" = yes ]; then exit 0; fi

.venv/bin/ruff check mindspeed_rl_plugin tests examples
# MindSpeed runs on Python 3.10: the linter's py310 target refuses newer syntax.
.venv/bin/ruff check --quiet --target-version py310 --select E9,F63,F7,F82 mindspeed_rl_plugin

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
marks="not slow and not gpu"
if [ "$full" = yes ]; then marks="not gpu"; fi
if [ -z "${MEGATRON_LM_PATH:-}" ]; then marks="$marks and not upstream"; fi
.venv/bin/python -m pytest -m "$marks" --durations=15 ${pass[@]+"${pass[@]}"}
