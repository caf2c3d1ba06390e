"""Trees of rows that share prefixes: their plan, their attention by each kernel, and steps of real Megatron."""

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkouts import checkouts
from hypothesis import example, given
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams

from mindspeed_rl_plugin.forward import layer_hooks, tree_kernels
from mindspeed_rl_plugin.forward.carried import Carried
from mindspeed_rl_plugin.forward.tree import Branches, plan_tree
from mindspeed_rl_plugin.host.npu_ops import npu_fusion_attention
from mindspeed_rl_plugin.rows import Ragged

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=7)


def planned(rows, multiple=1):
    tokens = Ragged.from_rows([torch.tensor(row, dtype=torch.int32) for row in rows])
    length = -(-max(len(tokens.values), 1) // multiple) * multiple
    return plan_tree(tokens, length, multiple), length


@given(ROWS, st.sampled_from([1, 2, 4]))
@example([[1, 2, 0], [1, 2, 0], [1, 2], [1, 2, 0, 0]], 4)  # a copy, and rows that begin others
@example([[0, 1], [1], [2, 2]], 2)  # nothing in common
@example([[], [300, 1], [2, 1], [2]], 1)  # numbers sort as numbers
def test_each_row_is_in_the_tree_and_sees_itself_alone(rows, multiple):
    tree, length = planned(rows, multiple)
    prefixes = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    if tree is None:
        assert len(prefixes) == sum(map(len, rows))
        return
    branches = Carried.decoded(Carried(tree.branches).encoded()).branches
    total, ends = tree.tokens.shape[1], branches.keys.tolist()
    assert total % multiple == 0 and len(prefixes) <= total < len(prefixes) + 2 * multiple
    seen = {}
    for query, queries, key, keys in zip(
        branches.queries.tolist(), branches.query_lengths, ends, branches.key_lengths, strict=True
    ):
        path = branches.kv_index[key - keys : key].tolist()
        assert path[keys - queries :] == list(range(query - queries, query))
        seen |= {place: path[: keys - queries + i + 1] for i, place in enumerate(path[keys - queries :])}
    assert sorted(seen) == list(range(total))
    padding = [0] * (length - sum(map(len, rows)))
    start = 0
    for row in [*rows, padding]:
        places = tree.at[start : start + len(row)].tolist()
        assert tree.tokens[0, places].tolist() == row
        assert tree.position_ids[0, places].tolist() == branches.positions[places].tolist() == list(range(len(row)))
        assert all(seen[place] == places[: i + 1] for i, place in enumerate(places))
        start += len(row)
    assert torch.equal(branches.at, tree.at) and start == length
    assert torch.equal(tree.at[branches.first[tree.at]], tree.at)
    assert all(int(first) <= i for i, first in enumerate(branches.first[tree.at]))


class OwnAttention(torch.nn.Module):
    """Has what is read of Megatron's attention; with another mask it gives this back."""

    def __init__(self, coefficient: int | None = None) -> None:
        super().__init__()
        self.softmax_scale, self.scale_mask_softmax = 0.5 / (coefficient or 1), SimpleNamespace(scale=coefficient)

    def forward(self, query, key, value, attention_mask):
        return attention_mask


class EngineAttention(OwnAttention):
    """TransformerEngine's THD behind Megatron's TEDotProductAttention: of its types of causal masks one aligns at the
    bottom right."""

    def forward(self, query, key, value, attention_mask, attn_mask_type, attention_bias=None, packed_seq_params=None):
        assert attention_mask is None and isinstance(packed_seq_params, PackedSeqParams)
        ends, lengths = [], []
        for name in ("q", "kv"):
            cumulative = getattr(packed_seq_params, f"cu_seqlens_{name}")
            assert cumulative.dtype == torch.int32 and cumulative[0] == 0
            assert cumulative.diff().max() == getattr(packed_seq_params, f"max_seqlen_{name}")
            ends.append(cumulative[1:])
            lengths.append(cumulative.diff().tolist())
        assert packed_seq_params.qkv_format == "thd" and (ends[0][-1], ends[1][-1]) == (len(query), len(key))
        bottom = {"padding_causal_bottom_right": True, "padding_causal": False}[attn_mask_type.name]
        outputs = []
        for q, k, v in zip(query.split(lengths[0]), key.split(lengths[1]), value.split(lengths[1]), strict=True):
            seen = torch.ones(len(q), len(k)).bool().tril(len(k) - len(q) if bottom else 0)
            parts = (t.transpose(0, 1) for t in (q, k, v))
            scaled = {"attn_mask": seen, "scale": self.softmax_scale, "enable_gqa": True}
            outputs.append(torch.nn.functional.scaled_dot_product_attention(*parts, **scaled).transpose(0, 1))
        return torch.cat(outputs).flatten(1)


DEEP = [[5, 6, 7, 8], [5, 6, 7, 1, 1], [5, 6, 7, 1, 2, 3], [5, 6], [5, 4, 4], [5, 4, 4, 9], [2]]
KERNELS = {"torch": tree_kernels.by_torch, "engine": tree_kernels.by_transformer_engine, "npu": tree_kernels.by_npu}


@pytest.mark.parametrize("rows", [DEEP, [[1, 2], [3, 4, 5], [6]]], ids=["deep", "apart"])
@pytest.mark.parametrize(
    ("kernel", "groups", "width", "coefficient"),
    [
        ("torch", 4, 8, None),
        ("torch", 2, 8, 3),
        *((name, *size, None) for name in KERNELS for size in ((2, 8), (4, 6))),
    ],
)
def test_attention_of_a_tree_is_that_of_each_row(monkeypatch, rows, kernel, groups, width, coefficient):
    """Against one softmax under the whole mask, in float64; twice, as a layer that runs again."""
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu_fusion_attention=npu_fusion_attention))
    tree, length = planned(rows, 4)
    ends = torch.tensor([len(row) for row in rows] + [length - sum(map(len, rows))]).cumsum(0)
    branches = tree.branches if tree else Branches(ends, ends)
    total, layer = int(branches.queries[-1]), torch.nn.Module()
    layer.self_attention = torch.nn.Module()
    layer.self_attention.core_attention = attention = (
        EngineAttention() if kernel == "engine" else OwnAttention(coefficient)
    )
    made = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(total, 1, heads, size, generator=made, dtype=torch.float64, requires_grad=True)
        for heads, size in ((4, 8), (groups, 8), (groups, width))
    )
    seen, index = torch.zeros(total, total).bool(), branches.kv_index if tree else torch.arange(total)
    for i, path in enumerate(index.split(branches.key_lengths)):
        for ahead in range(branches.query_lengths[i]):
            seen[path[len(path) - 1 - ahead], path[: len(path) - ahead]] = True
    keys, values = (t[:, 0].repeat_interleave(4 // groups, 1) for t in (key, value))
    scores = 0.5 * torch.einsum("qhd,khd->hqk", query[:, 0], keys).masked_fill(~seen, -torch.inf)
    right = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).reshape(total, 1, -1)
    expected = torch.autograd.grad(right.square().sum(), (query, key, value))
    for _ in range(2):
        layer_hooks.install(layer, KERNELS[kernel])
        output = attention(query, key, value, Carried(branches).encoded())
        torch.testing.assert_close(output, right, rtol=0, atol=1e-14)
        found = torch.autograd.grad(output.square().sum(), (query, key, value))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    if kernel != "engine":
        assert attention(query, key, value, whole := torch.ones(1, 1, 16, 16)) is whole
        assert attention(query, key, value, None) is None


@pytest.mark.upstream
@pytest.mark.parametrize("checkout", checkouts(), ids=lambda path: path.name)
def test_megatrons_wrapper_of_transformer_engine_takes_these_arguments(checkout):
    tree = ast.parse((checkout / "megatron/core/extensions/transformer_engine.py").read_text())
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    methods = (node for node in classes["TEDotProductAttention"].body if isinstance(node, ast.FunctionDef))
    forward = next(method for method in methods if method.name == "forward")
    names = [argument.arg for argument in forward.args.args]
    assert names[1:5] == ["query", "key", "value", "attention_mask"]
    assert {"attn_mask_type", "packed_seq_params"} <= {*names}
    assert "attn_mask_type=attn_mask_type.name" in ast.unparse(forward)


FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SELECTIVE = dict(recompute_granularity="selective", recompute_modules=["core_attn", "moe"])
AUX = dict(moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.05)
BIAS = dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
GROUPS = dict(moe_router_num_groups=2, moe_router_group_topk=1)
ROUTES = {"routes": True}
SP = dict(sequence_parallel=True)
# gloo sends in the background
SENT = dict(overlap_p2p_comm=True, batch_p2p_comm=False, deallocate_pipeline_outputs=False)
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}


