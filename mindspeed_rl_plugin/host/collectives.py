"""torch.distributed on gloo for code that asks for nccl or hccl, and operations that gloo lacks."""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_ACCELERATOR_BACKENDS = ("nccl", "hccl", "cuda:nccl", "npu:hccl", "cpu:gloo,cuda:nccl", "cpu:gloo,npu:hccl")
_AVERAGING = ("all_reduce", "reduce_scatter_tensor")
_torch: dict[str, Callable[..., Any]] = {}  # torch's own functions, by name


def install() -> None:
    ours = (init_process_group, new_group, all_to_all_single, all_gather, reduce_scatter, isend)
    for function in ours:
        _replace(function.__name__, function)
    for name in _AVERAGING:
        _replace(name, _averaging(getattr(dist, name)))
    atexit.register(_leave)


def _leave() -> None:
    """End gloo's threads at a normal exit. Older Megatron leaves them running; a thread inside C++ at the interpreter's
    end can abort a process that has finished its work."""
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def _replace(name: str, function: Callable[..., Any]) -> None:
    _torch[name] = getattr(dist, name)
    replacement = functools.update_wrapper(function, _torch[name])
    # Both modules are in use: torch.distributed re-exports names of distributed_c10d.
    setattr(dist, name, replacement)
    setattr(distributed_c10d, name, replacement)


def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    _torch["init_process_group"]("gloo", *args, **_without_options(kwargs))


def new_group(ranks: Any = None, timeout: Any = None, backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
    """Make a group over gloo instead of an accelerator's backend."""
    backend = None if backend in _ACCELERATOR_BACKENDS else backend
    return _torch["new_group"](ranks, timeout, backend, **_without_options(kwargs))


def _without_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in ("device_id", "pg_options")}


def all_to_all_single(
    output: torch.Tensor, input: torch.Tensor, output_sizes: Any = None, input_sizes: Any = None, **kwargs: Any
) -> Any:
    """Convert split sizes to Python ints, which gloo needs; Megatron does that only on a GPU.

    Even an asynchronous call is finished when it returns. MindSpeed's overlapped experts free tensors during the send:
    on a stream this is safe, but gloo reads the tensors in another thread.
    """
    sizes = (kwargs.pop("output_split_sizes", output_sizes), kwargs.pop("input_split_sizes", input_sizes))
    ints = (each.tolist() if hasattr(each, "tolist") else each for each in sizes)
    work = _torch["all_to_all_single"](output, input, *ints, **kwargs)
    if work is not None:
        work.wait()
    return work


def all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Gather tensors, also of different lengths, which gloo cannot do. Experts that are cut over tensor parallel ranks
    need it."""
    original = _torch["all_gather"]
    if len({t.shape for t in outputs}) == 1:
        return original(outputs, tensor, group, async_op)
    assert not async_op, "tensors of different lengths cannot be gathered asynchronously"
    padded = tensor.new_zeros(max(map(len, outputs)), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    longest = [torch.empty_like(padded) for _ in outputs]
    original(longest, padded, group)
    for output, whole in zip(outputs, longest, strict=True):
        output.copy_(whole[: len(output)])
    return None


def reduce_scatter(
    output: torch.Tensor,
    inputs: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Reduce and scatter tensors, also of different lengths (gradients of `all_gather`): one reduction per rank."""
    if len({t.shape for t in inputs}) == 1:
        return _torch["reduce_scatter"](output, inputs, op, group, async_op)
    assert not async_op, "tensors of different lengths cannot be scattered asynchronously"
    group = group or dist.group.WORLD
    for rank, part in enumerate(inputs):
        total = part.clone()
        dist.reduce(total, dist.get_global_rank(group, rank), op, group)
        if rank == dist.get_rank(group):
            output.copy_(total)
    return None


def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Send a copy, since Megatron's interleaved schedule frees an output during the send.

    With NCCL the allocator keeps the memory until the stream has finished the send. gloo reads the memory in another
    thread, and might send newer contents. The returned work keeps the copy. A caller that keeps the tensor until the
    end of the send sets the tensor's attribute `outlives_send`; then no copy is made.
    """
    kept = getattr(tensor, "outlives_send", False)
    return _torch["isend"](tensor if kept else tensor.detach().clone(), *args, **kwargs)


def _averaging(original: Callable[..., Any]) -> Callable[..., Any]:
    """gloo has no ReduceOp.AVG: divide the input by the group's size, and sum.

    The division comes first, since asynchronous and coalesced calls write the output later.
    """

    def collective(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("op") != dist.ReduceOp.AVG:
            return original(output, *args, **kwargs)
        kwargs["op"] = dist.ReduceOp.SUM
        size = dist.get_world_size(kwargs.get("group"))
        if original.__name__ == "all_reduce":
            return original(output.div_(size), *args, **kwargs)
        source = kwargs.pop("input") if "input" in kwargs else args[0]
        return original(output, source / size, *args[1:], **kwargs)

    return collective
