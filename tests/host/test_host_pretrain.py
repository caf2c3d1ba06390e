"""Megatron trains on CPU with the installed core: each way to split it, saved and resumed, bitwise."""

from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"
DP2 = ("--use-distributed-optimizer",)
MOE = """
    --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 --expert-model-parallel-size 2
    --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
"""


def test_distributed_optimizer_resumes_bitwise(resumed):
    resumed(SCRIPT, *DP2, "--ckpt-format", "torch")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["torch", "torch_dist"])
@pytest.mark.parametrize("dtype", [None, "--bf16"])
def test_every_split_resumes_bitwise(resumed, split, layout, dtype):
    resumed(SCRIPT, *split, "--ckpt-format", layout, *filter(None, [dtype]))


@pytest.mark.slow
def test_experts_with_tensor_and_sequence_parallel(pretrain):
    losses = [loss for loss, _ in pretrain(SCRIPT, *MOE.split(), iterations=3)]
    assert all(8.3 < loss < 8.7 for loss in losses)


@pytest.mark.slow
def test_interleaved_pipeline_is_deterministic(pretrain):
    """Outputs are freed while they are sent: without copies the losses differ from run to run."""
    flags = ["--pipeline-model-parallel-size", 2, "--num-layers", 4, "--num-layers-per-virtual-pipeline-stage", 1]
    runs = [pretrain(SCRIPT, *flags, iterations=3) for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.slow
def test_overlap_and_average_change_nothing(pretrain):
    """Overlapped gathers and ReduceOp.AVG give what the plain distributed optimizer gives."""
    plain = pretrain(SCRIPT, *DP2, "--bf16")
    overlap = ["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-average-in-collective"]
    assert pretrain(SCRIPT, *DP2, "--bf16", *overlap) == plain
