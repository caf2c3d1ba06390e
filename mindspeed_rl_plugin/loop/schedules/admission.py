"""Admission: how far generation may run ahead of training. Only counters, the same on every rank."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Admission:
    """Bounds the lag of every trained token to k = `staleness` publications; no sample is discarded for its age.

    Publication p is the weights that rollout p starts from; publication 0 is the weights before the first update.
    Groups are trained in the order of their admission; groups that selection drops do not count. A group admitted when
    publication p is the newest has position n < (p + k + 1) x rollout in this order, counted from 0. So it is trained
    in rollout p + k at latest, right before publication p + k + 1. No weights older than publication p may sample it.

    rollout: groups of a rollout.
    staleness: k, the largest lag.
    rollouts: number of rollouts of the run.
    published: number of the newest publication, -1 before the first.
    admitted, dropped: numbers of groups so far.
    versions: number of a publication -> its weight version (0 for the first one), for the newest `staleness` + 1.
    """

    rollout: int
    staleness: int
    rollouts: int
    published: int = -1
    admitted: int = 0
    dropped: int = 0
    versions: dict[int, int] = field(default_factory=dict)

    @property
    def allowed(self) -> int:
        """Groups that may be admitted now."""
        limit = min(self.published + self.staleness + 1, self.rollouts) * self.rollout
        return max(limit - self.admitted + self.dropped, 0)

    @property
    def next_epoch(self) -> int:
        """Groups of the next epoch: at most a rollout."""
        return min(self.allowed, self.rollout)

    def next_number(self, version: int) -> int:
        """Number of the first publication after a start: the last number again if the weights are still the same."""
        return self.published + (self.versions.get(self.published) != version)

    def begin(self, number: int, deferred: int) -> None:
        """Set the counts as if only the rollouts before publication `number`, and the deferred groups, had been
        admitted."""
        self.admitted, self.dropped = number * self.rollout + deferred, 0

    def publish(self, version: int, number: int) -> None:
        """Publication `number` holds the weights of `version`. A resume, and the end of a run, may repeat a number."""
        assert number in (self.published, self.published + 1), (number, self.published)
        # The first is entered as version 0: `lag` then finds it also for groups that a synchronous run deferred.
        first = self.published < 0
        self.published = number
        oldest = number - self.staleness
        kept = {n: v for n, v in self.versions.items() if n >= oldest}
        self.versions = kept | {number: 0 if first else version}

    def lag(self, version: int) -> int:
        """Number of publications after the one with `version`; `len(versions)` if it is older than all `versions`."""
        numbers = sorted(self.versions)
        at = bisect_right([self.versions[n] for n in numbers], version)
        return self.published - numbers[at - 1] if at else self.published - numbers[0] + 1

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "staleness": self.staleness,
            "published": self.published,
            "admitted": self.admitted,
            "dropped": self.dropped,
            "versions": [[n, v] for n, v in sorted(self.versions.items())],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.published, self.admitted, self.dropped = state["published"], state["admitted"], state["dropped"]
        self.versions = dict(map(tuple, state["versions"]))
