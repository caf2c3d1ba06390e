"""The parts of a loop that every algorithm needs on this rank: topology, plan, dock and monitor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mindspeed_rl_plugin.loop.docks import Docks, place
from mindspeed_rl_plugin.loop.inputs import Inputs
from mindspeed_rl_plugin.loop.monitoring import make_monitor
from mindspeed_rl_plugin.loop.rollout_plan import RolloutPlan
from mindspeed_rl_plugin.loop.schedules.schedule import Due, Job
from mindspeed_rl_plugin.loop.start import Start
from mindspeed_rl_plugin.loop.topology import Topology
from mindspeed_rl_plugin.ranks import Collectives
from mindspeed_rl_plugin.stages.context import RankContext


@dataclass(frozen=True)
class RankParts:
    """The parts of a loop on this rank."""

    inputs: Inputs  # read before the model was built
    docks: Docks  # the dock, with views for each kind of consumer
    job: Job  # what every schedule uses

    @classmethod
    def of(cls, inputs: Inputs, model: Any, start: Start) -> RankParts:
        """Build the parts. model: this rank's chunks. Collective over all ranks. Raises ValueError if the dock is
        too small."""
        flags, pairs = inputs.config.schedule, inputs.algorithm.from_pairs
        topology = Topology.from_megatron(1 if flags.apart or pairs else inputs.config.rollout.generate_tp, model)
        ranks = Collectives(inputs.config.monitor.wait_timeout)
        mixed = inputs.algorithm.dynamic_sampling or flags.partial  # a rollout has groups of several epochs
        budget = inputs.forward.budget and replace(inputs.forward.budget, whole=pairs)
        plan = RolloutPlan(inputs.sizes, place(topology, ranks.group), budget, mixed)
        if not pairs:
            inputs.dock_size().check_placed(plan.owners_of_round())
        docks = Docks.make(inputs.table(), inputs.config, topology, ranks.group, plan)
        due = Due(bool(inputs.held_out), inputs.config.monitor.eval_every, inputs.args.train_iters)
        job = Job(plan, topology, ranks, make_monitor(inputs, topology, start), docks.trainers, due)
        return cls(inputs, docks, job)

    def context(self, model: Any, **parts: Any) -> RankContext:
        """The context for building the stages. parts: further fields of `RankContext`."""
        inputs, job = self.inputs, self.job
        return RankContext(
            config=inputs.config,
            algorithm=inputs.algorithm,
            forward=inputs.forward,
            data=inputs.data,
            members=inputs.sizes.members,
            global_batch=inputs.sizes.global_batch,
            sampling=inputs.sampling,
            seed=inputs.response_seed,
            longest=inputs.config.rollout.max_response_length,
            decode=inputs.decode,
            graders=inputs.graders,
            responses=inputs.responses,
            dock_of=self.docks.of,
            ranks=job.ranks,
            monitor=job.monitor,
            leader=job.topology.leader,
            writer=job.topology.writer,
            last_stage=job.topology.last_stage,
            model=model,
            **parts,
        )
