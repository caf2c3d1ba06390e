"""Rollout metrics against plain loops."""

import statistics

import pytest
import torch

from mindspeed_rl_plugin.monitor.names import METRICS
from mindspeed_rl_plugin.monitor.rollout_metrics import filtration_metrics, largest, rollout_metrics, throughput
from mindspeed_rl_plugin.rows import Rows, SampleId

pytestmark = pytest.mark.quick


def test_rollout_metrics_equal_plain_loops(rows_builder):
    rows = rows_builder(3, 0.5, groups=7, members=5)
    rewards, lengths = rows["reward"].tolist(), [sum(m.tolist()) for m in rows["loss_mask"].rows()]
    groups = [rewards[k : k + 5] for k in range(0, 35, 5)]
    got = rollout_metrics(rows, rows["reward"].bool().tolist())
    assert got == pytest.approx(
        {
            "reward/mean": statistics.fmean(rewards),
            "reward/std": statistics.stdev(rewards),
            "groups/solved": sum(all(g) for g in groups) / 7,
            "groups/unsolved": sum(not any(g) for g in groups) / 7,
            "groups/informative": sum(len(set(g)) > 1 for g in groups) / 7,
            "response/length_mean": statistics.fmean(lengths),
            "response/length_max": max(lengths),
            "response/truncated": rows["finish"].tolist().count(1) / 35,
            "version": 3,
        }
    )
    assert got.keys() <= METRICS.keys(), "a metric without a line in the register"


def of(ids, reward, solved):
    one = torch.ones(len(ids))
    return rollout_metrics(Rows(tuple(ids), dict(reward=reward, response_length=one, finish=one, version=one)), solved)


def test_groups_are_known_by_id_and_not_by_position():
    ids = [SampleId(0, g, m) for m in range(2) for g in (4, 9, 2)]
    solved = [True, False, True, True, False, False]  # group 4 solved, 9 unsolved, 2 neither
    got = of(ids, torch.tensor(solved).float(), solved)
    assert [got[f"groups/{k}"] for k in ("solved", "unsolved", "informative")] == pytest.approx([1 / 3] * 3)


def test_graded_rewards_inform_without_any_solved_response():
    ids = [SampleId(0, g, m) for g in range(2) for m in range(2)]
    got = of(ids, torch.tensor([0.2, 0.7, 0.5, 0.5]), [False] * 4)
    assert (got["groups/informative"], got["groups/unsolved"]) == (0.5, 1.0)


def test_one_sample_has_no_spread_and_no_rows_is_an_error():
    assert of([SampleId(0, 0, 0)], torch.ones(1), [True])["reward/std"] == 0
    with pytest.raises(ValueError, match="no rows"):
        rollout_metrics(Rows((), {}), [])


def test_throughput_agrees_with_equation_5_where_lengths_are_equal():
    paper = 3 * 4 * (6 + 10) / 2 / 4.0  # G N (PL + SL) / ND / ETE
    ours = throughput(12 * 16, devices=2, seconds=4.0)
    assert ours == {"tokens_per_second": paper, "tokens_per_second_total": 2 * paper} and paper == 24.0


def test_the_slowest_rank_counts_whichever_it_is():
    ranks = [{"seconds/update": 1.0, "seconds/reward": 3.0}, {"seconds/update": 2.0, "peak_bytes/update": 7}]
    assert largest(ranks) == {"seconds/update": 2.0, "seconds/reward": 3.0, "peak_bytes/update": 7}


def test_filtration_is_measured_by_what_it_sampled():
    times, reward = torch.tensor([3, 0, 1, 0], dtype=torch.int32), torch.tensor([1.0, 9.0, 0.0, 9.0])
    assert filtration_metrics(times, reward) == {"filtration/distinct": 0.5, "filtration/reward_mean": 0.75}
