"""Builds the loop around the loaded models: dock, engine, stages, schedule."""

from __future__ import annotations

from typing import Any

from mindspeed_rl_plugin.critic.critic import Critic
from mindspeed_rl_plugin.loop.build_async import build_schedule, make_publisher
from mindspeed_rl_plugin.loop.colocation import Colocation
from mindspeed_rl_plugin.loop.docks import Docks, place
from mindspeed_rl_plugin.loop.inputs import Inputs
from mindspeed_rl_plugin.loop.loop import Loop
from mindspeed_rl_plugin.loop.megatron_trainer import MegatronTrainer
from mindspeed_rl_plugin.loop.monitoring import make_monitor
from mindspeed_rl_plugin.loop.rollout_plan import RolloutPlan
from mindspeed_rl_plugin.loop.schedules.colocated import SCHEDULES
from mindspeed_rl_plugin.loop.schedules.partial import PartialSchedule
from mindspeed_rl_plugin.loop.schedules.schedule import Job
from mindspeed_rl_plugin.loop.start import Start
from mindspeed_rl_plugin.loop.topology import Topology
from mindspeed_rl_plugin.ranks import Collectives
from mindspeed_rl_plugin.stages.evaluate import Due, Evaluate
from mindspeed_rl_plugin.stages.measure import IterationLog
from mindspeed_rl_plugin.stages.stage import Stages
from mindspeed_rl_plugin.weights.host_memory import HostWeights


def build_loop(
    inputs: Inputs, model: Any, optimizer: Any, reference: HostWeights | None, start: Start, critic: Critic | None
) -> Loop:
    """The loop of an algorithm that samples responses. model: this rank's chunks. Collective over all ranks; the engine
    takes seconds to start."""
    inputs = inputs.settled()
    config, flags = inputs.config, inputs.config.schedule
    topology = Topology.from_megatron(1 if flags.apart else config.rollout.generate_tp, model)
    ranks = Collectives(config.monitor.wait_timeout)
    mixed = inputs.algorithm.dynamic_sampling or flags.partial  # groups of several epochs make a rollout
    plan = RolloutPlan(inputs.sizes, place(topology, ranks.group), inputs.forward.budget, mixed)
    table, size = inputs.table(), inputs.dock_size()
    size.check_placed(plan.owners_of_round())
    docks = Docks.make(table, config, topology, ranks.group, plan)
    monitor = make_monitor(inputs, topology, start)
    colocation = publisher = None
    if flags.apart:
        publisher = make_publisher(inputs, topology.rank, ranks, docks.trainers, model, inputs.host_memory_budget())
    else:
        peers = docks.engines.peers
        colocation = Colocation.of(inputs, model, optimizer, critic, topology, peers, monitor.stage)
    trainer = MegatronTrainer.of(inputs, model, publisher)
    parts = {"trainer": trainer, "critic": critic, "reference": reference}
    parts["engine"] = colocation and colocation.engine
    context = inputs.context(model, topology, ranks, docks, monitor, **parts)
    stages = Stages.of(table, context)
    due = Due(bool(inputs.held_out), config.monitor.eval_every, inputs.args.train_iters)
    job = Job(plan, topology, ranks, monitor, docks.trainers, stages["prompts"], due)
    if colocation is None:
        schedule = build_schedule(inputs, job, stages, size.rounds, trainer, model, resumes=start.kind == "resume")
    else:
        kind = PartialSchedule if flags.partial else SCHEDULES[flags.schedule]
        colocated = {"colocation": colocation, "evaluation": Evaluate.of(context, inputs.held_out)}
        schedule = kind.of(inputs, job, stages, size.rounds, **colocated)
    return Loop(
        inputs.args,
        job,
        schedule,
        stages["update"],
        IterationLog(monitor, ranks, docks.trainers),
        colocation,
        warmup=config.algorithm.critic_warmup if critic is not None else 0,
    )
