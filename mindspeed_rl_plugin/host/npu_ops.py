"""The NPU operators that MindSpeed calls in a training step (torch_npu's and MindSpeed's own), written with torch.

They compute the same results; speed and rounding of the fused kernels are not reproduced. Signatures follow torch_npu's
documentation; tests/ascend compares arguments and returned values with torch_npu's wheels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from mindspeed_rl_plugin.host import grouped_matmul
from mindspeed_rl_plugin.host.reuse import reuse_data_ptr

MANY = 2**31 - 1  # a number of tokens that means: all tokens


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(x / rms(x) * gamma, 1 / rms(x)); rms is over the last dimension, in fp32."""
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


def _rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int) -> Tensor:
    """`npu_rotary_position_embedding` of MindSpeed, for --use-fused-rotary-pos-emb."""
    return npu_rotary_mul(x, cos, sin, "interleave" if mode else "half")


def npu_apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None,
    amsgrad: bool,
    maximize: bool,
    *,
    out: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """AdamW's step. out: (parameter, mean of gradients, mean of their squares), changed and returned.

    beta1_power, beta2_power: beta1 and beta2 to the power of the number of earlier steps. Raises ValueError if amsgrad.
    """
    if amsgrad:
        raise ValueError("npu_apply_adam_w on a host: amsgrad is not supported")
    grad, (param, average, square) = -grad if maximize else grad, out
    average.lerp_(grad.to(average.dtype), 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = (square / (1 - beta2_power * beta2)).sqrt_() + epsilon
    param.mul_(1 - lr * weight_decay).addcdiv_(average, root, value=-lr / (1 - beta1_power * beta1))
    return out


def _fused_adamw_v2(
    param: Tensor,
    grad: Tensor,
    average: Tensor,
    square: Tensor,
    highest: Tensor,
    step: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
) -> None:
    """`npu_apply_fused_adamw_v2` of MindSpeed: AdamW's step in place, by torch's fused function."""
    rates = dict(lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps)
    most = [highest] if amsgrad else []
    torch._fused_adamw_([param], [grad], [average], [square], most, [step], amsgrad=amsgrad, maximize=maximize, **rates)


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
    pre_tockens: int = MANY,
    next_tockens: int = MANY,
    sparse_mode: int = 0,
    **unused: Any,
) -> tuple[Any, ...]:
    """Attention in the layouts SBH, BSND, BNSD and TND; causal if a mask is given.

    Returns seven values like the operator: the output; maximum and sum of the softmax of each query; four unused
    values. Maximum and sum are `[B, N, S, 8]` fp32 with eight equal columns; they are None for TND, and if autograd
    computes the gradient. Raises ValueError for another layout, for dropout, and for a mask that is not causal or does
    not fit `sparse_mode`.
    """
    _no_dropout(keep_prob)
    ends = tuple(actual_seq_qlen or ()), tuple(actual_seq_kvlen or ())
    lengths = ends if input_layout == "TND" else tuple(_length(t, input_layout) for t in (query, key))
    causal = _causal(atten_mask, sparse_mode, lengths, pre_tockens, next_tockens)
    if input_layout == "TND":
        out = _packed(query, key, value, *ends, causal, scale)
        return out, None, None, None, 0, 0, 0
    groups = _groups(query, key, head_num)
    q, k, v = (_to_heads(t, input_layout, n) for t, n in ((query, head_num), (key, groups), (value, groups)))
    out = _from_heads(_attend(q, k, v, causal, scale), input_layout)
    differentiated = torch.is_grad_enabled() and out.requires_grad
    return out, *((None, None) if differentiated else _maximum_and_sum(q, k, causal, scale)), None, 0, 0, 0


