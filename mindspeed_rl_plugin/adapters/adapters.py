"""Adapters on a chunk of Megatron's model: while a layer runs, it has the weight W + scale x B A instead of W.

So each layer, fused or not, runs its own code, and trainer and engine have the same weights to the bit. W never
changes. The merged weight lives for one call: its backward merges it again instead of keeping it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from mindspeed_rl_plugin.adapters.targets import Adapted
from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.layout.layout import Segment
from mindspeed_rl_plugin.layout.parallel import Coordinates
from mindspeed_rl_plugin.weights.live import ADAPTERS

_MERGED_AT_ONCE = 1 << 24  # elements of a merge that are in the wider dtype at the same time


@dataclass(frozen=True)
class RankPlace:
    """Where this rank is, by axes of the layout, and the ranks that have other parts of the same matrices."""

    at: Coordinates
    cp: int  # context parallel size
    own_experts: bool  # whether experts are cut in another way than the rest, so other ranks have copies of them
    tensor: dist.ProcessGroup | None  # None: a single rank
    expert_tensor: dist.ProcessGroup | None

    def group(self, matrix: Adapted) -> dist.ProcessGroup | None:
        return self.expert_tensor if matrix.experts else self.tensor

    def peer(self, matrix: Adapted) -> int:
        """Number of this rank among those with the matrix."""
        return self.at.etp if matrix.experts else self.at.tp

    def copy(self, matrix: Adapted) -> int:
        """Number of this rank among those with the same part."""
        return self.at.edp if matrix.experts else self.at.dp * self.cp + self.at.cp


class AdaptedModule(Module):
    """The factors of a linear module, or of a module with all experts of a layer; its `forward` gives merged weights.

    path, module: of the linear module in its chunk; matrices: in it; rank: of the adapters. Factors start as peft's do:
    A random, the same in every layout, B zero.
    """

    def __init__(
        self,
        path: str,
        module: Module,
        matrices: Sequence[Adapted],
        rank: int,
        scale: float,
        seed: int,
        place: RankPlace,
    ) -> None:
        super().__init__()
        self.path, self.matrices, self.scale, self.place = path, matrices, scale, place
        self._base = (module,)  # in a tuple, so that it is no child
        self.attributes = list(dict.fromkeys(name for m in matrices for name, _ in m.stored))
        self.calls = self.backwards = 0
        for matrix in matrices:
            for name, factor in zip("AB", self._made(matrix, rank, seed), strict=True):
                self.register_parameter(factor_name(matrix, name), factor)

    @property
    def factors(self) -> list[Parameter]:
        """A and B of each matrix. Not kept: a move to a device may make new parameters."""
        return list(self._parameters.values())

    def forward(self) -> tuple[Tensor, ...]:
        """The merged weights, in the order of `attributes`. Being called, it lets Megatron's hooks of modules run."""
        self.calls += 1
        return _Merged.apply(self, *self.factors)

    def merged(self, attribute: str) -> Tensor:
        """The weight with its adapters, as a new tensor."""
        out = self._base[0]._parameters[attribute].detach().clone()  # not what the module has while it runs
        for matrix, a, b in self._pairs(self.factors):
            for expert, segment in _places(matrix, attribute):
                rows, columns = _inside(matrix, segment)
                part = segment.view(out, segment.start, segment.size)
                merge(part, b[expert][rows].detach(), a[expert][:, columns].detach(), self.scale)
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
        if self.place.group(self.matrices[0]) is not None:
            shared = [(da, db)[m.axis] for m, da, db in self._pairs(out) if m.axis is not None]
            flat = torch.cat([gradient.flatten() for gradient in shared])
            dist.all_reduce(flat, group=self.place.group(self.matrices[0]))
            for gradient, summed in zip(shared, flat.split([g.numel() for g in shared]), strict=True):
                gradient.copy_(summed.view_as(gradient))
        return [gradient.to(factor.dtype) for gradient, factor in zip(out, self.factors, strict=True)]

    def _made(self, matrix: Adapted, rank: int, seed: int) -> Iterator[Parameter]:
        """A and B as parameters, with the attributes by which Megatron reduces gradients and computes norms."""
        base, columns, rows = getattr(self._base[0], matrix.stored[0][0]), matrix.shape[1], []
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
            if matrix.experts and self.place.own_experts:
                made.allreduce = False  # Megatron up to 0.18 says so only with several expert parallel ranks
            if matrix.axis is not None or matrix.experts:  # tensor parallel ranks have other parts, or other experts
                made.tensor_model_parallel, made.partition_dim, made.partition_stride = True, 1 + (matrix.axis or 0), 1
                # Megatron's norm counts a factor that several ranks have only where it is not "shared".
                copied = matrix.axis is not None and not matrix.splits(name)
                made.shared = copied and self.place.peer(matrix) > 0
            yield made

    def sharded_state_dict(self, prefix: str = "", *_: Any, **__: Any) -> dict[str, Any]:
        """Of the factors, in Megatron's distributed checkpoints."""
        from megatron.core.dist_checkpointing import ShardedTensor

        out = {}
        for i, factor in enumerate(self.factors):
            matrix, name = self.matrices[i // 2], "AB"[i % 2]
            whole, at = matrix.in_whole(name, factor.shape)
            parts = zip(range(3), at, factor.shape, whole, strict=True)
            offsets = [(axis, low // size, total // size) for axis, low, size, total in parts]
            replica = (0, 0 if matrix.splits(name) else self.place.peer(matrix), self.place.copy(matrix))
            out[prefix + factor_name(matrix, name)] = ShardedTensor.from_rank_offsets(
                f"{ADAPTERS}.{matrix.name}.lora_{name}", factor, *offsets, replica_id=replica
            )
        return out

    def _pairs(self, each: Sequence[Tensor]) -> Iterator[tuple[Adapted, Tensor, Tensor]]:
        return zip(self.matrices, each[::2], each[1::2], strict=True)


class _Merged(torch.autograd.Function):
    """The merged weights of a module."""

    @staticmethod
    def forward(ctx: Any, module: AdaptedModule, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.module = module
        ctx.set_materialize_grads(False)
        return tuple(module.merged(name) for name in module.attributes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.module.backwards += 1
        return None, *ctx.module.gradients(gradients)


class Adapters(Module):
    """The adapters of a chunk, a child of it."""

    def __init__(self, chunk: Module, modules: Sequence[AdaptedModule]) -> None:
        super().__init__()
        self.enabled, self.modules_of = True, list(modules)
        self.stored = "base"  # what state dicts of the chunk hold and take: "base" (W), "factors" or "all"
        for i, one in enumerate(modules):
            self.add_module(str(i), one)
            self._hook(one, chunk.get_submodule(one.path))

    def _hook(self, one: AdaptedModule, linear: Module) -> None:
        """Replace the weights of a linear module while it runs. Its parameters stay where they are."""
        left: list[contextlib.ExitStack] = []

        def enter(module: Module, _: Any) -> None:
            left.append(contextlib.ExitStack())
            if self.enabled:
                weights = one()
                for weight in weights:
                    weight.requires_grad_()  # without gradients too: torch and Megatron choose the multiplication by it
                vars(module).update(zip(one.attributes, weights, strict=True))
                if torch.is_grad_enabled():
                    left[-1].enter_context(_merged_again(one, weights))

        def leave(module: Module, _: Any, __: Any) -> None:
            for name in one.attributes:
                vars(module).pop(name, None)
            left.pop().close()

        linear.register_forward_pre_hook(enter)
        linear.register_forward_hook(leave, always_call=True)

    def sharded_state_dict(self, prefix: str = "", *_: Any, **__: Any) -> dict[str, Any]:
        """The factors for Megatron's distributed checkpoints, which any layout can load."""
        each = (one.sharded_state_dict(f"{prefix}{name}.") for name, one in self.named_children())
        return {name: sharded for factors in each for name, sharded in factors.items()}

    def merging(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """Name in the chunk of every weight with an adapter, and what merges it; nothing while adapters are off."""
        for one in self.modules_of if self.enabled else ():
            yield from ((f"{one.path}.{name}", partial(one.merged, name)) for name in one.attributes)


def _merged_again(one: AdaptedModule, weights: Sequence[Tensor]) -> contextlib.AbstractContextManager:
    """A context in which autograd does not keep merged weights, but merges them again in the backward pass."""
    names = {w.untyped_storage().data_ptr(): name for w, name in zip(weights, one.attributes, strict=True)}
    left, made = Counter[str](), dict[str, Tensor]()  # copies that are still to be read, and what was merged for them

    def pack(tensor: Tensor) -> Any:
        name = names.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if name is None:
            return tensor
        left[name] += 1
        return name, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        name, *place = kept
        left[name] -= 1
        weight = made.pop(name, None)
        weight = one.merged(name) if weight is None else weight
        if left[name] > 0:
            made[name] = weight
        return weight.as_strided(*place)

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
def merge(weight: Tensor, b: Tensor, a: Tensor, scale: float) -> None:
    """weight += scale x b a, rounded once."""
    wide, step = get_device().merge_dtype, max(1, _MERGED_AT_ONCE // max(1, weight.shape[1]))
    a = a.to(wide)
    for part, rows in zip(weight.split(step), b.split(step), strict=True):
        part.copy_(torch.addmm(part.to(wide), rows.to(wide), a, alpha=scale))


def factor_name(matrix: Adapted, factor: str) -> str:
    """Name of a factor in a checkpoint of one file a rank; parameters have no dots in their names."""
    one = matrix.canonical[0] if len(matrix.experts) < 2 else matrix.name
    return f"{one}.lora_{factor}".replace(".", "/")
