"""Names and shapes of models with experts and latent attention against live ones: Megatron's and vLLM's, two ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def agree(worker: str, *argv: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(HERE / worker), *argv],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert done.stdout.count("tensors agree") == 2


@pytest.mark.parametrize("family", [pytest.param("qwen3_moe", marks=pytest.mark.slow), "deepseek_v3"])
def test_megatron_stores_what_the_table_says(family):
    """Tensor parallel attention with whole experts spread over the ranks, and with experts that are cut."""
    agree("live_trainer_ranks.py", family)


def test_vllm_stores_what_the_table_says(tmp_path):
    """Both families, experts cut and spread, fewer key heads than ranks."""
    agree("live_engine_ranks.py", str(tmp_path))
