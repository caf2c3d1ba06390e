"""A Megatron checkpoint of `--ckpt-format torch` or `torch_dist`: its files, and the tensors in them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl_plugin.checkpoints.checkpoint_files import TRACKER, iteration_dir, read_tracker
from mindspeed_rl_plugin.checkpoints.dist_files import DCP_INDEX, DistFiles, StoredTensor
from mindspeed_rl_plugin.checkpoints.pickles import load
from mindspeed_rl_plugin.layout.layout import Canonical, ModelShape, Parallel, Segment, megatron_layout
from mindspeed_rl_plugin.layout.parallel import chunk_prefix
from mindspeed_rl_plugin.weights.live import ADAPTERS, mtp_only, table_name, trainer_storage

MODEL_FILE = "model_optim_rng.pt"
# Entries of a model's state that are not weights.
_OTHER = re.compile(r".*(_extra_state|local_tokens_per_expert)$")
# Parts of names in torch_dist files.
_LAYERS, _EXPERT_LAYERS = "decoder.layers.", ".mlp.experts.experts."
_NUMBERED = re.compile(re.escape(_LAYERS) + r"\d+\.")
# Norms: name in torch_dist files (of all implementations) -> name in the implementation `local`.
_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "linear_q_up_proj.layer_norm_weight": "q_layernorm.weight",
    "linear_kv_up_proj.layer_norm_weight": "kv_layernorm.weight",
}
_FACTORS = f"{ADAPTERS}."  # of adapters
_OTHER_STATE = ("optimizer.", "mtp.")


def rank_folder(parallel: Parallel, rank: int) -> str:
    """Folder of a rank's file. Source: get_checkpoint_name of megatron/training/checkpointing.py."""
    at = parallel.coordinates(rank)
    stage = f"_{at.pp:03d}" if parallel.pp > 1 else ""
    expert = f"_{parallel.in_megatron(at.ep):03d}" if parallel.in_megatron(parallel.ep) > 1 else ""
    return f"mp_rank_{at.tp:02d}{stage}{expert}"


def rank_folders(shape: ModelShape, parallel: Parallel) -> dict[str, int]:
    """Folder -> the lowest rank that writes its file. Raises ValueError if two ranks would write different weights to
    one file, because Megatron would keep only one version."""
    first_of: dict[str, int] = {}
    for rank in range(parallel.world):
        folder = rank_folder(parallel, rank)
        first = first_of.setdefault(folder, rank)
        kept, other = (megatron_layout(shape, parallel, r) for r in (first, rank))
        if kept is not other and kept != other:
            raise ValueError(
                f"ranks {first} and {rank} have different weights and the same file {folder}/{MODEL_FILE}: a "
                f"checkpoint of --ckpt-format torch cannot store experts cut by etp {parallel.expert_tp} if tp is only "
                f"{parallel.tp}; give etp of at most tp"
            )
    return first_of


class Checkpoint:
    """A checkpoint on disk. args: Megatron's arguments as saved; parallel: layout of its files (torch_dist: that of a
    run with one rank). iteration: if None, that of the tracker file. Raises ValueError if there is no checkpoint of a
    known format, or if it was saved without arguments. of_run: arguments of a run that loaded it, for its layout."""

    def __init__(self, directory: Path, iteration: int | str | None = None, of_run: Any = None) -> None:
        iteration = read_tracker(str(directory)) if iteration is None else iteration
        if iteration is None:
            raise ValueError(f"no Megatron checkpoint in {directory}: there is no {TRACKER}")
        self.folder = Path(iteration_dir(str(directory), iteration))
        if not self.folder.is_dir():
            there = ", ".join(sorted(p.name for p in directory.iterdir() if _holds_weights(p))) or "none"
            raise ValueError(f"there is no {self.folder}; iterations in {directory}: {there}")
        self._whole = DistFiles(self.folder) if DistFiles.are_in(self.folder) else None
        files = sorted(self.folder.glob(f"mp_rank_*/{MODEL_FILE}"))
        if self._whole is None and not files:
            raise ValueError(
                f"{self.folder} has neither mp_rank_*/{MODEL_FILE} nor {DCP_INDEX}: only checkpoints of --ckpt-format "
                "torch and torch_dist can be exported; save the model again in one of these formats"
            )
        args = self._whole.common().get("args") if self._whole else of_run or load(files[0]).get("args")
        if not isinstance(args, argparse.Namespace):
            where = self.folder if self._whole else files[0]
            raise ValueError(f"{where} has no arguments of Megatron, so its layout is unknown; save it again with them")
        self.args = args
        self.parallel = Parallel(1) if self._whole else Parallel.from_megatron_args(args)

    def tensors(self, folder: str, first_stage: bool) -> Mapping[str, Tensor | StoredTensor]:
        """The model's tensors, or its adapters' by `factor_name`, in one file (torch_dist: in all). first_stage:
        whether it is of pipeline stage 0."""
        if self._whole:
            return {name: t for name, t in whole_model(self._whole).items() if not _OTHER.match(name)}
        path = self.folder / folder / MODEL_FILE
        if not path.is_file():
            raise ValueError(f"{path} is missing; the checkpoint was saved by {self.parallel.world} ranks")
        state, vpp, out = load(path), self.parallel.vpp, {}
        for i in range(vpp):
            chunk = state.get(f"model{i}" if vpp > 1 else "model")
            if chunk is None:
                raise ValueError(f"{path} does not hold the state of all {vpp} model chunks")
            left = mtp_only(any(name.startswith("mtp.") for name in chunk), first_stage and i == 0)
            for name, value in chunk.items():
                if isinstance(value, Tensor) and not _OTHER.match(name) and not name.startswith(left):
                    factor = name.rpartition(".")[2] if name.startswith(_FACTORS) else None
                    out[factor or chunk_prefix(i, vpp) + table_name(name)] = value
        return out


