"""The stand-ins of fused NPU operators against references written out."""

import math
from types import ModuleType

import pytest
import torch

from mindspeed_rl_plugin.host import npu
from mindspeed_rl_plugin.host.npu_ops import (
    COMPILED,
    npu_apply_adam_w,
    npu_fusion_attention,
    npu_fusion_attention_grad,
    npu_rms_norm,
    npu_rotary_mul,
    npu_swiglu,
)

B, S, HEADS, GROUPS, DIM = 2, 5, 4, 2, 8
SCALE = 1 / math.sqrt(DIM)
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)  # of sparse_mode 2 and 3


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
def test_values_may_be_shorter_than_keys(layout):
    """As multi-latent attention's are under --mla-fa-without-pad."""
    there, _ = LAYOUTS[layout]
    q, k, v = tensors()
    whole = npu_fusion_attention(*map(there, (q, k, v)), HEADS, layout, scale=SCALE)[0]
    part = npu_fusion_attention(*map(there, (q, k, v[..., :3])), HEADS, layout, scale=SCALE)[0]
    heads = (S, B, HEADS) if layout == "SBH" else whole.shape[:3]
    torch.testing.assert_close(part.reshape(*heads, 3), whole.reshape(*heads, DIM)[..., :3])


def merged(first, second):
    """(output, maximum, sum) of attention over two pieces of the keys, as over both; BNSD."""
    highest = torch.maximum(first[1], second[1])
    parts = [(out, total * (most - highest).exp()) for out, most, total, *_ in (first, second)]
    total = parts[0][1] + parts[1][1]
    return sum(out * (part / total)[..., :1] for out, part in parts), highest, total


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_of_keys_in_two_pieces(layout):
    """A block of queries sees an earlier block of keys and its own, as in a ring: output, gradients are of both."""
    there, back = LAYOUTS[layout]
    (_, *before), (q, *own) = tensors(1), tensors(2)
    keys, values = (torch.cat(pair, 2).requires_grad_() for pair in zip(before, own, strict=True))
    q.requires_grad_()
    scores = q @ keys.repeat_interleave(2, 1).mT * SCALE
    scores[..., S:] += torch.full((S, S), -math.inf).triu(1)
    expected = scores.softmax(-1) @ values.repeat_interleave(2, 1)
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    wanted = torch.autograd.grad(expected, (q, keys, values), dy)
    masks = (None, TRIANGLE)

    with torch.no_grad():
        blocks = [(k, v, m) for (k, v), m in zip((before, own), masks, strict=True)]
        outs = []
        for k, v, mask in blocks:
            masked = dict(atten_mask=mask, sparse_mode=3, scale=SCALE)
            out, *rest = npu_fusion_attention(*map(there, (q, k, v)), HEADS, layout, **masked)
            assert len(rest) == 6
            outs.append((back(out), *rest))
        assert outs[0][1].shape == outs[0][2].shape == (B, HEADS, S, 8)
        torch.testing.assert_close(outs[0][1][..., 3], scores[..., :S].amax(-1))
        out, highest, total = merged(*outs)
        torch.testing.assert_close(out, expected)
        softmax = {"softmax_max": highest, "softmax_sum": total, "attention_in": there(out)}
        grads = []
        for k, v, mask in blocks:
            given = map(there, (q, k, v, dy))
            masked = dict(atten_mask=mask, sparse_mode=3, scale_value=SCALE)
            each = npu_fusion_attention_grad(*given, HEADS, layout, **masked, **softmax)
            grads.append([back_of(t, layout) for t in each[:3]])
    dq = grads[0][0] + grads[1][0]
    dk, dv = (torch.cat((grads[0][i], grads[1][i]), 2) for i in (1, 2))
    for got, want in zip((dq, dk, dv), wanted, strict=True):
        torch.testing.assert_close(got, want)


def back_of(t, layout):
    """`[B, heads, S, D]` of a gradient, however many heads it has."""
    return t.unflatten(2, (-1, DIM)).permute(1, 2, 0, 3) if layout == "SBH" else LAYOUTS[layout][1](t)


def test_the_operator_that_mindspeed_compiles():
    """fusion_attention_v2 gives everything by its place, at the 22 and 30 places of MindSpeed's call."""
    q, k, v = tensors()
    forward, backward = COMPILED["fusion_attention_v2"].values()
    out = forward(q, k, v, HEADS, "BNSD", None, None, TRIANGLE, SCALE, 1.0, S, 0, *[None] * 4, 2, *[None] * 5)
    torch.testing.assert_close(out[0], attention(q, k, v, True))
    dy = torch.randn_like(q)
    given = (q, k, v, dy, HEADS, "BNSD", None, None, TRIANGLE, out[1], out[2], None, out[0], SCALE, 1.0)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    wanted = torch.autograd.grad(attention(*leaves, True), leaves, dy)
    for got, want in zip(backward(*given, S, 0, *[None] * 7, 2, *[None] * 5)[:3], wanted, strict=True):
        torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="pse"):
        forward(q, k, v, HEADS, "BNSD", torch.ones(1), *[None] * 16)


