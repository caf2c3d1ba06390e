"""Update: Megatron's own train_step on the rows of one optimizer step, with our forward step and loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mindspeed_rl_plugin.algorithms import Algorithm
from mindspeed_rl_plugin.rows import Rows, SampleId
from mindspeed_rl_plugin.stages import advantages
from mindspeed_rl_plugin.stages.context import RankContext
from mindspeed_rl_plugin.stages.stage import Stage, StageSpec

if TYPE_CHECKING:  # they import Megatron, which the stage table must not need
    from mindspeed_rl_plugin.update.step import MegatronStep
    from mindspeed_rl_plugin.update.value_step import ValueStep

GRAD_NORM = 5  # index in what Megatron's train_step returns, the same in 0.12.1, 0.16.1 and 0.19
OPTIMIZER, SCHEDULER, MODEL_CONFIG = 3, 4, 5  # indices of its arguments; `step.run` makes arguments 0 and 1
# Columns for every pipeline stage: inputs of the model, and which rows count.
FEEDS = ("tokens", "loss_mask", "valid", "multiplicity", "routes", "segments", "paths")
Stepped = tuple[tuple, dict[str, float]]  # result of Megatron's step, and metrics by the names of `monitor.names`


def spec(algorithm: Algorithm) -> StageSpec:
    """The stage, with the columns that it reads."""
    if algorithm.from_pairs:
        return StageSpec("update", ("tokens", "loss_mask", "reference"), (), resource="trainer", build=build)
    reads = ("tokens", "loss_mask", "logp_rollout", advantages.column_name(algorithm), "valid", "version")
    if_written = ("logp_old", "values", "returns", "multiplicity", "logp_ref", "paths")
    return StageSpec("update", reads, (), resource="trainer", if_written=if_written, build=build)


def build(spec: StageSpec, context: RankContext) -> Update:
    """Build the stage, with or without a critic."""
    if context.critic is None:
        return Update(spec, context)
    from mindspeed_rl_plugin.update.value_step import ValueStep  # imports Megatron

    settings = replace(context.forward, routed=())  # its routers choose
    return CriticUpdate(spec, context, ValueStep(context.algorithm, settings, context.critic.model))


@dataclass(frozen=True)
class TrainStep:
    """A call of Megatron's `train_step`."""

    function: Callable[..., tuple]
    args: tuple  # Megatron's arguments
    kwargs: Mapping[str, Any]


class Update(Stage):
    """Optimizer steps of the policy."""

    def run(
        self, batches: Sequence[Sequence[SampleId]], call: TrainStep, *, done: int, version: int, last_pass: bool
    ) -> Stepped:
        """One optimizer step on this data parallel rank's micro-batches.

        done: iterations before this one; version: of the weights before the rollout's first step; last_pass: whether
        this is the last pass over these rows. The last pass acknowledges the rows, an earlier pass gives them back.
        """
        needed = [name for name in self.spec.reads if self.context.last_stage or name in FEEDS]
        lease = self.lease([i for ids in batches for i in ids], needed)
        stepped = self.optimize([lease.rows.select(ids) for ids in batches], call, done, version)
        if last_pass:
            self.commit(lease)
        else:
            self.dock.release(lease)
        return stepped

    def optimize(self, parts: Sequence[Rows], call: TrainStep, done: int, version: int) -> Stepped:
        """The trainer's step on micro-batches."""
        return self.context.trainer.step(parts, call, version=version)


class CriticUpdate(Update):
    """Optimizer steps of the critic and the policy; the critic's step comes first."""

    def __init__(self, spec: StageSpec, context: RankContext, value_step: ValueStep) -> None:
        super().__init__(spec, context)
        self.value_step = value_step

    def optimize(self, parts: Sequence[Rows], call: TrainStep, done: int, version: int) -> Stepped:
        """Megatron's step of the critic, then of the policy; during `critic_warmup` only the critic's."""
        critic, lr = self.context.critic, learning_rate(call.args[OPTIMIZER])
        mine = (critic.model, critic.optimizer, critic.scheduler, critic.config)
        own = replace(call, args=(*call.args[:2], *mine, *call.args[MODEL_CONFIG + 1 :]))
        result, metrics = take_step(self.value_step, parts, own, "critic/")
        if done < self.context.config.algorithm.critic_warmup:
            # The policy's learning rate depends on the iteration, so its schedule advances too.
            call.args[SCHEDULER].step(increment=self.context.global_batch)
            return result, metrics | {"lr": lr}
        result, policy = super().optimize(parts, call, done, version)
        return result, metrics | policy


def take_step(step: MegatronStep, parts: Sequence[Rows], call: TrainStep, whose: str = "", **more: Any) -> Stepped:
    """One of Megatron's optimizer steps on micro-batches. whose: "critic/", or "" for the policy; more: arguments
    of `step.prepare`."""
    lr = learning_rate(call.args[OPTIMIZER])  # after the step, the rate is that of the next step
    step.prepare(parts, **more)
    result = step.run(call.function, call.args[2:], call.kwargs)
    norm = {} if result[GRAD_NORM] is None else {f"{whose}grad_norm": float(result[GRAD_NORM])}
    return result, {f"{whose}lr": lr} | norm | step.metrics()


def learning_rate(optimizer: Any) -> float:
    """Learning rate of the first parameter group."""
    return float(optimizer.param_groups[0]["lr"])
