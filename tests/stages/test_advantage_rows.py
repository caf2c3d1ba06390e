"""Select and advantages: however groups lie on ranks, the columns are those of one rank with all rows."""

import pytest
import torch
from stage_context import Ranks, context_of

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.forward import plan_batches
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId, spread
from mindspeed_rl_plugin.stages import advantages, logprobs, measure, select, update
from mindspeed_rl_plugin.stages.stage import resolved

pytestmark = pytest.mark.quick

LIMIT = 8
# Responses of each prompt: an empty one, one-token ones, one at the limit.
RESPONSES = ((3, 1, 8), (2, 0, 5), (1, 1, 1), (4, 6, 7))
RUNNING = ("ppo", "grpo", "dapo", "dr-grpo", "rloo", "reinforce++", "gspo", "cispo")


def rollout(dropped=()):
    """Rows with what the estimators read; `dropped`: rows whose grader failed."""
    g = torch.Generator().manual_seed(1)
    ids = tuple(SampleId(0, i, j) for i, group in enumerate(RESPONSES) for j in range(len(group)))
    lengths = [n for group in RESPONSES for n in group]
    masks = [torch.tensor([0, 0] + [1] * n, dtype=torch.uint8) for n in lengths]
    old, ref, values = ([torch.randn(len(m), generator=g) * m for m in masks] for _ in range(3))
    return Rows(
        ids,
        {
            "reward": torch.tensor([float(i % 3 == 1) for i in range(len(ids))]),
            "graded": torch.tensor([i not in dropped for i in range(len(ids))], dtype=torch.int8),
            "response_length": torch.tensor(lengths),
            "loss_mask": Ragged.from_rows(masks),
            "logp_old": Ragged.from_rows(old),
            "logp_ref": Ragged.from_rows(ref),
            "values": Ragged.from_rows(values),
        },
    )


class Together(Ranks):
    """Ranks that gather twice: first each gives its own, then each sees all."""

    def __init__(self):
        super().__init__()
        self.shared, self.whole = [], False

    def gather(self, value):
        if not self.whole:
            self.shared.append(value)
        return self.shared if self.whole else [value]


def collective(kind, spec, parts, algorithm, *more, seed=3):
    """What every rank writes; ranks with no rows take part in what is collective. And what each of them shared."""
    ranks = Together()
    stage = kind(spec, context_of(algorithm=algorithm, ranks=ranks, seed=seed, longest=LIMIT))
    for part in parts:
        stage.compute(part, *more)
    ranks.whole = True
    return [stage.compute(part, *more) for part in parts], ranks.shared


def selected(parts, algorithm, seed=3, steps=()):
    """The columns of select on every rank, and what was shared."""
    return collective(select.Select, select.spec(algorithm), parts, algorithm, steps, seed=seed)


def on_ranks(parts, algorithm):
    """Advantages, of rows that say whether they count."""
    chosen, _ = selected(parts, algorithm)
    parts = [part.with_columns(**new.columns) if new else part for part, new in zip(parts, chosen, strict=True)]
    written, shared = collective(advantages.Advantages, advantages.spec(algorithm), parts, algorithm)
    assert len(shared) == (len(parts) if algorithm.whitened else 0)
    return [rows and rows.with_columns(valid=part["valid"]) for rows, part in zip(written, parts, strict=True)]