def test_packed_sequences_do_not_see_each_other():
    lengths = (5, 3)
    parts = [[t[0] for t in tensors(seed, n)] for seed, n in enumerate(lengths)]
    packed = [torch.cat([p[i].transpose(0, 1) for p in parts]) for i in range(3)]
    ends = [5, 8]
    out, *_ = npu_fusion_attention(
        *(*packed, HEADS, "TND"),
        **dict(atten_mask=TRIANGLE, scale=SCALE, sparse_mode=2, actual_seq_qlen=ends, actual_seq_kvlen=ends),
    )
    for (q, k, v), piece in zip(parts, out.split(lengths), strict=True):
        torch.testing.assert_close(piece.transpose(0, 1), attention(q[None], k[None], v[None], True)[0])


def test_attention_refuses_what_it_would_get_wrong():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="'BSH'.*SBH, BSND, BNSD, TND"):
        npu_fusion_attention(q, k, v, HEADS, "BSH")
    with pytest.raises(ValueError, match="keep_prob=0.9"):
        npu_fusion_attention(q, k, v, HEADS, "BNSD", keep_prob=0.9)


WHOLE = TRIANGLE[:S, :S]


@pytest.mark.parametrize(
    ("refused", "given"),
    [
        ("sparse_mode 0 takes a mask", {"atten_mask": TRIANGLE}),
        ("sparse_mode 2 takes a mask", {"atten_mask": WHOLE, "sparse_mode": 2}),
        ("other pairs", {"atten_mask": torch.zeros(S, S)}),
        ("other pairs", {"atten_mask": torch.stack([WHOLE, WHOLE.T])[:, None], "sparse_mode": 1}),
        ("other pairs", {"atten_mask": ~TRIANGLE, "sparse_mode": 3}),
        ("sparse_mode 4; known: 0 to 3", {"atten_mask": TRIANGLE, "sparse_mode": 4, "pre_tockens": 1}),
        ("pre_tockens=3", {"atten_mask": WHOLE, "pre_tockens": S - 2, "next_tockens": 0}),
        ("next_tockens=-1", {"atten_mask": WHOLE, "next_tockens": -1}),
        ("TND, which needs 2 or 3", {"atten_mask": WHOLE, "input_layout": "TND"}),
    ],
)
def test_attention_refuses_other_masks_than_causal_ones(refused, given):
    q, k, v = tensors()
    args = {"head_num": HEADS, "input_layout": "BNSD", **given}
    with pytest.raises(ValueError, match=refused):
        npu_fusion_attention(q, k, v, **args)
    if args["input_layout"] != "TND":
        softmax = dict(softmax_max=q, softmax_sum=q, attention_in=q)
        with pytest.raises(ValueError, match=refused):
            npu_fusion_attention_grad(q, k, v, q, **args, **softmax)


@pytest.mark.parametrize("mask", [WHOLE, WHOLE.to(torch.uint8).expand(B, 1, S, S)])
@pytest.mark.parametrize("given", [{"pre_tockens": S - 1, "next_tockens": 0}, {"sparse_mode": 1, "pre_tockens": 1}])
def test_a_whole_mask_that_is_causal(mask, given):
    q, k, v = tensors()
    out = npu_fusion_attention(q, k, v, HEADS, "BNSD", atten_mask=mask, scale=SCALE, **given)[0]
    torch.testing.assert_close(out, attention(q, k, v, True))


def test_queries_and_keys_of_other_lengths_are_masked_in_mode_3_of_packed_sequences():
    """There queries are the last tokens of the keys; in mode 2 they would be the first."""
    q, k, v = (t.transpose(1, 2)[0] for t in tensors())
    ends = dict(actual_seq_qlen=[2, S], actual_seq_kvlen=[3, S], scale=SCALE)
    masked = dict(atten_mask=TRIANGLE, sparse_mode=3)
    seen = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    first = torch.nn.functional.scaled_dot_product_attention(
        *(t[:n].transpose(0, 1) for t, n in ((q, 2), (k, 3), (v, 3))), seen, scale=SCALE, enable_gqa=True
    )
    out = npu_fusion_attention(q, k, v, HEADS, "TND", **ends, **masked)[0]
    torch.testing.assert_close(out[:2].transpose(0, 1), first)
    masked["sparse_mode"] = 2
    with pytest.raises(ValueError, match=r"different lengths, \(2, 5\) and \(3, 5\)"):
        npu_fusion_attention(q, k, v, HEADS, "TND", **ends, **masked)
    assert npu_fusion_attention(q, k, v, HEADS, "TND", **ends)[0].shape == q.shape
    q, k, v = tensors()
    masked["sparse_mode"] = 3
    with pytest.raises(ValueError, match="different lengths, 2 and 5"):
        npu_fusion_attention(q[:, :, :2], k, v, HEADS, "BNSD", **masked)


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
    compiled = COMPILED["npu_rotary_position_embedding"]["npu_rotary_position_embedding"]
    torch.testing.assert_close(compiled(x, cos, sin, int(mode == "interleave")), expected)


