"""Adapters on a chunk of Megatron's model: while a layer runs, it has the weight W + scale x B A instead of W.

So each layer, fused or not, runs its own code, and trainer and engine have the same weights to the bit. W never
changes. The merged weight lives for one call: its backward merges it again instead of keeping it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from mindspeed_rl_plugin.adapters.targets import Adapted
from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.layout.layout import Segment
from mindspeed_rl_plugin.layout.parallel import Coordinates

CHILD = "rl_lora"  # name of the adapters in a chunk
_AT_ONCE = 1 << 24  # elements of a merge that are in the wider dtype at the same time


class AdaptedModule:
    """A linear module of the model, or a module with all experts of a layer, and the factors of its weights."""

    def __init__(self, path: str, module: Module, matrices: Sequence[Adapted], scale: float) -> None:
        self.path, self.module, self.matrices, self.scale = path, module, matrices, scale
        self.attributes = list(dict.fromkeys(name for m in matrices for name, _ in m.stored))
        self.factors: list[Parameter] = []  # A and B of each matrix
        # Over these ranks the gradient of the factor that all of them have is summed; None: they share no matrix.
        self.group: dist.ProcessGroup | None = None
        self.calls = self.backwards = 0

    def merged(self, attribute: str) -> Tensor:
        """The weight with its adapters, as a new tensor."""
        out = self.module._parameters[attribute].detach().clone()  # not what the module has while it runs
        for matrix, a, b in self._pairs(self.factors):
            for expert, segment in _places(matrix, attribute):
                rows, columns = _inside(matrix, segment)
                part = segment.view(out, segment.start, segment.size)
                _add(part, b[expert][rows].detach(), a[expert][:, columns].detach(), self.scale)
        return out

    def gradients(self, weights: Sequence[Tensor | None]) -> list[Tensor]:
        """Gradients of the factors from those of the module's merged weights. Collective over `group`."""
        wide = torch.promote_types(self.factors[0].dtype, torch.float32)
        out = [torch.zeros_like(factor, dtype=wide) for factor in self.factors]
        for (matrix, a, b), (_, da, db) in zip(self._pairs(self.factors), self._pairs(out), strict=True):
            for name, gradient in zip(self.attributes, weights, strict=True):
                for expert, segment in _places(matrix, name) if gradient is not None else ():
                    rows, columns = _inside(matrix, segment)
                    part = segment.view(gradient, segment.start, segment.size)
                    da[expert][:, columns] += self.scale * (b[expert][rows].T @ part)
                    db[expert][rows] += self.scale * (part @ a[expert][:, columns].T)
        if self.group is not None:
            shared = [(da, db)[m.axis] for m, da, db in self._pairs(out) if m.axis is not None]
            flat = torch.cat([gradient.flatten() for gradient in shared])
            dist.all_reduce(flat, group=self.group)
            for gradient, summed in zip(shared, flat.split([g.numel() for g in shared]), strict=True):
                gradient.copy_(summed.view_as(gradient))
        return [gradient.to(factor.dtype) for gradient, factor in zip(out, self.factors, strict=True)]

    def _pairs(self, each: Sequence[Tensor]) -> Iterator[tuple[Adapted, Tensor, Tensor]]:
        return zip(self.matrices, each[::2], each[1::2], strict=True)


