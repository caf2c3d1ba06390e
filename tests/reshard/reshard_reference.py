"""What Megatron and vLLM store, and its inverse, by torch.chunk, cat and reshape; no table of the package is used."""

from __future__ import annotations

import torch
from torch import Tensor

LAYER = "model.layers.{}."


def random_weights(shape, seed: int = 0, dtype=torch.float32) -> dict[str, Tensor]:
    """A canonical model as transformers names it."""
    make = torch.Generator().manual_seed(seed)
    sizes = {"model.embed_tokens.weight": (shape.vocab, shape.hidden), "model.norm.weight": (shape.hidden,)}
    if not shape.tied:
        sizes["lm_head.weight"] = (shape.vocab, shape.hidden)
    q, k = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    for i in range(shape.layers):
        h = LAYER.format(i)
        sizes[h + "input_layernorm.weight"] = sizes[h + "post_attention_layernorm.weight"] = (shape.hidden,)
        for x, rows in (("q", q), ("k", k), ("v", k)):
            sizes[f"{h}self_attn.{x}_proj.weight"] = (rows, shape.hidden)
            if shape.family == "qwen2":
                sizes[f"{h}self_attn.{x}_proj.bias"] = (rows,)
        if shape.family == "qwen3":
            sizes[h + "self_attn.q_norm.weight"] = sizes[h + "self_attn.k_norm.weight"] = (shape.head_dim,)
        sizes[h + "self_attn.o_proj.weight"] = (shape.hidden, q)
        sizes[h + "mlp.gate_proj.weight"] = sizes[h + "mlp.up_proj.weight"] = (shape.ffn, shape.hidden)
        sizes[h + "mlp.down_proj.weight"] = (shape.hidden, shape.ffn)
    return {name: torch.randn(size, generator=make).to(dtype) * 0.05 for name, size in sizes.items()}


def pad_rows(t: Tensor, rows: int) -> Tensor:
    return torch.cat([t, t.new_zeros(rows - t.shape[0], *t.shape[1:])])


