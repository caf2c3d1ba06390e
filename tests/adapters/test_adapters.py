"""Adapters on Megatron's layers: which matrices, gradients, merged weights, and what one module does."""

import json
from pathlib import Path

import pytest
import torch
from checkouts import checkouts
from torch.nn import Linear, Module

from mindspeed_rl_plugin.adapters.adapted_chunks import BaseModel, check_ran
from mindspeed_rl_plugin.adapters.adapters import AdaptedModule, Adapters, RankPlace, merge
from mindspeed_rl_plugin.adapters.targets import Adapted, adapted, matrices, target_names, unknown_targets
from mindspeed_rl_plugin.layout.families import FAMILIES
from mindspeed_rl_plugin.layout.layout import Segment, canonical_tensors
from mindspeed_rl_plugin.layout.parallel import Parallel
from mindspeed_rl_plugin.layout.shape import ModelShape
from mindspeed_rl_plugin.weights.live import sizes_of, stored_parameters

SP = "--sequence-parallel"
FULL = f"{SP} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
SELECTIVE = f"{SP} --recompute-granularity selective"
# Ranks -> cases; see adapter_ranks.py.
ORDINARY = {
    2: {
        "TP, SP, full recompute": dict(family="mistral", layout=dict(tp=2), flags=FULL),
        "experts over TP": dict(family="glm4_moe", layout=dict(tp=2, etp=2), flags=SELECTIVE),
        "experts over EP": dict(family="qwen2_moe", layout=dict(tp=2, ep=2, etp=1), flags=SP),
    }
}
SLOW = {
    1: {
        "dense, peft": dict(family="mistral", peft=True),
        "experts": dict(family="qwen2_moe"),
        "latent": dict(family="deepseek_v2"),
        "some": dict(family="qwen2_moe", targets=["linear_qkv", "experts.down_proj"]),
    },
    2: {
        "TP": dict(family="seed_oss", layout=dict(tp=2)),
        "PP, recompute by blocks": dict(family="mistral", layout=dict(pp=2), flags=BLOCK),
        "VPP": dict(family="mistral", layout=dict(pp=2, vpp=2), layers=4),
        "PP, experts": dict(family="qwen2_moe", layout=dict(pp=2)),
        "EP": dict(family="qwen2_moe", layout=dict(ep=2)),
        "ETP without TP": dict(family="qwen2_moe", layout=dict(etp=2)),
        "latent, EP": dict(family="deepseek_v2", layout=dict(ep=2)),
    },
    4: {
        "TP, PP": dict(family="mistral", layout=dict(tp=2, pp=2), flags=FULL),
        "TP, EP, ETP": dict(family="qwen2_moe", layout=dict(tp=2, ep=2, etp=2), flags=SP),
    },
}
# Of older Megatron, which has fewer models.
UPSTREAM = {name: ORDINARY[2][name] for name in ("TP, SP, full recompute",)}
UPSTREAM |= {
    "experts": dict(family="qwen3_moe", layout=dict(tp=2, ep=2, etp=1), flags=SP),
    "ETP": dict(family="qwen3_moe", layout=dict(etp=2)),
}
LATENT = 1e-6  # transformers' rotary angles of latent attention are float32


def check_gradients(torchrun, folder, ranks, cases, **more):
    done = torchrun(Path(__file__).with_name("adapter_ranks.py"), folder, json.dumps(cases), ranks=ranks, **more)
    lines = [line.split("\t") for line in done.stdout.splitlines() if line.count("\t") == 3]
    found = {name: (float(worst), what) for name, worst, what, _ in lines}
    assert [*found] == [*cases]
    for name, (worst, what) in found.items():
        assert worst < (LATENT if "latent" in name else 1e-10), (name, worst, what)


@pytest.mark.parametrize("ranks", ORDINARY)
def test_gradients_are_those_of_the_makers_model(torchrun, tmp_path, ranks):
    """By autograd on transformers' model with W + scale x B A, in float64; and without adapters it is the base."""
    check_gradients(torchrun, tmp_path, ranks, ORDINARY[ranks])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", SLOW)
def test_more_gradients(torchrun, tmp_path, ranks):
    check_gradients(torchrun, tmp_path, ranks, SLOW[ranks])


