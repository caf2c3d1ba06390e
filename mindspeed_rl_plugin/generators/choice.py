"""What an engine does next, as a pure function of what it has: put weights in, pull some, or take rows; and that."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from mindspeed_rl_plugin.rows import SampleId


class Bound(NamedTuple):
    """Versions that may sample a row: `oldest` and newer ones, up to `newest`; -1 there is no limit."""

    oldest: int
    newest: int = -1

    @property
    def pinned(self) -> bool:
        """Whether no newer weights than `newest` may sample it: of a strict order, or of an evaluation."""
        return self.newest >= 0

    def allows(self, version: int) -> bool:
        """Whether weights of a version may sample it."""
        return self.oldest <= version and (not self.pinned or version <= self.newest)


@dataclass(frozen=True)
class Situation:
    """Versions, each -1 for none: `version` of the engine's weights; `pulled`, that lie ready to be put in; `pulling`,
    on their way; `announced`, the newest of the job.

    running: of rows in the making; held: of rows that were taken and wait for other weights, in their order; slots:
    rows that the engine samples at once; drain: rows end before the weights change; strict: only rows that pin them
    change the weights, and a rollout is taken when the one before is finished.
    """

    version: int = -1
    pulled: int = -1
    pulling: int = -1
    announced: int = -1
    running: Sequence[Bound] = ()
    held: Sequence[Bound] = ()
    slots: int = 1
    drain: bool = False
    strict: bool = False


class Choice(NamedTuple):
    """One of: apply, pull, a version; or else resume, how many held rows go on, and take, how many more may be leased
    then. wait: nothing can be done without news of weights."""

    apply: int = -1
    pull: int = -1
    resume: int = 0
    take: int = 0
    wait: bool = False


def choose(s: Situation) -> Choice:
    """The next thing to do."""
    wanted = _wanted(s)
    if s.pulled >= 0 and _may_apply(s, wanted):
        return Choice(apply=s.pulled)
    draining = s.drain and s.running and s.pulled > s.version  # a pull would write over what these rows end for
    if wanted not in (-1, s.version, s.pulled) and s.pulling < 0 and not draining:
        return Choice(pull=wanted)
    resume = sum(1 for _ in takewhile(lambda bound: bound.allows(s.version), s.held))
    take = s.slots - len(s.running) - resume if _may_take(s, resume) else 0
    return Choice(resume=resume, take=max(take, 0), wait=not s.running and not resume and take <= 0)


def _wanted(s: Situation) -> int:
    """The version to work with: what rows pin, else the newest."""
    if any(bound.pinned for bound in set(s.running)):  # few differ
        return s.version
    if s.held and s.held[0].pinned:
        return s.held[0].newest
    return s.version if s.strict else s.announced


def _may_apply(s: Situation, wanted: int) -> bool:
    """Whether to put in now what is pulled: what is wanted, or newer than the engine's where the newest is."""
    fits = s.pulled == wanted or (wanted == s.announced and s.pulled > s.version)
    return fits and not (s.drain and s.running) and all(bound.allows(s.pulled) for bound in s.running)


def _may_take(s: Situation, resumed: int) -> bool:
    """Not while rows wait for other weights, nor while those in the making are to end before newer ones."""
    if resumed < len(s.held) or (s.drain and s.pulled > s.version) or (s.strict and (s.running or resumed)):
        return False
    return max(s.version, s.announced if s.strict else -1) >= 0


@dataclass
class Work:
    """The books of an engine: versions and limits as in `Situation`, and its rows, each with its `bound`."""

    slots: int
    drain: bool
    strict: bool
    version: int = -1
    pulled: int = -1
    pulling: int = -1
    running: dict[SampleId, Any] = field(default_factory=dict)
    held: deque[Any] = field(default_factory=deque)

    def choose(self, announced: int) -> Choice:
        """The next thing to do, where `announced` is the newest version."""
        return choose(
            Situation(
                version=self.version,
                pulled=self.pulled,
                pulling=self.pulling,
                announced=announced,
                running=[row.bound for row in self.running.values()],
                held=[row.bound for row in self.held],
                slots=self.slots,
                drain=self.drain,
                strict=self.strict,
            )
        )

    def pull(self, version: int) -> None:
        """A pull begins; what is staged is written over."""
        self.pulled, self.pulling = -1, version

    def pull_ended(self, version: int) -> None:
        """It is over."""
        self.pulled, self.pulling = version, -1

    def applied(self, version: int) -> None:
        """The engine has the weights that were pulled."""
        self.version, self.pulled = version, -1

    def resumed(self, count: int) -> list[Any]:
        """The first held rows, which go on."""
        return [self.held.popleft() for _ in range(count)]

    def fitting(self, rows: Iterable[Any]) -> list[Any]:
        """New rows that these weights may sample; the others are held."""
        fit = []
        for row in rows:
            (fit if row.bound.allows(self.version) and not self.held else self.held).append(row)
        return fit
