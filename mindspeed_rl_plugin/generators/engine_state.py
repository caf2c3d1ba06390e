"""What an engine has, and what it does next: a pure function of that, which the model of schedules calls, too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mindspeed_rl_plugin.dock import VersionBound
from mindspeed_rl_plugin.rows import GenerateRequest, SampleId


class Action(NamedTuple):
    """What all ranks of an engine do next: one of these, or only steps of the engine."""

    apply: int = -1  # version to put into the engine; -1: none
    pull: int = -1  # version to pull during the engine's steps; -1: none
    take: int = 0  # most rows to lease, which the first rank does
    wait: bool = False  # for news of weights, as the first rank does: there is nothing else to do
    requests: tuple[tuple[int, GenerateRequest], ...] = ()  # what was leased, each with the replica that samples it
    end: bool = False  # leave the job


@dataclass
class EngineState:
    """What an engine has. A pull ends in another thread: `pulled` is set before `pulling`, and read after it."""

    slots: int = 1  # rows that it samples at once
    drain: bool = False  # whether rows end before the weights change
    strict: bool = False  # whether only rows that pin them change the weights, and one rollout follows the other
    version: int = -1  # of its weights; -1: none, as below
    pulling: int = -1  # version that is on its way
    pulled: int = -1  # version that lies ready to be put in
    announced: int = -1  # newest version of the job
    needs: VersionBound | None = None  # of the rows that are next in the dock, where `version` may not sample them
    running: dict[SampleId, Any] = field(default_factory=dict)  # rows in the making, each with its `bound`

    def pull_begins(self, version: int) -> None:
        """What is staged is written over."""
        self.pulled, self.pulling = -1, version

    def pull_ended(self, version: int) -> None:
        self.pulled, self.pulling = version, -1

    def applied(self, version: int) -> None:
        """The engine has the weights that were pulled; the dock is asked anew."""
        self.version, self.pulled, self.needs = version, -1, None


def choose(state: EngineState) -> Action:
    """The next thing to do."""
    wanted = _wanted(state)
    if state.pulled >= 0 and _may_apply(state, wanted):
        return Action(apply=state.pulled)
    # A pull would write over the weights for which rows are made to end.
    draining = state.drain and state.running and state.pulled > state.version
    if wanted not in (-1, state.version, state.pulled) and state.pulling < 0 and not draining:
        return Action(pull=wanted)
    take = state.slots - len(state.running) if _may_take(state) else 0
    return Action(take=max(take, 0), wait=not state.running and take <= 0)


def _wanted(state: EngineState) -> int:
    """The version to work with: what rows pin, else the newest."""
    if any(row.bound.pinned for row in state.running.values()):
        return state.version
    if state.needs is not None and state.needs.pinned:
        return state.needs.newest
    return state.version if state.strict else state.announced


def _may_apply(state: EngineState, wanted: int) -> bool:
    """Whether to put in now what is pulled: what is wanted, or newer than the engine's where the newest is."""
    fits = state.pulled == wanted or (wanted == state.announced and state.pulled > state.version)
    waits = state.drain and state.running
    return fits and not waits and all(row.bound.allows(state.pulled) for row in state.running.values())


def _may_take(state: EngineState) -> bool:
    """Not while those in the making are to end before newer weights, nor where there is nothing that an idle engine may
    sample. One with rows in the making asks again, for others may have taken what it may not sample."""
    if state.strict:
        return not state.running and state.needs is None and max(state.version, state.announced) >= 0
    draining = state.drain and state.pulled > state.version
    return state.version >= 0 and not draining and bool(state.running or state.needs is None)
