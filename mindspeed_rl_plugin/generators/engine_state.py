"""What an engine does next, as a pure function of what it has: put weights in, pull some, or take rows; and that."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
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
        return self.oldest <= version and (not self.pinned or version <= self.newest)


class Action(NamedTuple):
    """One of: apply, pull, a version; or else resume, how many held rows go on, and take, how many more may be leased
    then. wait: nothing can be done without news of weights."""

    apply: int = -1
    pull: int = -1
    resume: int = 0
    take: int = 0
    wait: bool = False


@dataclass
class EngineState:
    """What an engine has. Versions, each -1 for none: `version` of its weights; `pulled`, that lie ready to be put in;
    `pulling`, on their way; `announced`, the newest of the job.

    running: rows in the making, each with its `bound`; held: those that were taken and wait for other weights, in their
    order; slots: rows that the engine samples at once; drain: rows end before the weights change; strict: only rows
    that pin them change the weights, and a rollout is taken when the one before is finished.
    """

    slots: int = 1
    drain: bool = False
    strict: bool = False
    version: int = -1
    pulled: int = -1
    pulling: int = -1
    announced: int = -1
    running: dict[SampleId, Any] = field(default_factory=dict)
    held: deque[Any] = field(default_factory=deque)

    def choose(self, announced: int) -> Action:
        """The next thing to do, where `announced` is the newest version. A pull may end meanwhile."""
        return choose(replace(self, announced=announced))

    def pull(self, version: int) -> None:
        """A pull begins; what is staged is written over."""
        self.pulled, self.pulling = -1, version

    def pull_ended(self, version: int) -> None:
        self.pulled, self.pulling = version, -1

    def applied(self, version: int) -> None:
        """The engine has the weights that were pulled."""
        self.version, self.pulled = version, -1

    def resumed(self, count: int) -> list[Any]:
        return [self.held.popleft() for _ in range(count)]

    def fitting(self, rows: Iterable[Any]) -> list[Any]:
        """New rows that these weights may sample; the others are held."""
        fit = []
        for row in rows:
            (fit if row.bound.allows(self.version) and not self.held else self.held).append(row)
        return fit


def choose(w: EngineState) -> Action:
    """The next thing to do."""
    wanted = _wanted(w)
    if w.pulled >= 0 and _may_apply(w, wanted):
        return Action(apply=w.pulled)
    draining = w.drain and w.running and w.pulled > w.version  # a pull would write over what these rows end for
    if wanted not in (-1, w.version, w.pulled) and w.pulling < 0 and not draining:
        return Action(pull=wanted)
    resume = sum(1 for _ in takewhile(lambda row: row.bound.allows(w.version), w.held))
    take = w.slots - len(w.running) - resume if _may_take(w, resume) else 0
    return Action(resume=resume, take=max(take, 0), wait=not w.running and not resume and take <= 0)


def _wanted(w: EngineState) -> int:
    """The version to work with: what rows pin, else the newest."""
    if any(row.bound.pinned for row in w.running.values()):
        return w.version
    if w.held and w.held[0].bound.pinned:
        return w.held[0].bound.newest
    return w.version if w.strict else w.announced


def _may_apply(w: EngineState, wanted: int) -> bool:
    """Whether to put in now what is pulled: what is wanted, or newer than the engine's where the newest is."""
    fits = w.pulled == wanted or (wanted == w.announced and w.pulled > w.version)
    return fits and not (w.drain and w.running) and all(row.bound.allows(w.pulled) for row in w.running.values())


def _may_take(w: EngineState, resumed: int) -> bool:
    """Not while rows wait for other weights, nor while those in the making are to end before newer ones."""
    if resumed < len(w.held) or (w.drain and w.pulled > w.version) or (w.strict and (w.running or resumed)):
        return False
    return max(w.version, w.announced if w.strict else -1) >= 0
