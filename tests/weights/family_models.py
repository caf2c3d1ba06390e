"""Small random models of the families, as their makers publish them, and what gives their log-probs.

transformers' models, or where it has none a float64 forward pass of our own by the names in the files.
"""

import json
import math
import re

import torch
from family_configs import CONFIGS
from safetensors.torch import save_file

from mindspeed_rl_plugin.layout.layout import ModelShape, canonical_tensors
from mindspeed_rl_plugin.tools.convert.files import open_tensors

# How Megatron's own pretrain_gpt.py runs on a host, whatever the model.
HOST = (
    "--seq-length 32 --attention-dropout 0 --hidden-dropout 0 --transformer-impl local --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion "
    "--no-bias-dropout-fusion --attention-backend unfused"
)
SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
SIZES |= dict(max_position_embeddings=32, tie_word_embeddings=False, initializer_range=0.1, rms_norm_eps=1e-5)
# Whose log-probs are compared: the others are special cases of them, or are trained in tests/loop.
NAMES = "mistral seed_oss mixtral qwen2_moe glm4_moe glm4_moe_355b bailing_moe deepseek_v2 deepseek_v2-lite kimi_k2"
FAMILIES = {name: CONFIGS[name] for name in NAMES.split()}


def fill(live, layout, folder):
    """Copies the weights of the files to where the layout has them."""
    source = open_tensors(folder)
    for name, segments in layout.items():
        for s in segments:
            at = (slice(None),) * s.axis + (slice(s.start, s.stop),)
            s.view(live[name], s.start, s.size).copy_(source[s.name][at])


def random_model(family, folder, vocab):
    """A model as its makers would publish it; returns what gives log-probs `[L, V]` of tokens `[L]`."""
    config = dict(vocab_size=vocab, **SIZES | FAMILIES[family])
    family = re.sub("(-lite|_355b)$", "", family)
    if family == "bailing_moe":
        return random_ling(config, folder)
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = {"kimi_k2": "deepseek_v3"}.get(family, family)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).float().eval()
    with torch.no_grad():
        for name, t in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("bias", "gate.weight")):
                t.normal_(std=0.3)
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": family}))
    return transformers_logps(model)


def transformers_logps(model):
    """What gives log-probs `[L, V]` of tokens `[L]`."""

    def logps(tokens):
        with torch.no_grad():
            return model(tokens[None]).logits[0].double().log_softmax(-1)

    return logps


def random_ling(config, folder):
    """Ling's files, and their log-probs."""
    folder.mkdir()
    config |= {"model_type": "bailing_moe", "architectures": ["BailingMoeV2ForCausalLM"], "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {name: t.shape for name, t in canonical_tensors(ModelShape.from_hf_config(config)).items()}
    w = {name: torch.randn(size) * 0.1 + ("norm" in name) for name, size in shapes.items()}
    save_file(w, folder / "model.safetensors", {"format": "pt"})
    return ling_logps(config, w)


def ling_logps(config, w):
    """Ling's forward pass by the names in its files. Source: modeling_bailing_moe_v2.py of its published files."""
    w = {name: t.double() for name, t in w.items()}
    heads, groups, size = (config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    eps, k = config["rms_norm_eps"], config["num_experts_per_tok"]

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[name]

    def rotate(x):  # [L, heads, size]: the first half of a head
        dim = int(size * config["partial_rotary_factor"])
        inverse = config["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)
        angle = torch.outer(torch.arange(len(x)).double(), inverse).repeat(1, 2)[:, None]
        a, b = x[..., : dim // 2], x[..., dim // 2 : dim]
        turned = x[..., :dim] * angle.cos() + torch.cat([-b, a], -1) * angle.sin()
        return torch.cat([turned, x[..., dim:]], -1)

    def attention(x, at):
        q, key, v = (x @ w[f"{at}query_key_value.weight"].T).unflatten(1, (-1, size)).split((heads, groups, groups), 1)
        q, key = (rotate(norm(t, f"{at}{n}_layernorm.weight")) for t, n in ((q, "query"), (key, "key")))
        key, v = (t.repeat_interleave(heads // groups, 1) for t in (key, v))
        scores = torch.einsum("ihd,jhd->hij", q, key) / math.sqrt(size)
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
        return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1) @ w[f"{at}dense.weight"].T

    def mlp(x, at):
        gate, up, down = (w[f"{at}{n}_proj.weight"].T for n in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down

    def routed(x, at):
        scores = (x @ w[f"{at}gate.weight"].T).sigmoid()
        choice = (scores + w[f"{at}gate.expert_bias"]).view(len(x), config["n_group"], -1)
        groups = choice.topk(2, -1).values.sum(-1).topk(config["topk_group"], -1).indices
        masked = torch.full_like(choice, -math.inf).scatter(
            1,
            groups[..., None].expand(-1, -1, choice.shape[-1]),
            choice.gather(1, groups[..., None].expand(-1, -1, choice.shape[-1])),
        )
        chosen = masked.flatten(1).topk(k, -1).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * config["routed_scaling_factor"]
        out = mlp(x, f"{at}shared_experts.")
        for i, j in torch.cartesian_prod(torch.arange(len(x)), torch.arange(k)):
            out[i] += weights[i, j] * mlp(x[i], f"{at}experts.{chosen[i, j]}.")
        return out

    def logps(tokens):
        x = w["model.word_embeddings.weight"][tokens]
        for layer in range(config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            x = x + attention(norm(x, f"{at}input_layernorm.weight"), f"{at}attention.")
            feed = mlp if layer < config["first_k_dense_replace"] else routed
            x = x + feed(norm(x, f"{at}post_attention_layernorm.weight"), f"{at}mlp.")
        return (norm(x, "model.norm.weight") @ w["lm_head.weight"].T).log_softmax(-1)

    return logps
