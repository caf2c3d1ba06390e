"""Fits the costs of the simulation (simulate.py) to measured runs, by their run.json and metrics.jsonl.

The measured seconds of a stage are divided by its amount of work (tokens of the fullest rank, decode steps of the
slowest engine). This amount is the time of a simulated rollout of the run, if a token or step costs 1 s and all else 0.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_rl_plugin.loop.arithmetic import Arithmetic
from mindspeed_rl_plugin.loop.run_setup import SETUP, Setup
from mindspeed_rl_plugin.monitor.run_files import read_metrics, read_run
from mindspeed_rl_plugin.tools.plan.simulate import WARM_UP, simulate
from mindspeed_rl_plugin.tools.plan.virtual import Costs, Responses, lognormal, sigma_of

# Assumed Costs.sequence / Costs.step, if rollouts are too similar to measure both, or if all runs are async. It is
# small: on an accelerator a step mostly reads the weights, which takes the same time for any number of sequences.
USUAL_RATIO = 0.02
OLD_SHARE = 1 / 3  # assumed Costs.old_token / Costs.token, if no run has a pass for old log-probs
NOTICE = 0.05  # assumed `Costs.notice`, in seconds
TOKEN_STAGES = ("update", "logp_ref", "values")
ONCE = ("reshard", "swap_back")
INSIDE = ("transfer", "evaluate", "iteration")  # parts of other stages, stages outside of an iteration, and the total
TURNS = 5  # iterations of `_decode_apart`, which converges
# Metrics of a complete rollout; a rollout without one of them is not counted.
NEEDED = (
    "response/length_mean",
    "response/length_max",
    "seconds/generate",
    "seconds/update",
    "tokens_per_second_total",
)
COUNTED = 6  # rollouts that are measured in each simulated run
OF_APART = {"publish": "seconds/publish", "pull": "weights/pull_seconds", "apply": "weights/pause_seconds"}
COLLINEAR = 1e-3  # squared sine between the vectors of steps and of sequences; below it their costs cannot be separated


@dataclass(frozen=True)
class Observed:
    """A measured run."""

    setup: Setup
    # metrics of each rollout after WARM_UP; those in seconds are summed over its iterations
    rollouts: Sequence[Mapping[str, float]]
    responses: Responses  # with lengths as in the run, and no time for grading
    engines: tuple[int, int] = (0, 0)  # fewest and most working engines outside the trainers

    def mean(self, name: str) -> float | None:
        """Mean of a metric over the rollouts that have it."""
        return _mean([rollout.get(name) for rollout in self.rollouts])

    def seconds(self, *stages: str) -> float:
        return sum(self.mean(f"seconds/{stage}") or 0.0 for stage in stages)

    @property
    def calls(self) -> tuple[float, float] | None:
        """Seconds of the calls that grade a response, and number of concurrent calls in a reward worker; None if no
        response was graded. Older runs have only call_seconds or worker_seconds, and made one call at a time."""
        calls, worker = self.mean("reward/call_seconds"), self.mean("reward/worker_seconds")
        if calls is None and worker is None:
            return None
        calls, worker = calls or worker, worker or calls
        return calls, calls / worker if worker else 1.0

    @property
    def iteration(self) -> float:
        """Mean seconds of a rollout / its optimizer steps."""
        return self.seconds("iteration") / self.setup.sizes.steps


def observed(run_dir: str | os.PathLike[str]) -> Observed:
    """Read a run: the setup from run.json, the rest from metrics. Raises ValueError if metrics or setup are missing,
    or if there are too few rollouts."""
    lines, run = read_metrics(run_dir), read_run(run_dir)
    if SETUP not in run:
        raise ValueError(
            f"{run_dir}: run.json has no {SETUP!r}: it is of an old version, DPO or partial rollouts; give another run"
        )
    known = {field.name for field in dataclasses.fields(Setup)}
    stored = {name: value for name, value in run[SETUP].items() if name in known}  # other versions stored more
    setup = Setup(**stored | {"sizes": Arithmetic(**stored["sizes"])})
    rollouts: list[dict[str, float]] = []
    for line in lines:
        if "seconds/iteration" not in line:
            continue
        if "seconds/generate" in line:
            rollouts.append({})
        if rollouts:
            _add(rollouts[-1], line)
    counted = [r for r in rollouts[WARM_UP:] if all(name in r for name in NEEDED)]  # the last one may be incomplete
    if not counted:
        raise ValueError(
            f"{run_dir} has {len(rollouts)} rollouts, but the first {WARM_UP} are not counted; give a run of at "
            f"least {WARM_UP + 1} rollouts (raise --train-iters)"
        )
    tokens = statistics.fmean(r["tokens_per_second_total"] * r["seconds/iteration"] for r in counted)
    prompt = tokens / setup.sizes.samples - statistics.fmean(r["response/length_mean"] for r in counted)
    at_work = [int(r.get("engines", 0)) for r in counted]
    # The metric counts engines that share experts as one; the flags do not count engines that joined later.
    sizes = dataclasses.replace(setup.sizes, engines=max(setup.sizes.engines, round(statistics.median(at_work))))
    setup = dataclasses.replace(setup, sizes=sizes, prompt_tokens=setup.prompt_tokens or max(round(prompt), 0))
    return Observed(setup, counted, _responses(setup, counted), (min(at_work), max(at_work)))


def fit(runs: Sequence[Observed]) -> Costs:
    """The costs with which the simulation fits the runs best. A cost that no run has measured is derived from another
    cost (publish, pull and apply from reshard, old_token from token, sequence from step), or is NOTICE, or 0."""
    apart = {cost: _mean([run.mean(name) for run in runs]) for cost, name in OF_APART.items()}
    passes = [run for run in runs if run.setup.old_logps and run.mean("seconds/logp_old") is not None]
    reshard = _mean([run.seconds(*ONCE) for run in runs if run.setup.schedule != "async"]) or 0.0
    token = _per_unit(runs, "token", *TOKEN_STAGES)
    return Costs(
        token=token,
        old_token=_per_unit(passes, "old_token", "logp_old") if passes else OLD_SHARE * token,
        rollout=_mean([_rest(run) for run in runs]) or 0.0,
        reshard=reshard,
        **{cost: reshard if seconds is None else seconds for cost, seconds in apart.items()},
        notice=NOTICE,
        **_decode(runs),
    )


def guessed(runs: Sequence[Observed], costs: Costs) -> list[str]:
    """Those of the costs step, sequence, reshard, publish, pull and apply that no run has measured."""
    known = {
        "step": costs.step > 0,
        "sequence": costs.sequence > 0 and costs.sequence != USUAL_RATIO * costs.step,
        "reshard": any(run.setup.schedule != "async" for run in runs),
        **{cost: any(run.mean(name) is not None for run in runs) for cost, name in OF_APART.items()},
    }
    return [cost for cost, measured in known.items() if not measured]


# inside


def _add(rollout: dict[str, float], line: Mapping[str, Any]) -> None:
    for name, value in line.items():
        if isinstance(value, int | float):
            rollout[name] = rollout.get(name, 0.0) + value if name.startswith("seconds/") else value


def _responses(setup: Setup, rollouts: Sequence[Mapping[str, float]]) -> Responses:
    """Lognormal lengths with the run's mean and tail."""
    mean = statistics.fmean(r["response/length_mean"] for r in rollouts)
    longest = [r["response/length_max"] for r in rollouts]
    limit = max(setup.limit, round(max(longest)))
    sigma = sigma_of(mean, statistics.median(longest), setup.sizes.samples, limit)
    informative = statistics.fmean(r.get("sampling/informative") or 1.0 for r in rollouts) if setup.rounds else 1.0
    return Responses(lognormal(mean, sigma, limit), informative=informative)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _units(run: Observed, **cost: float) -> float:
    """Seconds of a simulated rollout of such a run with only this cost; for a cost of 1 s, its number of units."""
    return simulate(run.setup, Costs(**cost), run.responses, COUNTED).rollout