def _causal(mask: Tensor | None, sparse_mode: int, lengths: tuple[Any, Any], before: int, after: int) -> bool:
    """Whether attention is causal. Raises ValueError for any other mask.

    Modes 0 and 1 take a mask of all pairs of tokens, 2 and 3 a triangle `[2048, 2048]`; with more keys than queries, in
    the layout TND and mode 3, the queries are the last of them. lengths: numbers of queries and
    of keys; in the layout TND (only modes 2 and 3) the ends of all sequences. before, after: in mode 0, the number of
    tokens that a query sees before and after its own token.
    """
    name = "npu_fusion_attention on a host"
    if sparse_mode not in (0, 1, 2, 3):
        raise ValueError(f"{name}: sparse_mode {sparse_mode}; known: 0 to 3, for causal attention")
    if mask is None:
        return False
    length, keys = lengths
    if sparse_mode < 2 and not isinstance(length, int):
        raise ValueError(f"{name}: sparse_mode {sparse_mode} with the layout TND, which needs 2 or 3")
    if length != keys and (isinstance(length, int) or sparse_mode != 3):
        raise ValueError(f"{name}: a mask with queries and keys of different lengths, {length} and {keys}")
    if sparse_mode == 0 and (before < length - 1 or after < 0):
        raise ValueError(
            f"{name}: pre_tockens={before}, next_tockens={after} in rows of {length} tokens; for causal attention give"
            f" pre_tockens of at least {length - 1} and next_tockens of at least 0"
        )
    size = 2048 if sparse_mode > 1 else length
    if mask.shape[-2:] != (size, size):
        raise ValueError(f"{name}: sparse_mode {sparse_mode} takes a mask [{size}, {size}], not {list(mask.shape)}")
    if not (mask.bool() == _triangle(size)).all():
        raise ValueError(f"{name}: the mask {list(mask.shape)} masks other pairs than keys after the query's own token")
    return True


@functools.lru_cache(maxsize=2)
def _triangle(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).triu_(1)


def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = MANY,
    next_tockens: int = MANY,
    sparse_mode: int = 0,
    **unused: Any,
) -> tuple[Any, ...]:
    """Gradients (dq, dk, dv, None) of attention, for a part of the keys.

    softmax_max, softmax_sum: of the softmax over all keys; attention_in: the output of attention over all keys. Raises
    the errors of `npu_fusion_attention`, and ValueError for the layout TND.
    """
    _no_dropout(keep_prob)
    lengths = tuple(_length(t, input_layout) for t in (query, key))
    causal = _causal(atten_mask, sparse_mode, lengths, pre_tockens, next_tockens)
    groups = _groups(query, key, head_num)
    k, v = (_to_heads(t, input_layout, groups) for t in (key, value))
    q, dy, out = (_to_heads(t, input_layout, head_num) for t in (query, dy, attention_in))
    groups = k.shape[1]
    k, v = (t.repeat_interleave(q.shape[1] // groups, 1).float() for t in (k, v))
    q, dy, out = q.float(), dy.float(), out.float()
    p = torch.exp(_scores(q, k, causal, scale_value) - softmax_max[..., :1]) / softmax_sum[..., :1]
    ds = p * (dy @ v.mT - (dy * out).sum(-1, keepdim=True)) * scale_value
    grads = ds @ k, *(t.unflatten(1, (groups, -1)).sum(2) for t in (ds.mT @ q, p.mT @ dy))
    return *(_from_heads(grad, input_layout).type_as(query) for grad in grads), None


def _attention_v2(*args: Any) -> tuple[Any, ...]:
    """The forward pass of `mindspeed.ops.fusion_attention_v2`; all arguments are positional."""
    query, key, value, head_num, layout, pse, _, mask, scale, keep_prob, *_ = args
    _no_bias(pse)
    places = {"pre_tockens": 10, "next_tockens": 11, "actual_seq_qlen": 14, "actual_seq_kvlen": 15, "sparse_mode": 16}
    more = {name: args[place] for name, place in places.items()}
    return npu_fusion_attention(
        query, key, value, head_num, layout, atten_mask=mask, scale=scale, keep_prob=keep_prob, **more
    )


def _attention_grad_v2(*args: Any) -> tuple[Any, ...]:
    query, key, value, dy, head_num, layout, pse, _, mask, maximum, total, _, out, scale, keep_prob, *_ = args
    _no_bias(pse)
    more = {"softmax_max": maximum, "softmax_sum": total, "attention_in": out}
    more |= {"pre_tockens": args[15], "next_tockens": args[16], "sparse_mode": args[24]}
    return npu_fusion_attention_grad(
        query, key, value, dy, head_num, layout, atten_mask=mask, scale_value=scale, keep_prob=keep_prob, **more
    )


def _no_bias(pse: Tensor | None) -> None:
    if pse is not None:
        raise ValueError("npu_fusion_attention on a host: pse, a bias of the scores, is not supported; use rope")


def _no_dropout(keep_prob: float) -> None:
    if keep_prob != 1.0:
        raise ValueError(f"npu_fusion_attention on a host: keep_prob={keep_prob}; attention dropout must be 0")


def _groups(query: Tensor, key: Tensor, heads: int) -> int:
    """Number of heads of keys and values in SBH. Heads of queries and keys have the same size; heads of values may be
    smaller."""
    return heads * key.shape[-1] // query.shape[-1]


def _length(t: Tensor, layout: str) -> int:
    if layout not in ("SBH", "BSND", "BNSD"):
        raise ValueError(f"npu_fusion_attention on a host: layout {layout!r}; known: SBH, BSND, BNSD, TND (forward)")
    return t.shape[layout.index("S")]


def _to_heads(t: Tensor, layout: str, heads: int) -> Tensor:
    """A tensor in a layout as `[B, heads, S, D]`; SBH has all heads in its last dimension."""
    if layout == "SBH":
        return t.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
    return t.transpose(1, 2) if layout == "BSND" else t


def _from_heads(t: Tensor, layout: str) -> Tensor:
    """`[B, heads, S, D]` in a layout."""
    if layout == "SBH":
        return t.permute(2, 0, 1, 3).flatten(2).contiguous()
    return t.transpose(1, 2) if layout == "BSND" else t


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """q, k `[..., S, D]`, `[..., K, D]` to `[..., S, K]`, -inf for masked pairs."""
    scores = q @ k.mT * scale
    return scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), -torch.inf) if causal else scores


