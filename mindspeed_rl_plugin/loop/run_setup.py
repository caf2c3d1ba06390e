"""The flags on which a run's time depends. run.json stores them for `plan --schedule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mindspeed_rl_plugin.algorithms import Algorithm, resolve
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.loop.arithmetic import Arithmetic, reads_old_logps

SETUP = "setup"  # key of `Setup` in run.json


@dataclass(frozen=True)
class Setup:
    """The flags on which a run's time depends."""

    sizes: Arithmetic  # here `engines` counts all engines that the flags name
    schedule: str = "sync"
    slots: int = 256  # sequences that an engine decodes at the same time
    graders: int = 2  # reward workers, of all ranks
    staleness: int = 1
    order: str = "free"
    inflight: str = "keep"
    prompt_tokens: int = 0  # mean of the prompts; 0: not known
    limit: int = 2**20  # most tokens of a response
    rounds: int = 0  # of dynamic sampling, 0 without it
    trainer_ranks: int = 1  # of one trainer, which is one data parallel replica
    engine_ranks: int = 1  # of one engine
    shared: bool = False  # common first tokens of a group run once in a micro-batch
    old_read: bool = False  # result of `reads_old_logps`
    ruled_out: Mapping[str, str] = field(default_factory=dict)  # schedules that other flags exclude, each with the flag

    @classmethod
    def of(cls, config: RLConfig, sizes: Arithmetic, ranks: int) -> Setup:
        """From the flags of a job. ranks: number of ranks that train."""
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
            shared=config.forward.share_prompts,
            old_read=reads_old_logps(config, algorithm),
            ruled_out=_ruled_out(config, algorithm),
        )

    @property
    def world(self) -> int:
        """Ranks of all trainers; with async also of all engines, those on Ray and those behind a URL included."""
        trainers, engines = self.sizes.data_parallel * self.trainer_ranks, self.sizes.engines * self.engine_ranks
        return trainers + engines if self.schedule == "async" else trainers

    @property
    def old_logps(self) -> bool:
        """Whether old log-probs are computed before the update."""
        return self.sizes.steps > 1 or self.old_read


def _ruled_out(config: RLConfig, algorithm: Algorithm) -> dict[str, str]:
    """The schedules that other flags exclude, each with the flag."""
    out = (
        {"async": "--rl-reward-model-device accelerator"} if config.reward.reward_model_device == "accelerator" else {}
    )
    if algorithm.filters and algorithm.filtration_whole_batch:
        out |= dict.fromkeys(("streamed", "async"), "--rl-filtration-whole-batch")
    return out
