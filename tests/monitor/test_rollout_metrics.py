"""Rollout metrics against plain loops."""

import math
import statistics

import pytest
import torch

from mindspeed_rl_plugin.monitor.metrics import (
    group_shares,
    logp_difference,
    merge,
    paper_throughput,
    rollout_metrics,
    throughput,
    token_count,
)
from mindspeed_rl_plugin.monitor.names import NAMES
from mindspeed_rl_plugin.types import Ragged, Rows, SampleId


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
    got = rollout_metrics(rows)
    want = {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.stdev(rewards),
        "groups/solved": sum(all(g) for g in groups) / 7,
        "groups/unsolved": sum(not any(g) for g in groups) / 7,
        "groups/mixed": sum(any(g) and not all(g) for g in groups) / 7,
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
    reward = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])  # group 4 solved, 9 unsolved, 2 mixed
    third = pytest.approx(1 / 3)
    assert group_shares(reward, ids) == {"groups/solved": third, "groups/unsolved": third, "groups/mixed": third}


def test_a_weighted_sum_that_misses_its_maximum_by_rounding_is_correct():
    reward = torch.tensor([0.1 + 0.2 + 0.7]).float() - 1e-7
    assert group_shares(reward, [SampleId(0, 0, 0)])["groups/solved"] == 1
    assert group_shares(reward, [SampleId(0, 0, 0)], correct_at=1.01)["groups/solved"] == 0


def test_columns_that_are_absent_leave_their_metrics_out_and_no_rows_is_an_error():
    assert set(rollout_metrics(Rows((SampleId(0, 0, 0),), {"reward": torch.ones(1)}))) == {
        "reward/mean", "reward/std", "groups/solved", "groups/unsolved", "groups/mixed",
    }  # fmt: skip
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
    paper = paper_throughput(groups=3, members=4, prompt_length=6, response_length=10, devices=2, seconds=4.0)
    assert ours == {"tokens_per_second": paper, "tokens_per_second_total": 2 * paper} and paper == 24.0
    with pytest.raises(ValueError, match="seconds 0"):
        throughput(1, devices=1, seconds=0)
    with pytest.raises(ValueError, match="tokens or loss_mask"):
        token_count(Rows((SampleId(0, 0, 0),), {"reward": torch.ones(1)}))


def test_merge_refuses_two_values_of_one_name():
    assert merge({"a": 1.0}, {"b": 2.0}, {"a": 1.0}) == {"a": 1.0, "b": 2.0}
    with pytest.raises(ValueError, match="'a' is written twice"):
        merge({"a": 1.0}, {"a": 2.0})
