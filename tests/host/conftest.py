"""Snippets and pretraining in processes of their own: host mode changes torch for good."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(**extra: str) -> dict[str, str]:
    """This process's, without a launcher's traces, with the package found first."""
    env = {k: v for k, v in os.environ.items() if k not in LAUNCH_VARIABLES}
    paths = [extra.pop("PYTHONPATH", ""), str(ROOT), os.environ.get("PYTHONPATH")]
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", **extra}


@pytest.fixture
def snippet():
    """Run Python source in a new process; returns its stdout, fails on an error."""

    def run(source: str, timeout: float = 120, **env: str) -> str:
        command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(source)]
        done = subprocess.run(command, env=environment(**env), capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run


MODEL = """
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --min-lr 1e-4
    --lr-decay-style cosine --lr-decay-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 5000
    --transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --no-rope-fusion --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-iters 0
    --eval-interval 1000 --distributed-timeout-minutes 2 --num-workers 0
"""


@pytest.fixture
def pretrain(torchrun, tmp_path):
    """Run an entry script for some iterations; returns [loss, gradient norm] of each, exact."""

    def run(script: Path, *flags: object, iterations: int = 3, ranks: int = 2, **env: str) -> list[list[float]]:
        record = tmp_path / "steps.jsonl"
        record.unlink(missing_ok=True)
        arguments = [script, *MODEL.split(), "--train-iters", iterations, *flags]
        command = [HERE / "recorded_pretrain.py", record, *arguments]
        torchrun(*command, ranks=ranks, cwd=tmp_path, cold=bool(env), **env)
        return [json.loads(line) for line in record.read_text().splitlines()]

    return run


@pytest.fixture
def resumed(pretrain, tmp_path):
    """Four iterations, and the last two again from the checkpoint in the middle: bitwise the same. Returns all four."""

    def run(script: Path, *flags: object, **env: str) -> list[list[float]]:
        folder = tmp_path / "ckpt"
        whole = pretrain(script, *flags, "--save", folder, "--save-interval", 2, iterations=4, **env)
        assert len(whole) == 4 and len({loss for loss, _ in whole}) == 4
        assert all(8.3 < loss < 8.7 for loss, _ in whole)  # ln 5000 = 8.52
        (folder / "latest_checkpointed_iteration.txt").write_text("2")
        assert pretrain(script, *flags, "--load", folder, iterations=4, **env) == whole[2:]
        return whole

    return run


SPLITS = {
    "tp2": ("--tensor-model-parallel-size", 2),
    "pp2": ("--pipeline-model-parallel-size", 2),
    "dp2": ("--use-distributed-optimizer",),
}


@pytest.fixture(params=SPLITS)
def split(request):
    """Flags of each way to split the model over two ranks."""
    return SPLITS[request.param]
