"""Sizes of published models, as their config.json has them, for plans without a checkpoint."""

from __future__ import annotations

_TIED = {"tied": True}
_QWEN3_MOE = {"experts": 128, "expert_ffn": 768}
_DEEPSEEK = {"experts": 256, "expert_ffn": 2048, "shared_ffn": 2048, "dense_layers": (0, 1, 2)}
_DEEPSEEK |= {"q_lora": 1536, "kv_lora": 512, "nope": 128, "rope": 64, "value": 128}
# family; layers, hidden, heads, groups, head_dim, ffn, vocabulary; more
MODELS = {
    "llama3.1-8b": ("llama", (32, 4096, 32, 8, 128, 14336, 128256), {}),
    "llama3.1-70b": ("llama", (80, 8192, 64, 8, 128, 28672, 128256), {}),
    "qwen2.5-0.5b": ("qwen2", (24, 896, 14, 2, 64, 4864, 151936), _TIED),
    "qwen2.5-1.5b": ("qwen2", (28, 1536, 12, 2, 128, 8960, 151936), _TIED),
    "qwen2.5-7b": ("qwen2", (28, 3584, 28, 4, 128, 18944, 152064), {}),
    "qwen2.5-14b": ("qwen2", (48, 5120, 40, 8, 128, 13824, 152064), {}),
    "qwen2.5-32b": ("qwen2", (64, 5120, 40, 8, 128, 27648, 152064), {}),
    "qwen2.5-72b": ("qwen2", (80, 8192, 64, 8, 128, 29568, 152064), {}),
    "qwen3-8b": ("qwen3", (36, 4096, 32, 8, 128, 12288, 151936), {}),
    "qwen3-32b": ("qwen3", (64, 5120, 64, 8, 128, 25600, 151936), {}),
    "qwen3-30b-a3b": ("qwen3_moe", (48, 2048, 32, 4, 128, 6144, 151936), _QWEN3_MOE),
    "qwen3-235b-a22b": ("qwen3_moe", (94, 4096, 64, 4, 128, 12288, 151936), _QWEN3_MOE | {"expert_ffn": 1536}),
    "deepseek-v3": ("deepseek_v3", (61, 7168, 128, 128, 192, 18432, 129280), _DEEPSEEK),
    "deepseek-r1": ("deepseek_v3", (61, 7168, 128, 128, 192, 18432, 129280), _DEEPSEEK),
}
