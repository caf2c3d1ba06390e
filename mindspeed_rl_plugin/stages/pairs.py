"""Pairs: the next preference pairs enter the dock as two rows each, with the reference's log-probs (DPO)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_rl_plugin.dock import ColumnSpec, Dock
from mindspeed_rl_plugin.prompts import Pair, PairStream
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId
from mindspeed_rl_plugin.stages.context import RankContext
from mindspeed_rl_plugin.stages.prompts import Prompts
from mindspeed_rl_plugin.stages.stage import StageSpec

CHOSEN, REJECTED = 0, 1  # members of a pair


def build(spec: StageSpec, context: RankContext) -> Pairs:
    """The stage on this rank."""
    return Pairs(context.dock_of("trainer"), context.data, context.pair_references, context.leader)


SPEC = StageSpec(
    "pairs",
    reads=(),
    writes=(
        ColumnSpec("tokens", torch.int32, "token", ragged=True),
        ColumnSpec("loss_mask", torch.uint8, "token", ragged=True),
        ColumnSpec("reference", torch.float64, "sample", ragged=False),  # log-prob of the response, summed
    ),
    resource="leader",
    build=build,
)


class Pairs(Prompts):
    """The stage on this rank. reference: `[len(data), 2]`, log-probs of the data's pairs, in their order."""

    def __init__(self, dock: Dock, data: PairStream, reference: Tensor, leader: bool) -> None:
        super().__init__(dock, data, members=2, leader=leader)
        self.reference = reference
        self._place_of = {row: place for place, row in enumerate(data.rows)}

    def compute(self, epoch: int, groups: int, *_: object) -> Rows:
        """Two rows per pair, in the order of the data, with the log-probs of the reference."""
        pairs = self.data.next(groups)
        return pair_rows(pairs, self.reference[[self._place_of[pair.row] for pair in pairs]], epoch)


def pair_rows(pairs: Sequence[Pair], reference: Tensor | None = None, epoch: int = 0) -> Rows:
    """Two rows per pair, chosen first, with `tokens` and `loss_mask`; group is the pair's place among these.

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


def share_of_rank(count: int, in_batch: int, dp_rank: int, dp_size: int) -> list[list[int]]:
    """Pairs that a rank scores, `in_batch` a micro-batch; every rank runs equally many micro-batches, so the last pairs
    of the data may be scored several times."""
    batches = -(-count // (in_batch * dp_size))
    first = dp_rank * batches * in_batch
    places = [min(first + i, count - 1) for i in range(batches * in_batch)]
    return [places[i : i + in_batch] for i in range(0, len(places), in_batch)]
