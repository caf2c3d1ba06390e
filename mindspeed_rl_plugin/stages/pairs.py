"""Pairs: puts the next preference pairs into the dock, two rows each, with the reference's log-probs (DPO). These
log-probs are computed once, before training, and stored on disk."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mindspeed_rl_plugin.algorithms.rewards import row_sums
from mindspeed_rl_plugin.dock import ColumnSpec
from mindspeed_rl_plugin.forward import ForwardSettings
from mindspeed_rl_plugin.monitor.monitor import Monitor
from mindspeed_rl_plugin.monitor.run_files import atomic_write
from mindspeed_rl_plugin.prompts import Pair, PairStream
from mindspeed_rl_plugin.ranks import Collectives
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId
from mindspeed_rl_plugin.stages.context import RankContext
from mindspeed_rl_plugin.stages.prompts import Prompts
from mindspeed_rl_plugin.stages.stage import StageSpec

CHOSEN, REJECTED = 0, 1  # members of a pair
AT_ONCE = 64  # micro-batches of one forward pass, which the host holds together


class Pairs(Prompts):
    """The stage on this rank."""

    def __init__(self, spec: StageSpec, context: RankContext) -> None:
        super().__init__(spec, context)
        self._place_of = {row: place for place, row in enumerate(self.data.rows)}

    def compute(self, epoch: int, groups: int, *_: object) -> Rows:
        """Two rows per pair, in the seeded order of the `PairStream`, with the log-probs of the reference."""
        pairs = self.data.next(groups)
        places = [self._place_of[pair.row] for pair in pairs]
        return pair_rows(pairs, self.context.pair_references[places], epoch)


SPEC = StageSpec(
    "pairs",
    reads=(),
    writes=(
        ColumnSpec("tokens", torch.int32, "token", ragged=True),
        ColumnSpec("loss_mask", torch.uint8, "token", ragged=True),
        ColumnSpec("reference", torch.float64, "sample", ragged=False),  # log-prob of the response, summed
    ),
    resource="leader",
    build=Pairs,
)


def pair_rows(pairs: Sequence[Pair], reference: Tensor | None = None, epoch: int = 0) -> Rows:
    """Two rows per pair, chosen first, with `tokens` and `loss_mask`; the group is the pair's index in `pairs`.

    reference: `[len(pairs), 2]`, which becomes the column `reference` `[2 * len(pairs)]`.
    """
    tokens, masks, ids = [], [], []
    for place, pair in enumerate(pairs):
        for member, answer in ((CHOSEN, pair.chosen), (REJECTED, pair.rejected)):
            tokens.append(torch.tensor((*pair.prompt, *answer), dtype=torch.int32))
            masks.append(torch.tensor([0] * len(pair.prompt) + [1] * len(answer), dtype=torch.uint8))
            ids.append(SampleId(epoch, place, member))
    columns = {"tokens": Ragged.from_rows(tokens, torch.int32), "loss_mask": Ragged.from_rows(masks, torch.uint8)}
    return Rows(tuple(ids), columns | ({} if reference is None else {"reference": reference.flatten()}))


@dataclass(eq=False)
class PairScorer:
    """Computes log-probs of pairs under the weights in the model."""

    forward: Callable[[Sequence[Rows]], list[Ragged] | None]  # the trainer's forward pass
    data: Sequence[PairStream]  # pairs to train on, then held-out pairs; a place is an index over both
    settings: ForwardSettings
    ranks: Collectives
    monitor: Monitor
    dp_rank: int  # of this rank
    dp_size: int
    writer: bool  # whether this rank hands over what its data parallel rank computed

    def __len__(self) -> int:
        return sum(map(len, self.data))

    def pair(self, place: int) -> Pair:
        first = len(self.data[0])
        return self.data[0].at(place) if place < first else self.data[1].at(place - first)

    def score(self, places: Sequence[int], what: str) -> Tensor:
        """`[len(places), 2]` float64 log-prob of chosen and rejected, summed over the response's tokens, in nats.

        what: title of the progress bar. Collective over all ranks; the same result on each.
        """
        in_batch = self.settings.micro_batch_size // 2
        share = share_of_rank(len(places), in_batch, self.dp_rank, self.dp_size)
        mine: dict[int, list[float]] = {}
        with self.monitor.progress(-(-len(places) // self.dp_size), what) as bar:
            for begin in range(0, len(share), AT_ONCE):
                part = share[begin : begin + AT_ONCE]
                rows = [pair_rows([self.pair(places[i]) for i in batch]) for batch in part]
                for asked, logps in zip(part, self.forward(rows) or (), strict=False):
                    sums = row_sums(Ragged(logps.values.double(), logps.offsets)).view(-1, 2).tolist()
                    mine |= dict(zip(asked, sums, strict=True))
                bar.update(len(part) * in_batch)
        scored: dict[int, list[float]] = {}
        for theirs in self.ranks.gather(mine if self.writer else {}):
            scored |= theirs
        return torch.tensor([scored[i] for i in range(len(places))], dtype=torch.float64)


def share_of_rank(count: int, in_batch: int, dp_rank: int, dp_size: int) -> list[list[int]]:
    """Pairs that a rank scores, `in_batch` per micro-batch. Every rank runs the same number of micro-batches, so the
    last pair of the data may be scored several times."""
    batches = -(-count // (in_batch * dp_size))
    first = dp_rank * batches * in_batch
    places = [min(first + i, count - 1) for i in range(batches * in_batch)]
    return [places[i : i + in_batch] for i in range(0, len(places), in_batch)]


def cache_key(weights: str, fingerprint: str, settings: ForwardSettings, dtype: torch.dtype) -> str:
    """Digest of all that determines the log-probs: the weights on the ranks, the pairs, the temperature, the vocabulary
    and the dtype."""
    parts = (weights, fingerprint, settings.temperature, settings.vocab_size, dtype)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def cache_file(folder: str, key: str) -> Path:
    """File of the log-probs of a key."""
    return Path(folder) / f"reference-{key[:16]}.pt"


def read_cache(folder: str, key: str, count: int) -> Tensor | None:
    """`[count, 2]` log-probs of an earlier run, or None. Raises ValueError for a damaged file."""
    path = cache_file(folder, key)
    if not path.exists():
        return None
    try:
        saved = torch.load(path, weights_only=True)
        fits = saved["key"] == key and tuple(saved["logps"].shape) == (count, 2)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no log-probs of a reference; remove it, then they are computed") from error
    if not fits:
        raise ValueError(f"{path} belongs to other pairs or weights; remove it, then the log-probs are computed again")
    return saved["logps"]


def write_cache(folder: str, key: str, logps: Tensor) -> Path:
    """Store log-probs for later runs; the file is written atomically."""
    path = cache_file(folder, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, lambda target: torch.save({"key": key, "logps": logps}, target))
    return path
