"""Log-probs of both responses of every pair under a frozen model, taken once and kept on disk."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl_plugin.algorithms.rewards import row_sums
from mindspeed_rl_plugin.forward import ForwardSettings
from mindspeed_rl_plugin.loop.topology import Topology
from mindspeed_rl_plugin.monitor.run_files import atomic_write
from mindspeed_rl_plugin.prompts import Pair
from mindspeed_rl_plugin.rows import Ragged
from mindspeed_rl_plugin.stages.logprobs import compute_logps
from mindspeed_rl_plugin.stages.pair_rows import pair_rows, share_of_rank

AT_ONCE = 64  # micro-batches of one forward pass, which are on the host together


def score_pairs(
    model: Sequence[torch.nn.Module],
    pairs: Callable[[Sequence[int]], list[Pair]],
    count: int,
    settings: ForwardSettings,
    topology: Topology,
    gather: Callable[[Any], list[Any]],
    told: Callable[[int], None] = lambda done: None,
) -> Tensor:
    """`[count, 2]` float64 log-prob of chosen and rejected, summed over the response's tokens, in nats.

    model: this rank's chunks; pairs: those at given places; gather: every rank's value, collective; told: pairs of this
    rank that are done. Collective over all ranks; the same on each.
    """
    share = share_of_rank(count, settings.micro_batch_size // 2, topology.dp_rank, topology.dp_size)
    mine: dict[int, tuple[float, float]] = {}
    for begin in range(0, len(share), AT_ONCE):
        part = share[begin : begin + AT_ONCE]
        found = compute_logps(model, [pair_rows(pairs(places)) for places in part], settings)
        for places, logps in zip(part, found or (), strict=False):
            sums = row_sums(Ragged(logps.values.double(), logps.offsets)).view(-1, 2).tolist()
            mine |= dict(zip(places, sums, strict=True))
        told((begin + len(part)) * settings.micro_batch_size // 2)
    scored: dict[int, tuple[float, float]] = {}
    for theirs in gather(mine if topology.writer else {}):
        scored |= theirs
    return torch.tensor([scored[i] for i in range(count)], dtype=torch.float64)


def cache_key(weights: str, fingerprint: str, settings: ForwardSettings, dtype: torch.dtype) -> str:
    """What the log-probs are a function of: digest of the weights as they lie on the ranks, and of the pairs, the
    temperature, the vocabulary and the dtype."""
    parts = (weights, fingerprint, settings.temperature, settings.vocab_size, dtype)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def cache_file(folder: str, key: str) -> Path:
    """Where log-probs of this key lie."""
    return Path(folder) / f"reference-{key[:16]}.pt"


def read_cache(folder: str, key: str, count: int) -> Tensor | None:
    """`[count, 2]` of an earlier run, or None where there are none. Raises ValueError for a damaged file."""
    path = cache_file(folder, key)
    if not path.exists():
        return None
    try:
        saved = torch.load(path, weights_only=True)
        fits = saved["key"] == key and tuple(saved["logps"].shape) == (count, 2)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no log-probs of a reference; remove it, they are taken anew") from error
    if not fits:
        raise ValueError(f"{path} belongs to other pairs or weights; remove it, its log-probs are taken anew")
    return saved["logps"]


def write_cache(folder: str, key: str, logps: Tensor) -> Path:
    """Keep log-probs for later runs; the file appears whole or not at all."""
    path = cache_file(folder, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, lambda target: torch.save({"key": key, "logps": logps}, target))
    return path
