"""What the model of a run is given: costs, sizes, and what responses are like."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from statistics import NormalDist

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.loop.arithmetic import Arithmetic, reads_old_logps, ruled_out

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Costs:
    """Seconds, all of them.

    step, sequence: one decode step of an engine, and more for each sequence in it; token: training on one token,
    prompts included, on a data parallel rank; old_token: its old log-prob; rollout: what a rollout takes of the
    trainers whatever its size; reshard: weights to colocated engines and back; publish: the trainers' copy of weights;
    pull: an engine reads them, beside its steps; apply: it puts them in, and makes no step; notice: from the end of a
    response to the start of its grading, and again to a trainer that waits.
    """

    step: float = 0.0
    sequence: float = 0.0
    token: float = 0.0
    old_token: float = 0.0
    rollout: float = 0.0
    reshard: float = 0.0
    publish: float = 0.0
    pull: float = 0.0
    apply: float = 0.0
    notice: float = 0.0


@dataclass(frozen=True)
class Setup:
    """A run's flags, as far as time depends on them.

    sizes: with `data_parallel` trainers and `engines`; trainer_ranks, engine_ranks: of one of these; slots: sequences
    that an engine decodes at once; graders: grading calls at once, of all ranks; prompt_tokens: of a prompt; limit:
    most tokens of a response; rounds: of dynamic sampling, 0 without it; old_read: whether more than the loss reads old
    log-probs; ruled_out: schedules that other flags exclude, each with the flag.
    """

    sizes: Arithmetic
    schedule: str = "sync"
    slots: int = 256
    graders: int = 2
    staleness: int = 1
    order: str = "free"
    inflight: str = "keep"
    prompt_tokens: int = 0
    limit: int = 2**20
    rounds: int = 0
    trainer_ranks: int = 1
    engine_ranks: int = 1
    old_read: bool = False
    ruled_out: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RLConfig, sizes: Arithmetic, ranks: int) -> Setup:
        """Of a job whose trainers have so many ranks."""
        schedule, tp, algorithm = config.schedule, config.rollout.generate_tp, resolve(config.algorithm)
        who = schedule.who_generates
        engines = sizes.engines + (who.engines + len(schedule.engine_url) if schedule.apart else 0)
        return cls(
            replace(sizes, engines=max(engines, 1)),
            schedule.schedule,
            slots=config.rollout.max_running,
            graders=config.reward.reward_workers * ranks,
            staleness=schedule.max_staleness,
            order=schedule.async_order,
            inflight=schedule.inflight,
            limit=config.rollout.max_response_length,
            rounds=config.algorithm.dynamic_sampling_rounds if algorithm.dynamic_sampling else 0,
            trainer_ranks=ranks // sizes.data_parallel,
            engine_ranks=who.tp if schedule.apart and who.engines else tp,
            old_read=reads_old_logps(config, algorithm),
            ruled_out=ruled_out(config, algorithm),
        )

    @property
    def world(self) -> int:
        """Ranks of the job."""
        trainers, engines = self.sizes.data_parallel * self.trainer_ranks, self.sizes.engines * self.engine_ranks
        return trainers + engines if self.schedule == "async" else trainers

    @property
    def old_logps(self) -> bool:
        """Whether old log-probs are computed before the update."""
        return self.sizes.steps > 1 or self.old_read


@dataclass(frozen=True)
class Responses:
    """What is sampled. length: (row of the data, member, random numbers) -> tokens; grading: seconds of a call; rows:
    of the data, which come in another order in each of its epochs, 0: none comes twice; informative: share of groups
    whose rewards differ."""

    length: Callable[[int, int, Random], int]
    grading: Callable[[Random], float] = lambda rng: 0.0
    rows: int = 0
    informative: float = 1.0
    seed: int = 0


def recorded(lengths: Sequence[Sequence[int]]) -> Callable[[int, int, Random], int]:
    """Lengths `[row][member]` that were measured; rows and members beyond begin anew."""
    return lambda row, member, rng: lengths[row % len(lengths)][member % len(lengths[row % len(lengths)])]


def lognormal(mean: float, sigma: float, limit: int) -> Callable[[int, int, Random], int]:
    """Lognormal lengths, cut at `limit`, whose mean is `mean` after the cut. sigma: of the logarithm, 0: all alike.
    Raises ValueError where the mean is not within the limit."""
    if not 1 <= mean <= limit:
        raise ValueError(f"a mean of {mean:g} tokens is not between 1 and the limit of {limit}")
    low, high = math.log(mean), math.log(mean) + 20.0
    for _ in range(60):  # mu by bisection: the cut mean rises with it
        mu = (low + high) / 2
        low, high = (mu, high) if _cut_mean(mu - sigma**2 / 2, sigma, limit) < mean else (low, mu)
    mu -= sigma**2 / 2
    return lambda row, member, rng: max(1, min(limit, round(math.exp(mu + sigma * rng.gauss(0.0, 1.0)))))


def sigma_of(mean: float, longest: float, count: int, limit: int) -> float:
    """The sigma with which the longest of `count` lognormal lengths, cut at `limit`, is `longest` in the median."""
    if longest >= limit:  # what is cut hides the tail: the least sigma that reaches the limit so often
        longest = limit
    quantile = _NORMAL.inv_cdf(0.5 ** (1 / max(count, 2)))
    gain = math.log(max(longest / mean, 1.0))
    # mean * exp(quantile * sigma - sigma^2 / 2) = longest, the smaller root
    return quantile - math.sqrt(max(quantile**2 - 2 * gain, 0.0))


def _cut_mean(mu: float, sigma: float, limit: int) -> float:
    """Mean of min(X, limit), X lognormal."""
    if not sigma:
        return min(math.exp(mu), limit)
    z = (math.log(limit) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * _NORMAL.cdf(z - sigma) + limit * (1 - _NORMAL.cdf(z))
