"""Waits until rows are graded, by the graders of any rank, while other work continues."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mindspeed_rl_plugin.ranks import Collectives, Stall
from mindspeed_rl_plugin.rows import SampleId
from mindspeed_rl_plugin.stages.grading import GradingThread
from mindspeed_rl_plugin.stages.reward import Reward
from mindspeed_rl_plugin.status.status_file import doing

GRADED_LOOK_SECONDS = 1.0  # longest time that the first rank polls the dock before it tells the other ranks
PAUSE_SECONDS = 0.005, 0.1  # between two polls: the first pause, and the longest


class GradeWait:
    """check: called regularly by the first rank; it may raise. who: returns a text about the engines, for an error."""

    def __init__(
        self,
        ranks: Collectives,
        stage: Reward,
        grader: GradingThread,
        check: Callable[[], None] = lambda: None,
        who: Callable[[], str] = lambda: "",
    ) -> None:
        self.ranks, self.stage, self.grader, self._check, self._who = ranks, stage, grader, check, who
        self._stall = Stall(ranks.deadline)

    def until_graded(self, ids: Sequence[SampleId]) -> None:
        """Wait until all these rows are graded. Collective. Raises TimeoutError if no row is graded for too long,
        and the error that ended this rank's grading thread."""
        self._stall = Stall(self.ranks.deadline)
        asked = torch.tensor(ids, dtype=torch.int64).reshape(-1, 3)  # converted once: this takes longer than a poll
        with doing("responses and their grades", "ranks"):
            while self.ranks.broadcast(self._look(asked) if self.ranks.rank == 0 else None):
                self.grader.check()

    def ungraded(self, ids: Sequence[SampleId] | Tensor) -> int:
        """Number of rows that are not graded yet."""
        return self.stage.dock.remaining(self.stage.spec.name, ids)

    def _look(self, ids: Tensor) -> int:
        """Number of rows that are not graded, after at most GRADED_LOOK_SECONDS."""
        self._check()
        end, pause = time.monotonic() + GRADED_LOOK_SECONDS, PAUSE_SECONDS[0]
        while (left := self.ungraded(ids)) and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS[1])
        # Any graded row is progress: engines may be busy with an evaluation, whose rows they take first.
        if left and self._stall.seen((left, self.stage.dock.remaining(self.stage.spec.name))):
            raise TimeoutError(
                f"{left} of {len(ids)} responses (first id of all: {tuple(ids[0].tolist())}) are not graded, "
                f"none was graded for {self.ranks.deadline:g} s (--rl-wait-timeout); {self._who()}"
            )
        return left
