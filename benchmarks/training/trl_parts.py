"""What TRL's arms share: its settings, and the clock of its steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from trl import GRPOConfig

DRIFT = "sampling/sampling_logp_difference/max"  # of the engine's log-probs from the trainer's


class Clock(TrainerCallback):
    """Seconds of each optimizer step, and of what was timed inside it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.inside: Counter[str] = Counter()
        self.last = 0.0
        self.drift = 0.0

    def on_train_begin(self, *_, **__) -> None:
        self.last = time.perf_counter()

    def on_step_end(self, *_, **__) -> None:
        now = time.perf_counter()
        self.steps.append({"iteration": now - self.last, **self.inside})
        self.last = now
        self.inside.clear()

    def on_log(self, _args, _state, _control, logs, **_) -> None:
        self.drift = max(self.drift, logs.get(DRIFT, 0.0))


def timed(clock: Clock, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose time is booked under a name."""

    def call(*args, **kwargs):
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            clock.inside[name] += time.perf_counter() - begin

    return call


def settings(
    out: Path, iterations: int, *, micro_batch: int, steps: int, members: int, limit: int, **more: Any
) -> GRPOConfig:
    """GRPO in fp32 on a CPU, an optimizer step after each rollout. steps: micro-batches of a process in it; members:
    responses of a prompt; limit: of a response [tokens]; more: further fields."""
    return GRPOConfig(
        output_dir=f"{out}.trl",
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=steps,
        steps_per_generation=steps,
        num_generations=members,
        max_completion_length=limit,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="grpo",
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_steps=iterations,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=1,
        **more,
    )
