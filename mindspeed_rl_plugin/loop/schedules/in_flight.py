"""Which groups are in flight, when enough of them are finished for a rollout, and how old they are. `InFlight`
depends only on its calls, which are the same on every rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_rl_plugin.rows import Group, SampleId


@dataclass
class InFlight:
    """Bounds the age of trained groups to `staleness` rollouts: generation continues until this is certain.

    Rollout number r trains the `prompts` oldest finished groups. A group that began in rollout s is trained
    in rollout s + staleness at latest. So after rollout r at most d x prompts of the remaining groups may be due by
    rollout r + d, for each d below `staleness`. For d = staleness this always holds: at most `most` groups are in
    flight, and `most` is at most (staleness + 1) x prompts. With staleness 0 `most` may be larger: unfinished groups
    are dropped, so no rollout waits for them.

    prompts: groups of a rollout.
    members: rows of a group.
    most: largest number of groups in flight.
    rollout: number of the rollout that is collected.
    versions: of the weights with which the newest rollouts began; only these may have sampled tokens in flight.
    started: group that is neither trained nor dropped -> rollout in which it began.
    unfinished: group that `take` has not returned -> its members that are not finished.
    engine_of: row that is not finished -> the engine that samples it.
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
        """Number of groups to start now. rollouts: how many the run still has, with this one; None: groups may be
        unfinished at the end of the run."""
        most = self.most if rollouts is None else min(self.most, rollouts * self.prompts)
        return max(most - len(self.started), 0)

    def start(self, groups: Sequence[Group], engines: int) -> None:
        """Start new groups. Rows are dealt so that each engine has the same number of rows in all."""
        for group in groups:
            self.started[group], self.unfinished[group] = self.rollout, set(range(self.members))
        held = [0] * engines
        for engine in self.engine_of.values():
            held[engine] += 1
        rows = [SampleId(*group, member) for group in groups for member in range(self.members)]
        self.engine_of |= dict(zip(rows, level(held, len(rows)), strict=True))

    def rows_of(self, engine: int) -> list[SampleId]:
        """Unfinished rows of an engine, the oldest first."""
        return sorted(row for row, its in self.engine_of.items() if its == engine)

    def finish(self, rows: Iterable[SampleId]) -> None:
        """These rows are finished."""
        for row in rows:
            del self.engine_of[row]
            self.unfinished[row[:2]].remove(row.member)

    def enough(self) -> bool:
        """Whether the rollout can be trained now so that no later rollout has groups that are too old."""
        if not self.engine_of:
            return True
        finished = [group for group in self.started if not self.unfinished.get(group)]
        return len(finished) >= self.prompts and all(self._late(d) <= d * self.prompts for d in range(self.staleness))

    def take(self, most: int | None) -> tuple[Group, ...]:
        """The oldest finished groups, at most `most`."""
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
        """Number of rollouts that began with newer weights than `version`; at most `staleness` + 1."""
        return sum(newer > version for newer in self.versions)

    def _late(self, later: int) -> int:
        """Number of groups that this rollout would leave, but that must be trained at most `later` rollouts later."""
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
        """Restore `state`. deferred: groups that `take` has returned, but that are not trained. Rows keep their
        engines; if one of these engines does not exist any more, all rows are dealt again."""
        self.rollout, self.versions = state["rollout"], list(state["versions"])[-(self.staleness + 1) :]
        self.unfinished = {(epoch, group): set(left) for epoch, group, *left in state["left"]}
        started = {(epoch, group): begun for epoch, group, begun in state["started"]}
        self.started = {group: begun for group, begun in started.items() if group in {*self.unfinished, *deferred}}
        self.engine_of = {SampleId(*row): engine for *row, engine in state["places"]}
        if any(engine >= engines for engine in self.engine_of.values()):
            self.engine_of = dict(zip(sorted(self.engine_of), level([0] * engines, len(self.engine_of)), strict=True))


def level(held: Sequence[int], items: int) -> list[int]:
    """Distribute items so that the sizes of parts become as equal as possible. held: present sizes. Returns the part
    of each item; the items of a part follow each other."""
    more, lowest = [0] * len(held), min(held)
    while (left := items - sum(more)) > 0:
        for part, count in enumerate(held):
            if count + more[part] <= lowest and left:
                more[part], left = more[part] + 1, left - 1
        lowest += 1
    return [part for part, count in enumerate(more) for _ in range(count)]
