"""The stand-ins of fused NPU operators against references written out."""

import math

import pytest
import torch

from mindspeed_rl_plugin.host.npu_ops import npu_fusion_attention, npu_rms_norm, npu_rotary_mul, npu_swiglu

B, S, HEADS, GROUPS, DIM = 2, 5, 4, 2, 8
SCALE = 1 / math.sqrt(DIM)


def attention(q, k, v, causal):
    """q `[B, heads, S, D]`, k and v `[B, groups, S, D]`, head by head."""
    out = torch.empty_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h * k.shape[1] // q.shape[1]
            scores = q[b, h] @ k[b, g].T * SCALE
            if causal:
                scores = scores.masked_fill(torch.triu(torch.ones_like(scores), 1).bool(), -math.inf)
            out[b, h] = scores.softmax(-1) @ v[b, g]
    return out


def tensors(seed=0, length=S):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, HEADS, length, DIM), (B, GROUPS, length, DIM), (B, GROUPS, length, DIM))
    return [torch.randn(shape, generator=generator) for shape in shapes]


LAYOUTS = {
    "BNSD": (lambda t: t, lambda o: o),
    "BSND": (lambda t: t.transpose(1, 2), lambda o: o.transpose(1, 2)),
    "SBH": (
        lambda t: t.permute(2, 0, 1, 3).flatten(2),
        lambda o: o.unflatten(2, (HEADS, DIM)).permute(1, 2, 0, 3),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
def test_attention(layout, causal):
    there, back = LAYOUTS[layout]
    q, k, v = tensors()
    mask = torch.ones(1) if causal else None
    out = npu_fusion_attention(*map(there, (q, k, v)), HEADS, layout, atten_mask=mask, scale=SCALE)
    assert len(out) == 7
    torch.testing.assert_close(back(out[0]), attention(q, k, v, causal))


def test_packed_sequences_do_not_see_each_other():
    lengths = (5, 3)
    parts = [[t[0] for t in tensors(seed, n)] for seed, n in enumerate(lengths)]
    packed = [torch.cat([p[i].transpose(0, 1) for p in parts]) for i in range(3)]
    ends = [5, 8]
    out, *_ = npu_fusion_attention(
        *packed, HEADS, "TND", atten_mask=torch.ones(1), scale=SCALE, actual_seq_qlen=ends, actual_seq_kvlen=ends
    )
    for (q, k, v), piece in zip(parts, out.split(lengths), strict=True):
        torch.testing.assert_close(piece.transpose(0, 1), attention(q[None], k[None], v[None], True)[0])


def test_attention_refuses_what_it_would_get_wrong():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="'BSH'.*SBH, BSND, BNSD, TND"):
        npu_fusion_attention(q, k, v, HEADS, "BSH")
    with pytest.raises(ValueError, match="keep_prob=0.9"):
        npu_fusion_attention(q, k, v, HEADS, "BNSD", keep_prob=0.9)


def test_norm_and_swiglu():
    x = torch.randn(3, 8)
    norm = torch.nn.RMSNorm(8, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    out, scale = npu_rms_norm(x, norm.weight, 1e-5)
    torch.testing.assert_close(out, norm(x))
    torch.testing.assert_close(scale[:, 0], 1 / (x.pow(2).mean(-1) + 1e-5).sqrt())
    torch.testing.assert_close(npu_swiglu(x), x[:, :4] * torch.sigmoid(x[:, :4]) * x[:, 4:])


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_is_a_rotation_of_pairs(mode):
    """Each pair (a, b) turned by its angle; pairs are i and i + D/2, or neighbours."""
    half = DIM // 2
    x, angles = torch.randn(3, DIM), torch.rand(half)
    pairs = [(i, i + half) if mode == "half" else (2 * i, 2 * i + 1) for i in range(half)]
    expected, cos, sin = torch.empty_like(x), torch.empty(DIM), torch.empty(DIM)
    for angle, (i, j) in zip(angles, pairs, strict=True):
        cos[[i, j]], sin[[i, j]] = angle.cos(), angle.sin()
        expected[:, i] = x[:, i] * angle.cos() - x[:, j] * angle.sin()
        expected[:, j] = x[:, j] * angle.cos() + x[:, i] * angle.sin()
    torch.testing.assert_close(npu_rotary_mul(x, cos, sin, mode), expected)
