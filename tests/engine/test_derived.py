"""Tensors that vLLM derives from weights, as its versions keep them, after the weights have changed."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mindspeed_rl_plugin.engine import vllm_api

HEADS, NOPE, VALUE, LORA = 2, 3, 4, 5


def latent(holder, kept: str):
    """Attention with W_UK_T and W_UV made of its weight: as parameters, plain copies, or views."""
    holder.num_heads, holder.qk_nope_head_dim, holder.v_head_dim = HEADS, NOPE, VALUE
    holder.kv_b_proj = nn.Linear(LORA, HEADS * (NOPE + VALUE), bias=False)
    both = holder.kv_b_proj.weight.T.view(LORA, HEADS, NOPE + VALUE).split([NOPE, VALUE], -1)
    keys, values = both[0].permute(1, 2, 0), both[1].transpose(0, 1)
    make = {"views": lambda t: t.data, "copies": lambda t: t.data.contiguous(), "parameters": nn.Parameter}[kept]
    holder.W_UK_T, holder.W_UV = make(keys), make(values)
    return holder


@pytest.mark.parametrize("where", ["layer", "implementation"])
@pytest.mark.parametrize("kept", ["views", "copies", "parameters"])
def test_derived_tensors_follow_the_weight_in_place(monkeypatch, where, kept):
    layer = nn.Module()
    if where == "layer":
        holder = latent(layer, kept)
    else:  # vllm-ascend
        holder = latent(SimpleNamespace(), kept)
        layer.impl, layer.kv_b_proj = holder, holder.kv_b_proj
    monkeypatch.setattr(vllm_api, "model", lambda worker: nn.ModuleList([layer, nn.Linear(2, 2)]))
    weight, addresses = holder.kv_b_proj.weight.data, [holder.W_UK_T.data_ptr(), holder.W_UV.data_ptr()]
    weight.copy_(torch.randn_like(weight))
    assert vllm_api.refresh_derived(None) == 1
    query, key = torch.randn(HEADS, NOPE), torch.randn(LORA)
    whole = (weight @ key).view(HEADS, NOPE + VALUE)  # what a prompt computes
    torch.testing.assert_close((query[:, None] @ holder.W_UK_T)[:, 0] @ key, (query * whole[:, :NOPE]).sum(-1))
    torch.testing.assert_close((key @ holder.W_UV), whole[:, NOPE:])
    assert [holder.W_UK_T.data_ptr(), holder.W_UV.data_ptr()] == addresses


def test_weights_that_change_are_followed(make_engine, fake_vllm):
    engine = make_engine()
    engine.update_weights(0)
    engine.update_weights(1)
    assert fake_vllm.refreshed == [fake_vllm] * 2
