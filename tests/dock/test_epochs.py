"""What a process outside of the job remembers of the epochs whose rows it leases."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_rl_plugin.dock.calls import KEPT, Epochs
from mindspeed_rl_plugin.dock.messages import Grant


def grant(*epochs: int) -> Grant:
    """The first row of each epoch, of 4 groups x 2 members, all in warehouse 1."""
    ids = np.array([(epoch, 0, 0) for epoch in epochs], np.int64)
    empty = Grant.empty(1)
    return Grant(
        1, ids, np.full(len(ids), 1, np.int32), empty.segment, empty.offset, empty.length, [(e, 4, 2) for e in epochs]
    )


def test_epochs_that_are_learned_do_not_grow_without_bound() -> None:
    """The oldest are forgotten, which reads like a cleared one, and come back with a lease."""
    epochs = Epochs(None)
    for number in range(3 * KEPT):
        epochs.learn(grant(number))
    assert list(epochs.known) == list(range(2 * KEPT, 3 * KEPT))
    assert list(epochs.owned("read", np.array([(3 * KEPT - 1, 0, 0)]))) == [(3 * KEPT - 1, 1)]
    old = np.array([(5, 0, 0)])
    assert epochs.cleared("read", old).all() and not epochs.owned("commit", old)
    epochs.learn(grant(5))
    assert list(epochs.owned("commit", old)) == [(5, 1)] and len(epochs.known) == KEPT
    with pytest.raises(ValueError, match="epoch 9999 was not opened"):
        epochs.opened("read", 9999)


def test_what_one_lease_brings_is_all_known() -> None:
    epochs = Epochs(None)
    epochs.learn(grant(*range(KEPT)))
    epochs.learn(grant(0, *range(KEPT, 2 * KEPT)))
    assert {0, *range(KEPT, 2 * KEPT)} == epochs.known.keys()
