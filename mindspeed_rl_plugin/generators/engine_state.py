"""The state of an engine, and a pure function that chooses the next action. `tools/plan/simulate.py` calls it too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mindspeed_rl_plugin.dock import VersionBound
from mindspeed_rl_plugin.rows import GenerateRequest, SampleId


class Action(NamedTuple):
    """What all ranks of an engine do before its next steps. At most one field is set; with `take` also `requests`."""

    apply: int = -1  # version to put into the engine; -1: none
    pull: int = -1  # version to pull during the engine's steps; -1: none
    take: int = 0  # most rows to lease, by the first rank
    wait: bool = False  # the first rank waits for weights, since there is nothing else to do
    requests: tuple[tuple[int, GenerateRequest], ...] = ()  # leased rows, each with the replica that samples it
    end: bool = False  # leave the job


@dataclass
class EngineState:
    """The state of an engine. Versions: -1 if there is none. A pull ends in another thread, which sets `pulled` before
    `pulling`; so readers read `pulling` first."""

    slots: int = 1  # most rows that are sampled at the same time
    drain: bool = False  # whether running rows must end before the weights change
    strict: bool = False  # weights change only for rows that pin a version; a rollout ends before the next begins
    version: int = -1  # of the engine's weights
    pulling: int = -1  # version that is being pulled
    pulled: int = -1  # version that was pulled and can be applied
    announced: int = -1  # newest version of the job
    needs: VersionBound | None = None  # bound of the next rows in the dock, if `version` may not sample them
    running: dict[SampleId, Any] = field(default_factory=dict)  # rows that are sampled now, each with its `bound`

    def pull_begins(self, version: int) -> None:
        """The pull overwrites a version that was pulled earlier."""
        self.pulled, self.pulling = -1, version

    def pull_ended(self, version: int) -> None:
        self.pulled, self.pulling = version, -1

    def applied(self, version: int) -> None:
        """The engine has the pulled weights, so the dock may give it other rows."""
        self.version, self.pulled, self.needs = version, -1, None


def choose(state: EngineState) -> Action:
    """The next thing to do."""
    wanted = _wanted(state)
    if state.pulled >= 0 and _may_apply(state, wanted):
        return Action(apply=state.pulled)
    # While running rows must end, pulled weights wait; a new pull would overwrite them.
    draining = state.drain and state.running and state.pulled > state.version
    if wanted not in (-1, state.version, state.pulled) and state.pulling < 0 and not draining:
        return Action(pull=wanted)
    take = state.slots - len(state.running) if _may_take(state) else 0
    return Action(take=max(take, 0), wait=not state.running and take <= 0)


def _wanted(state: EngineState) -> int:
    """The version to use: the version that rows pin, else the newest (under a strict order: the current version)."""
    if any(row.bound.pinned for row in state.running.values()):
        return state.version
    if state.needs is not None and state.needs.pinned:
        return state.needs.newest
    return state.version if state.strict else state.announced


def _may_apply(state: EngineState, wanted: int) -> bool:
    """Whether to apply the pulled version now. It must be the wanted version or, if the newest is wanted, newer than
    the engine's; and all running rows must allow it (with `drain`: there must be none)."""
    fits = state.pulled == wanted or (wanted == state.announced and state.pulled > state.version)
    waits = state.drain and state.running
    return fits and not waits and all(row.bound.allows(state.pulled) for row in state.running.values())


def _may_take(state: EngineState) -> bool:
    """Whether to lease rows. Not without weights; not while pulled weights wait for the end of running rows; and not if
    no row runs and the engine may not sample the dock's next rows. If rows run, the engine asks the dock again, since
    other engines may have taken those next rows.

    Under a strict order an engine leases only if no row runs. It also asks without weights, once the job has announced
    some: the answer says which version it needs.
    """
    if state.strict:
        return not state.running and state.needs is None and max(state.version, state.announced) >= 0
    draining = state.drain and state.pulled > state.version
    return state.version >= 0 and not draining and bool(state.running or state.needs is None)
