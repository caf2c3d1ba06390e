"""Rollout metrics against plain loops."""

import math
import statistics

import pytest
import torch

from mindspeed_rl_plugin.monitor.names import NAMES
from mindspeed_rl_plugin.monitor.rollout_metrics import (
    filtration_metrics,
    group_shares,
    informative_share,
    largest,
    logp_difference,
    merge,
    rollout_metrics,
    throughput,
    token_count,
)
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId


def test_rollout_metrics_equal_plain_loops(rows_builder):
    rows = rows_builder(3, 0.5, groups=7, members=5)
    rewards = rows["reward"].tolist()
    masks = [r.tolist() for r in rows["loss_mask"].rows()]
    engine, trainer = ([r.tolist() for r in rows[n].rows()] for n in ("logp_rollout", "logp_old"))
    lengths = [sum(m) for m in masks]
    diffs = [
        abs(e - t)
        for em, tm, mm in zip(engine, trainer, masks, strict=True)
        for e, t, m in zip(em, tm, mm, strict=True)
        if m
    ]
    groups = [rewards[k : k + 5] for k in range(0, 35, 5)]
    got = rollout_metrics(rows, solved=rows["reward"].bool().tolist())
    want = {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.stdev(rewards),
        "groups/solved": sum(all(g) for g in groups) / 7,
        "groups/unsolved": sum(not any(g) for g in groups) / 7,
        "groups/informative": sum(len(set(g)) > 1 for g in groups) / 7,
        "response/length_mean": statistics.fmean(lengths),
        "response/length_max": max(lengths),
        "response/truncated": rows["finish"].tolist().count(1) / 35,
        "version": 3,
        "logp_diff/mean": statistics.fmean(diffs),
        "logp_diff/max": max(diffs),
    }
    assert got == pytest.approx(want)
    assert got.keys() <= NAMES.keys(), "a metric without a line in the register"


def test_groups_are_told_apart_by_id_and_not_by_position():
    ids = [SampleId(0, g, m) for m in range(2) for g in (4, 9, 2)]
    solved = [True, False, True, True, False, False]  # group 4 solved, 9 unsolved, 2 neither
    third = pytest.approx(1 / 3)
    assert group_shares(solved, ids) == {"groups/solved": third, "groups/unsolved": third}
    assert informative_share(torch.tensor(solved).float(), ids) == third


def test_graded_rewards_inform_without_any_solved_response():
    ids = [SampleId(0, g, m) for g in range(2) for m in range(2)]
    rows = Rows(tuple(ids), {"reward": torch.tensor([0.2, 0.7, 0.5, 0.5])})
    got = rollout_metrics(rows, solved=[False] * 4)
    assert (got["groups/informative"], got["groups/unsolved"]) == (0.5, 1.0)


def test_columns_that_are_absent_leave_their_metrics_out_and_no_rows_is_an_error():
    one = Rows((SampleId(0, 0, 0),), {"reward": torch.ones(1)})
    assert set(rollout_metrics(one)) == {"reward/mean", "reward/std", "groups/informative"}
    assert set(rollout_metrics(one, solved=[True])) - set(rollout_metrics(one)) == {"groups/solved", "groups/unsolved"}
    with pytest.raises(ValueError, match="no rows"):
        rollout_metrics(Rows((), {}))


def test_one_sample_has_no_spread_and_no_trained_token_no_difference():
    rows = Rows((SampleId(0, 0, 0),), {"reward": torch.ones(1)})
    assert rollout_metrics(rows)["reward/std"] == 0
    zero = Ragged.from_rows([torch.zeros(3)])
    assert all(math.isnan(v) for v in logp_difference(zero, zero, zero).values())


def test_masked_tokens_do_not_count_in_the_difference():
    mask = Ragged.from_rows([torch.tensor([0, 1, 1]), torch.tensor([0, 1])])
    engine = Ragged.from_rows([torch.tensor([9.0, -1.0, -2.0]), torch.tensor([5.0, -3.0])])
    trainer = Ragged.from_rows([torch.tensor([0.0, -1.5, -2.0]), torch.tensor([0.0, -3.25])])
    assert logp_difference(engine, trainer, mask) == {"logp_diff/mean": 0.25, "logp_diff/max": 0.5}


def test_throughput_agrees_with_equation_5_where_lengths_are_equal(rows_builder):
    ids = tuple(SampleId(0, g, m) for g in range(3) for m in range(4))
    rows = Rows(ids, {"tokens": Ragged.from_rows([torch.zeros(16, dtype=torch.int32)] * 12)})
    ours = throughput(token_count(rows), devices=2, seconds=4.0)
    paper = 3 * 4 * (6 + 10) / 2 / 4.0  # G N (PL + SL) / ND / ETE
    assert ours == {"tokens_per_second": paper, "tokens_per_second_total": 2 * paper} and paper == 24.0
    with pytest.raises(ValueError, match="seconds 0"):
        throughput(1, devices=1, seconds=0)
    with pytest.raises(ValueError, match="tokens or loss_mask"):
        token_count(Rows((SampleId(0, 0, 0),), {"reward": torch.ones(1)}))


def test_the_slowest_rank_counts_whichever_it_is():
    ranks = [{"seconds/update": 1.0, "seconds/reward": 3.0}, {"seconds/update": 2.0, "peak_bytes/update": 7}]
    assert largest(ranks) == {"seconds/update": 2.0, "seconds/reward": 3.0, "peak_bytes/update": 7}


def test_merge_refuses_two_values_of_one_name():
    assert merge({"a": 1.0}, {"b": 2.0}, {"a": 1.0}) == {"a": 1.0, "b": 2.0}
    with pytest.raises(ValueError, match="'a' is written twice"):
        merge({"a": 1.0}, {"a": 2.0})


def test_filtration_is_measured_by_what_it_drew():
    times, reward = torch.tensor([3, 0, 1, 0], dtype=torch.int32), torch.tensor([1.0, 9.0, 0.0, 9.0])
    found = filtration_metrics(times, reward)
    assert found == {"filtration/distinct": 0.5, "filtration/reward_mean": 0.75}
