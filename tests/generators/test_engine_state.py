"""What an engine does next: a table of situations, and whole runs by a virtual clock with slow pulls."""

import itertools
import random
from functools import partial
from types import SimpleNamespace

import pytest

from mindspeed_rl_plugin.dock import VersionBound as Bound
from mindspeed_rl_plugin.generators.engine_state import Action, EngineState, choose

pytestmark = pytest.mark.quick

FREE = Bound(1)


def having(running=(), **more) -> EngineState:
    """An engine with rows of these bounds in the making."""
    return EngineState(running={k: SimpleNamespace(bound=bound) for k, bound in enumerate(running)}, **more)


begun = partial(having, version=1, announced=1, slots=4)
TABLE = {
    "nothing is published yet": (having(), Action(wait=True)),
    "the first weights": (having(announced=0), Action(pull=0)),
    "they are on their way": (having(announced=0, pulling=0), Action(wait=True)),
    "they lie ready": (having(announced=0, pulled=0), Action(apply=0)),
    "free slots": (begun(running=[FREE]), Action(take=3)),
    "no free slot": (begun(running=[FREE] * 4), Action()),
    "newer weights are pulled beside work": (begun(running=[FREE], announced=2), Action(pull=2)),
    "rows are taken while they are on their way": (begun(running=[FREE], announced=2, pulling=2), Action(take=3)),
    "put in under rows in the making": (begun(running=[FREE], announced=2, pulled=2), Action(apply=2)),
    "drain: these end first, and none begins": (begun(running=[FREE], announced=2, pulled=2, drain=True), Action()),
    "drain: newer ones that come meanwhile wait for it": (
        begun(running=[FREE], announced=3, pulled=2, drain=True),
        Action(),
    ),
    "drain: all have ended": (begun(announced=2, pulled=2, drain=True), Action(apply=2)),
    "an evaluation pins its weights": (begun(running=[Bound(1, 1)], announced=2, pulled=2), Action(take=3)),
    "with rows in the making it asks again for what it may not sample": (
        begun(running=[FREE], needs=Bound(2), announced=2, pulling=2),
        Action(take=3),
    ),
    "without any it waits for weights": (begun(needs=Bound(2), announced=2, pulling=2), Action(wait=True)),
    "for news of them, too: a job admits, then announces": (begun(needs=Bound(2)), Action(wait=True)),
    "the dock is asked anew when they are in": (begun(version=2, announced=2), Action(take=4)),
    "an evaluation of older weights": (begun(version=2, announced=2, needs=Bound(1, 1)), Action(pull=1)),
    "it does not bring them under rows that they may not sample": (
        begun(version=2, announced=2, running=[Bound(2)], needs=Bound(1, 1), pulled=1),
        Action(take=3),
    ),
    "others have taken the evaluation": (begun(version=2, announced=2, pulled=1), Action(take=4)),
    "older weights than wanted, newer than its own": (begun(announced=3, pulled=2), Action(apply=2)),
    "strict: no weights before rows want them": (having(announced=0, strict=True, slots=4), Action(take=4)),
    "strict: rows want them": (having(announced=0, strict=True, needs=Bound(0, 0)), Action(pull=0)),
    "strict: newer ones are not wanted": (begun(announced=2, strict=True), Action(take=4)),
    "strict: one rollout after the other": (begun(strict=True, running=[Bound(1, 1)]), Action()),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_next_thing_to_do(case):
    state, expected = TABLE[case]
    assert choose(state) == expected


@pytest.mark.parametrize("seed", range(12))
def test_every_row_is_sampled_by_weights_that_may_sample_it(seed):
    """Publications come while pulls are slow and rows are in the making; rows are admitted with bounds, some pinned."""
    dice = random.Random(seed)
    drain, slots = dice.random() < 0.4, dice.randint(1, 5)
    dock: list[Bound] = []
    state = EngineState(slots, drain)
    arrives, done, admitted = -1, [], 0
    for step in range(4000):
        if state.announced < 12 and step % dice.randint(5, 40) == 0 and len(dock) < 20:
            state.announced = newest = state.announced + 1
            bounds = [Bound(newest)] * dice.randint(0, 6) + [Bound(newest, newest)] * dice.choice((0, 0, 3))
            dock = [b for b in bounds if b.pinned] + dock + [b for b in bounds if not b.pinned]
            admitted += len(bounds)
        if state.pulling >= 0 and step >= arrives:
            state.pull_ended(state.pulling)
        action = choose(state)
        assert len(state.running) + action.take <= slots
        if action.apply >= 0:
            assert not (drain and state.running)
            state.applied(action.apply)
            for row in state.running.values():
                row.parts.append((row.steps - row.left, state.version))
        elif action.pull >= 0:
            assert state.pulling < 0
            state.pull_begins(action.pull)
            arrives = step + dice.randint(1, 60)
        elif action.take:
            taken = [*itertools.takewhile(lambda bound: bound.allows(state.version), dock[: action.take])]
            state.needs = dock[0] if dock and not taken else None
            dock = dock[len(taken) :]
            for bound in taken:
                row = SimpleNamespace(bound=bound, steps=(steps := dice.randint(1, 30)), left=steps)
                row.parts = [(0, state.version)]
                state.running[id(row)] = row
        elif action.wait:
            state.needs = None
        for row in state.running.values():
            row.left -= 1
        done += [row for row in state.running.values() if row.left <= 0]
        state.running = {key: row for key, row in state.running.items() if row.left > 0}
        if state.announced == 12 and len(done) == admitted:
            break
    assert len(done) == admitted > 0
    assert all(row.bound.allows(version) for row in done for _, version in row.parts)
    assert all(len(row.parts) == 1 for row in done if row.bound.pinned or drain)