def _per_unit(runs: Sequence[Observed], cost: str, *stages: str) -> float:
    return sum(run.seconds(*stages) for run in runs) / sum(_units(run, **{cost: 1.0}) for run in runs)


def _rest(run: Observed) -> float:
    """Seconds of a rollout that belong to no other cost."""
    known = {*TOKEN_STAGES, *ONCE, "logp_old", "publish", "generate", "reward", *INSIDE}
    stages = {name.removeprefix("seconds/") for r in run.rollouts for name in r if name.startswith("seconds/")}
    return max(run.seconds("iteration") - run.seconds(*(stages & known - set(INSIDE))), 0.0)


def _decode(runs: Sequence[Observed]) -> dict[str, float]:
    """The costs `step` and `sequence`: by least squares of relative errors over the rollouts of colocated engines;
    without such rollouts, by the tokens per second of engines outside the trainers."""
    rows = []
    for run in runs:
        if run.setup.schedule == "async":
            continue
        steps, sequences = _units(run, step=1.0), _units(run, sequence=1.0)
        longest, mean = run.mean("response/length_max"), run.mean("response/length_mean")
        # If no response waits for a slot, there are as many steps as the longest response has tokens.
        if run.setup.sizes.samples <= run.setup.slots * run.setup.sizes.engines:
            steps = longest
        for rollout in run.rollouts:
            seconds = rollout["seconds/generate"]
            s = steps * rollout["response/length_max"] / longest
            q = sequences * rollout["response/length_mean"] / mean
            rows.append((s / seconds, q / seconds))
    if not rows:
        return _decode_apart([run for run in runs if run.mean("engines/tokens_per_second")])
    both = np.array(rows)
    squares, sums = both.T @ both, both.sum(axis=0)
    if np.linalg.det(squares) > COLLINEAR * squares.diagonal().prod():
        step, sequence = np.linalg.solve(squares, sums).tolist()
        if min(step, sequence) < 0:  # then only the positive cost is used
            alone = (sums / squares.diagonal()).tolist()
            step, sequence = (alone[0], 0.0) if sequence < 0 else (0.0, alone[1])
        return {"step": step, "sequence": sequence}
    usual = both @ (1.0, USUAL_RATIO)
    step = float(usual.sum() / (usual @ usual))
    return {"step": step, "sequence": USUAL_RATIO * step}


def _decode_apart(runs: Sequence[Observed]) -> dict[str, float]:
    """The same costs by the response tokens per second of engines while they work, with the ratio USUAL_RATIO."""
    if not runs:
        return {}
    steps = []
    for run in runs:
        idle = sum(run.mean(f"idle/engines_{cause}") or 0.0 for cause in ("back_pressure", "version"))
        measured = run.mean("engines/tokens_per_second") / max(1 - idle, 1e-3)
        token, step = run.seconds(*TOKEN_STAGES, "logp_old") / _units(run, token=1.0), 0.01
        for _ in range(TURNS):
            costs = Costs(step=step, sequence=USUAL_RATIO * step, token=token)
            outcome = simulate(run.setup, costs, run.responses, COUNTED)
            works = run.setup.sizes.engines * max(1 - sum(outcome.engines.values()), 1e-3)
            step *= outcome.tokens / works / measured
        steps.append(step)
    step = statistics.fmean(steps)
    return {"step": step, "sequence": USUAL_RATIO * step}
