"""Layers of multi-token prediction are frozen: not run, not trained, still there; in Megatron's own model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_rl_plugin.launch import megatron_setup
from mindspeed_rl_plugin.launch.mtp import freeze_mtp


class Chunk(torch.nn.Module):
    """As Megatron's GPTModel uses them: concatenated before the output layer, split and scored with labels after."""

    def __init__(self, last: bool = True):
        super().__init__()
        self.config = SimpleNamespace(mtp_num_layers=1)
        self.decoder = torch.nn.Linear(2, 2)
        self.mtp_process = last
        if last:
            self.mtp = torch.nn.Linear(2, 2)

    def forward(self, x, labels=None):
        x = self.decoder(x)
        if self.mtp_process:
            x = torch.cat([x, self.mtp(x)])
        if self.config.mtp_num_layers:
            labels.clone()
        return x


def test_they_are_left_out_of_calls_only():
    chunk = freeze_mtp(Chunk())
    x = torch.ones(3, 2)
    assert torch.equal(chunk(x), chunk.decoder(x))
    assert chunk.mtp_process and chunk.config.mtp_num_layers == 1
    assert [n for n, p in chunk.named_parameters() if p.requires_grad] == ["decoder.weight", "decoder.bias"]
    assert {"mtp.weight", "mtp.bias"} <= set(chunk.state_dict())
    with pytest.raises(RuntimeError):
        chunk(torch.ones(3, 5))
    assert chunk.mtp_process and chunk.config.mtp_num_layers == 1


def test_a_chunk_without_them_is_left_alone():
    chunk = freeze_mtp(Chunk(last=False))
    assert "forward" not in vars(chunk) and all(p.requires_grad for p in chunk.parameters())


def test_every_chunk_is_changed_before_it_is_wrapped():
    seen = []

    def change(chunk):
        seen.append(chunk)
        return chunk + 10

    def by_provider(model_provider_func, model_type):
        return [model_provider_func(post_process=False), model_provider_func(post_process=True)]

    def by_container(train_iters, cfg_container=None):
        chunks = [0, 1]
        for hook in cfg_container.model.pre_wrap_hooks:
            chunks = hook(chunks)
        return chunks

    call = megatron_setup.on_each_chunk(
        by_provider, (lambda post_process: int(post_process),), {"model_type": 1}, change
    )
    assert by_provider(*call.args, **call.kwargs) == [10, 11]
    container = SimpleNamespace(model=SimpleNamespace(pre_wrap_hooks=[]))
    call = megatron_setup.on_each_chunk(by_container, (3,), {"cfg_container": container}, change)
    assert by_container(*call.args, **call.kwargs) == [10, 11]
    assert seen == [0, 1, 0, 1]
