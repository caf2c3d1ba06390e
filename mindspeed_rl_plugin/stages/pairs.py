"""Pairs: the next preference pairs enter the dock as two rows each, with the reference's log-probs (DPO)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_rl_plugin.dock import ColumnSpec
from mindspeed_rl_plugin.prompts import Pair
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId
from mindspeed_rl_plugin.stages.context import RankContext
from mindspeed_rl_plugin.stages.prompts import Prompts
from mindspeed_rl_plugin.stages.stage import StageSpec

CHOSEN, REJECTED = 0, 1  # members of a pair


class Pairs(Prompts):
    """The stage on this rank."""

    def __init__(self, spec: StageSpec, context: RankContext) -> None:
        super().__init__(spec, context)
        self._place_of = {row: place for place, row in enumerate(self.data.rows)}

    def compute(self, epoch: int, groups: int, *_: object) -> Rows:
        """Two rows per pair, in the order of the data, with the log-probs of the reference."""
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
