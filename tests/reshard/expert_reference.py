"""What Megatron and vLLM store of models with experts or latent attention, by torch.chunk, cat and stack.

Layers only, beside `reshard_reference`, which has attention over groups, embedding and head. No table of the package
is used.
"""

from __future__ import annotations

import torch
from reshard_reference import fuse_groups, pad_rows
from torch import Tensor

LAYER = "model.layers.{}."
E_BIAS = "mlp.gate.e_score_correction_bias"


def random_weights(shape, seed: int = 0) -> dict[str, Tensor]:
    """A canonical model as transformers saves it."""
    make = torch.Generator().manual_seed(seed)
    s, hidden = shape, shape.hidden
    sizes = {"model.embed_tokens.weight": (s.vocab, hidden), "model.norm.weight": (hidden,)}
    if not s.tied:
        sizes["lm_head.weight"] = (s.vocab, hidden)
    for i in range(s.layers):
        h = LAYER.format(i)
        mine = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        if s.family == "deepseek_v3":
            mine |= {
                "self_attn.q_a_proj.weight": (s.q_lora, hidden),
                "self_attn.q_a_layernorm.weight": (s.q_lora,),
                "self_attn.q_b_proj.weight": (s.heads * (s.nope + s.rope), s.q_lora),
                "self_attn.kv_a_proj_with_mqa.weight": (s.kv_lora + s.rope, hidden),
                "self_attn.kv_a_layernorm.weight": (s.kv_lora,),
                "self_attn.kv_b_proj.weight": (s.heads * (s.nope + s.value), s.kv_lora),
                "self_attn.o_proj.weight": (hidden, s.heads * s.value),
            }
        else:
            mine |= {f"self_attn.{x}_proj.weight": (s.groups * s.head_dim, hidden) for x in "kv"}
            mine |= {f"self_attn.{x}_norm.weight": (s.head_dim,) for x in "qk"}
            mine["self_attn.q_proj.weight"] = (s.heads * s.head_dim, hidden)
            mine["self_attn.o_proj.weight"] = (hidden, s.heads * s.head_dim)
        widths = {"mlp.": s.ffn}
        if i not in s.dense_layers:
            widths = {f"mlp.experts.{e}.": s.expert_ffn for e in range(s.experts)}
            mine["mlp.gate.weight"] = (s.experts, hidden)
            if s.family == "deepseek_v3":
                mine[E_BIAS] = (s.experts,)
                widths["mlp.shared_experts."] = s.shared_ffn
        for where, width in widths.items():
            mine |= {f"{where}{x}_proj.weight": (width, hidden) for x in ("gate", "up")}
            mine[f"{where}down_proj.weight"] = (hidden, width)
        sizes |= {h + name: size for name, size in mine.items()}
    return {name: torch.randn(size, generator=make) for name, size in sizes.items()}


