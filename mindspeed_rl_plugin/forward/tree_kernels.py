"""Attention of packed rows and trees by one call of a kernel, or by torch's own, branch by branch.

A kernel gets query `[T, 1, heads, head_dim]`, key and value `[K, 1, groups, head_dim]`, already gathered for each path,
and returns `[T, 1, heads x value_dim]`. Alignment at the bottom right is asked for by name: TransformerEngine's
"padding_causal" would align queries and keys of different numbers at the top left, without an error.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mindspeed_rl_plugin.forward.tree import Branches

Kernel = Callable[[torch.nn.Module, Callable[..., Tensor], Tensor, Tensor, Tensor, Branches], Tensor]


def by_torch(
    attention: torch.nn.Module, _: Callable, query: Tensor, key: Tensor, value: Tensor, branches: Branches
) -> Tensor:
    """In the place of Megatron's own attention, whose mask for all tokens would cost as much as one row of them."""
    # Under --apply-query-key-layer-scaling the softmax multiplies by the number by which the scale is divided.
    scale = attention.softmax_scale * (attention.scale_mask_softmax.scale or 1.0)
    grouped = query.shape[2] != key.shape[2]
    heads = (t.permute(1, 2, 0, 3) for t in (query, key, value))
    lengths = branches.query_lengths, branches.key_lengths, branches.key_lengths
    outputs = []
    for q, k, v in zip(*(t.split(n, 2) for t, n in zip(heads, lengths, strict=True)), strict=True):
        ahead = k.shape[2] - q.shape[2]
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril_(ahead) if ahead else None
        each = {"attn_mask": seen, "is_causal": not ahead, "scale": scale, "enable_gqa": grouped}
        outputs.append(F.scaled_dot_product_attention(q, k, v, **each))
    return torch.cat(outputs, 2).permute(2, 0, 1, 3).flatten(2)


def by_transformer_engine(
    _: torch.nn.Module, forward: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, branches: Branches
) -> Tensor:
    """Megatron's TEDotProductAttention (core 0.12.1 to 0.19), which passes on the name of the mask's type. Its enum has
    no member for this type."""
    output = forward(
        *(t.squeeze(1) for t in (query, key, value)),
        None,
        attn_mask_type=SimpleNamespace(name="padding_causal_bottom_right"),
        packed_seq_params=packed_seq_params(branches, query.device),
    )
    return output.view(len(query), 1, -1)


def by_npu(
    attention: torch.nn.Module, _: Callable, query: Tensor, key: Tensor, value: Tensor, branches: Branches
) -> Tensor:
    """The NPU's operator, called as MindSpeed calls it for keys of a longer range than the queries
    (te/pytorch/attention/dot_product_attention/kvallgather_context_parallel.py, v26.1.0). The adaptor of its flash
    attention would take mode 2, which aligns at the top left."""
    operator = sys.modules["torch_npu"].npu_fusion_attention  # MindSpeed has imported it
    return operator(
        *(t.squeeze(1) for t in (query, key, value)),
        query.shape[2],
        "TND",
        pse=None,
        padding_mask=None,
        atten_mask=_triangle(query.device),
        scale=attention.softmax_scale,
        keep_prob=1.0,
        inner_precise=0,
        sparse_mode=3,  # causal, aligned at the bottom right
        actual_seq_qlen=branches.queries.tolist(),
        actual_seq_kvlen=branches.keys.tolist(),
    )[0].view(len(query), 1, -1)


@functools.lru_cache(maxsize=1)
def _triangle(device: torch.device) -> Tensor:
    """`[2048, 2048]` bool, True above the diagonal: what the operator takes for causal attention of any length."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu_(1)


def packed_seq_params(branches: Branches, device: torch.device | str) -> PackedSeqParams:
    """Boundaries of branches and paths for the attention (the same in core 0.12.1 to 0.19). There are no gaps.

    MindSpeed passes the boundaries with the leading 0 to the NPU's kernel, which takes this 0 as one more, empty row.
    """
    cu_q, cu_kv = (ends.to(device) for ends in branches.cu_seqlens)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_q,
        cu_seqlens_kv=cu_kv,
        max_seqlen_q=max(branches.query_lengths),
        max_seqlen_kv=max(branches.key_lengths),
    )
