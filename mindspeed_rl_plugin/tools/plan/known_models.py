"""Sizes of published models, as their config.json has them, for plans without a checkpoint."""

from __future__ import annotations

from mindspeed_rl_plugin.reshard.shape import ModelShape

# layers, hidden, heads, groups, head_dim, ffn, vocabulary
_DENSE = {
    "llama3.1-8b": ("llama", 32, 4096, 32, 8, 128, 14336, 128256, False),
    "llama3.1-70b": ("llama", 80, 8192, 64, 8, 128, 28672, 128256, False),
    "qwen2.5-0.5b": ("qwen2", 24, 896, 14, 2, 64, 4864, 151936, True),
    "qwen2.5-1.5b": ("qwen2", 28, 1536, 12, 2, 128, 8960, 151936, True),
    "qwen2.5-7b": ("qwen2", 28, 3584, 28, 4, 128, 18944, 152064, False),
    "qwen2.5-14b": ("qwen2", 48, 5120, 40, 8, 128, 13824, 152064, False),
    "qwen2.5-32b": ("qwen2", 64, 5120, 40, 8, 128, 27648, 152064, False),
    "qwen2.5-72b": ("qwen2", 80, 8192, 64, 8, 128, 29568, 152064, False),
    "qwen3-8b": ("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, False),
    "qwen3-32b": ("qwen3", 64, 5120, 64, 8, 128, 25600, 151936, False),
}
_QWEN3_MOE = {
    "qwen3-30b-a3b": (48, 2048, 32, 4, 128, 6144, 128, 768),
    "qwen3-235b-a22b": (94, 4096, 64, 4, 128, 12288, 128, 1536),
}
_DEEPSEEK = ("deepseek-v3", "deepseek-r1")


def known_models() -> tuple[str, ...]:
    """Names that `known_model` takes."""
    return (*_DENSE, *_QWEN3_MOE, *_DEEPSEEK)


def known_model(name: str, pad_to: int = 1) -> ModelShape:
    """Shape of a published model, Megatron's embedding padded to a multiple of `pad_to` rows.

    Raises ValueError listing the known names.
    """

    def padded(vocab: int) -> int:
        return -(-vocab // pad_to) * pad_to

    if name in _DENSE:
        family, layers, hidden, heads, groups, head, ffn, vocab, tied = _DENSE[name]
        return ModelShape(family, layers, hidden, heads, groups, head, ffn, vocab, padded(vocab), tied)
    if name in _QWEN3_MOE:
        *sizes, experts, width = _QWEN3_MOE[name]
        return ModelShape("qwen3_moe", *sizes, 151936, padded(151936), experts=experts, expert_ffn=width)
    if name in _DEEPSEEK:
        return ModelShape(
            "deepseek_v3",
            layers=61,
            hidden=7168,
            heads=128,
            groups=128,
            head_dim=192,
            ffn=18432,
            vocab=129280,
            padded_vocab=padded(129280),
            experts=256,
            expert_ffn=2048,
            shared_ffn=2048,
            dense_layers=(0, 1, 2),
            q_lora=1536,
            kv_lora=512,
            nope=128,
            rope=64,
            value=128,
        )
    raise ValueError(f"no published model {name!r} is known; known: {', '.join(known_models())}")