StoredPart = tuple[str, Tensor | StoredTensor, Segment]  # folder, stored parameter, the segment in it


def model_parts(shape: ModelShape, checkpoint: Checkpoint) -> Iterator[StoredPart]:
    """What all ranks saved of a model. Raises ValueError, with names and shapes, if it is not one of `shape`."""
    parallel = checkpoint.parallel
    for folder, rank in rank_folders(shape, parallel).items():
        stored = checkpoint.tensors(folder, parallel.coordinates(rank).pp == 0)
        storage = trainer_storage(shape, parallel, rank, stored, str(checkpoint.folder / folder))
        for name, segments in megatron_layout(shape, parallel, rank, *storage).items():
            yield from ((folder, stored[name], s) for s in segments)


class Assembled:
    """Assembles complete tensors, one by one, from the parts that all ranks saved. tensors: by name."""

    def __init__(self, tensors: Mapping[str, Canonical], parts: Iterable[StoredPart]) -> None:
        self.tensors = tensors
        self._parts: dict[str, dict[tuple[int, int], list[StoredPart]]] = {name: {} for name in tensors}
        for part in parts:
            self._parts[part[2].name].setdefault((part[2].start, part[2].stop), []).append(part)

    def dtype(self, name: str) -> torch.dtype:
        return next(iter(self._parts[name].values()))[0][1].dtype

    def make(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The complete tensor, in the stored dtype or in `dtype`. Raises ValueError if two ranks store
        different values of the same slices."""
        tensor = self.tensors[name]
        out = torch.empty(tensor.shape, dtype=dtype or self.dtype(name))
        for (low, high), copies in self._parts[name].items():
            who, values = copies[0][0], _values(copies[0])
            for again in copies[1:]:
                if not torch.equal(values, _values(again)):
                    raise ValueError(f"{name} [{low}, {high}): {who} and {again[0]} store different values")
            out.narrow(tensor.axis, low, high - low).copy_(values)
        return out


def _values(part: StoredPart) -> Tensor:
    _, stored, segment = part
    if isinstance(stored, StoredTensor) and segment.slot >= 0:  # read one expert only
        one = (segment.slot, segment.slot + 1)
        stored = replace(stored, box=(one, *stored.box[1:]), shape=(1, *stored.shape[1:]))
        segment = segment._replace(slot=0)
    return segment.view(stored.read() if isinstance(stored, StoredTensor) else stored, segment.start, segment.size)


def _holds_weights(folder: Path) -> bool:
    return any(folder.glob("mp_rank_*")) or DistFiles.are_in(folder)


def whole_model(files: DistFiles) -> dict[str, StoredTensor]:
    """Tensors of `--ckpt-format torch_dist` as on a single rank: parameter name (implementation `local`, experts
    `sequential`) -> tensor, read when it is used.

    The files have complete tensors: [gate; up], query groups one after the other, the embedding with its padding.
    Sources (core 0.12.1, 0.16.1 and 0.19 do the same here): sharded_state_dict of transformer_block.py, mlp.py and
    moe/experts.py.
    """
    return dict(_each(files))


def _each(files: DistFiles) -> Iterator[tuple[str, StoredTensor]]:
    for name, (size, dtype) in files.tensors().items():
        if name.startswith(_OTHER_STATE):
            continue
        layered = name.startswith(_LAYERS) and not _NUMBERED.match(name)
        leading = layered + (_EXPERT_LAYERS in name)  # number of stacked axes: layers, experts
        for at in product(*map(range, size[:leading])):
            box = tuple((i, i + 1) for i in at) + tuple((0, n) for n in size[leading:])
            yield _plain(name, list(at), layered), StoredTensor(files, name, box, size[leading:], dtype)


def _plain(name: str, at: list[int], layered: bool) -> str:
    if name.startswith(_FACTORS):
        return name.removeprefix(_FACTORS).replace(".", "/")
    if layered:
        name = f"{_LAYERS}{at.pop(0)}.{name.removeprefix(_LAYERS)}"
    if _EXPERT_LAYERS in name:
        name = name.replace(_EXPERT_LAYERS, f".mlp.experts.local_experts.{at.pop(0)}.")
    for fused, plain in _NORMS.items():
        name = name.replace(fused, plain)
    return table_name(name)