@pytest.mark.upstream
@pytest.mark.parametrize("checkout", checkouts(), ids=lambda p: p.name)
def test_gradients_in_other_megatron_versions(torchrun, tmp_path, checkout):
    check_gradients(torchrun, tmp_path, 2, UPSTREAM, PYTHONPATH=str(checkout), cold=True)


def model_shape(family, **more):
    given = dict(layers=2, hidden=32, heads=4, groups=2, head_dim=8, ffn=64, vocab=60, padded_vocab=64)
    if FAMILIES[family].experts:
        given |= dict(experts=4, expert_ffn=16, shared_ffn=16 if FAMILIES[family].shared_experts else 0)
    if FAMILIES[family].mla:
        given |= dict(groups=4, head_dim=12, q_lora=16, kv_lora=8, nope=8, rope=4, value=8)
    return ModelShape(family, **given | more)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_linear_layer_of_attention_and_mlp_has_an_adapter(family):
    """And no other tensor has one: over all ranks of a layout, each part once."""
    stacked = family == "bailing_moe"  # q, k and v are one matrix
    shape, parallel = model_shape(family), Parallel(8, tp=1 if stacked else 2, pp=2, ep=2)
    if stacked:
        with pytest.raises(ValueError, match="--rl-lora-targets without query_key_value"):
            adapted(shape, Parallel(2, tp=2), 0, ("local", "sequential"), ())
    wanted = {name: size for name, size in matrices(shape, ())}
    others = ("embed", "lm_head", "norm", "gate.weight", "shared_expert_gate", "bias")
    tensors = {n: t.shape for n, t in canonical_tensors(shape).items() if not any(word in n for word in others)}
    assert {f"{name}.weight": size for name, size in wanted.items()} == tensors
    held = {}
    for rank in range(8):
        for matrix in adapted(shape, parallel, rank, ("local", "sequential"), ()):
            for name in matrix.canonical:
                held.setdefault(name, set()).add((matrix.start, matrix.size))
    assert held.keys() == wanted.keys()
    for name, parts in held.items():
        ends = [(start, start + size) for start, size in sorted(parts)]
        assert ends[0][0] == 0 and all(one[1] == two[0] for one, two in zip(ends, ends[1:], strict=False)), name


