"""What an engine does next, as a pure function of what it has: put weights in, pull some, or take rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple


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
    if wanted not in (-1, s.version, s.pulled) and s.pulling < 0:
        return Choice(pull=wanted)
    resume = sum(1 for _ in takewhile(lambda bound: bound.allows(s.version), s.held))
    take = s.slots - len(s.running) - resume if _may_take(s, resume) else 0
    return Choice(resume=resume, take=max(take, 0), wait=not s.running and not resume and take <= 0)


def _wanted(s: Situation) -> int:
    """The version to work with: what rows pin, else the newest."""
    if any(bound.pinned for bound in s.running):
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
