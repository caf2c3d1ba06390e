"""Reads the files of one checkpoint of `--ckpt-format torch_dist`, without Megatron and without running code in them.

A box is a part of a tensor: a range on each axis.

FOLDER/.metadata          the index. Of every tensor: its complete shape, its boxes, and the file of each box
FOLDER/__0_0.distcp       the boxes that rank 0 wrote, one after the other, each as torch.save writes it
FOLDER/common.pt          arguments and counters; since core 0.19 these are an entry `common_state/...` of .distcp files
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl_plugin.checkpoints import pickles

DCP_INDEX, COMMON_FILE = ".metadata", "common.pt"
_COMMON_ENTRY = "common_state/"
Box = tuple[tuple[int, int], ...]  # of each axis: start, stop


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the files of a checkpoint; `read` loads it."""

    files: DistFiles
    name: str  # of its entry in the index
    box: Box  # the part of this entry that is the tensor
    shape: tuple[int, ...]  # of the box, without its leading axes of layer and expert, which have size 1
    dtype: torch.dtype

    def read(self) -> Tensor:
        """Read the tensor. Raises ValueError if the files lack a part of it."""
        out = torch.empty([stop - start for start, stop in self.box], dtype=self.dtype)
        missing = out.numel()
        for entry, (offsets, sizes) in self.files.boxes(self.name, self.box):
            low = [max(start, at) for (start, _), at in zip(self.box, offsets, strict=True)]
            high = [min(stop, at + n) for (_, stop), at, n in zip(self.box, offsets, sizes, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                there = self.files.load(entry).view(sizes)
                _cut(out, low, high, [start for start, _ in self.box]).copy_(_cut(there, low, high, offsets))
                missing -= prod(b - a for a, b in zip(low, high, strict=True))
        if missing:
            raise ValueError(f"{self.files.folder} does not hold all of {self.name}: {missing} numbers are missing")
        return out.view(self.shape)


class DistFiles:
    """The files that the index of an iteration folder names. Raises ValueError for a damaged index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def are_in(folder: Path) -> bool:
        """Whether an iteration folder has this format."""
        return (folder / DCP_INDEX).is_file()

    def are_whole(self) -> bool:
        """Whether every file exists, with at least the size that the index says."""
        ends: dict[str, int] = {}
        for where in self._index.storage_data.values():
            ends[where.relative_path] = max(ends.get(where.relative_path, 0), where.offset + where.length)
        return all((path := self.folder / name).is_file() and path.stat().st_size >= end for name, end in ends.items())

    @cached_property
    def _index(self) -> Any:
        return pickles.load_index(self.folder / DCP_INDEX)

    @cached_property
    def _entries(self) -> dict[str, list[Any]]:
        out: dict[str, list[Any]] = {}
        for key, where in self._index.storage_data.items():
            out.setdefault(key.fqn, []).append((key, where))
        return out

    @cached_property
    def _boxes(self) -> dict[str, dict[tuple[int, int], list[Any]]]:
        """Stored boxes of each tensor, by start and stop on its first axis (often the layer): a tensor of experts has
        tens of thousands of boxes, but only few for each layer."""
        out: dict[str, dict[tuple[int, int], list[Any]]] = {}
        for name in self.tensors():
            sizes = {tuple(c.offsets): tuple(c.sizes) for c in self._index.state_dict_metadata[name].chunks}
            for key, where in self._entries.get(name, []):
                at, size = tuple(key.offset), sizes[tuple(key.offset)]
                first = (at[0], at[0] + size[0]) if at else (0, 1)
                out.setdefault(name, {}).setdefault(first, []).append((where, (at, size)))
        return out

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Complete shape and dtype of each tensor, by name."""
        known = ((n, t) for n, t in self._index.state_dict_metadata.items() if hasattr(t, "chunks"))
        return {name: (tuple(t.size), t.properties.state[0]) for name, t in known}

    def boxes(self, name: str, box: Box) -> Iterator[tuple[Any, tuple[tuple[int, ...], tuple[int, ...]]]]:
        """Stored boxes of a tensor that overlap `box` on the first axis: (record for `load`, (offsets, sizes))."""
        low, high = box[0] if box else (0, 1)
        for (start, stop), stored in self._boxes.get(name, {}).items():
            if start < high and low < stop:
                yield from stored

    def load(self, where: Any) -> Any:
        """Load what a record of the index points to. Raises ValueError for a missing or truncated file."""
        path = self.folder / where.relative_path
        size = path.stat().st_size if path.is_file() else 0
        if size < where.offset + where.length:
            raise ValueError(f"{path} is missing or cut short: {size} bytes, fewer than {DCP_INDEX} says; restore it")
        with open(path, "rb") as file:
            file.seek(where.offset)
            return pickles.load_content(io.BytesIO(file.read(where.length)), path)

    def common(self) -> dict[str, Any]:
        """All that is not a tensor: arguments, iteration. Empty if the files have no such values."""
        if (self.folder / COMMON_FILE).is_file():
            return pickles.load(self.folder / COMMON_FILE)
        names = [name for name in self._entries if name.startswith(_COMMON_ENTRY)] if self.are_in(self.folder) else []
        return self.load(self._entries[names[0]][0][1])[0] if names else {}


def _cut(tensor: Tensor, low: list[int], high: list[int], start: Any) -> Tensor:
    return tensor[tuple(slice(a - at, b - at) for a, b, at in zip(low, high, start, strict=True))]
