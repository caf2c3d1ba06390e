"""The model beside what a run has measured, for its end."""

from __future__ import annotations

import os
from dataclasses import replace

from mindspeed_rl_plugin.loop.timing.calibrate import Observed, fit, grading_seconds, observed
from mindspeed_rl_plugin.loop.timing.simulate import simulate

CANNOT = "the model cannot say what this run should have taken"
MOST = 16_384  # responses of a rollout, with which the model takes half a minute at a run's end
IN_ALL = 24_576  # responses of the rollouts that it simulates, of which there are LEAST at least
LEAST, USUAL = 3, 12
# What of the model -> the same in metrics.jsonl, as shares of an iteration.
IDLE = (
    ("back-pressure", "back-pressure", "idle/engines_back_pressure"),
    ("waiting for a version", "version", "idle/engines_version"),
)


def line(run_dir: str | os.PathLike[str]) -> str:
    """What the model, fitted to the stages of a run, says of its iteration and idle shares, beside the measured ones;
    or why it cannot say that; "" where there are too few rollouts."""
    try:
        run = observed(run_dir)
        if (samples := run.setup.sizes.samples) > MOST:
            return f"{CANNOT}: it takes too long for the {samples} responses of a rollout, more than {MOST}"
        low, high = run.engines
        if low != high:
            return f"{CANNOT}: it had {low} to {high} engines, and the model knows a fixed number only"
        grading, costs = grading_seconds(run), fit([run])
        if not costs.step + costs.sequence:
            return f"{CANNOT}: no decode step was measured; rollouts that take seconds show them"
        rollouts = min(max(IN_ALL // samples, LEAST), USUAL)
        outcome = simulate(run.setup, costs, replace(run.responses, grading=lambda rng: grading or 0.0), rollouts)
    except (ValueError, RuntimeError):
        return ""
    parts = [f"iteration {outcome.iteration:.2f} s (measured {run.iteration:.2f} s)"]
    if run.setup.schedule == "async":
        shares = [("trainers starved", outcome.trainers["starved"], _starved(run))]
        shares += [(text, outcome.engines[cause], run.mean(name) or 0.0) for text, cause, name in IDLE]
        parts += [f"{text} {predicted:.0%} ({measured:.0%})" for text, predicted, measured in shares]
    hidden = "" if grading is not None else " (without grading, which it has not measured)"
    return f"the model of this run's stages{hidden}: {', '.join(parts)}; `plan --schedule --from` tries other flags"


def _starved(run: Observed) -> float:
    return run.seconds("generate") / run.seconds("iteration")
