"""Which ranks share experts, and what is said where one of them does not come."""

import pytest
import torch

from mindspeed_rl_plugin.engine import expert_group
from mindspeed_rl_plugin.engine.expert_group import AGREE_EVERY, ExpertGroup

pytestmark = pytest.mark.quick


@pytest.fixture
def group(monkeypatch):
    """Rank 6 of 8, in groups of four."""
    made = []

    def new_group(ranks, timeout, backend):
        made.append((list(ranks), timeout.total_seconds(), backend))
        return f"group {len(made) - 1}"

    monkeypatch.setattr(expert_group.dist, "get_rank", lambda: 6)
    monkeypatch.setattr(expert_group.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(expert_group.dist, "new_group", new_group)
    group = ExpertGroup(4, 5.0)
    assert made == [([0, 1, 2, 3], 5.0, "gloo"), ([4, 5, 6, 7], 5.0, "gloo")]
    return group


def test_ranks_agree_now_and_then(group, monkeypatch) -> None:
    """Engines may be done in between, and start again: all have taken as many steps."""
    asked, others = [], iter([1, 0, 0])

    def all_reduce(flag, op, group):
        assert (op, group) == (torch.distributed.ReduceOp.MAX, "group 1")
        asked.append(int(flag))
        flag.fill_(max(int(flag), next(others)))

    monkeypatch.setattr(expert_group.dist, "all_reduce", all_reduce)
    steps = [group.any_works(False) for _ in range(AGREE_EVERY + 1)]
    assert steps == [True] * AGREE_EVERY + [False] and asked == [0, 0]
    assert [group.any_works(works) for works in (True, False)] == [True, True] and asked == [0, 0, 1]


def test_a_rank_that_does_not_come(group, monkeypatch) -> None:
    def all_reduce(flag, op, group):
        raise RuntimeError("Timed out waiting 5000ms for recv operation to complete\nmore")

    monkeypatch.setattr(expert_group.dist, "all_reduce", all_reduce)
    with pytest.raises(TimeoutError, match="rank 6 .* step 1 .* 4 to 7.* 5 s .*--rl-wait-timeout.*5000ms"):
        group.any_works(False)
