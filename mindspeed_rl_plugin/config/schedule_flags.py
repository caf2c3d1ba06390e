"""Flags of the schedule: in which order, and on which ranks, the stages work on a rollout."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl_plugin.config.flag import flag


@dataclass(frozen=True)
class ScheduleConfig:
    """The schedule: which stages of a rollout work at the same time, and where."""

    schedule: str = flag(
        "sync",
        "sync: one stage after the other; streamed: each response is graded as soon as it is finished, while the "
        "engine generates the others, with the same results bit for bit; async: engines on ranks of their own "
        "generate the next rollouts while the others train, see --rl-generators",
        choices=("sync", "streamed", "async"),
    )
    generators: int | None = flag(
        None,
        "with async: the last N ranks of the job generate, the others are the Megatron job that trains; 0: only "
        "engines that join it (`python -m mindspeed_rl_plugin generate`)",
        unit="ranks",
        least=0,
    )
    max_staleness: int = flag(
        1,
        "with async: most publications of weights between those that sampled a token and those that are trained with "
        "it, kept by admission of prompts; above 0 a --rl-correction is needed",
        unit="publications",
        least=0,
    )
    inflight: str = flag(
        "keep",
        "with async: what new weights do to responses in the making: keep (they go on with what older weights computed "
        "of them), recompute (they go on, their tokens so far are computed anew) or drain (they end first)",
        choices=("keep", "recompute", "drain"),
    )
    async_order: str = flag(
        "free",
        "with async: free (an engine takes the next prompt when it has a slot) or strict (rollout e is sampled by "
        "publication max(0, e - --rl-max-staleness) exactly, in equal parts: the same results in every run)",
        choices=("free", "strict"),
    )
    exact_resume: bool = flag(
        False,
        "with async: a checkpoint waits until all admitted prompts are answered and graded, so that a resumed run "
        "samples none of them anew (always so with --rl-async-order strict); without, those in the making are",
    )

    @property
    def apart(self) -> bool:
        """Whether other processes than the trainers generate."""
        return self.schedule == "async"


# Flags that only `async` reads.
OF_ASYNC = ("--rl-generators", "--rl-max-staleness", "--rl-inflight", "--rl-async-order", "--rl-exact-resume")
