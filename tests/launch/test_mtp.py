"""Layers of multi-token prediction are frozen: not run, not trained, still there; in Megatron's own model."""

from types import SimpleNamespace

import pytest
import torch

from mindspeed_rl_plugin.launch import megatron_setup
from mindspeed_rl_plugin.launch.megatron_setup import freeze_mtp, report_unused_embeddings


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


class Group:
    """As core 0.12.1's _ParamAndGradBucketGroup under overlap: gradients are sent once all are registered."""

    def __init__(self, params, overlap=True, aligned=False):
        self.params, self.ready, self.sent = set(params), set(), 0
        self.ddp_config = SimpleNamespace(overlap_grad_reduce=overlap)
        self.grad_reduce_handle = "started" if aligned else None

    def register_grad_ready(self, param):
        assert param in self.params and param not in self.ready, "Cannot set grad twice"
        self.ready.add(param)
        if self.ready == self.params:
            self.sent, self.grad_reduce_handle = self.sent + 1, "started"

    def finish_grad_sync(self):
        assert self.grad_reduce_handle is not None or not self.ddp_config.overlap_grad_reduce, "has not been issued"
        self.grad_reduce_handle = None
        self.ready.clear()


def wrapped(first: bool = False, mtp: bool = True, **options):
    """A chunk as Megatron's DDP wraps it: one group for all parameters, the embedding's among them."""
    chunk = Chunk(last=mtp)
    chunk.pre_process, chunk.embedding = first, torch.nn.Embedding(3, 2)
    trained = [p for name, p in chunk.named_parameters() if not name.startswith("mtp")]
    group = Group(trained, **options)
    chunk.param_to_bucket_group = dict.fromkeys(trained, group)
    return chunk, group


def test_the_last_stages_copy_of_the_embedding_is_not_waited_for():
    chunk, group = wrapped()
    report_unused_embeddings([chunk])
    for step in (1, 2):
        for param in chunk.decoder.parameters():
            group.register_grad_ready(param)
        assert group.sent == step - 1
        group.finish_grad_sync()
        assert group.sent == step


def test_where_nothing_waits_for_it_nothing_is_reported():
    """Another chunk; the first stage, whose embedding has a gradient; a schedule that starts all groups by itself."""
    for options in (dict(mtp=False), dict(first=True)):
        chunk, group = wrapped(**options)
        report_unused_embeddings([chunk])
        with pytest.raises(AssertionError, match="not been issued"):
            group.finish_grad_sync()
    for options in (dict(aligned=True), dict(overlap=False)):
        chunk, group = wrapped(**options)
        report_unused_embeddings([chunk])
        group.finish_grad_sync()
        assert group.sent == 0 and not group.ready