def case(kind, layout=None, chunks=1, **config):
    return {"kind": kind, "layout": layout or {}, "chunks": chunks, "config": config}


ORDINARY = {
    1: {
        "groups": case("dense", **FULL),
        "latent, experts": case("latent rope experts", **FULL),
        "experts, recomputed": case("experts", **AUX, **BIAS, **SELECTIVE),
        "bf16": case("latent yarn experts", **AUX) | {"dtype": "bfloat16"},
        "routes": case("experts", **FULL) | ROUTES,
    },
    2: {
        "TP": case("latent yarn experts", TP2, **SP, **AUX, **BIAS, **FULL),
        "routes": case("latent rope experts", TP2, **SP, **AUX, **BIAS, **GROUPS, **FULL) | ROUTES,
    },
}
SLOW = {
    1: {
        "experts": case("experts"),
        "experts, counted": case("experts", **BIAS),
        "latent": case("latent rope", **SELECTIVE),
        "MLP": case("dense", recompute_granularity="selective", recompute_modules=["mlp"]),
        "block": case("experts", **AUX, **FULL | {"recompute_method": "block"}),
        "latent, yarn": case("latent yarn experts", **AUX, **FULL),
        "bf16": case("dense") | {"dtype": "bfloat16"},
        "fp32": case("experts", **AUX) | {"dtype": "float32"},
        "routes, recomputed": case("experts", **BIAS, **SELECTIVE) | ROUTES,
        "routes, before the softmax": case("latent rope experts", moe_router_pre_softmax=True, **GROUPS) | ROUTES,
        "routes, losses": case("experts", **AUX, **BIAS, **FULL) | ROUTES,
        "routes, scaled": case("experts", moe_router_topk_scaling_factor=2.5) | ROUTES,
    },
    2: {
        "PP": case("dense", PP2),
        "VPP": case("latent rope experts", VPP2, 2, **FULL, **AUX, **SENT),
        "TP": case("dense", TP2, **SP),
        "TP, experts": case("experts", TP2, **SP, **AUX, **BIAS),
        "EP": case("latent yarn experts", EP2, **AUX, **SELECTIVE),
        "routes, PP": case("experts", PP2, **BIAS, **FULL) | ROUTES,
        "routes, VPP": case("latent rope experts", VPP2, 2, **AUX, **SELECTIVE, **SENT) | ROUTES,
        "routes, EP": case("experts", EP2, **AUX, **FULL) | ROUTES,
    },
}


