"""Flags of the schedule: in which order, and on which ranks, the stages work on a rollout."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass

from mindspeed_rl_plugin.config.flag import FlagReader, flag
from mindspeed_rl_plugin.environment import is_part

_RAY_FORM = re.compile(r"ray:(?P<engines>[1-9]\d*)(,tp=(?P<tp>[1-9]\d*))?(,device=(?P<device>cpu|cuda|npu))?")
OVERSAMPLE = 1.25  # default of --rl-oversample
_ASYNC = FlagReader("--rl-schedule async", lambda _, c: c.schedule.apart)
_STREAMED = FlagReader("--rl-schedule streamed", lambda _, c: c.schedule.schedule == "streamed")
_STALENESS = FlagReader(
    "--rl-schedule async or --rl-carry-unfinished",
    lambda _, c: c.schedule.apart or c.schedule.carry_unfinished,
)


@dataclass(frozen=True)
class Generators:
    """What generates: the last `ranks` ranks of the job, or `engines` engines that Ray places. At least one of these
    two numbers is 0."""

    text: str  # the flag's value as given
    ranks: int = 0
    engines: int = 0
    tp: int = 1  # ranks of an engine that Ray places
    device: str = ""  # "": the kind of the trainers' devices

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
        "sync: one stage after the other; streamed: each response is graded when it is finished, while the engine "
        "generates others (same results as sync, bit for bit, unless --rl-carry-unfinished or --rl-oversample-drop is "
        "given); async: engines in other processes (--rl-generators) generate the next rollouts during training",
        choices=("sync", "streamed", "async"),
    )
    generators: str | None = flag(
        None,
        "with async: what generates. N: the last N ranks of the job (the others are the Megatron job that trains); "
        "0: no ranks, engines join the job (`python -m mindspeed_rl_plugin generate`); "
        "ray:N[,tp=T][,device=cpu|cuda|npu]: N engines of T ranks, which Ray places on its cluster",
        form=Generators.parse,
        reader=_ASYNC,
    )
    engine_url: tuple[str, ...] = flag(
        (),
        "with async: addresses, http://HOST:PORT, of your own servers (`vllm serve`, started as in docs/schedules.md); "
        "each server is one more engine",
        reader=_ASYNC,
    )
    max_staleness: int = flag(
        1,
        "with async or --rl-carry-unfinished: the weights that sampled a token are at most N publications (one per "
        "rollout) older than the weights that are trained with it; above 0 needs a --rl-correction",
        unit="publications",
        least=0,
        reader=_STALENESS,
    )
    inflight: str = flag(
        "keep",
        "with async: what unfinished responses do when an engine gets new weights: keep (continue with the KV cache of "
        "the old weights), recompute (continue with a new KV cache) or drain (finish before the new weights)",
        choices=("keep", "recompute", "drain"),
        reader=_ASYNC,
    )
    async_order: str = flag(
        "free",
        "with async: free (an engine takes a prompt when it has a free slot) or strict (each engine gets an equal part "
        "of rollout e, and samples it with publication max(0, e - --rl-max-staleness): all runs have equal results)",
        choices=("free", "strict"),
        reader=_ASYNC,
    )
    exact_resume: bool = flag(
        False,
        "with async: a checkpoint waits until all prompts that engines have or may take are answered and graded "
        "(strict always waits); without this flag, a resumed run samples unfinished prompts again",
        reader=_ASYNC,
    )
    carry_unfinished: bool = flag(
        False,
        "with streamed: generation stops when enough prompts are answered for a rollout; unfinished responses continue "
        "in the next rollout, with new weights; needs a --rl-correction",
        reader=_STREAMED,
    )
    oversample: float | None = flag(
        None,
        "with --rl-carry-unfinished or --rl-oversample-drop: a rollout works on N times the prompts that it needs; "
        "N is at most --rl-max-staleness + 1 with --rl-carry-unfinished (default: 1.25)",
        least=1.0,
        reader=_STREAMED,
    )
    oversample_drop: bool = flag(
        False,
        "with streamed: generation stops when enough prompts are answered for a rollout; other prompts are dropped, "
        "which favours short responses: compare the metrics dropped/length_mean and response/length_mean",
        reader=_STREAMED,
    )

    @property
    def who_generates(self) -> Generators:
        return Generators.parse(self.generators or "0")

    @property
    def generator_ranks(self) -> int:
        """Number of the launcher's ranks that generate."""
        return self.who_generates.ranks if self.apart else 0

    def trainers_text(self, world: int) -> str:
        """For a message, how the number of trainers `world` is computed; "" if all ranks of the launcher train."""
        apart = self.generator_ranks if is_part() else 0
        return f" ({world} trainers = {world + apart} ranks - --rl-generators {apart})" if apart else ""

    @property
    def partial(self) -> bool:
        """Whether generation stops before all responses are finished."""
        return self.carry_unfinished or self.oversample_drop

    def in_the_making(self, prompts: int) -> int:
        """Number of groups that are generated at the same time. prompts: groups of a rollout."""
        factor = (OVERSAMPLE if self.oversample is None else self.oversample) if self.partial else 1.0
        return math.ceil(round(factor * prompts, 6))

    @property
    def going_on(self) -> str:
        """The flag by which responses of old weights go on with new ones, as new requests; "" if there is none."""
        if self.apart and self.inflight == "recompute":
            return "--rl-inflight recompute"
        return "--rl-carry-unfinished" if self.carry_unfinished else ""

    @property
    def apart(self) -> bool:
        """Whether other processes than the trainers generate."""
        return self.schedule == "async"


# Flags that are only read if engines share the trainers' ranks.
OF_COLOCATED = ("--rl-reshard", "--rl-reshard-bucket-mb", "--rl-swap")
