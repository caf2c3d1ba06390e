"""The fused NPU operators that MindSpeed calls in a plain training step, written with torch operators.

They compute the same thing; how fast, and how the fused kernels round, is not rehearsed by them.
Signatures follow torch_npu's documentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(x / rms(x) * gamma, 1 / rms(x)) over the last dimension, computed in fp32."""
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (x.float() * scale).type_as(x) * gamma, scale


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """silu(a) * b of the halves a, b of x along `dim`."""
    gate, up = x.chunk(2, dim)
    return silu(gate) * up


def npu_rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str = "half") -> Tensor:
    """Rotary embedding of x; mode "half" rotates halves, "interleave" neighbours."""
    if rotary_mode == "half":
        first, second = x.chunk(2, -1)
        rotated = torch.cat((-second, first), -1)
    else:
        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos + rotated * sin


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    **unused: Any,
) -> tuple[Any, ...]:
    """Attention in the layouts SBH, BSND, BNSD and TND; causal wherever a mask is given.

    Returns seven values like the operator, of which only the first, the output, is real. Raises
    ValueError for another layout and for dropout.
    """
    if keep_prob != 1.0:
        raise ValueError(f"npu_fusion_attention on a host: keep_prob={keep_prob}; attention dropout must be 0")
    causal = atten_mask is not None
    if input_layout == "TND":
        out = _packed(query, key, value, actual_seq_qlen or (), actual_seq_kvlen or (), causal, scale)
    elif input_layout == "SBH":
        s, b, h = query.shape
        q, k, v = (t.reshape(t.shape[0], b, -1, h // head_num).permute(1, 2, 0, 3) for t in (query, key, value))
        out = _attend(q, k, v, causal, scale).permute(2, 0, 1, 3).reshape(s, b, -1)
    elif input_layout == "BSND":
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        out = _attend(q, k, v, causal, scale).transpose(1, 2)
    elif input_layout == "BNSD":
        out = _attend(query, key, value, causal, scale)
    else:
        raise ValueError(f"npu_fusion_attention on a host: layout {input_layout!r}; known: SBH, BSND, BNSD, TND")
    return out, None, None, None, 0, 0, 0


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """q, k, v `[B, heads, S, head_dim]`."""
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)


def _packed(
    q: Tensor, k: Tensor, v: Tensor, q_ends: Sequence[int], k_ends: Sequence[int], causal: bool, scale: float
) -> Tensor:
    """q, k, v `[T, heads, head_dim]`, sequences end at the cumulative `q_ends`, `k_ends`."""
    outputs, q_start, k_start = [], 0, 0
    for q_end, k_end in zip(q_ends, k_ends, strict=True):
        one = [t.transpose(0, 1)[None] for t in (q[q_start:q_end], k[k_start:k_end], v[k_start:k_end])]
        outputs.append(_attend(*one, causal, scale)[0].transpose(0, 1))
        q_start, k_start = q_end, k_end
    return torch.cat(outputs)


OPERATORS = {
    "npu_rms_norm": npu_rms_norm,
    "npu_swiglu": npu_swiglu,
    "npu_rotary_mul": npu_rotary_mul,
    "npu_fusion_attention": npu_fusion_attention,
}
