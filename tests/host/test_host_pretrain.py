"""Megatron trains on CPU with the installed core: each way to split it, saved and resumed, bitwise."""

from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"
SPLITS = {
    "tp2": ("--tensor-model-parallel-size", 2),
    "pp2": ("--pipeline-model-parallel-size", 2),
    "dp2": ("--use-distributed-optimizer",),
}
MOE = """
    --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 --expert-model-parallel-size 2
    --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
"""


def resume(folder: Path, iteration: int) -> None:
    """Make `--load folder` start at an earlier iteration than the last saved."""
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def test_distributed_optimizer_resumes_bitwise(pretrain, tmp_path):
    flags = ["--use-distributed-optimizer", "--ckpt-format", "torch"]
    whole = pretrain(SCRIPT, *flags, "--save", tmp_path / "ckpt", "--save-interval", 2, iterations=4)
    resume(tmp_path / "ckpt", 2)
    rest = pretrain(SCRIPT, *flags, "--load", tmp_path / "ckpt", iterations=4)
    assert len(whole) == 4 and len({loss for loss, _ in whole}) == 4
    assert rest == whole[2:]


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tp2", "pp2"])
def test_each_split_trains(pretrain, split):
    losses = [loss for loss, _ in pretrain(SCRIPT, *SPLITS[split], iterations=2)]
    assert len(losses) == 2 and all(8.4 < loss < 8.7 for loss in losses)  # ln 5000 = 8.52


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("layout", ["torch", "torch_dist"])
@pytest.mark.parametrize("dtype", [None, "--bf16"])
def test_every_split_resumes_bitwise(pretrain, tmp_path, split, layout, dtype):
    flags = [*SPLITS[split], "--ckpt-format", layout, *filter(None, [dtype])]
    whole = pretrain(SCRIPT, *flags, "--save", tmp_path / "ckpt", "--save-interval", 2, iterations=4)
    resume(tmp_path / "ckpt", 2)
    assert pretrain(SCRIPT, *flags, "--load", tmp_path / "ckpt", iterations=4) == whole[2:]


@pytest.mark.slow
def test_experts_with_tensor_and_sequence_parallel(pretrain):
    losses = [loss for loss, _ in pretrain(SCRIPT, *MOE.split(), iterations=3)]
    assert all(8.3 < loss < 8.7 for loss in losses)


@pytest.mark.slow
def test_interleaved_pipeline_is_deterministic(pretrain):
    """Outputs are freed while they are sent: without copies the losses differ from run to run."""
    flags = [*SPLITS["pp2"], "--num-layers", 4, "--num-layers-per-virtual-pipeline-stage", 1]
    runs = [pretrain(SCRIPT, *flags, iterations=3) for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.slow
def test_overlap_and_average_change_nothing(pretrain):
    """Overlapped gathers and ReduceOp.AVG give what the plain distributed optimizer gives."""
    plain = pretrain(SCRIPT, *SPLITS["dp2"], "--bf16")
    overlap = ["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-average-in-collective"]
    assert pretrain(SCRIPT, *SPLITS["dp2"], "--bf16", *overlap) == plain
