"""The models of `doctor`: two layers each, random weights, as Hugging Face directories; and their log-probs by
transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mindspeed_rl_plugin.engine.hf_config import for_engine, write_config
from mindspeed_rl_plugin.layout.layout import ModelShape, canonical_tensors
from mindspeed_rl_plugin.tools.rehearse.shrink import VOCABULARY

CONTEXT = 256  # tokens
_SMALL_SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
)
_SMALL_SIZES |= dict(num_key_value_heads=2, max_position_embeddings=CONTEXT, rms_norm_eps=1e-6, rope_theta=10000.0)
_SMALL_SIZES |= dict(hidden_act="silu", tie_word_embeddings=False)
_SMALL_EXPERTS = dict(
    moe_intermediate_size=48, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1
)
_SMALL_EXPERTS |= dict(topk_group=1, first_k_dense_replace=1, norm_topk_prob=True)
_YARN = dict(rope_type="yarn", type="yarn", factor=4.0, original_max_position_embeddings=4096, rope_theta=10000.0)
_YARN |= dict(beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
# name -> config.json: a tied head and norms of queries and keys; experts with a router bias and partly rotated heads;
# latent attention with YaRN. vLLM on a CPU has latent attention only of these sizes.
SMALL_MODELS: dict[str, dict[str, Any]] = {
    "dense": _SMALL_SIZES | dict(model_type="qwen3", head_dim=32, tie_word_embeddings=True),
    "experts": _SMALL_SIZES
    | _SMALL_EXPERTS
    | dict(model_type="glm4_moe", head_dim=32, attention_bias=True, partial_rotary_factor=0.5)
    | dict(routed_scaling_factor=1.5, rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
    "latent attention": _SMALL_SIZES
    | _SMALL_EXPERTS
    | dict(model_type="kimi_k2", num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=512, routed_scaling_factor=2.5)
    | dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rope_parameters=_YARN),
}


def shape_of_model(name: str) -> ModelShape:
    return ModelShape.from_hf_config(SMALL_MODELS[name])


def config_of(name: str) -> dict[str, Any]:
    """config.json of a model, with the fields that are the same in all models of its family."""
    table = shape_of_model(name).table
    return {
        **table.hf.fixed,
        **table.hf.code,
        **table.hf.written,
        "architectures": [table.architecture],
        **SMALL_MODELS[name],
    }


def random_weights(name: str, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Hugging Face's name -> random tensor. The values are large enough that each tensor matters for the log-probs, and
    all tensors differ between two seeds."""
    generator, out = torch.Generator().manual_seed(seed), {}
    for tensor, canonical in canonical_tensors(shape_of_model(name)).items():
        noise = torch.randn(canonical.shape, generator=generator)
        scale = 0.25 if "embed" in tensor or "lm_head" in tensor else 0.125
        values = noise * scale if noise.dim() == 2 else 1 + 0.2 * noise if "norm" in tensor else 0.3 * noise
        out[tensor] = values.to(torch.float32 if canonical.wide else dtype)
    return out


def write_model(name: str, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write config.json and model.safetensors into an existing folder."""
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    write_config(config_of(name) | {"torch_dtype": dtype}, folder)
    save_file(dict(weights), folder / "model.safetensors", {"format": "pt"})


class Judge:
    """transformers' model of the files in a folder, in float32 on the host: neither the engine nor the trainer."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()

        config = for_engine(json.loads((folder / "config.json").read_text()))
        kind = "deepseek_v3" if config["model_type"] == "kimi_k2" else config["model_type"]
        read = AutoConfig.for_model(kind, **{k: v for k, v in config.items() if k not in ("model_type", "torch_dtype")})
        self.model = AutoModelForCausalLM.from_pretrained(folder, config=read, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], cache: Any = None) -> Tensor:
        """`[L, V]` float32. cache: of the tokens before, which is extended; None: there are none."""
        more = {} if cache is None else {"past_key_values": cache, "use_cache": True}
        return self.model(torch.tensor(tokens)[None], **more).logits[0].float()
