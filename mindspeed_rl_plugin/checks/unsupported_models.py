"""Families of models that upstream trains and RL does not support: the argument that identifies each family, and its
special parts.

They are refused by name before the validation of Megatron and MindSpeed, whose messages only name single flags. A test
compares the list in docs/bring-your-model.md with these tables.
"""

from __future__ import annotations

from typing import Any

from mindspeed_rl_plugin.config.flag import spelt

# Name of a family, and its parts that no supported family has.
_GEMMA = "norm weights stored minus one, norms after its blocks too, GELU, capped logits, sliding windows of attention"
_DELTA = ("Qwen3-Next", "gated delta nets instead of attention in most layers")
_PLM = ("PLM", "multi-latent attention without experts, squared ReLU; vLLM has no such model")
_SPARSE = ("DeepSeek-V3.2 or GLM-5", "an indexer that chooses the keys of each query")
# Module of MindSpeed-LLM's --spec (MODEL_FLAGS: argument and value) -> name of the family, and its special parts.
SPECS = {
    "gemma2_spec": ("Gemma 2", _GEMMA),
    "phi35_moe_spec": ("Phi-3.5-MoE", "LayerNorm, biases in attention, a router with noise"),
    "plm_spec": _PLM,
    "longcat_spec": ("LongCat-Flash", "two attentions in a layer, experts that do nothing"),
    "qwen3_next_spec": _DELTA,
    "deepseek4_spec": ("DeepSeek-V4", "compressed keys, several residual streams, experts chosen by token id"),
    "grok_spec": ("Grok 1", "four norms in a layer, GELU, scaled embeddings"),
    "hunyuan_spec": ("Hunyuan-Large", "keys that layers share"),
    "minicpm_spec": ("MiniCPM", "scaled embeddings, residuals and logits"),
    "mamba_spec": ("Mamba 2", "state space layers instead of attention"),
}
MODEL_FLAGS: dict[str, dict[Any, tuple[str, str]]] = {
    "enable_dsa_indexer": {True: _SPARSE},
    "experimental_attention_variant": {"dsa": _SPARSE, "gated_delta_net": _DELTA},
    "rope_scaling_type": {
        "longrope": ("Phi-3.5", "rotary embeddings whose frequencies depend on the length"),
        "plm": _PLM,
    },
}
GPT3 = ("GPT-3", "learned positions, LayerNorm and an MLP without gate")
_GPT3_FLAGS = {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "swiglu": False}


def unbuilt_family(args: Any) -> str | None:
    """A message if the model is of an unsupported family, else None. args: Megatron's, before or after validation."""
    spec = getattr(args, "spec", None) or ()
    for module, family in SPECS.items():
        if any(part.rpartition(".")[2] == module for part in spec):
            return _refusal(f"--spec {' '.join(spec)}", *family)
    for name, families in MODEL_FLAGS.items():
        value = getattr(args, name, None)
        if value in families:
            flag = spelt(name)
            return _refusal(flag if value is True else f"{flag} {value}", *families[value])
    if all(getattr(args, name, None) == value for name, value in _GPT3_FLAGS.items()):
        given = "without --position-embedding-type rope, --normalization RMSNorm and --swiglu"
        return _refusal(given, *GPT3)
    return None


def _refusal(given: str, name: str, has: str) -> str:
    return f"{given}: {name} is no family that RL knows ({has}); train one of docs/bring-your-model.md"
