"""Names and shapes of models with experts and latent attention against live ones: Megatron's and vLLM's, two ranks."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def agree(torchrun, worker: str, *argv: object) -> None:
    # vLLM names its shared memory by what its own worker, which is not built here, would set.
    assert torchrun(HERE / worker, *argv, VLLM_DIST_IDENT="live").stdout.count("tensors agree") == 2


@pytest.mark.parametrize("family", [pytest.param("qwen3_moe", marks=pytest.mark.slow), "deepseek_v3"])
def test_megatron_stores_what_the_table_says(torchrun, family):
    """Tensor parallel attention with whole experts spread over the ranks, and with experts that are cut."""
    agree(torchrun, "live_trainer_ranks.py", family)


def test_vllm_stores_what_the_table_says(torchrun, tmp_path):
    """Both families, experts cut and spread, fewer key heads than ranks."""
    agree(torchrun, "live_engine_ranks.py", tmp_path)