def megatron_weights(shape, parallel, rank: int, w, impl: str, experts: str) -> dict[str, Tensor]:
    """What a trainer rank stores of the canonical model w."""
    at, out = parallel.coordinates(rank), {}
    tp = lambda t, axis=0: t.chunk(parallel.tp, axis)[at.tp].clone()  # noqa: E731
    te = impl.startswith("te")
    chunks = parallel.stage_layers(shape.layers, at.pp)
    for c, layers in enumerate(chunks):
        pre = f"chunk{c}." if parallel.vpp > 1 else ""
        if at.pp == 0 and c == 0:
            out[pre + "embedding.word_embeddings.weight"] = tp(
                pad_rows(w["model.embed_tokens.weight"], shape.padded_vocab)
            )
        for i, layer in enumerate(layers):
            own = {k.removeprefix(LAYER.format(layer)): t for k, t in w.items() if k.startswith(LAYER.format(layer))}
            stored = _latent(own, tp, impl) if shape.family == "deepseek_v3" else _grouped(shape, own, tp, te)
            after = own["post_attention_layernorm.weight"].clone()
            if layer in shape.dense_layers:
                stored["mlp.linear_fc1.layer_norm_weight" if te else "pre_mlp_layernorm.weight"] = after
                stored |= _mlp("mlp.", own, "mlp.", tp)
            else:
                stored["pre_mlp_layernorm.weight"] = after
                stored["mlp.router.weight"] = own["mlp.gate.weight"].clone()
                if shape.family == "deepseek_v3":
                    stored["mlp.router.expert_bias"] = own[E_BIAS].clone()
                    stored |= _mlp("mlp.shared_experts.", own, "mlp.shared_experts.", tp)
                stored |= _experts(shape, parallel, at, own, experts)
            out |= {f"{pre}decoder.layers.{i}.{name}": t for name, t in stored.items()}
        if at.pp == parallel.pp - 1 and c == len(chunks) - 1:
            out[pre + "decoder.final_layernorm.weight"] = w["model.norm.weight"].clone()
            if not shape.tied or parallel.pp > 1:
                head = w["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
                out[pre + "output_layer.weight"] = tp(pad_rows(head, shape.padded_vocab))
    return out


def _grouped(shape, own, tp, te: bool) -> dict[str, Tensor]:
    a = "self_attention."
    return {
        a + "linear_qkv.layer_norm_weight" if te else "input_layernorm.weight": own["input_layernorm.weight"].clone(),
        a + "linear_qkv.weight": tp(fuse_groups(shape, *(own[f"self_attn.{x}_proj.weight"] for x in "qkv"))),
        a + "linear_proj.weight": tp(own["self_attn.o_proj.weight"], 1),
        a + "q_layernorm.weight": own["self_attn.q_norm.weight"].clone(),
        a + "k_layernorm.weight": own["self_attn.k_norm.weight"].clone(),
    }


def _latent(own, tp, impl: str) -> dict[str, Tensor]:
    a, get = "self_attention.", lambda name: own[f"self_attn.{name}.weight"].clone()
    out = {
        "input_layernorm.weight": own["input_layernorm.weight"].clone(),
        a + "linear_proj.weight": tp(get("o_proj"), 1),
    }
    for x in ("q", "kv"):
        fused = impl.startswith("te")
        norm = f"{a}linear_{x}_up_proj.layer_norm_weight" if fused else f"{a}{x}_layernorm.weight"
        out[norm] = get(f"{x}_a_layernorm")
        out[f"{a}linear_{x}_up_proj.weight"] = tp(get(f"{x}_b_proj"))
    down = get("q_a_proj"), get("kv_a_proj_with_mqa")
    if impl == "mindspeed":
        return out | {a + "linear_qkv.weight": torch.cat(down)}
    whole = impl == "te"
    return out | {
        f"{a}linear_{x}_down_proj.weight": t if whole else tp(t) for x, t in zip(("q", "kv"), down, strict=True)
    }


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


def engine_weights(shape, engine, rank: int, w) -> dict[str, Tensor]:
    """What a vLLM rank stores of the canonical model w; rows of vocabulary padding are zero."""
    tp_rank = rank % engine.tp
    cut = lambda t, axis=0: t.chunk(engine.tp, axis)[tp_rank].clone()  # noqa: E731
    padded = -(-shape.vocab // 64) * 64
    out = {"model.embed_tokens.weight": cut(pad_rows(w["model.embed_tokens.weight"], padded))}
    out["model.norm.weight"] = w["model.norm.weight"].clone()
    if not shape.tied:
        out["lm_head.weight"] = cut(pad_rows(w["lm_head.weight"], padded))
    for i in range(shape.layers):
        h = LAYER.format(i)
        own = {k.removeprefix(h): t for k, t in w.items() if k.startswith(h)}
        stored = {n: own[n].clone() for n in own if "norm" in n or n.startswith("mlp.gate.")}
        stored["self_attn.o_proj.weight"] = cut(own["self_attn.o_proj.weight"], 1)
        if shape.family == "deepseek_v3":
            down = [f"self_attn.{x}.weight" for x in ("q_a_proj", "kv_a_proj_with_mqa")]
            if engine.fused_down:
                stored["self_attn.fused_qkv_a_proj.weight"] = torch.cat([own[n] for n in down])
            else:
                stored |= {n: own[n].clone() for n in down}
            for x in ("q_b", "kv_b"):
                stored[f"self_attn.{x}_proj.weight"] = cut(own[f"self_attn.{x}_proj.weight"])
        else:
            q, k, v = (own[f"self_attn.{x}_proj.weight"] for x in "qkv")
            per_head = [t.view(shape.groups, shape.head_dim, -1) for t in (k, v)]
            if engine.tp > shape.groups:
                keys = [t[tp_rank * shape.groups // engine.tp] for t in per_head]
            else:
                keys = [cut(t) for t in (k, v)]
            stored["self_attn.qkv_proj.weight"] = torch.cat([cut(q), *keys])
        for where in ("mlp.", "mlp.shared_experts."):
            if where + "gate_proj.weight" in own:
                halves = [cut(own[f"{where}{x}_proj.weight"]) for x in ("gate", "up")]
                stored[where + "gate_up_proj.weight"] = torch.cat(halves)
                stored[where + "down_proj.weight"] = cut(own[where + "down_proj.weight"], 1)
        if i not in shape.dense_layers:
            stored |= _engine_experts(shape, engine, rank, own, cut)
        out |= {h + name: t for name, t in stored.items()}
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