@pytest.mark.parametrize(
    "targets, count",
    [(("q_proj", "v_proj"), 4), (("linear_qkv",), 6), (("experts.down_proj",), 8), (("mlp.experts.linear_fc1",), 16)],
)
def test_targets_are_ends_of_names(targets, count):
    shape = model_shape("qwen3_moe")
    assert len(list(matrices(shape, targets))) == count
    assert unknown_targets(shape, (*targets, "gate", "proj")) == ["gate", "proj"]
    assert target_names(shape) == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Small(Module):
    """A chunk with one linear module: gate above up."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.linear = Linear(6, 8, bias=False, dtype=dtype).requires_grad_(False)

    def forward(self, x):
        return self.linear(x)


def adapted_chunk(dtype=torch.float64, rank=2):
    chunk, place = Small(dtype), RankPlace(Parallel(1).coordinates(0), 1, False, None, None)
    parts = [
        Adapted(name, (), (4, 6), None, 0, 4, "linear", (("weight", (Segment(f"{name}.weight", 0, 0, 4, at),)),))
        for name, at in (("gate", 0), ("up", 4))
    ]
    one = AdaptedModule("linear", chunk.linear, parts, rank, 3.0, 1, place)
    chunk.add_module("rl_lora", Adapters(chunk, [one]))
    for factor in one.factors:
        factor.data.normal_()
    return chunk, one


def by_hand(one, base):
    (a, b), (c, d) = one.factors[:2], one.factors[2:]
    return base.double() + 3.0 * torch.cat([b[0].double() @ a[0].double(), d[0].double() @ c[0].double()])


def test_a_module_runs_with_merged_weights_and_its_parameter_stays():
    chunk, one = adapted_chunk()
    base, x = chunk.linear.weight.clone(), torch.randn(5, 6, dtype=torch.float64)
    want = by_hand(one, base)
    torch.testing.assert_close(chunk(x), x @ want.T, rtol=0, atol=1e-12)
    assert torch.equal(chunk.linear.weight, base) and "weight" not in vars(chunk.linear)
    asked, linear = [], chunk.linear.forward
    chunk.linear.forward = lambda x: asked.append(chunk.linear.weight.requires_grad) or linear(x)
    with torch.no_grad():
        chunk(x)
    assert asked == [True], "by it torch chooses how to multiply: as with gradients"
    with BaseModel().swapped_into([chunk]):
        assert torch.equal(chunk(x), x @ base.T)
    with pytest.raises(RuntimeError):
        chunk(x[:, :5])
    assert "weight" not in vars(chunk.linear), "an error leaves nothing"
    (chunk(x) ** 2).sum().backward()
    found = [factor.grad.clone() for factor in one.factors]
    for factor in one.factors:
        factor.grad = None
    ((x @ by_hand(one, base).T) ** 2).sum().backward()
    for factor, grad in zip(one.factors, found, strict=True):
        torch.testing.assert_close(factor.grad, grad, rtol=1e-12, atol=1e-12)


def test_autograd_keeps_no_merged_weight():
    """It merges again in the backward pass, from what the base is then."""
    chunk, one = adapted_chunk()
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    out = chunk(x)
    chunk.linear.weight.data.zero_()
    out.sum().backward()
    torch.testing.assert_close(x.grad, by_hand(one, chunk.linear.weight).sum(0).expand(5, 6), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_merge_is_rounded_once(dtype):
    """To the nearest number of the dtype: within one unit in the last place of a merge in float64."""
    chunk, one = adapted_chunk(dtype)
    ((name, found),) = ((name, merged()) for name, merged in chunk.rl_lora.merging())
    exact = by_hand(one, chunk.linear.weight)
    assert name == "linear.weight" and torch.equal(found, exact.to(dtype))


def test_stored_parameters_are_merged_when_they_are_read():
    """One at a time; their shapes cost nothing."""
    chunk, one = adapted_chunk()
    stored = stored_parameters([chunk])
    assert [*stored] == ["linear.weight"] and stored["linear.weight"] is stored["linear.weight"]
    assert stored.plain["linear.weight"].data_ptr() == chunk.linear.weight.data_ptr()
    assert sizes_of(stored) == {"linear.weight": (8, 6)}
    torch.testing.assert_close(stored["linear.weight"], by_hand(one, chunk.linear.weight), rtol=0, atol=1e-12)
    with BaseModel().swapped_into([chunk]):
        assert torch.equal(stored_parameters([chunk])["linear.weight"], chunk.linear.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_part_of_a_merge_is_the_merge_of_a_part(dtype):
    """So engines have the same weights whatever the layout."""
    weight, b, a = (
        torch.randn(96, 160, dtype=dtype),
        torch.randn(96, 16, dtype=dtype),
        torch.randn(16, 160, dtype=dtype),
    )
    whole = weight.clone()
    merge(whole, b, a, 0.5)
    for rows, columns in ((slice(0, 48), slice(None)), (slice(17, 96), slice(None)), (slice(None), slice(33, 140))):
        part = weight[rows, columns].clone()
        merge(part, b[rows], a[:, columns], 0.5)
        assert torch.equal(part, whole[rows, columns])
    assert not torch.equal(whole, weight)


def test_a_weight_that_is_read_twice_is_merged_once_in_the_backward():
    chunk, one = adapted_chunk()
    merges, merged = [], one.merged
    one.merged = lambda name: merges.append(name) or merged(name)
    chunk.linear.forward = lambda x: x @ chunk.linear.weight.T @ chunk.linear.weight
    chunk(torch.randn(5, 6, dtype=torch.float64, requires_grad=True)).sum().backward()
    assert len(merges) == 2


def test_a_module_that_does_not_run_is_named():
    chunk, _ = adapted_chunk()
    x = torch.randn(5, 6, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"1 linear modules did not run .*: linear \(forward\)"):
        (x @ chunk.linear.weight.T).sum(), check_ran([chunk])
    out = chunk(x)
    with pytest.raises(ValueError, match=r"linear \(backward\)"):
        check_ran([chunk])
    out.sum().backward()
    check_ran([chunk])