class _Merged(torch.autograd.Function):
    """The merged weights of a module."""

    @staticmethod
    def forward(ctx: Any, module: AdaptedModule, *factors: Tensor) -> tuple[Tensor, ...]:
        ctx.module = module
        ctx.set_materialize_grads(False)
        return tuple(module.merged(name) for name in module.attributes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.module.backwards += 1
        return None, *ctx.module.gradients(gradients)


class Adapters(Module):
    """The adapters of a chunk, a child of it.

    matrices: of this chunk; rank: of the adapters; place: of this process; cp: context parallel size. Factors start as
    peft's do: A random, the same in every layout, B zero.
    """

    def __init__(
        self,
        chunk: Module,
        matrices: Sequence[Adapted],
        rank: int,
        scale: float,
        seed: int,
        place: Coordinates,
        cp: int,
    ) -> None:
        super().__init__()
        self.enabled, self.place, self.cp = True, place, cp
        self.of_base = True  # whether the chunk's state dicts hold W only; else they hold the factors only
        self.modules_of: list[AdaptedModule] = []
        for path in dict.fromkeys(m.module for m in matrices):
            mine = [m for m in matrices if m.module == path]
            one = AdaptedModule(path, chunk.get_submodule(path), mine, scale)
            self.modules_of.append(one)
            for matrix in mine:
                for name, factor in zip("AB", self._made(matrix, one.module, rank, seed), strict=True):
                    self.register_parameter(_file_name(matrix, name), factor)
                    one.factors.append(factor)
            self._hook(one)

    def _made(self, matrix: Adapted, module: Module, rank: int, seed: int) -> Iterator[Parameter]:
        """A and B as parameters, with the attributes by which Megatron reduces gradients and computes norms."""
        base, columns, rows = getattr(module, matrix.stored[0][0]), matrix.shape[1], []
        for name in matrix.canonical:
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            random = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            rows.append(torch.empty(rank, columns).uniform_(-(columns**-0.5), columns**-0.5, generator=random))
        a, b = torch.stack(rows), torch.zeros(matrix.factor_shapes(rank)[1])
        a = a[..., matrix.start : matrix.start + matrix.size] if matrix.axis == 1 else a
        for name, values in (("A", a), ("B", b)):
            made = Parameter(values.to(base.device, base.dtype).contiguous())
            for attribute in ("allreduce", "sequence_parallel"):
                if hasattr(base, attribute):
                    setattr(made, attribute, getattr(base, attribute))
            if matrix.axis is not None:
                made.tensor_model_parallel, made.partition_dim, made.partition_stride = True, 2 - matrix.axis, 1
                # Megatron's norm counts a factor that several ranks have only where it is not "shared".
                made.shared = not matrix.splits(name) and (self.place.etp if matrix.experts else self.place.tp) > 0
            yield made

    def _hook(self, one: AdaptedModule) -> None:
        """Replace the weights of the module while it runs. Its parameters stay where they are."""
        left: list[contextlib.ExitStack] = []

        def enter(module: Module, _: Any) -> None:
            left.append(contextlib.ExitStack())
            if not self.enabled:
                return
            weights = _Merged.apply(one, *one.factors)
            one.calls += 1
            vars(module).update(zip(one.attributes, weights, strict=True))
            if torch.is_grad_enabled():
                left[-1].enter_context(_merged_again(one, weights))

        def leave(module: Module, _: Any, __: Any) -> None:
            for name in one.attributes:
                vars(module).pop(name, None)
            left.pop().close()

        one.module.register_forward_pre_hook(enter)
        one.module.register_forward_hook(leave, always_call=True)

    def _save_to_state_dict(self, *given: Any, **named: Any) -> None:
        if not self.of_base:
            super()._save_to_state_dict(*given, **named)

    def _load_from_state_dict(self, *given: Any, **named: Any) -> None:
        if not self.of_base:
            super()._load_from_state_dict(*given, **named)

    def sharded_state_dict(self, prefix: str = "", *_: Any, **__: Any) -> dict[str, Any]:
        """The factors for Megatron's distributed checkpoints, which any layout can load."""
        from megatron.core.dist_checkpointing import ShardedTensor

        out = {}
        for one in () if self.of_base else self.modules_of:
            for i, factor in enumerate(one.factors):
                matrix, name = one.matrices[i // 2], "AB"[i % 2]
                whole, at = matrix.in_whole(name, factor.shape)
                parts = zip(range(3), at, factor.shape, whole, strict=True)
                offsets = [(axis, low // size, total // size) for axis, low, size, total in parts]
                copies = self.place.edp if matrix.experts else self.place.dp * self.cp + self.place.cp
                peer = self.place.etp if matrix.experts else self.place.tp
                replica = (0, 0 if matrix.splits(name) else peer, copies)
                out[prefix + _file_name(matrix, name)] = ShardedTensor.from_rank_offsets(
                    f"{CHILD}.{matrix.name}.lora_{name}", factor, *offsets, replica_id=replica
                )
        return out

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Name in the chunk and merged tensor of every weight with an adapter; nothing while adapters are off."""
        for one in self.modules_of if self.enabled else ():
            yield from ((f"{one.path}.{name}", one.merged(name)) for name in one.attributes)


def _merged_again(one: AdaptedModule, weights: Sequence[Tensor]) -> contextlib.AbstractContextManager:
    """A context in which autograd does not keep merged weights, but merges them again in the backward pass."""
    names = {w.untyped_storage().data_ptr(): name for w, name in zip(weights, one.attributes, strict=True)}

    def pack(tensor: Tensor) -> Any:
        name = names.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        return tensor if name is None else (name, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else one.merged(kept[0]).as_strided(*kept[1:])

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _places(matrix: Adapted, attribute: str) -> Iterator[tuple[int, Segment]]:
    """Index of the expert within the factors, and a segment of the parameter."""
    for expert, (name, segments) in enumerate(matrix.stored):
        if name == attribute:
            yield from ((expert, segment) for segment in segments)


def _inside(matrix: Adapted, segment: Segment) -> tuple[slice, slice]:
    """Rows of this rank's B and columns of its A that make a segment."""
    whole = slice(None)
    first = segment.start - (matrix.start if matrix.axis is not None else 0)
    part = slice(first, first + segment.size)
    return (part, whole) if segment.axis == 0 else (whole, part)


@torch.no_grad()
def _add(weight: Tensor, b: Tensor, a: Tensor, scale: float) -> None:
    """weight += scale x b a, rounded once."""
    wide, step = get_device().merge_dtype, max(1, _AT_ONCE // max(1, weight.shape[1]))
    a = a.to(wide)
    for part, rows in zip(weight.split(step), b.split(step), strict=True):
        part.copy_(torch.addmm(part.to(wide), rows.to(wide), a, alpha=scale))


def _file_name(matrix: Adapted, factor: str) -> str:
    """Name of a factor in a checkpoint of one file a rank; parameters have no dots in their names."""
    one = matrix.canonical[0] if len(matrix.experts) < 2 else matrix.name
    return f"{one}.lora_{factor}".replace(".", "/")
