"""What Megatron and vLLM store of a canonical model, by torch.chunk, cat and stack, without the package's layouts."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl_plugin.layout.layout import EngineParallel, canonical_tensors

LAYER = "model.layers.{}."
E_BIAS = "mlp.gate.e_score_correction_bias"
LATENT = ("deepseek_v2", "deepseek_v2_236b", "deepseek_v3", "kimi_k2")
# Names of single families -> those that the functions below know.
_ALIKE = {
    "bailing_moe": {
        "model.word_embeddings.": "model.embed_tokens.",
        ".attention.dense.": ".self_attn.o_proj.",
        ".attention.query_layernorm.": ".self_attn.q_norm.",
        ".attention.key_layernorm.": ".self_attn.k_norm.",
        ".mlp.gate.expert_bias": f".{E_BIAS}",
        ".attention.query_key_value.": ".self_attn.qkv_proj.",
    },
    "mixtral": {
        ".block_sparse_moe.": ".mlp.",
        ".w1.": ".gate_proj.",
        ".w3.": ".up_proj.",
        ".w2.": ".down_proj.",
    },
    "qwen2_moe": {".mlp.shared_expert.": ".mlp.shared_experts."},
}


def alike(shape, w: dict[str, Tensor], back: bool = False) -> dict[str, Tensor]:
    """Weights by the names that most families have; back: by the family's own."""
    words = _ALIKE.get(shape.family, {}).items()
    for own, usual in words:
        old, new = (usual, own) if back else (own, usual)
        w = {name.replace(old, new): t for name, t in w.items()}
    return w


def random_weights(shape, seed: int = 0, dtype=torch.float32) -> dict[str, Tensor]:
    """A canonical model. That its names and sizes are those of transformers: tests/engine/test_hf_config.py."""
    make = torch.Generator().manual_seed(seed)
    sizes = {name: tensor.shape for name, tensor in canonical_tensors(shape).items()}
    return {name: torch.randn(size, generator=make).to(dtype) * 0.05 for name, size in sizes.items()}


def pad_rows(t: Tensor, rows: int) -> Tensor:
    return torch.cat([t, t.new_zeros(rows - t.shape[0], *t.shape[1:])])


