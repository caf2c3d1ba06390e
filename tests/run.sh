#!/usr/bin/env bash
# The tests. Default: the tier for every change. --quick: the linter and a choice of a minute, for each save.
# --full: the long ones too, those on upstream's checkouts included; --without-upstream leaves these out. --browser: fail
# without a browser instead of leaving its tests out.
# --setup-only: stop after the set-up. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

full=no
quick=no
upstream=yes
setup_only=no
browser=no
pass=()
for argument in "$@"; do
    case "$argument" in
        --full) full=yes ;;
        --quick) quick=yes ;;
        --without-upstream) upstream=no ;;
        --setup-only) setup_only=yes ;;
        --browser) browser=yes ;;
        *) pass+=("$argument") ;;
    esac
done

# The report is tested in a real browser, Debian's package: installed beside the set-up, by root and with apt-get only.
has_browser() { chromium --version >/dev/null 2>&1; }
install_browser() {
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium
}
installing=""
if [ "$quick" = no ] && ! has_browser && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    install_browser >/dev/null 2>&1 &
    installing=$!
fi
bash setup.sh
if [ "$quick" = no ]; then
    .venv/bin/python tests/ascend/fetch.py
    PYTHONPATH=tests/ascend .venv/bin/python tests/episodes/trl_wheel.py
fi
if [ -n "$installing" ]; then wait "$installing" || true; fi
if [ "$browser" = yes ] && ! has_browser; then
    echo "tests/run.sh --browser: there is no working chromium, and apt-get could not install it" >&2
    exit 1
fi
if [ "$setup_only" = yes ]; then exit 0; fi

# The project's own files; a user may have others beside them.
.venv/bin/ruff check mindspeed_rl_plugin tests examples benchmarks setup.py
# MindSpeed runs on Python 3.10: the linter's py310 target refuses newer syntax.
.venv/bin/ruff check --quiet --target-version py310 --select E9,F63,F7,F82 mindspeed_rl_plugin

unset PYTHONDONTWRITEBYTECODE  # else each process compiles all that it imports: half a minute of vLLM alone
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
marks="not slow and not gpu"
examples=ordinary  # of hypothesis: the same in each run; else (tests/conftest.py) others
if [ "$full" = yes ]; then
    marks="not gpu"
    examples=full
fi
if [ "$quick" = yes ]; then
    marks="quick and $marks"
    mapfile -t marked < <(grep -rl --include='test_*.py' 'mark\.quick$' tests)  # the others need not even be imported
    pass=(${marked[@]+"${marked[@]}"} ${pass[@]+"${pass[@]}"})
fi
if [ -z "${MEGATRON_LM_PATH:-}" ] || [ "$upstream" = no ]; then marks="$marks and not upstream"; fi
if ! has_browser; then
    marks="$marks and not browser"
    [ "$quick" = yes ] || echo "tests/run.sh leaves out the report in a browser: there is no chromium here (apt-get install chromium)"
fi

# Two files at once, on two cores: the tests of a file share jobs. Not the long tests, some of which have eight ranks.
if [ "$full" = no ]; then pass=(-n 2 --dist loadfile ${pass[@]+"${pass[@]}"}); fi

left_out=()
if [ "$full" = yes ] && [ "$upstream" = yes ]; then
    [ -n "${MEGATRON_LM_PATH:-}" ] || left_out+=("MEGATRON_LM_PATH is not set: every test on a checkout of Megatron-LM, and all below")
    [ -n "${MINDSPEED_PATH:-}" ] || left_out+=("MINDSPEED_PATH is not set: the tests under MindSpeed")
    [ -n "${MINDSPEED_NEXT_PATH:-}" ] || left_out+=("MINDSPEED_NEXT_PATH is not set: what is read of MindSpeed's core_r0.16.0 and core_r0.18.0")
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
.venv/bin/python -m pytest -m "$marks" "--hypothesis-profile=$examples" --durations=15 ${pass[@]+"${pass[@]}"} || status=$?
say_left_out
if [ "$status" = 0 ] && [ ${#left_out[@]} -gt 0 ]; then status=1; fi
exit "$status"
