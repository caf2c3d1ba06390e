"""The plan of a rollout whose groups share tokens: the same on every rank, and after a checkpoint."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_rl_plugin.forward import TokenBudget
from mindspeed_rl_plugin.forward.fragments import common_tokens
from mindspeed_rl_plugin.launch import read_inputs
from mindspeed_rl_plugin.loop.arithmetic import Arithmetic, tokens_of_group
from mindspeed_rl_plugin.loop.placement import Placement
from mindspeed_rl_plugin.loop.rollout_plan import RolloutPlan, of_epoch
from mindspeed_rl_plugin.stages.groups import GroupStats

pytestmark = pytest.mark.quick

GROUPS, MEMBERS, PROMPT = 4, 4, 20
SHARED = TokenBudget(1000, True, shared=True)


def graded() -> dict:
    """Members 0 and 1 of a group share two tokens of their responses too."""
    stats = {}
    for group in of_epoch(0, GROUPS):
        prompt = [5] * (PROMPT + group[1])
        rows = [np.array([*prompt, *response], np.int32) for response in ([1, 1, 2], [1, 1, 1, 1], [2], [3] * 9)]
        stats[group] = GroupStats(False, True, 0.5, tuple(map(len, rows)), common=common_tokens(rows))
    return stats


def fresh(budget: TokenBudget, ranks: int = 2) -> RolloutPlan:
    sizes = Arithmetic(GROUPS, MEMBERS, GROUPS * MEMBERS, 1, 1, ranks, engines=ranks, train_iters=9)
    return RolloutPlan(sizes, Placement((0,) * ranks, tuple(range(ranks)), tuple(range(ranks))), budget)


def ready(budget: TokenBudget, ranks: int = 2) -> RolloutPlan:
    plan = fresh(budget, ranks)
    plan.measured(graded())
    plan.use(of_epoch(0, GROUPS), plan.plan(of_epoch(0, GROUPS)))
    return plan


def test_tokens_that_run_once_are_counted():
    plan = ready(SHARED)
    lost = sum(3 * (PROMPT + g) + 2 for g in range(GROUPS))
    assert [len(plan.batches(rank)) for rank in range(2)] == [1, 1] and plan.metrics() == {"tokens/shared": lost}
    computed = sum(plan.tokens(ids) for rank in range(2) for ids in plan.batches(rank))
    assert computed + lost == sum(map(sum, plan.lengths.values()))
    assert ready(TokenBudget(35, True, shared=True)).metrics()["tokens/shared"] < lost, (
        "a prompt runs once in each fragment"
    )


def test_without_sharing_nothing_is_saved_and_common_tokens_change_no_plan():
    plan, bare = ready(TokenBudget(1000, True)), fresh(TokenBudget(1000, True))
    bare.lengths = dict(plan.lengths)
    assert plan.one_pass == bare.plan(of_epoch(0, GROUPS)) and plan.metrics() == {}


def test_a_checkpoint_keeps_what_rows_share():
    before, after = ready(SHARED), fresh(SHARED)
    state = json.loads(json.dumps(before.state()))
    after.load(state, {})
    after.resume(1)
    assert after.one_pass == before.one_pass and after.metrics() == before.metrics() and after.common == before.common
    old = fresh(SHARED)
    old.load({name: value for name, value in state.items() if name != "common"}, {})
    old.resume(1)
    assert old.common == {} and old.one_pass, "of an older version: then rows are planned as if they shared nothing"


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((512, 64, 8, 8192), (4608, 1024)), ((100, 10, 8, 150), (880, 280)), ((100, 10, 3, 110), (330, 330))],
)
def test_what_a_start_expects_of_a_group(sizes, expected):
    assert tokens_of_group(*sizes) == expected


class Data(list):
    """Rows as a stream of prompts or pairs gives them."""

    at = list.__getitem__


def test_a_start_says_what_it_expects(monkeypatch):
    said = []
    monkeypatch.setattr(read_inputs, "say", said.append)
    prompts = [
        SimpleNamespace(tokens=(1,) * n, prompt=(1,) * n, chosen=(2,) * 10, rejected=(3,) * 30) for n in (90, 110)
    ]
    for pairs, members, responses in ((False, 8, ("64 (the limit)", "16 (a quarter of it)")), (True, 2, ("20;",))):
        inputs = SimpleNamespace(
            data=Data(prompts),
            sizes=SimpleNamespace(members=members),
            forward=SimpleNamespace(max_tokens=4096),
            config=SimpleNamespace(rollout=SimpleNamespace(max_response_length=64)),
            algorithm=SimpleNamespace(from_pairs=pairs),
        )
        read_inputs._announce_sharing(inputs)
        assert all(f"tokens a pass with responses of {n}" in said[-1] for n in responses)
    assert "100 tokens (mean of 2), so 8 rows compute 612 instead of 1312 tokens" in said[0]
    assert "so 2 rows compute 140 instead of 240 tokens" in said[1]