def fuse_groups(shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    g, rest = shape.groups, q.shape[1:]
    return torch.cat([x.view(g, -1, *rest) for x in (q, k, v)], dim=1).reshape(-1, *rest)


def split_groups(shape, fused: Tensor) -> list[Tensor]:
    per, rest = shape.heads // shape.groups * shape.head_dim, fused.shape[1:]
    grouped = fused.view(shape.groups, -1, *rest)
    return [x.reshape(-1, *rest) for x in grouped.split([per, shape.head_dim, shape.head_dim], dim=1)]


NAMES = {
    "local": ("input_layernorm.weight", "pre_mlp_layernorm.weight"),
    "te": ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"),
}


def megatron_weights(shape, parallel, rank: int, w: dict[str, Tensor], impl: str = "local") -> dict[str, Tensor]:
    """What a trainer rank stores of the canonical model w."""
    at, tp, out = parallel.coordinates(rank), parallel.tp, {}
    cut = lambda t, axis=0: t.chunk(tp, axis)[at.tp].clone()  # noqa: E731
    chunks = parallel.stage_layers(shape.layers, at.pp)
    for c, layers in enumerate(chunks):
        pre = f"chunk{c}." if parallel.vpp > 1 else ""
        if at.pp == 0 and c == 0:
            embedding = pad_rows(w["model.embed_tokens.weight"], shape.padded_vocab)
            out[pre + "embedding.word_embeddings.weight"] = cut(embedding)
        for i, layer in enumerate(layers):
            m, h = f"{pre}decoder.layers.{i}.", LAYER.format(layer)
            out[m + NAMES[impl][0]] = w[h + "input_layernorm.weight"].clone()
            out[m + NAMES[impl][1]] = w[h + "post_attention_layernorm.weight"].clone()
            for kind in ("weight", "bias") if shape.family == "qwen2" else ("weight",):
                qkv = (w[f"{h}self_attn.{x}_proj.{kind}"] for x in "qkv")
                out[f"{m}self_attention.linear_qkv.{kind}"] = cut(fuse_groups(shape, *qkv))
            if shape.family == "qwen3":
                for x in "qk":
                    out[f"{m}self_attention.{x}_layernorm.weight"] = w[f"{h}self_attn.{x}_norm.weight"].clone()
            out[m + "self_attention.linear_proj.weight"] = cut(w[h + "self_attn.o_proj.weight"], 1)
            gate_up = [cut(w[f"{h}mlp.{x}_proj.weight"]) for x in ("gate", "up")]
            out[m + "mlp.linear_fc1.weight"] = torch.cat(gate_up)
            out[m + "mlp.linear_fc2.weight"] = cut(w[h + "mlp.down_proj.weight"], 1)
        if at.pp == parallel.pp - 1 and c == len(chunks) - 1:
            out[pre + "decoder.final_layernorm.weight"] = w["model.norm.weight"].clone()
            if not shape.tied or parallel.pp > 1:
                head = w["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
                out[pre + "output_layer.weight"] = cut(pad_rows(head, shape.padded_vocab))
    return out


def assemble(shape, parallel, ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The canonical model from what all trainer ranks store (local names): the inverse of `megatron_weights`."""
    w = {}
    for pp in range(parallel.pp):
        peers = [None] * parallel.tp
        for rank, params in enumerate(ranks):
            at = parallel.coordinates(rank)
            if at.pp == pp and peers[at.tp] is None:
                peers[at.tp] = params
        joined = lambda name, axis=0, peers=peers: torch.cat([p[name] for p in peers], axis)  # noqa: E731
        for c, layers in enumerate(parallel.stage_layers(shape.layers, pp)):
            pre = f"chunk{c}." if parallel.vpp > 1 else ""
            for i, layer in enumerate(layers):
                m, h = f"{pre}decoder.layers.{i}.", LAYER.format(layer)
                w[h + "input_layernorm.weight"] = peers[0][m + "input_layernorm.weight"]
                w[h + "post_attention_layernorm.weight"] = peers[0][m + "pre_mlp_layernorm.weight"]
                for kind in ("weight", "bias") if shape.family == "qwen2" else ("weight",):
                    parts = split_groups(shape, joined(f"{m}self_attention.linear_qkv.{kind}"))
                    w |= {f"{h}self_attn.{x}_proj.{kind}": t for x, t in zip("qkv", parts, strict=True)}
                if shape.family == "qwen3":
                    for x in "qk":
                        w[f"{h}self_attn.{x}_norm.weight"] = peers[0][f"{m}self_attention.{x}_layernorm.weight"]
                w[h + "self_attn.o_proj.weight"] = joined(m + "self_attention.linear_proj.weight", 1)
                halves = [p[m + "mlp.linear_fc1.weight"].chunk(2) for p in peers]
                for j, x in enumerate(("gate", "up")):
                    w[f"{h}mlp.{x}_proj.weight"] = torch.cat([half[j] for half in halves])
                w[h + "mlp.down_proj.weight"] = joined(m + "mlp.linear_fc2.weight", 1)
            for mine, name in (
                ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
                ("output_layer.weight", "lm_head.weight"),
            ):
                if pre + mine in peers[0] and not (shape.tied and name == "lm_head.weight"):
                    w[name] = joined(pre + mine)[: shape.vocab]
            if pre + "decoder.final_layernorm.weight" in peers[0]:
                w["model.norm.weight"] = peers[0][pre + "decoder.final_layernorm.weight"]
    return w


def engine_weights(shape, tp: int, rank: int, w: dict[str, Tensor], own_head: bool | None = None) -> dict[str, Tensor]:
    """What a vLLM rank stores of the canonical model w; rows of vocabulary padding are zero."""
    cut = lambda t, axis=0: t.chunk(tp, axis)[rank].clone()  # noqa: E731
    padded = -(-shape.vocab // 64) * 64
    embed = w["model.embed_tokens.weight"]
    out = {"model.embed_tokens.weight": cut(pad_rows(embed, padded))}
    out["model.norm.weight"] = w["model.norm.weight"].clone()
    if own_head if own_head is not None else not shape.tied:
        out["lm_head.weight"] = cut(pad_rows(embed if shape.tied else w["lm_head.weight"], padded))

    def heads(t: Tensor) -> Tensor:
        """The key or value heads of this rank: one each where there are more ranks than heads."""
        per_head = t.view(shape.groups, shape.head_dim, *t.shape[1:])
        if tp > shape.groups:
            return per_head[rank * shape.groups // tp].clone()
        return cut(t)

    for i in range(shape.layers):
        h = LAYER.format(i)
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            out[h + name] = w[h + name].clone()
        for kind in ("weight", "bias") if shape.family == "qwen2" else ("weight",):
            q, k, v = (w[f"{h}self_attn.{x}_proj.{kind}"] for x in "qkv")
            out[f"{h}self_attn.qkv_proj.{kind}"] = torch.cat([cut(q), heads(k), heads(v)])
        if shape.family == "qwen3":
            for x in "qk":
                out[f"{h}self_attn.{x}_norm.weight"] = w[f"{h}self_attn.{x}_norm.weight"].clone()
        out[h + "self_attn.o_proj.weight"] = cut(w[h + "self_attn.o_proj.weight"], 1)
        out[h + "mlp.gate_up_proj.weight"] = torch.cat([cut(w[f"{h}mlp.{x}_proj.weight"]) for x in ("gate", "up")])
        out[h + "mlp.down_proj.weight"] = cut(w[h + "mlp.down_proj.weight"], 1)
    return out


def deliver(plan, source, destination) -> None:
    """Carry a plan out in one process; source and destination: rank -> name -> tensor."""
    for rank, piece in plan.copies:
        _give(piece, source[rank], destination[rank])
    for move in plan.moves:
        _give(move.piece, source[move.source], destination[move.destination])


def _give(piece, source, destination) -> None:
    piece.inside(destination, piece.destination).copy_(piece.inside(source, piece.source))
