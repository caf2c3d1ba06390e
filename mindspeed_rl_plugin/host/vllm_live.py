"""Changes vLLM on a CPU for reinforcement learning: weights can be updated in place, and jobs do not collide.

Original vLLM repacks weights for the CPU's kernels when it loads them, and deletes the originals. Weights that are
written later have no effect, or a wrong one. Here linear layers multiply by the weight itself, and experts are computed
by torch's operators, so an update only writes into parameters. This is slower than the packed kernels; log-probs agree
to 5e-6.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import linear, silu

SHARED_MEMORY = Path("/dev/shm")
SEGMENT_PREFIX = "mindspeed-rl-"
LEFTOVER_AGE = 600.0  # seconds; younger segments may belong to a job that is starting


@functools.cache
def apply() -> None:
    """Change vLLM, before an engine is built. Idempotent; imports vLLM (after `engine_env` has set its variables)."""
    _live_linears()
    _live_experts()
    _rotary_by_heads()
    _own_shared_memory()
    _unequal_collectives()
    remove_leftovers()


def _live_linears() -> None:
    import vllm.model_executor.layers.utils as layers

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = linear

    layers.dispatch_cpu_unquantized_gemm = dispatch


def _live_experts() -> None:
    import vllm.model_executor.layers.fused_moe.experts.cpu_moe as cpu_moe

    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        self._use_zentorch = False

    base = cpu_moe.CPUUnquantizedExperts
    for experts in (base, *base.__subclasses__()):
        experts.process_weights_after_loading = process_weights_after_loading
        experts.apply = _apply_experts


def _apply_experts(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    *unused: Any,
    **also_unused: Any,
) -> None:
    """Gated SiLU experts, written to `output` `[T, H]`.

    hidden_states `[T, H]`; w1 `[E, 2F, H]` gate above up; w2 `[E, H, F]`; topk_weights, topk_ids `[T, k]`; expert_map
    `[E global]` -> local expert, -1: on another rank.
    """
    if activation.value != "silu":
        raise ValueError(f"experts with activation {activation.value!r} are not supported on a CPU; only silu is")
    local = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()].long()
    total = torch.zeros(output.shape, dtype=torch.float32)
    for expert in range(w1.shape[0]):
        tokens, slots = (local == expert).nonzero(as_tuple=True)
        if tokens.numel():
            gate, up = linear(hidden_states[tokens], w1[expert]).chunk(2, -1)
            out = linear(silu(gate) * up, w2[expert]).float()
            total.index_add_(0, tokens, out * topk_weights[tokens, slots, None])
    output.copy_(total)


def _rotary_by_heads() -> None:
    """Rotate `[T, heads, D]` in torch.

    vLLM's kernel for the CPU expects `[T, heads x D]`: it always uses the second-last stride as that of tokens. Latent
    attention passes `[T, heads, D]`, also as slices of wider rows; of such tensors it rotates only the first tokens.
    """
    from vllm.model_executor.layers.rotary_embedding import base

    rotary = base.RotaryEmbedding
    kernel = rotary.forward_cpu

    @functools.wraps(kernel)
    def forward_cpu(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None, *more: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        flat = query.dim() == 2 and (key is None or key.dim() == 2)
        return (kernel if flat else rotary.forward_native)(self, positions, query, key, *more)

    rotary.forward_cpu = forward_cpu


def _own_shared_memory() -> None:
    """Give shared memory segments a name of this job, and remove the name as soon as every rank has mapped them, so
    that nothing remains of killed processes. In original vLLM the name is the same in every job: two jobs collide, and
    a job collides with segments of a killed job."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as Shm

    group_name, init = Shm.make_group_name, Shm._init_cpu_shm
    parts = [os.environ.get(k, "") for k in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    if not any(parts):  # true for workers of vLLM's own server
        parts = [str(os.getppid())]
    job = f"{zlib.crc32('|'.join(parts).encode()):08x}"  # the same in all its ranks

    def segment(name: str, communicator: Any) -> Path:
        return SHARED_MEMORY / f"{name[1:]}_{communicator.rank}"

    def make_group_name(communicator: Any) -> str:
        name = f"/{SEGMENT_PREFIX}{job}-{group_name(communicator).replace('/', '')}"
        # Each rank removes only its own segment: another rank's segment may be in use already.
        segment(name, communicator).unlink(missing_ok=True)
        return name

    def init_cpu_shm(self: Any) -> int:
        handle = init(self)  # ends with a barrier
        segment(self.group_name, self.communicator).unlink(missing_ok=True)
        return handle

    Shm.make_group_name = staticmethod(make_group_name)
    Shm._init_cpu_shm = init_cpu_shm


def _unequal_collectives() -> None:
    """Adds two collectives for engines that share experts, where each rank has a different number of tokens. vLLM 0.32
    needs them, but its communicator for CPUs lacks them."""
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase as Base
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    for collective in (all_gatherv, reduce_scatterv):
        if getattr(CpuCommunicator, collective.__name__) is getattr(Base, collective.__name__, None):
            setattr(CpuCommunicator, collective.__name__, collective)


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Rows of all ranks, in rank order. input_: `[sizes[rank], ...]`, or a list of such tensors; sizes: number of rows
    of each rank, None if it is the same on all ranks."""
    assert dim == 0, f"rows are gathered, not dimension {dim}"
    if not isinstance(input_, torch.Tensor):
        return [all_gatherv(self, part, dim, sizes) for part in input_]
    parts = [input_.new_empty(n, *input_.shape[1:]) for n in sizes or [len(input_)] * self.world_size]
    dist.all_gather(parts, input_.contiguous(), group=self.device_group)
    return torch.cat(parts)


def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """This rank's rows of the sum over ranks. input_: `[sum(sizes), ...]`; sizes: as in `all_gatherv`."""
    assert dim == 0, f"rows are scattered, not dimension {dim}"
    parts = input_.split(sizes or len(input_) // self.world_size)
    output = torch.empty_like(parts[self.rank_in_group])
    dist.reduce_scatter(output, [part.contiguous() for part in parts], group=self.device_group)
    return output


def remove_leftovers(folder: Path = SHARED_MEMORY) -> None:
    """Remove segments that are older than LEFTOVER_AGE: their jobs were killed while engines started."""
    for path in folder.glob(SEGMENT_PREFIX + "*"):
        # another rank has removed it, or another user owns it
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if path.is_file() and time.time() - path.stat().st_mtime > LEFTOVER_AGE:
                path.unlink()