@pytest.mark.parametrize("name", RUNNING)
@pytest.mark.parametrize("dropped", [(), (4,), range(12)])
def test_advantages_do_not_depend_on_who_holds_which_group(name, dropped):
    algorithm = resolve(AlgorithmConfig(algorithm=name))
    rows = rollout(dropped)
    (whole,) = on_ranks([rows], algorithm)
    *_, first, second = resolved([*logprobs.specs(algorithm), select.spec(algorithm), advantages.spec(algorithm)])
    reads = (*first.reads, *second.reads)
    rows = Rows(rows.ids, {n: c for n, c in rows.columns.items() if n in reads})
    parts = [rows.take(range(0, 3)), rows.take(range(3, 12)), Rows(())]
    first, second, nothing = on_ranks(parts, algorithm)
    assert nothing is None
    assert {*advantages.spec(algorithm).written, "valid"} == set(whole.columns)
    name = advantages.column_name(algorithm)
    valid = torch.cat([part["valid"] for part in (first, second)])
    assert torch.equal(valid, whole["valid"]) and valid.tolist() == [
        int(not any(i // 3 == j // 3 for j in dropped)) for i in range(12)
    ]
    *parts, wanted = (c[name].values if algorithm.per_token else c[name] for c in (first, second, whole))
    values = torch.cat(parts)
    torch.testing.assert_close(values, wanted, rtol=1e-6, atol=1e-7)
    assert values.dtype == torch.float32 and torch.isfinite(values).all()
    assert (len(set(dropped)) == 12) == (not values.any())


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("rule", ["best-worst", "best-random", "pow"])
def test_filtration_does_not_depend_on_who_holds_which_group(rule, whole):
    """Two steps of two groups; a dropped group is neither sampled nor counted."""
    algorithm = resolve(AlgorithmConfig(algorithm="grpo", filtration=rule, filtration_whole_batch=whole))
    rows = rollout(dropped=(4,))
    rows = rows.with_columns(reward=torch.tensor([0.2, 0.5, 0.9, 1, 1, 1, 0.1, 0.1, 0.4, 2.0, 0.0, 1.0]))
    steps = plan_batches(rows.ids, global_batch_size=6, micro_batch_size=3, dp_size=2)

    def on(parts, seed=3):
        written, shared = selected(parts, algorithm, seed, steps)
        assert len(shared) == (len(parts) if whole else 0)
        return written

    (one,) = on([rows])
    shuffled = rows.take([2, 0, 1, 5, 4, 3])
    first, second, nothing = on([rows.take(range(6, 12)), shuffled, Rows(())])
    assert nothing is None
    both = torch.cat([first["multiplicity"], second["multiplicity"]])[[7, 8, 6, 11, 10, 9, *range(6)]]
    assert torch.equal(both, one["multiplicity"]) and one["multiplicity"].dtype == torch.int32
    times = one["multiplicity"].tolist()
    assert times[3:6] == [0, 0, 0]
    pools = [range(0, 3), range(6, 12)] if whole else [range(0, 3), range(6, 9), range(9, 12)]
    assert [sum(times[i] for i in pool) for pool in pools] == [len(pool) for pool in pools]
    for pool in pools:
        reward = [float(rows["reward"][i]) for i in pool]
        for i, r in zip(pool, reward, strict=True):
            assert times[i] == 0 or rule == "best-random" or r in (max(reward), min(reward)) or rule == "pow" and r
    assert any(on([rows], seed)[0]["multiplicity"].tolist() != times for seed in range(4, 9)), (
        "the sample depends on the seed"
    )
    assert set(one.columns) == set(select.spec(algorithm).written)
    behind = [select.spec(algorithm), measure.spec(algorithm), update.spec(algorithm)]
    assert all("multiplicity" in spec.reads for spec in resolved(behind)[1:])


@pytest.mark.parametrize("advantage", ["reinforce++", "reinforce++-baseline"])
def test_whitened_advantages_have_mean_zero_and_variance_one_over_kept_tokens(advantage):
    """Over tokens, where a response has one advantage too."""
    algorithm, rows = resolve(AlgorithmConfig(algorithm="grpo", advantage=advantage)), rollout()
    (got,) = on_ranks([rollout(dropped=(4,))], algorithm)
    mask = rows["loss_mask"]
    values = got["advantages"] if algorithm.per_token else spread(got["advantage"], mask)
    valid = got["valid"].repeat_interleave(mask.lengths).bool() & mask.values.bool()
    trained = values.values[valid].double()
    assert [float(trained.mean()), float(trained.var())] == pytest.approx([0.0, 1.0], rel=1e-5, abs=1e-6)
    assert not values.values[~valid].any()


def test_the_penalty_on_length_and_the_kl_reach_the_advantage():
    rows = rollout()
    flat = rows.with_columns(reward=torch.zeros(12))
    plain = resolve(AlgorithmConfig(algorithm="dr-grpo"))
    (got,) = on_ranks([flat], plain)
    assert not got["advantage"].any()
    long = resolve(AlgorithmConfig(algorithm="dr-grpo", overlong_buffer=4, overlong_penalty=2.0))
    (got,) = on_ranks([flat], long)
    shaped = [[-2.0 * min(max(n - 4, 0), 4) / 4 for n in group] for group in RESPONSES]
    want = [
        r - sum(group) / 3 if n else 0.0
        for group, ns in zip(shaped, RESPONSES, strict=True)
        for r, n in zip(group, ns, strict=True)
    ]
    assert got["advantage"].tolist() == pytest.approx(want, abs=1e-6)
    kl = resolve(AlgorithmConfig(algorithm="dr-grpo", kl_reward_coef=0.5))
    (got,) = on_ranks([flat], kl)
    costs = [
        -0.5 * float(((old - ref) * mask).sum())
        for old, ref, mask in zip(
            rows["logp_old"].rows(), rows["logp_ref"].rows(), rows["loss_mask"].rows(), strict=True
        )
    ]
    for i, n in enumerate(rows["response_length"].tolist()):
        mine = costs[i // 3 * 3 : i // 3 * 3 + 3]
        assert float(got["advantage"][i]) == pytest.approx(costs[i] - sum(mine) / 3 if n else 0.0, abs=1e-5)


def test_a_critic_learns_the_returns_from_before_whitening():
    """With gamma and lambda 1 the return of a token is the rewards that follow, whatever the critic said."""
    rows = rollout()
    algorithm = resolve(AlgorithmConfig(algorithm="ppo", kl_reward_coef=0.5))
    (got,) = on_ranks([rows], algorithm)
    assert got["returns"].values.dtype == torch.float32
    columns_ = (rows[name].rows() for name in ("loss_mask", "logp_old", "logp_ref"))
    for i, (mask, old, ref) in enumerate(zip(*columns_, strict=True)):
        cost = 0.5 * (old - ref) * mask
        trained = mask.nonzero().flatten().tolist()
        want = [float(rows["reward"][i]) - float(cost[t:].sum()) if t in trained else 0.0 for t in range(len(mask))]
        assert got["returns"].row(i).tolist() == pytest.approx(want, abs=1e-5)
