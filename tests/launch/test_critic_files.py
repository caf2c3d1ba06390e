"""Checkpoints for --rl-critic-load: told apart and measured before anything is built."""

import argparse
from types import SimpleNamespace

import pytest
import torch

from mindspeed_rl_plugin.launch import checkpoint_files as files
from mindspeed_rl_plugin.launch import critic_files
from mindspeed_rl_plugin.launch.build_critic import learning_rate

MODEL = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 16,
    "padded_vocab_size": 256,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
}


@pytest.fixture
def checkpoint(tmp_path):
    """`checkpoint(name, **changes)` writes one with these arguments; returns its directory."""

    def write(name="critic", file="mp_rank_00/model_optim_rng.pt", **changes):
        folder = tmp_path / name / "iter_0000005"
        (folder / file).parent.mkdir(parents=True)
        torch.save({"args": argparse.Namespace(**{**MODEL, **changes}), "iteration": 5}, folder / file)
        (tmp_path / name / files.TRACKER).write_text("5")
        return str(tmp_path / name)

    return write


def problems(directory, **changes):
    return list(critic_files.problems(directory, SimpleNamespace(**{**MODEL, **changes})))


def test_a_checkpoint_of_the_same_model_is_good(checkpoint):
    directory = checkpoint()
    assert problems(directory) == []
    assert problems(directory, padded_vocab_size=None) == [], "not known yet"
    folder = critic_files.source_folder(directory)
    assert folder.endswith("critic/iter_0000005") and not critic_files.starts_with_head(folder)
    critic_files.mark(directory, 5)
    assert critic_files.starts_with_head(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128}, "--hidden-size is 128 there and 64 here; a critic has the policy's own architecture"),
        ({"num_layers": 4}, "--num-layers is 4 there and 2 here"),
        ({"group_query_attention": False}, "--num-query-groups is 4 there and 2 here"),
        ({"padded_vocab_size": 512}, "padded vocabulary is 512 there and 256 here"),
        ({"tensor_model_parallel_size": 1}, "--tensor-model-parallel-size is 1 there and 2 here"),
    ],
)
def test_another_size_is_refused(checkpoint, changes, message):
    (line,) = problems(checkpoint(**changes))
    assert message in line


def test_the_layout_of_a_distributed_checkpoint_is_free(checkpoint):
    assert problems(checkpoint(file="common.pt", tensor_model_parallel_size=1)) == []
    (line,) = problems(checkpoint(name="other", file="common.pt", ffn_hidden_size=1))
    assert "--ffn-hidden-size is 1 there and 128 here" in line


def test_no_checkpoint(tmp_path, checkpoint):
    (line,) = problems(str(tmp_path))
    assert "holds no checkpoint (latest_checkpointed_iteration.txt is missing)" in line
    directory = checkpoint()
    (tmp_path / "critic" / files.TRACKER).write_text("6")
    (line,) = problems(directory)
    assert "latest_checkpointed_iteration.txt names 6, but there is no" in line


def test_the_reference_is_not_the_critic_beside_it(tmp_path):
    (tmp_path / "critic" / "iter_0000005").mkdir(parents=True)
    (tmp_path / "critic" / "iter_0000005" / "model.pt").write_text("critic")
    (tmp_path / "model.pt").write_text("policy")
    assert files.weight_files(str(tmp_path)) == {"model.pt": 6}


def test_the_schedule_is_scaled_as_a_whole():
    args = SimpleNamespace(lr=1e-3, min_lr=1e-4, lr_warmup_init=0.0, decoupled_lr=None)
    assert learning_rate(args, None) == {}
    assert learning_rate(args, 1e-2) == pytest.approx({"lr": 1e-2, "min_lr": 1e-3, "lr_warmup_init": 0.0})
    assert learning_rate(SimpleNamespace(lr=0.0, min_lr=0.0), 1e-2) == {"lr": 1e-2, "min_lr": 0.0}
