"""Builds the loop around the loaded models: engine or publisher, stages, schedule."""

from __future__ import annotations

from functools import partial
from typing import Any

from mindspeed_rl_plugin.critic.critic import Critic
from mindspeed_rl_plugin.environment import replayed
from mindspeed_rl_plugin.loop.build_async import build_schedule, make_publisher
from mindspeed_rl_plugin.loop.colocation import Colocation
from mindspeed_rl_plugin.loop.inputs import Inputs
from mindspeed_rl_plugin.loop.loop import Loop
from mindspeed_rl_plugin.loop.megatron_trainer import MegatronTrainer
from mindspeed_rl_plugin.loop.rank_parts import RankParts
from mindspeed_rl_plugin.loop.replayed import RecordingTrainer, ReplayedSchedule
from mindspeed_rl_plugin.loop.schedules.partial import PartialSchedule
from mindspeed_rl_plugin.loop.schedules.schedule import SCHEDULES
from mindspeed_rl_plugin.loop.start import Start
from mindspeed_rl_plugin.stages.evaluate import Evaluate
from mindspeed_rl_plugin.stages.measure import IterationLog
from mindspeed_rl_plugin.stages.stage import Stages
from mindspeed_rl_plugin.weights.host_memory import HostWeights


def build_loop(
    inputs: Inputs, model: Any, optimizer: Any, reference: HostWeights | None, start: Start, critic: Critic | None
) -> Loop:
    """The loop of an algorithm that samples responses. model: this rank's chunks. Collective over all ranks; the engine
    takes seconds to start."""
    inputs = inputs.settled()
    flags, at = inputs.config.schedule, RankParts.of(inputs, model, start)
    colocation, replays = None, bool(replayed())
    if not flags.apart and not replays:  # the engines run on the ranks that train
        of_rank = {"rank": at.job.topology.rank, "peers": at.docks.engines.peers, "stage": at.job.monitor.stage}
        colocation = Colocation.of(inputs, model, optimizer, critic, **of_rank)
    trainer = MegatronTrainer.of(inputs, model, make_publisher(at, model) if flags.apart and not replays else None)
    trainer = RecordingTrainer(**vars(trainer), at=at) if replays else trainer
    engine = colocation and colocation.engine
    context = at.context(model, trainer=trainer, critic=critic, reference=reference, engine=engine)
    stages = Stages.of(inputs.table(), context)
    if replays:
        schedule = ReplayedSchedule(at.job, stages, inputs.table())
    elif colocation is None:
        schedule = build_schedule(at, stages, trainer, model, resumes=start.kind == "resume")
    else:
        make = partial(PartialSchedule.of, inputs) if flags.partial else SCHEDULES[flags.schedule]
        evaluation = Evaluate(context, inputs.held_out)
        schedule = make(at.job, stages, inputs.dynamic_rounds, colocation=colocation, evaluation=evaluation)
    warmup = inputs.config.algorithm.critic_warmup if critic is not None else 0
    log = IterationLog(at.job.monitor, at.job.ranks, at.job.dock)
    return Loop(inputs.args, at.job, schedule, stages["update"], log, colocation, warmup)
