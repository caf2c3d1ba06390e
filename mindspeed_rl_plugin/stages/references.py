"""References: log-probs of both responses of every pair under a frozen model, taken once and kept on disk (DPO)."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mindspeed_rl_plugin.algorithms.rewards import row_sums
from mindspeed_rl_plugin.forward import ForwardSettings
from mindspeed_rl_plugin.monitor.monitor import Monitor
from mindspeed_rl_plugin.monitor.run_files import atomic_write
from mindspeed_rl_plugin.prompts import Pair, PairStream
from mindspeed_rl_plugin.ranks import Collectives
from mindspeed_rl_plugin.rows import Ragged
from mindspeed_rl_plugin.stages.logprobs import compute_logps
from mindspeed_rl_plugin.stages.pairs import pair_rows

AT_ONCE = 64  # micro-batches of one forward pass, which are on the host together


@dataclass(eq=False)
class PairScorer:
    """Scores pairs under the weights in the model."""

    model: Sequence[torch.nn.Module]
    data: Sequence[PairStream]  # pairs to train on, then the held-out ones, which makes a place of each
    settings: ForwardSettings
    ranks: Collectives
    monitor: Monitor
    dp_rank: int  # data parallel place
    dp_size: int
    writer: bool  # whether this rank speaks for its pipeline

    def __len__(self) -> int:
        return sum(map(len, self.data))

    def pair(self, place: int) -> Pair:
        first = len(self.data[0])
        return self.data[0].at(place) if place < first else self.data[1].at(place - first)

    def score(self, places: Sequence[int], what: str) -> Tensor:
        """`[len(places), 2]` float64 log-prob of chosen and rejected, summed over the response's tokens, in nats.

        what: the work, for the progress bar. Collective over all ranks; the same on each.
        """
        in_batch = self.settings.micro_batch_size // 2
        share = share_of_rank(len(places), in_batch, self.dp_rank, self.dp_size)
        mine: dict[int, list[float]] = {}
        with self.monitor.progress(-(-len(places) // self.dp_size), what) as bar:
            for begin in range(0, len(share), AT_ONCE):
                part = share[begin : begin + AT_ONCE]
                rows = [pair_rows([self.pair(places[i]) for i in batch]) for batch in part]
                for asked, logps in zip(part, compute_logps(self.model, rows, self.settings) or (), strict=False):
                    sums = row_sums(Ragged(logps.values.double(), logps.offsets)).view(-1, 2).tolist()
                    mine |= dict(zip(asked, sums, strict=True))
                bar.update(len(part) * in_batch)
        scored: dict[int, list[float]] = {}
        for theirs in self.ranks.gather(mine if self.writer else {}):
            scored |= theirs
        return torch.tensor([scored[i] for i in range(len(places))], dtype=torch.float64)


def share_of_rank(count: int, in_batch: int, dp_rank: int, dp_size: int) -> list[list[int]]:
    """Pairs that a rank scores, `in_batch` a micro-batch; every rank runs equally many micro-batches, so the last pairs
    of the data may be scored several times."""
    batches = -(-count // (in_batch * dp_size))
    first = dp_rank * batches * in_batch
    places = [min(first + i, count - 1) for i in range(batches * in_batch)]
    return [places[i : i + in_batch] for i in range(0, len(places), in_batch)]


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
        raise ValueError(f"{path} holds no log-probs of a reference; remove it, they are computed again") from error
    if not fits:
        raise ValueError(f"{path} belongs to other pairs or weights; remove it, they are computed again")
    return saved["logps"]


def write_cache(folder: str, key: str, logps: Tensor) -> Path:
    """Keep log-probs for later runs; the file appears whole or not at all."""
    path = cache_file(folder, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, lambda target: torch.save({"key": key, "logps": logps}, target))
    return path
