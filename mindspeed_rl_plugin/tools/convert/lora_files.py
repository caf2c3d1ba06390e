"""Checkpoints of a run with `--rl-lora-rank`, which hold adapters only: merged into their base, or as files for peft.

The base is the checkpoint with which the run began; the RL state has its path and digest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl_plugin.adapters.adapters import factor_name, merge
from mindspeed_rl_plugin.adapters.targets import adapted, matrices
from mindspeed_rl_plugin.checkpoints.checkpoint_files import read_state, split_iteration_dir
from mindspeed_rl_plugin.checkpoints.reference_digest import hash_file, weight_files
from mindspeed_rl_plugin.config.run_flags import LoraConfig
from mindspeed_rl_plugin.layout.family_table import EXPERTS, IMPLS
from mindspeed_rl_plugin.layout.layout import Canonical, ModelShape, Segment
from mindspeed_rl_plugin.ranks import combine_hashes
from mindspeed_rl_plugin.tools.convert import checkpoint as stored
from mindspeed_rl_plugin.tools.convert.files import write_file
from mindspeed_rl_plugin.weights.live import differences, raise_if, sizes_of

_STORAGES = [kinds for kinds in product(IMPLS, EXPERTS) if kinds[0] != "mindspeed_split"]  # refused with adapters
_NUMBERS = re.compile(r"^model\.layers\.\d+\.|(?<=\.experts)\.\d+")


def lora_of(checkpoint: stored.Checkpoint) -> LoraConfig | None:
    """The flags of the adapters; None: the checkpoint holds a whole model."""
    rank, alpha, targets = (getattr(checkpoint.args, f"rl_lora_{x}", None) for x in ("rank", "alpha", "targets"))
    return LoraConfig(rank, alpha, tuple(targets or ())) if rank is not None else None


def base_of(checkpoint: stored.Checkpoint, given: Path | None) -> stored.Checkpoint:
    """The base of the adapters. given: where it is now. Raises ValueError if it is not there, or is another one."""
    reference = read_state(*split_iteration_dir(str(checkpoint.folder)))[0]["reference"]
    if reference["path"] is None:
        raise ValueError(f"the run of {checkpoint.folder} began with random weights, which no file has; give --adapter")
    folder = Path(reference["path"])
    if given is not None:
        folder = given / folder.name if (given / folder.name).is_dir() else given
    if not folder.is_dir():
        raise ValueError(f"{folder}, the base of these adapters, is not there; if it was moved, name it by --base DIR")
    hashes = {path: hash_file(str(folder / path)) for path in weight_files(str(folder))}
    if combine_hashes(hashes) != reference["digest"]:
        raise ValueError(
            f"{folder} is not the base of these adapters, or has changed since their run began (SHA-256 at that time: "
            f"{reference['digest'] or 'not recorded'}); restore it, or name the right one by --base DIR"
        )
    return stored.Checkpoint(folder.parent, folder.name, checkpoint.args)


class Factors(stored.Assembled):
    """`NAME.lora_A` `[rank, in]` and `NAME.lora_B` `[out, rank]` of the matrices with an adapter. Raises ValueError if
    the checkpoint does not hold them."""

    def __init__(self, shape: ModelShape, checkpoint: stored.Checkpoint, lora: LoraConfig) -> None:
        self.lora = lora
        each = factor_shapes(shape, lora, lora.target_names).items()
        tensors = {name: Canonical(size, 1 if name.endswith("A") else 0) for name, size in each}
        super().__init__(tensors, self._of_ranks(shape, checkpoint))
        self.stored_dtype = self.dtype(next(iter(tensors)))

    def _of_ranks(self, shape: ModelShape, checkpoint: stored.Checkpoint) -> Iterator[stored.StoredPart]:
        for folder, rank in stored.rank_folders(shape, checkpoint.parallel).items():
            tensors, wrong = checkpoint.tensors(folder, first_stage=True), []
            for kinds in _STORAGES:  # where the way in which a rank stores W matters, factors differ in name or shape
                held = adapted(shape, checkpoint.parallel, rank, kinds, self.lora.target_names)
                each = ((m, zip("AB", m.factor_shapes(self.lora.lora_rank), strict=True)) for m in held)
                sizes = {factor_name(m, x): size for m, factors in each for x, size in factors}
                wrong.append(differences(sizes, sizes_of(tensors)))
                if not wrong[-1]:
                    break
            raise_if(min(wrong, key=len), f"{checkpoint.folder / folder} does not hold the adapters of its arguments")
            for matrix, x in product(held, "AB"):
                tensor, axis = tensors[factor_name(matrix, x)], 1 if x == "A" else 0
                start = matrix.start if matrix.splits(x) else 0
                for i, name in enumerate(matrix.canonical):
                    yield folder, tensor, Segment(f"{name}.lora_{x}", axis, start, tensor.shape[1 + axis], 0, i)


class MergedModel(stored.Assembled):
    """A base with its adapters: W + scale x B A, rounded once to the run's dtype, as trainer and engine had it."""

    def __init__(self, *given: Any, factors: Factors) -> None:
        super().__init__(*given)
        self._factors = factors

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32 if self.tensors[name].wide else self._factors.stored_dtype

    def make(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        out, (a, b) = super().make(name), (f"{name.removesuffix('.weight')}.lora_{x}" for x in "AB")
        if a in self._factors.tensors:
            merge(out, self._factors.make(b), self._factors.make(a), self._factors.lora.lora_scale)
        return out.to(dtype or out.dtype)


def factor_shapes(shape: ModelShape, lora: LoraConfig, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Shapes of `Factors`. targets: as the flag's, () for all linear layers."""
    rank, each = lora.lora_rank, matrices(shape, targets)
    return {f"{n}.lora_{x}": (rank, size[1]) if x == "A" else (size[0], rank) for n, size in each for x in "AB"}


def write_peft(out: Path, shape: ModelShape, factors: Factors, dtype: torch.dtype, model_type: str) -> int:
    """Write adapter_config.json and adapter_model.safetensors; returns the number of adapters. Raises ValueError for
    a model that transformers does not have.

    transformers 5 stacks experts, so peft (0.21) stacks their factors, but only gate, up and down together: those that
    have no adapter get zeros. In a model with experts it takes these three names among `target_modules` for experts, so
    other layers so named go by their parameters.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"--adapter: peft needs a model of transformers, and that has no {model_type!r}; leave it out")
    experts = any(".experts." in name for name in factors.tensors)
    sizes = factor_shapes(shape, factors.lora, ())
    sizes = {name: size for name, size in sizes.items() if name in factors.tensors or experts and ".experts." in name}
    made = {
        n: factors.make(n, dtype) if n in factors.tensors else torch.zeros(s, dtype=dtype) for n, s in sizes.items()
    }
    write_file(out / "adapter_model.safetensors", {f"base_model.model.{name}.weight": t for name, t in made.items()})
    names = dict.fromkeys(_NUMBERS.sub("", name.rpartition(".")[0]) for name in sizes)
    ends = ("gate_proj", "up_proj", "down_proj") if shape.experts else ()
    plain = [name for name in names if name.endswith(ends) and ".experts." not in name]
    config = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True},
        **{"r": factors.lora.lora_rank, "lora_alpha": factors.lora.lora_scale * factors.lora.lora_rank},
        "target_modules": [name for name in names if name not in plain],
        "target_parameters": [f"{name}.weight" for name in plain] or None,
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=1))
    return len(factors.tensors) // 2
