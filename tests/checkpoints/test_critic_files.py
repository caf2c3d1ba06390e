"""Checkpoints for --rl-critic-load: distinguished from a language model's and measured before anything is built."""

import argparse
from types import SimpleNamespace

import pytest
import torch

from mindspeed_rl_plugin.checkpoints import checkpoint_files as files
from mindspeed_rl_plugin.checks.flag_checks import critic_problems
from mindspeed_rl_plugin.launch import build_critic
from mindspeed_rl_plugin.launch.build_critic import learning_rate
from mindspeed_rl_plugin.loop.start import Start

SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups")
LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
MODEL = {"group_query_attention": True} | dict.fromkeys(SIZES + LAYOUT, 2)


def problems(folder, file="mp_rank_00/model_optim_rng.pt", **changes):
    """Of a checkpoint in `folder` whose arguments are those of MODEL but for the changes."""
    path = folder / "iter_0000005" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"args": argparse.Namespace(**{**MODEL, **changes}), "iteration": 5}, path)
    (folder / files.TRACKER).write_text("5")
    return list(critic_problems(str(folder), SimpleNamespace(**MODEL, padded_vocab_size=None)))


def test_a_checkpoint_of_the_same_model_is_good_and_a_critic_is_marked(tmp_path):
    assert problems(tmp_path, padded_vocab_size=7) == [], "not known here yet"
    start = Start("fresh", None, 0, None, None)
    for has_head in (False, True):
        arguments, source, answer = build_critic._source(start, str(tmp_path), {})
        assert arguments["ckpt_step"] == 5 and "iter_0000005" in source and answer is has_head
        assert ("with a fresh value head" in source) != has_head
        (tmp_path / "iter_0000005" / files.CRITIC_MARK).touch()


@pytest.mark.parametrize("name", [*SIZES, *LAYOUT, "group_query_attention"])
def test_another_size_is_refused(tmp_path, name):
    other = False if MODEL[name] is True else 1
    (line,) = problems(tmp_path, **{name: other})
    assert f"--{name.replace('_', '-')} is {other} in the checkpoint and {MODEL[name]} in this run" in line
    (tmp_path / "iter_0000005/mp_rank_00/model_optim_rng.pt").unlink()
    lines = problems(tmp_path, "common.pt", **{name: other})
    assert lines == ([] if name in LAYOUT else [line]), "the layout of a distributed checkpoint is free"


def test_groups_without_grouped_attention_are_not_compared(tmp_path, monkeypatch):
    monkeypatch.setitem(MODEL, "group_query_attention", False)
    assert problems(tmp_path, num_query_groups=1) == []


def test_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint"):
        list(critic_problems(str(tmp_path), None))
    (tmp_path / files.TRACKER).write_text("6")
    with pytest.raises(ValueError, match="latest_checkpointed_iteration.txt names 6"):
        list(critic_problems(str(tmp_path), None))


def test_the_schedule_is_scaled_as_a_whole():
    args = SimpleNamespace(lr=1e-3, min_lr=1e-4, lr_warmup_init=0.0, decoupled_lr=None)
    assert learning_rate(args, None) == {}
    assert learning_rate(args, 1e-2) == pytest.approx({"lr": 1e-2, "min_lr": 1e-3, "lr_warmup_init": 0.0})
    assert learning_rate(SimpleNamespace(lr=0.0, min_lr=0.0), 1e-2) == {"lr": 1e-2, "min_lr": 0.0}