@pytest.mark.parametrize("name", ["npu_apply_adam_w", "npu_apply_fused_adamw_v2"])
@pytest.mark.parametrize("maximize", [False, True])
def test_adamw(name, maximize):
    """Three steps of torch's."""
    rates = dict(lr=0.1, weight_decay=0.05, betas=(0.8, 0.9), eps=1e-3)
    theirs = torch.randn(7, generator=torch.Generator().manual_seed(1))
    mine, average, square = theirs.clone(), torch.zeros(7), torch.zeros(7)
    optimizer = torch.optim.AdamW([theirs], maximize=maximize, **rates)
    for step in range(1, 4):
        theirs.grad = torch.randn(7, generator=torch.Generator().manual_seed(10 + step))
        optimizer.step()
        if name == "npu_apply_adam_w":
            powers, out = [beta ** (step - 1) for beta in rates["betas"]], (mine, average, square)
            args = (*powers, 0.1, 0.05, *rates["betas"], 1e-3, theirs.grad, None, False, maximize)
            assert npu_apply_adam_w(*args, out=out) is out
        else:
            args = (mine, theirs.grad, average, square, torch.ones(1), torch.tensor(step), 0.1)
            COMPILED[name][name](*args, *rates["betas"], 0.05, 1e-3, False, maximize)
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("counts", [0, 1])
def test_grouped_matrix_products(counts):
    """Forward and gradients of MindSpeed's operator against autograd, with an expert without tokens."""
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(s, generator=generator, requires_grad=True) for s in ((6, 3), (3, 3, 4), (6, 4)))
    groups = torch.tensor([2, 0, 4] if counts else [2, 2, 6])
    expected = torch.cat([x[:2] @ w[0], x[2:] @ w[2]])
    dx, dw = torch.autograd.grad(expected, (x, w), dy)
    compiled = COMPILED["grouped_matmul_v2" if counts else "grouped_matmul"]
    with torch.no_grad():
        torch.testing.assert_close(compiled["npu_gmm"]([x], [w], [], groups, 0, counts), [expected])
        torch.testing.assert_close(
            compiled["npu_gmm_backward"]([dy], [x], [w], groups.tolist(), counts), ([dx], [dw], [])
        )
        assert torch.equal(compiled["npu_gmm_backward_fusion"]([dy], [w], groups, counts)[0][0], dx)
        with pytest.raises(ValueError, match="bias"):
            compiled["npu_gmm"]([x], [w], [dy], groups, 0, counts)


def test_matrix_products_that_add_to_a_gradient():
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(s, generator=generator) for s in ((6, 3), (6, 4)))
    grad = torch.ones(4, 3)
    COMPILED["npu_matmul_add_fp32"]["npu_matmul_add_fp32"](dy, x, grad)
    torch.testing.assert_close(grad, 1 + dy.t() @ x)
    grad = torch.ones(2 * 3, 4)
    COMPILED["npu_groupmatmul_add_fp32"]["npu_groupmatmul_add_fp32"](x, dy, torch.tensor([2, 6]), grad)
    torch.testing.assert_close(grad, 1 + torch.cat([x[:2].t() @ dy[:2], x[2:].t() @ dy[2:]]))


@pytest.mark.parametrize("owner", ["MindSpeedOpBuilder", "AtbOpBuilder"])
def test_what_mindspeed_would_compile_is_a_stand_in(owner):
    """Each of its two kinds of builders has a `load` of its own."""
    module = ModuleType("builder")
    cls = type(owner, (), {"name": "npu_matmul_add_fp32", "load": None})
    setattr(module, owner, cls)
    npu._replace_compiled(module)
    assert vars(cls().load()) == COMPILED["npu_matmul_add_fp32"]
    cls.name = "npu_unknown"
    with pytest.raises(NotImplementedError, match="npu_unknown"):
        cls().load()
