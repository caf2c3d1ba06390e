"""The model beside what a run has measured, for its end."""

from __future__ import annotations

import os
from dataclasses import replace

from mindspeed_rl_plugin.loop.timing.calibrate import Observed, fit, grading_seconds, observed
from mindspeed_rl_plugin.loop.timing.simulate import simulate

MOST = 2048  # responses of a rollout beyond which the model would take long at a run's end
# What of the model -> the same in metrics.jsonl, as shares of an iteration.
IDLE = (
    ("back-pressure", "back-pressure", "idle/engines_back_pressure"),
    ("waiting for a version", "version", "idle/engines_version"),
)


def line(run_dir: str | os.PathLike[str]) -> str:
    """What the model, fitted to the stages of a run, says of its iteration and idle shares, beside the measured ones;
    "" where there are too few rollouts, or too many responses in one."""
    try:
        run = observed(run_dir)
        if run.setup.sizes.samples > MOST:
            return ""
        grading = grading_seconds(run)
        outcome = simulate(run.setup, fit([run]), replace(run.responses, grading=lambda rng: grading or 0.0))
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
