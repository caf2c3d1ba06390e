"""Rules for the sizes of an engine. Megatron's arguments are checked against them before a model is built."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.device.meters import host_total
from mindspeed_rl_plugin.host.engine_env import engines_share_experts
from mindspeed_rl_plugin.layout.families import GROUP_LIMITED
from mindspeed_rl_plugin.layout.shape import ModelShape

CPU_LOWEST_HEAD_DIM = 32
CPU_LATENT_SIZE = 576  # numbers per token: vllm/v1/attention/backends/mla/cpu_mla.py supports only this size


def engine_problems(
    shape: ModelShape, config: RLConfig, *, kind: str, world: int, max_positions: int, itemsize: int
) -> Iterator[str]:
    """One message for each problem that vLLM reports late, unclearly, or not at all.

    kind: "npu" | "cuda" | "cpu"; world: number of ranks of the job; max_positions: --max-position-embeddings; itemsize:
    bytes of one number in the KV cache.
    """
    tp, tokens = config.rollout.generate_tp, config.data.max_prompt_length + config.rollout.max_response_length
    if world % tp:
        yield f"--rl-generate-tp {tp} does not divide the world of {world} ranks"
    for size, flag in ((shape.heads, "--num-attention-heads"), (shape.ffn, "--ffn-hidden-size")):
        if size % tp:
            yield f"--rl-generate-tp {tp} does not divide {flag} {size}"
    yield from _expert_problems(shape, tp, config.rollout.generate_ep, world)
    if not shape.table.mla and shape.groups % tp and tp % shape.groups:
        yield f"--rl-generate-tp {tp} neither divides nor is a multiple of the {shape.groups} query groups"
    if tokens > max_positions:
        yield (
            f"prompt and response may have {tokens} tokens together, more than --max-position-embeddings "
            f"{max_positions}; lower --rl-max-prompt-length or --rl-max-response-length"
        )
    if kind == "npu" and shape.table.router.by_best and _ranked_by_sums():
        yield (
            f"--moe-router-load-balancing-type {GROUP_LIMITED} on NPUs: this vllm-ascend ranks a group of experts by "
            "the sum of its two best scores, the trainer by its best score; install vllm-ascend 0.11"
        )
    if kind == "cpu":
        yield from cpu_problems(shape)
        least = tokens * _token_bytes(shape, tp, itemsize)
        if least > int(config.rollout.kv_cache_gb * 2**30):
            yield (
                f"one response of {tokens} tokens with its prompt needs {least / 2**30:.3g} GiB of KV cache, more "
                f"than --rl-kv-cache-gb {config.rollout.kv_cache_gb:.3g}; raise it or shorten the responses"
            )


def kv_cache_problems(gb: float, ranks: int) -> Iterator[str]:
    """A message if the KV caches, `gb` GiB for each of the `ranks` engine ranks of this machine, are larger than its
    memory. No message on a machine with an accelerator."""
    total = host_total() / 2**30
    if get_device().is_cpu and gb * ranks > total:
        yield (
            f"--rl-kv-cache-gb {gb:g} x {ranks} ranks = {gb * ranks:g} GiB, but this machine has {total:.0f} GiB of "
            "memory; lower it (for an engine that joins: --kv-cache-gb)"
        )


def _ranked_by_sums() -> bool:
    """Whether the installed vllm-ascend always ranks groups of experts by the sum of two scores (0.18 or newer)."""
    try:
        files = importlib.metadata.files("vllm-ascend") or ()
    except importlib.metadata.PackageNotFoundError:
        return False
    return "vllm_ascend/ops/fused_moe/experts_selector.py" in map(str, files)


def _token_bytes(shape: ModelShape, tp: int, itemsize: int) -> int:
    """Bytes of keys and values of one token on one rank. Each rank has all latent vectors, and at least one query
    group."""
    heads = max(1, shape.groups // tp)
    return shape.layers * itemsize * (shape.kv_lora + shape.rope or 2 * heads * shape.head_dim)


def _expert_problems(shape: ModelShape, tp: int, ep: int, world: int) -> Iterator[str]:
    flag, experts = f"--rl-generate-ep {ep}", shape.experts
    if ep > 1 and not experts:
        yield f"{flag}: the model has no experts to spread; leave it out"
    elif ep > 1 and ep % tp:
        yield (
            f"{flag} with --rl-generate-tp {tp}: experts are spread over all ranks of one or several engines; give 1 or"
            f" a multiple of {tp}"
        )
    elif ep > experts > 0:
        yield f"{flag}: there are only {experts} experts"
    elif ep > tp and experts % ep:
        yield f"{flag} does not divide the {experts} experts, as it must if several engines share experts"
    elif ep > tp and world % ep:
        yield f"{flag} does not divide the world of {world} ranks"
    elif ep > tp and not engines_share_experts():
        yield f"{flag}: engines of this vLLM cannot share experts (from 0.11 on they can); give {tp}, or 1"
    elif ep == 1 and shape.expert_ffn % tp:
        yield f"--rl-generate-tp {tp} does not divide --moe-ffn-hidden-size {shape.expert_ffn}"


def cpu_problems(shape: ModelShape) -> Iterator[str]:
    """One message for each size of the model that vLLM on a CPU does not support."""
    latent = shape.kv_lora + shape.rope  # numbers per token and layer in the KV cache of multi-latent attention
    if latent not in (0, CPU_LATENT_SIZE):
        yield (
            f"multi-latent attention with {latent} numbers per token in the KV cache: vLLM on a CPU supports only "
            f"{CPU_LATENT_SIZE}, for example --kv-lora-rank 512 with --qk-pos-emb-head-dim 64"
        )
    if not latent and shape.head_dim < CPU_LOWEST_HEAD_DIM:
        more = (
            f"give --kv-channels {CPU_LOWEST_HEAD_DIM}, or fewer heads and no --kv-channels"
            if shape.table.hf.own_head_dim
            else "give fewer heads and no --kv-channels: this family's head size is --hidden-size / heads"
        )
        yield (f"attention head size {shape.head_dim}: vLLM on CPU needs at least {CPU_LOWEST_HEAD_DIM}; {more}")
