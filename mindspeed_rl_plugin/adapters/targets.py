"""Which matrices of a model get an adapter, and which part of each a trainer rank stores. Reads no tensors.

The families' tables say which matrices of the Hugging Face checkpoint a stored parameter holds; so q, k and v, or gate
and up, which Megatron stores in one parameter, have an adapter each, as peft gives them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from mindspeed_rl_plugin.config.run_flags import LoraConfig
from mindspeed_rl_plugin.layout.family_table import EXPERTS, IMPLS, LayerType, Row
from mindspeed_rl_plugin.layout.layout import Segment, canonical_tensors, megatron_layout
from mindspeed_rl_plugin.layout.parallel import Parallel
from mindspeed_rl_plugin.layout.shape import ModelShape

_EXPERT_NUMBER = re.compile(r"(?<=\.experts)\.(\d+)(?=\.)")
_LAYER_PREFIX = re.compile(r"^(model|decoder)\.layers\.\{layer\}\.")


@dataclass(frozen=True)
class Adapted:
    """A matrix `[out, in]` of a layer, or the same matrix of all experts that one module of the rank stores.

    An adapter is a pair of factors, A `[rank, in]` and B `[out, rank]`; the matrix becomes W + scale x B A.
    """

    name: str  # canonical, without the expert's number and without ".weight"
    experts: tuple[int, ...]  # global numbers; empty: no routed expert
    shape: tuple[int, int]  # of the complete matrix
    axis: int | None  # along which ranks split it; None: each rank stores all of it
    start: int  # first row or column that this rank stores
    size: int  # how many
    module: str  # path of the module in its chunk
    stored: tuple[tuple[str, tuple[Segment, ...]], ...]  # for each expert: attribute of the module, places in it
    of: int = 1  # number of routed experts of a layer

    @property
    def canonical(self) -> tuple[str, ...]:
        """The name for each expert."""
        return tuple(self.name.replace(".experts", f".experts.{e}") for e in self.experts) or (self.name,)

    def factor_shapes(self, rank: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Shapes of A and B on this rank, with an axis of experts."""
        (rows, columns), count = self.shape, len(self.stored)
        a = (count, rank, self.size if self.axis == 1 else columns)
        return a, (count, self.size if self.axis == 0 else rows, rank)

    def splits(self, factor: str) -> bool:
        """Whether ranks have different parts of factor A or B; else all have the same."""
        return self.axis == {"A": 1, "B": 0}[factor]

    def in_whole(self, factor: str, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape of the factor of all ranks and experts, and where the one of this rank, of `shape`, begins in it."""
        part = 1 + self.axis if self.splits(factor) else None
        whole = [self.of, *(self.shape[self.axis] if i == part else shape[i] for i in (1, 2))]
        return tuple(whole), (min(self.experts, default=0), *(self.start if i == part else 0 for i in (1, 2)))


def linear_rows(shape: ModelShape, targets: Sequence[str] = ()) -> list[Row]:
    """The rows of the family's table with linear layers of attention and MLP, the routed experts' too, of which at
    least one matrix is named by `targets`; without targets all of them. Norms, routers, gates of shared experts, the
    embedding and the head are none."""
    kinds = (LayerType.EVERY, LayerType.DENSE, LayerType.MOE, LayerType.EXPERT)
    rows = [row for kind in kinds if kind is not LayerType.DENSE or shape.dense_layers or not shape.experts
            for row in shape.rows(kind) if kind is not LayerType.EXPERT or shape.experts]  # fmt: skip
    linear = [row for row in rows if len(row.parts[0].shape) == 2 and any(_is_linear(n) for n in row.names.values())]
    return [row for row in linear if any(_named(row, part.name, targets) for part in row.parts)]


def unknown_targets(shape: ModelShape, targets: Sequence[str]) -> list[str]:
    """Those of `targets` that name no linear layer of the model."""
    return [target for target in targets if not linear_rows(shape, [target])]


def target_names(shape: ModelShape) -> list[str]:
    """The last parts of the names that targets may have."""
    rows = linear_rows(shape)
    ends = [part.name.removesuffix(".weight").rpartition(".")[2] for row in rows for part in row.parts]
    return list(dict.fromkeys(ends))


def matrices(shape: ModelShape, targets: Sequence[str]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Canonical name (without ".weight") and shape of every matrix that gets an adapter."""
    rows = linear_rows(shape, targets)
    for row, layer in shape.rows_in_order():
        if row in rows:
            for expert in range(shape.experts if row.layer_type is LayerType.EXPERT else 1):
                for part, name in zip(row.parts, shape.names_of(row, layer, expert), strict=True):
                    if _named(row, part.name, targets):
                        yield name.removesuffix(".weight"), shape.shape_of(part)


def adapted(
    shape: ModelShape, parallel: Parallel, rank: int, kinds: tuple[str, str], targets: Sequence[str]
) -> list[Adapted]:
    """All that a trainer rank stores of adapted matrices, in the order of its parameters.

    kinds: see `live.trainer_storage`. Module paths start with `chunk_prefix`. Raises ValueError for a matrix of which
    the rank stores several pieces.
    """
    wanted = _wanted(shape, tuple(targets))
    tensors, places = canonical_tensors(shape), dict[tuple[str, str], list[tuple[str, str, tuple[Segment, ...]]]]()
    for stored, segments in megatron_layout(shape, parallel, rank, *kinds).items():
        module, _, attribute = stored.rpartition(".")
        for canonical in dict.fromkeys(s.name for s in segments if s.name in wanted):
            held = tuple(s for s in segments if s.name == canonical)
            name = _EXPERT_NUMBER.sub("", canonical).removesuffix(".weight")
            places.setdefault((module, name), []).append((canonical, attribute, held))
    made = (_adapted(name, module, held, tensors[held[0][0]].shape) for (module, name), held in places.items())
    return [replace(one, of=shape.experts) if one.experts else one for one in made]


def adapter_numels(shape: ModelShape, parallel: Parallel, rank: int, lora: LoraConfig) -> tuple[int, int, list[int]]:
    """Elements on a trainer rank: of factors, of routed experts' factors among them, of each weight with an adapter."""
    each = adapted(shape, parallel, rank, (IMPLS[0], EXPERTS[0]), lora.target_names) if lora.lora_rank else []
    factors = [(m.experts, sum(map(prod, m.factor_shapes(lora.lora_rank)))) for m in each]
    weights = {f"{m.module}.{attribute}" for m in each for attribute, _ in m.stored}
    merged = [prod(megatron_layout(shape, parallel, rank).shapes[name]) for name in weights]
    return sum(n for _, n in factors), sum(n for experts, n in factors if experts), merged


def saved_numel(shape: ModelShape, lora: LoraConfig) -> int:
    """Number of parameters, over all ranks, that are trained and saved: the model's or, with LoRA, the factors'."""
    if lora.lora_rank is None:
        return sum(prod(tensor.shape) for tensor in canonical_tensors(shape).values())
    return sum(lora.lora_rank * sum(size) for _, size in matrices(shape, lora.target_names))


def describe_adapters(shape: ModelShape, lora: LoraConfig) -> str:
    """The number and kinds of the matrices with adapters, and how many parameters, over all ranks, are trained."""
    names = [name.rpartition(".")[2] for name, _ in matrices(shape, lora.target_names)]
    trained, base = (saved_numel(shape, each) for each in (lora, LoraConfig()))
    return (
        f"LoRA of rank {lora.lora_rank}, scale {lora.lora_scale:g}: {len(names):,} matrices "
        f"({', '.join(dict.fromkeys(names))}), {trained:,} of {trained + base:,} parameters are trained; "
        "a reference is the model without them"
    )


@lru_cache(maxsize=16)
def _wanted(shape: ModelShape, targets: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name + ".weight" for name, _ in matrices(shape, targets))


def _adapted(
    name: str, module: str, held: Sequence[tuple[str, str, tuple[Segment, ...]]], shape: tuple[int, ...]
) -> Adapted:
    segments = held[0][2]
    axis, start, size = segments[0].axis, min(s.start for s in segments), sum(s.size for s in segments)
    if max(s.stop for s in segments) - start != size:
        raise ValueError(
            f"adapters: of {name} a tensor parallel rank stores rows that do not follow each other; give "
            f"--tensor-model-parallel-size 1, or --rl-lora-targets without {name.rpartition('.')[2]}"
        )
    experts = tuple(int(found[1]) for canonical, *_ in held if (found := _EXPERT_NUMBER.search(canonical)))
    stored = tuple((attribute, places) for _, attribute, places in held)
    return Adapted(name, experts, shape, axis if size < shape[axis] else None, start, size, module, stored)


def _is_linear(trainer_name: str) -> bool:
    return ".linear_" in trainer_name or ".experts.weight" in trainer_name


def _named(row: Row, part: str, targets: Iterable[str]) -> bool:
    """Whether a target is the end of the matrix's canonical name, or of the path of Megatron's module."""
    names = {part, *(name for name in row.names.values() if _is_linear(name))}
    paths = {re.sub(r"(\.local_experts)?\.\{\w+\}(?=\.)|\{\w+\}$", "", _LAYER_PREFIX.sub(".", name)) for name in names}
    paths = {path.removesuffix(".weight") for path in paths}
    return not targets or any(path.endswith("." + target) for path in paths for target in targets)
