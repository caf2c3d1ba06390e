"""Which groups are in flight over rollouts, when enough of them are finished, and how old they are. Pure, the same on
every rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_rl_plugin.rows import Group, SampleId


@dataclass
class InFlight:
    """Bounds the age of what a rollout trains to `staleness` rollouts: generation goes on until that is certain.

    Rollout number r trains `prompts` groups, the oldest that are finished. A group that began in rollout s is trained
    in rollout s + staleness at latest. So after rollout r no more than d x prompts groups may be left that must be
    trained by rollout r + d, for each d below `staleness`; for d = staleness that holds because at most `most` groups,
    which is at most (staleness + 1) x prompts, are in flight at once. With staleness 0 what is not finished in time
    is not to go on, so nothing is waited for.

    prompts: groups of a rollout.
    members: rows of a group.
    most: groups that are in flight at once.
    rollout: number of the one that is collected.
    versions: weights of the newest rollouts, as many as a token may have seen.
    started: rollout in which each group began, of those that are not trained or dropped.
    unfinished: the members that are not finished, of each group that `take` has not returned.
    engine_of: engine that samples each row that is not finished.
    """

    prompts: int
    members: int
    most: int
    staleness: int
    rollout: int = -1
    versions: list[int] = field(default_factory=list)
    started: dict[Group, int] = field(default_factory=dict)
    unfinished: dict[Group, set[int]] = field(default_factory=dict)
    engine_of: dict[SampleId, int] = field(default_factory=dict)

    def begin(self, version: int) -> None:
        """A rollout begins, with these weights."""
        self.rollout += 1
        self.versions = [*self.versions, version][-(self.staleness + 1) :]

    def wanted(self, rollouts: int | None) -> int:
        """Groups to start now; rollouts: how many are left of the run, this one included, None where what is left over
        at its end is no harm."""
        most = self.most if rollouts is None else min(self.most, rollouts * self.prompts)
        return max(most - len(self.started), 0)

    def start(self, groups: Sequence[Group], engines: int) -> None:
        """New groups. Engines get equally many rows, with those that they have."""
        for group in groups:
            self.started[group], self.unfinished[group] = self.rollout, set(range(self.members))
        held = [0] * engines
        for engine in self.engine_of.values():
            held[engine] += 1
        rows = [SampleId(*group, member) for group in groups for member in range(self.members)]
        self.engine_of |= dict(zip(rows, level(held, len(rows)), strict=True))

    def rows_of(self, engine: int) -> list[SampleId]:
        """Rows that an engine goes on with, the oldest first."""
        return sorted(row for row, its in self.engine_of.items() if its == engine)

    def finish(self, rows: Iterable[SampleId]) -> None:
        """These rows are finished."""
        for row in rows:
            del self.engine_of[row]
            self.unfinished[row[:2]].remove(row.member)

    def enough(self) -> bool:
        """Whether the rollout can be trained, and those after it without anything that is too old."""
        if not self.engine_of:
            return True
        finished = [group for group in self.started if not self.unfinished.get(group)]
        return len(finished) >= self.prompts and all(self._late(d) <= d * self.prompts for d in range(self.staleness))

    def take(self, most: int | None) -> tuple[Group, ...]:
        """The oldest groups that are finished, so many or all."""
        groups = sorted(group for group, left in self.unfinished.items() if not left)[:most]
        for group in groups:
            del self.unfinished[group]
        return tuple(groups)

    def end(self, groups: Iterable[Group]) -> None:
        """These groups are trained, or dropped."""
        for group in groups:
            del self.started[group]
            for member in self.unfinished.pop(group, ()):
                del self.engine_of[SampleId(*group, member)]

    def lag(self, version: int) -> int:
        """Rollouts that began with newer weights than `version`; past the bound it is one more than that."""
        return sum(newer > version for newer in self.versions)

    def _late(self, later: int) -> int:
        """Groups that would be left after this rollout, of those that must be trained so many rollouts later."""
        due = [group for group, begun in self.started.items() if begun + self.staleness <= self.rollout + later]
        finished = sum(not self.unfinished.get(group) for group in due)
        return len(due) - min(finished, self.prompts)

    # checkpoint

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "staleness": self.staleness,
            "rollout": self.rollout,
            "versions": list(self.versions),
            "started": [[*group, begun] for group, begun in self.started.items()],
            "left": [[*group, *sorted(left)] for group, left in self.unfinished.items()],
            "places": [[*row, engine] for row, engine in self.engine_of.items()],
        }

    def load(self, state: Mapping[str, Any], deferred: Collection[Group], engines: int) -> None:
        """Take `state` over. deferred: groups that are finished and taken, but not trained. Rows stay with their
        engines, or are dealt anew where one of these is no more."""
        self.rollout, self.versions = state["rollout"], list(state["versions"])[-(self.staleness + 1) :]
        self.unfinished = {(epoch, group): set(left) for epoch, group, *left in state["left"]}
        started = {(epoch, group): begun for epoch, group, begun in state["started"]}
        self.started = {group: begun for group, begun in started.items() if group in {*self.unfinished, *deferred}}
        self.engine_of = {SampleId(*row): engine for *row, engine in state["places"]}
        if any(engine >= engines for engine in self.engine_of.values()):
            self.engine_of = dict(zip(sorted(self.engine_of), level([0] * engines, len(self.engine_of)), strict=True))


def level(held: Sequence[int], items: int) -> list[int]:
    """Part that each item goes to, so that parts, which hold some already, become as equal as may be; neighbours stay
    together."""
    more, lowest = [0] * len(held), min(held)
    while (left := items - sum(more)) > 0:
        for part, count in enumerate(held):
            if count + more[part] <= lowest and left:
                more[part], left = more[part] + 1, left - 1
        lowest += 1
    return [part for part, count in enumerate(more) for _ in range(count)]
