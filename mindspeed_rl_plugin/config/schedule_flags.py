"""Flags of the schedule: in which order, and on which ranks, the stages work on a rollout."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass

from mindspeed_rl_plugin.config.flag import FlagReader, flag
from mindspeed_rl_plugin.environment import is_part

_RAY_FORM = re.compile(r"ray:(?P<engines>[1-9]\d*)(,tp=(?P<tp>[1-9]\d*))?(,device=(?P<device>cpu|cuda|npu))?")
OVERSAMPLE = 1.25  # of --rl-oversample, where it is read
_ASYNC = FlagReader("--rl-schedule async", lambda _, c: c.schedule.apart)
_STREAMED = FlagReader("--rl-schedule streamed", lambda _, c: c.schedule.schedule == "streamed")
_STALENESS = FlagReader(
    "--rl-schedule async, or streamed with --rl-carry-unfinished,",
    lambda _, c: c.schedule.apart or c.schedule.carry_unfinished,
)


@dataclass(frozen=True)
class Generators:
    """Who generates: the last `ranks` ranks of the job, or `engines` engines that Ray places. One of these numbers is
    0."""

    text: str  # the flag's value as given
    ranks: int = 0
    engines: int = 0
    tp: int = 1  # ranks of an engine
    device: str = ""  # "": the trainers' own

    @classmethod
    def parse(cls, text: str) -> Generators:
        """From `N` or `ray:N[,tp=T][,device=cpu|cuda|npu]`. Raises argparse.ArgumentTypeError for anything else."""
        if text.isdecimal():
            return cls(text, ranks=int(text))
        if found := _RAY_FORM.fullmatch(text):
            return cls(text, 0, int(found["engines"]), int(found["tp"] or 1), found["device"] or "")
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of ranks nor ray:N[,tp=T][,device=cpu|cuda|npu] with N and T at least 1"
        )


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
    generators: str | None = flag(
        None,
        "with async: N, the last N ranks of the job generate, the others are the Megatron job that trains; 0, only "
        "engines that join it (`python -m mindspeed_rl_plugin generate`); ray:N[,tp=T][,device=cpu|cuda|npu], N "
        "engines of T ranks that Ray places on its cluster",
        form=Generators.parse,
        reader=_ASYNC,
    )
    engine_url: tuple[str, ...] = flag(
        (),
        "with async: addresses of servers of your own (`vllm serve`, started as docs/schedules.md says), each of which "
        "generates as one more engine; http://HOST:PORT",
        reader=_ASYNC,
    )
    max_staleness: int = flag(
        1,
        "with async and --rl-carry-unfinished: most publications of weights between those that sampled a token and "
        "those that are trained with it, kept by admission of prompts; above 0 a --rl-correction is needed",
        unit="publications",
        least=0,
        reader=_STALENESS,
    )
    inflight: str = flag(
        "keep",
        "with async: what new weights do to responses in the making: keep (they go on with what older weights computed "
        "of them), recompute (they go on, their tokens so far are computed anew) or drain (they end first)",
        choices=("keep", "recompute", "drain"),
        reader=_ASYNC,
    )
    async_order: str = flag(
        "free",
        "with async: free (an engine takes the next prompt when it has a slot) or strict (rollout e is sampled by "
        "publication max(0, e - --rl-max-staleness) exactly, in equal parts: the same results in every run)",
        choices=("free", "strict"),
        reader=_ASYNC,
    )
    exact_resume: bool = flag(
        False,
        "with async: a checkpoint waits until all admitted prompts are answered and graded, so that a resumed run "
        "samples none of them anew (always so with --rl-async-order strict); without, those in the making are",
        reader=_ASYNC,
    )
    carry_unfinished: bool = flag(
        False,
        "with streamed: generation stops when enough prompts are answered for a rollout; responses that are not "
        "finished go on in the next one, under new weights; needs a --rl-correction",
        reader=_STREAMED,
    )
    oversample: float | None = flag(
        None,
        "with --rl-carry-unfinished or --rl-oversample-drop: how many times the prompts that it needs a rollout has in "
        "the making; 1.25 by default, at most --rl-max-staleness + 1 where they are carried over",
        least=1.0,
        reader=_STREAMED,
    )
    oversample_drop: bool = flag(
        False,
        "with streamed: generation stops when enough prompts are answered for a rollout, and the others are thrown "
        "away, which favours short responses: see the metrics dropped/length_mean and response/length_mean",
        reader=_STREAMED,
    )

    @property
    def who_generates(self) -> Generators:
        return Generators.parse(self.generators or "0")

    @property
    def generator_ranks(self) -> int:
        """Ranks of the launcher that generate."""
        return self.who_generates.ranks if self.apart else 0

    def trainers_text(self, world: int) -> str:
        """How the number of ranks that train is computed, for a message; "" where all ranks of the launcher do."""
        apart = self.generator_ranks if is_part() else 0
        return f" ({world} trainers = {world + apart} ranks - --rl-generators {apart})" if apart else ""

    @property
    def partial(self) -> bool:
        """Whether generation stops before all responses are finished."""
        return self.carry_unfinished or self.oversample_drop

    def in_the_making(self, prompts: int) -> int:
        """Groups in flight at once, for a rollout of so many."""
        factor = (OVERSAMPLE if self.oversample is None else self.oversample) if self.partial else 1.0
        return math.ceil(round(factor * prompts, 6))

    @property
    def apart(self) -> bool:
        """Whether other processes than the trainers generate."""
        return self.schedule == "async"


# Flags that are only read if engines share the trainers' ranks.
OF_COLOCATED = ("--rl-reshard", "--rl-reshard-bucket-mb", "--rl-swap")