LIMITS = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 0.1}


def check_steps(torchrun, ranks, cases, **more):
    done = torchrun(Path(__file__).with_name("tree_ranks.py"), json.dumps(cases), ranks=ranks, **more)
    found = dict(line.split("\t", 1) for line in done.stdout.splitlines() if "\t" in line)
    assert found.keys() == cases.keys()
    limits = {name: LIMITS[one.get("dtype", "float64")] for name, one in cases.items()}
    assert all(float(worst.split("\t")[0]) < limits[name] for name, worst in found.items()), found


@pytest.mark.parametrize("ranks", ORDINARY)
def test_a_step_on_trees_is_that_of_rows(torchrun, ranks):
    """In float64: loss, log-probs, counts and every gradient; before the update the same log-probs, bit for bit."""
    check_steps(torchrun, ranks, ORDINARY[ranks])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", SLOW)
def test_more_steps_on_trees(torchrun, ranks):
    check_steps(torchrun, ranks, SLOW[ranks])


@pytest.mark.upstream
@pytest.mark.slow
@pytest.mark.parametrize("checkout", checkouts(), ids=lambda path: path.name)
def test_steps_of_other_megatron_versions(torchrun, checkout):
    # Core 0.16 builds none without TransformerEngine.
    latent = "HAVE_TE = False" not in (checkout / "megatron/core/transformer/multi_latent_attention.py").read_text()
    for steps in (ORDINARY, SLOW):
        for ranks, cases in steps.items():
            chosen = {name: one for name, one in cases.items() if latent or "latent" not in one["kind"]}
            if chosen:
                check_steps(torchrun, ranks, chosen, PYTHONPATH=str(checkout), cold=True)