def fuse_groups(shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    g, rest = shape.groups, q.shape[1:]
    return torch.cat([x.view(g, -1, *rest) for x in (q, k, v)], dim=1).reshape(-1, *rest)


def megatron_weights(
    shape, parallel, rank: int, w: dict[str, Tensor], impl: str = "local", experts: str = "sequential"
) -> dict[str, Tensor]:
    """What a trainer rank stores of the canonical model w."""
    at, out, w = parallel.coordinates(rank), {}, _apart(shape, alike(shape, w))
    cut = lambda t, axis=0: t.chunk(parallel.tp, axis)[at.tp].clone()  # noqa: E731
    chunks = parallel.stage_layers(shape.layers, at.pp)
    for c, layers in enumerate(chunks):
        pre = f"chunk{c}." if parallel.vpp > 1 else ""
        if at.pp == 0 and c == 0:
            embedding = pad_rows(w["model.embed_tokens.weight"], shape.padded_vocab)
            out[pre + "embedding.word_embeddings.weight"] = cut(embedding)
        for layer, i in layers.items():
            own = layer_of(w, layer)
            latent = shape.family in LATENT
            stored = _latent(shape, own, cut, impl) if latent else _grouped(shape, own, cut, impl)
            after = own["post_attention_layernorm.weight"].clone()
            if "mlp.gate.weight" in own:
                stored["pre_mlp_layernorm.weight"] = after
                stored["mlp.router.weight"] = own["mlp.gate.weight"].clone()
                if E_BIAS in own:
                    stored["mlp.router.expert_bias"] = own[E_BIAS].clone()
                if "mlp.shared_expert_gate.weight" in own:
                    stored["mlp.shared_experts.gate_weight"] = own["mlp.shared_expert_gate.weight"].clone()
                if shape.shared_ffn:
                    stored |= _mlp("mlp.shared_experts.", own, "mlp.shared_experts.", cut)
                stored |= _experts(shape, parallel, at, own, experts)
            else:
                fused = impl.startswith("te")
                stored["mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight"] = after
                stored |= _mlp("mlp.", own, "mlp.", cut)
            out |= {f"{pre}decoder.layers.{i}.{name}": t for name, t in stored.items()}
        if at.pp == (0 if parallel.folded else parallel.pp - 1) and c == len(chunks) - 1:
            out[pre + "decoder.final_layernorm.weight"] = w["model.norm.weight"].clone()
            if not shape.tied or parallel.pp > 1:
                head = w["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
                out[pre + "output_layer.weight"] = cut(pad_rows(head, shape.padded_vocab))
    return out


def _apart(shape, w: dict[str, Tensor]) -> dict[str, Tensor]:
    """With queries, keys and values apart."""
    out = {}
    for name, t in w.items():
        if ".qkv_proj." not in name:
            out[name] = t
            continue
        q, k = shape.heads * shape.head_dim, shape.groups * shape.head_dim
        out |= {name.replace("qkv_", f"{x}_"): part for x, part in zip("qkv", t.split([q, k, k]), strict=True)}
    return out


def layer_of(w: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """A layer's tensors by their names within it."""
    prefix = LAYER.format(layer)
    return {name.removeprefix(prefix): t for name, t in w.items() if name.startswith(prefix)}


def _grouped(shape, own, cut, impl: str) -> dict[str, Tensor]:
    a = "self_attention."
    norm = a + "linear_qkv.layer_norm_weight" if impl.startswith("te") else "input_layernorm.weight"
    out = {norm: own["input_layernorm.weight"].clone()}
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in own:
            qkv = (own[f"self_attn.{x}_proj.{kind}"] for x in "qkv")
            out[f"{a}linear_qkv.{kind}"] = cut(fuse_groups(shape, *qkv))
    for x in "qk":
        if f"self_attn.{x}_norm.weight" in own:
            out[f"{a}{x}_layernorm.weight"] = own[f"self_attn.{x}_norm.weight"].clone()
    return out | {a + "linear_proj.weight": cut(own["self_attn.o_proj.weight"], 1)}


def _latent(shape, own, cut, impl: str) -> dict[str, Tensor]:
    a, get = "self_attention.", lambda name: own[f"self_attn.{name}.weight"].clone()
    out = {
        "input_layernorm.weight": own["input_layernorm.weight"].clone(),
        a + "linear_proj.weight": cut(get("o_proj"), 1),
    }
    compressed = ("q", "kv") if shape.q_lora else ("kv",)
    for x in compressed:
        fused = impl.startswith("te")
        norm = f"{a}linear_{x}_up_proj.layer_norm_weight" if fused else f"{a}{x}_layernorm.weight"
        out[norm] = get(f"{x}_a_layernorm")
        if impl != "mindspeed_split":
            out[f"{a}linear_{x}_up_proj.weight"] = cut(get(f"{x}_b_proj"))
            continue
        # --mla-mm-split, each head's rows apart: view, split, flatten, as MindSpeed-LLM's convert_hf2mg.py does.
        names, last = {"q": ("qk_nope", "qk_rope"), "kv": ("kv_nope", "v")}[x], {"q": shape.rope, "kv": shape.value}[x]
        up = get(f"{x}_b_proj").view(shape.heads, shape.nope + last, -1)
        for name, part in zip(names, up.split([shape.nope, last], 1), strict=True):
            out[f"{a}linear_{name}.weight"] = cut(part.flatten(0, 1))
    down = {x: get(n) for x, n in (("q", "q_a_proj"), ("kv", "kv_a_proj_with_mqa")) if x in compressed}
    whole_query = {} if shape.q_lora else {"q": get("q_proj")}
    if impl.startswith("mindspeed"):
        return out | {a + "linear_qkv.weight": torch.cat([*whole_query.values(), *down.values()])}
    out |= {f"{a}linear_{x}_proj.weight": cut(t) for x, t in whole_query.items()}
    whole = impl == "te"
    return out | {f"{a}linear_{x}_down_proj.weight": t if whole else cut(t) for x, t in down.items()}


def _mlp(name: str, own, canonical: str, cut) -> dict[str, Tensor]:
    gate_up = [cut(own[f"{canonical}{x}_proj.weight"]) for x in ("gate", "up")]
    return {
        name + "linear_fc1.weight": torch.cat(gate_up),
        name + "linear_fc2.weight": cut(own[canonical + "down_proj.weight"], 1),
    }


def _experts(shape, parallel, at, own, kind: str) -> dict[str, Tensor]:
    cut = lambda t, axis=0: t.chunk(parallel.expert_tp, axis)[at.etp].clone()  # noqa: E731
    count = shape.experts // parallel.ep
    mine = [_mlp("", own, f"mlp.experts.{at.ep * count + j}.", cut) for j in range(count)]
    e = "mlp.experts."
    if kind == "sequential":
        return {f"{e}local_experts.{j}.{name}": t for j, m in enumerate(mine) for name, t in m.items()}
    if kind == "te_grouped":
        return {f"{e}{name}{j}": t for j, m in enumerate(mine) for name, t in m.items()}
    # GroupedMLP.forward: weight1.view(experts, H, -1), weight2.view(experts, -1, H), inputs from the left
    first = torch.stack([m["linear_fc1.weight"].t() for m in mine])
    second = torch.stack([m["linear_fc2.weight"].t() for m in mine])
    return {e + "weight1": first.reshape(shape.hidden, -1), e + "weight2": second.reshape(-1, shape.hidden)}


def engine_weights(shape, engine: EngineParallel, rank: int, w: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a vLLM rank stores of the canonical model w; rows of vocabulary padding are zero."""
    tp_rank = rank % engine.tp
    cut = lambda t, axis=0: t.chunk(engine.tp, axis)[tp_rank].clone()  # noqa: E731
    w = _apart(shape, alike(shape, w))
    padded, embed = -(-shape.vocab // 64) * 64, w["model.embed_tokens.weight"]
    out = {"model.embed_tokens.weight": cut(pad_rows(embed, padded))}
    out["model.norm.weight"] = w["model.norm.weight"].clone()
    if engine.own_head or not shape.tied:
        out["lm_head.weight"] = cut(pad_rows(embed if shape.tied else w["lm_head.weight"], padded))
    for i in range(shape.layers):
        own = layer_of(w, i)
        whole = ("mlp.gate.", "mlp.shared_expert_gate.")
        stored = {n: own[n].clone() for n in own if "norm" in n or n.startswith(whole)}
        stored["self_attn.o_proj.weight"] = cut(own["self_attn.o_proj.weight"], 1)
        attention = _engine_latent if shape.family in LATENT else _engine_grouped
        stored |= attention(shape, engine, tp_rank, own, cut)
        for where in ("mlp.", "mlp.shared_experts."):
            if where + "gate_proj.weight" in own:
                share = (lambda t, axis=0: t) if engine.whole_shared and "shared" in where else cut
                halves = [share(own[f"{where}{x}_proj.weight"]) for x in ("gate", "up")]
                stored[where + "gate_up_proj.weight"] = torch.cat(halves)
                stored[where + "down_proj.weight"] = share(own[where + "down_proj.weight"], 1).clone()
        if "mlp.gate.weight" in own:
            stored |= _engine_experts(shape, engine, rank, own, cut)
        out |= {LAYER.format(i) + name: t for name, t in stored.items()}
    return alike(shape, out, back=True)


def _engine_latent(shape, engine, tp_rank: int, own, cut) -> dict[str, Tensor]:
    if not shape.q_lora:
        whole = "self_attn.kv_a_proj_with_mqa.weight"
        cuts = [f"self_attn.{x}_proj.weight" for x in ("q", "kv_b")]
        return {whole: own[whole].clone()} | {name: cut(own[name]) for name in cuts}
    down = [f"self_attn.{x}.weight" for x in ("q_a_proj", "kv_a_proj_with_mqa")]
    if engine.fused_down:
        stored = {"self_attn.fused_qkv_a_proj.weight": torch.cat([own[n] for n in down])}
    else:
        stored = {n: own[n].clone() for n in down}
    up = [f"self_attn.{x}_b_proj.weight" for x in ("q", "kv")]
    return stored | {name: cut(own[name]) for name in up}


def _engine_grouped(shape, engine, tp_rank: int, own, cut) -> dict[str, Tensor]:
    def heads(t: Tensor) -> Tensor:
        """The key or value heads of this rank: one each where there are more ranks than heads."""
        if engine.tp > shape.groups:
            return t.view(shape.groups, shape.head_dim, *t.shape[1:])[tp_rank * shape.groups // engine.tp].clone()
        return cut(t)

    out = {}
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in own:
            q, k, v = (own[f"self_attn.{x}_proj.{kind}"] for x in "qkv")
            out[f"self_attn.qkv_proj.{kind}"] = torch.cat([cut(q), heads(k), heads(v)])
    return out


def _engine_experts(shape, engine, rank: int, own, cut) -> dict[str, Tensor]:
    mine = torch.arange(shape.experts).tensor_split(engine.ep)[rank].tolist() if engine.ep > 1 else range(shape.experts)
    share = (lambda t, axis=0: t) if engine.ep > 1 else cut
    first, second = [], []
    for e in mine:
        gate, up, down = (own[f"mlp.experts.{e}.{x}_proj.weight"] for x in ("gate", "up", "down"))
        first.append(torch.cat([share(gate), share(up)]))
        second.append(share(down, 1))
    w13, w2 = torch.stack(first), torch.stack(second)
    if engine.transposed:
        w13, w2 = w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
    prefix = "mlp.experts.routed_experts." if engine.nested else "mlp.experts."
    return {prefix + "w13_weight": w13, prefix + "w2_weight": w2}


def collected(
    stored: Mapping[str, Tensor],
    stored_by: Callable[[int, dict[str, Tensor]], dict[str, Tensor]],
    like: dict[str, Tensor],
) -> dict[str, Tensor]:
    """The canonical model, with the names of `like`, out of what all ranks have stored: each number goes where its own
    index says. stored_by: (rank, canonical model) -> what the rank stores of it. Collective."""
    everywhere = [None] * dist.get_world_size()
    # Copies: a view of a buffer is pickled with all of the buffer.
    dist.all_gather_object(everywhere, {name: t.clone() for name, t in stored.items()})
    total, index = 1, {}  # 0: of padding
    for name, t in like.items():
        index[name] = torch.arange(total, total + t.numel(), dtype=torch.float64).view(t.shape)
        total += t.numel()
    flat = torch.full((total,), torch.nan)
    for rank, mine in enumerate(everywhere):
        for name, where in stored_by(rank, index).items():
            flat[where.long().flatten()] = mine[name].flatten().float()
    assert not flat[1:].isnan().any()
    return {name: flat[i.long()] for name, i in index.items()}
