"""Jobs that train adapters: agreement with the engines, checkpoints that hold only factors, and resumes."""

from mindspeed_rl_plugin.checkpoints.checkpoint_files import read_state
from mindspeed_rl_plugin.checkpoints.dist_files import DistFiles

LORA = ("--rl-lora-rank", "4", "--rl-lora-alpha", "8", "--lr", "2e-2")
TP2 = ("--tensor-model-parallel-size", "2", "--rl-generate-tp", "1")
GATHERED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
MOVED = 1e-6  # nats, least KL to the reference after an update


def test_tp2_with_the_distributed_optimizer_and_a_resume_from_torch_dist(job):
    """The reference is the model without adapters, also after a resume."""
    saved = ("--ckpt-format", "torch_dist", "--save-interval", "2")
    run = job("--train-iters", "4", *TP2, *LORA, *GATHERED, *saved, "--rl-verify-weights")
    run.stop_at(2)
    files = DistFiles(run.save / "iter_0000002")
    names = [name for name in files.tensors() if not name.startswith("optimizer")]
    assert names and all(name.startswith("rl_lora.model.layers.") for name in names)
    result = run.run()
    assert "training resumes from" in result.log
    result.check_agreement(4, MOVED)
    assert read_state(str(run.save), 4)[0]["loop"]["adapter"]["--rl-lora-rank"] == 4
