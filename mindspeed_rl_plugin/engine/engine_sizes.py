"""What an engine can be built from: pure rules on numbers, known before any model exists.

The start-up asks them of Megatron's arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_rl_plugin.reshard.shape import ModelShape

CPU_LOWEST_HEAD_DIM = 32
CPU_LATENT_SIZE = 576  # vllm/v1/attention/backends/mla/cpu_mla.py has this size only


@dataclass(frozen=True)
class EngineSizes:
    """Numbers of one engine and of its model.

    shape: of the model; kind: "npu" | "cuda" | "cpu"; world: ranks of the job; tp: ranks of one engine; ep: ranks over
    which whole experts are spread; max_positions: --max-position-embeddings; tokens: most of prompt and response
    together; element: bytes of one number in the KV cache; kv_cache: bytes of it on a rank of a host without
    accelerator.
    """

    shape: ModelShape
    kind: str
    world: int
    tp: int
    ep: int
    max_positions: int
    tokens: int
    element: int
    kv_cache: int

    @property
    def latent(self) -> int:
        """Numbers that multi-latent attention keeps of a token in a layer; 0: it is none."""
        return self.shape.kv_lora + self.shape.rope

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token on one rank; groups that do not divide, and what is latent, are repeated."""
        heads = max(1, self.shape.groups // self.tp)
        return self.shape.layers * self.element * (self.latent or 2 * heads * self.shape.head_dim)

    def problems(self) -> Iterator[str]:
        """One message for each thing that vLLM refuses late, obscurely, or not at all."""
        tp, shape = self.tp, self.shape
        if self.world % tp:
            yield f"--rl-generate-tp {tp} does not divide the world of {self.world} ranks"
        for size, flag in ((shape.heads, "--num-attention-heads"), (shape.ffn, "--ffn-hidden-size")):
            if size % tp:
                yield f"--rl-generate-tp {tp} does not divide {flag} {size}"
        yield from self._expert_problems()
        if not self.latent and shape.groups % tp and tp % shape.groups:
            yield f"--rl-generate-tp {tp} neither divides nor is a multiple of the {shape.groups} query groups"
        if self.tokens > self.max_positions:
            yield (
                f"prompt and response may have {self.tokens} tokens together, more than --max-position-embeddings "
                f"{self.max_positions}; lower --rl-max-prompt-length or --rl-max-response-length"
            )
        if self.kind == "cpu":
            yield from self._cpu_problems()

    def _expert_problems(self) -> Iterator[str]:
        tp, ep, experts = self.tp, self.ep, self.shape.experts
        flag = f"--rl-generate-ep {ep}"
        if ep > 1 and not experts:
            yield f"{flag}: the model has no experts to spread; leave it out"
        elif ep > 1 and ep != tp:
            yield f"{flag} with --rl-generate-tp {tp}: whole experts are spread over an engine's ranks; give {tp} or 1"
        elif ep > experts > 0:
            yield f"{flag}: there are {experts} experts only"
        elif ep == 1 and self.shape.expert_ffn % tp:
            yield f"--rl-generate-tp {tp} does not divide --moe-ffn-hidden-size {self.shape.expert_ffn}"

    def _cpu_problems(self) -> Iterator[str]:
        if self.latent not in (0, CPU_LATENT_SIZE):
            yield (
                f"multi-latent attention that keeps {self.latent} numbers of a token: vLLM on CPU needs "
                f"{CPU_LATENT_SIZE}, such as --kv-lora-rank 512 and --qk-pos-emb-head-dim 64"
            )
        if not self.latent and self.shape.head_dim < CPU_LOWEST_HEAD_DIM:
            more = (
                f" or --kv-channels {CPU_LOWEST_HEAD_DIM}"
                if self.shape.table.hf.own_head_dim
                else " and no --kv-channels: this family's head size is --hidden-size / --num-attention-heads"
            )
            yield (
                f"attention head size {self.shape.head_dim}: vLLM on CPU needs at least {CPU_LOWEST_HEAD_DIM}; use "
                f"fewer heads{more}"
            )
        least = self.token_bytes * self.tokens
        if least > self.kv_cache:
            yield (
                f"one response of {self.tokens} tokens with its prompt needs {least / 2**30:.3g} GiB of KV cache, more "
                f"than --rl-kv-cache-gb {self.kv_cache / 2**30:.3g}; raise it or shorten the responses"
            )