def _maximum_and_sum(q: Tensor, k: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Maximum and sum of the softmax of each query, both `[B, heads, S, 8]`; computed head by head to save memory."""
    b, heads, rows, _ = q.shape
    each = torch.empty(2, b, heads, rows, 1, device=q.device)
    for i in range(b):
        for n in range(heads):
            scores = _scores(q[i, n].float(), k[i, n * k.shape[1] // heads].float(), causal, scale)
            highest = scores.amax(-1, keepdim=True)
            each[0, i, n], each[1, i, n] = highest, (scores - highest).exp_().sum(-1, keepdim=True)
    maximum, total = each.expand(*each.shape[:-1], 8).contiguous()
    return maximum, total


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """q, k, v `[B, heads, S, head_dim]`; if there are more keys, the queries are the last of them."""
    grouped, seen = q.shape[1] != k.shape[1], None
    if causal and q.shape[2] != k.shape[2]:
        causal, seen = False, q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).tril_(k.shape[2] - q.shape[2])
    return scaled_dot_product_attention(q, k, v, seen, is_causal=causal, scale=scale, enable_gqa=grouped)


def _packed(
    q: Tensor, k: Tensor, v: Tensor, q_ends: Sequence[int], k_ends: Sequence[int], causal: bool, scale: float
) -> Tensor:
    """q, k, v `[T, heads, head_dim]`; q_ends, k_ends: the end of each sequence in q, and in k and v."""
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
    "npu_apply_adam_w": npu_apply_adam_w,
    "npu_fusion_attention": npu_fusion_attention,
    "npu_fusion_attention_grad": npu_fusion_attention_grad,
}
# Operators that MindSpeed compiles for the NPU: name of the builder -> functions of the module that it loads.
COMPILED = {
    "algorithm": {"reuse_data_ptr": reuse_data_ptr},
    "npu_rotary_position_embedding": {"npu_rotary_position_embedding": _rotary_position_embedding},
    "npu_apply_fused_adamw_v2": {"npu_apply_fused_adamw_v2": _fused_adamw_v2},
    **grouped_matmul.GROUPED_COMPILED,
    "fusion_attention_v2": {
        "npu_fusion_attention_v2": _attention_v2,
        "npu_fusion_attention_grad_v2": _attention_grad_v2,
    },
}
