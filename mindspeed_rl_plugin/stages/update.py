"""Update: Megatron's own train_step on the rows of one optimizer step, with our forward step and loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_rl_plugin.algorithms import Algorithm
from mindspeed_rl_plugin.dock import Dock
from mindspeed_rl_plugin.rows import Rows, SampleId
from mindspeed_rl_plugin.stages import advantages
from mindspeed_rl_plugin.stages.context import RankContext
from mindspeed_rl_plugin.stages.logprobs import columns_of_rank
from mindspeed_rl_plugin.stages.stage import Stage, StageSpec
from mindspeed_rl_plugin.stages.trainer import Trainer

if TYPE_CHECKING:  # they import Megatron, which the stage table does without
    from mindspeed_rl_plugin.critic.critic import Critic
    from mindspeed_rl_plugin.update.pair_step import PairStep
    from mindspeed_rl_plugin.update.value_step import ValueStep

GRAD_NORM = 5  # place in what Megatron's train_step returns, the same in 0.12.1, 0.16.1 and 0.19
OPTIMIZER, SCHEDULER, CONFIG = 3, 4, 5  # places among its arguments; from 2, the model, on they are passed through
Stepped = tuple[tuple, dict[str, float]]  # what Megatron's step returns, and metrics by the register's names


def spec(algorithm: Algorithm) -> StageSpec:
    """What the update reads of every row."""
    reads = ("tokens", "loss_mask", "logp_rollout", advantages.column_name(algorithm), "valid", "version")
    if_written = ("logp_old", "values", "returns", "multiplicity", "logp_ref")
    return StageSpec("update", reads, (), resource="trainer", if_written=if_written, build=build)


def build(spec: StageSpec, context: RankContext) -> Update:
    """The stage on this rank."""
    given = *spec.on(context), context.trainer, context.last_stage
    if context.critic is None:
        return Update(*given)
    from mindspeed_rl_plugin.update.value_step import ValueStep  # imports Megatron, the table does not

    value_step = ValueStep(context.algorithm, context.forward, context.critic.model)
    warmup, batch = context.config.algorithm.critic_warmup, context.global_batch
    return CriticUpdate(*given, critic=context.critic, value_step=value_step, warmup=warmup, global_batch=batch)


def pair_spec() -> StageSpec:
    """The same for pairs."""
    return StageSpec("update", ("tokens", "loss_mask", "reference"), (), resource="trainer", build=build_pairs)


def build_pairs(spec: StageSpec, context: RankContext) -> PairUpdate:
    """The stage on this rank, of pairs."""
    from mindspeed_rl_plugin.update.pair_step import PairStep  # imports Megatron, the table does not

    step = PairStep(context.algorithm, context.forward, context.model, context.prompts)
    return PairUpdate(*spec.on(context), step, last_stage=True)


@dataclass(frozen=True)
class TrainStep:
    """A call of Megatron's `train_step`: the function, and what Megatron gave it."""

    function: Callable[..., tuple]
    args: tuple
    kwargs: Mapping[str, Any]


class Update(Stage):
    """trainer: of the policy, for pairs their step; columns: those of the reads that this rank needs."""

    def __init__(
        self, spec: StageSpec, dock: Dock, deadline: float, trainer: Trainer | PairStep, last_stage: bool
    ) -> None:
        super().__init__(spec, dock, deadline)
        self.trainer, self.columns = trainer, columns_of_rank(spec.reads, last_stage)

    def run(
        self,
        batches: Sequence[Sequence[SampleId]],
        call: TrainStep,
        *,
        done: int,
        version: int,
        last_pass: bool,
    ) -> Stepped:
        """One optimizer step on this data parallel rank's micro-batches.

        done: iterations before this one; version: of the weights that sampled the rollout; last_pass: over these rows,
        which acknowledges them; until then they are handed back.
        """
        lease = self.lease([i for ids in batches for i in ids], self.columns)
        parts = [lease.rows.select(ids) for ids in batches]
        result, metrics = self.optimize(parts, call, done, version)
        if last_pass:
            self.commit(lease)
        else:
            self.dock.release(lease)
        return result, metrics

    def optimize(self, parts: Sequence[Rows], call: TrainStep, done: int, version: int) -> Stepped:
        """The trainer's step on micro-batches; its result, and metrics."""
        return self.trainer.step(parts, call, measured=self.spec.reads, version=version)


class CriticUpdate(Update):
    """The same with a critic, which learns first. value_step: its step; warmup: iterations in which it learns alone;
    global_batch: samples by which the policy's learning rate goes on meanwhile."""

    def __init__(self, *update: Any, critic: Critic, value_step: ValueStep, warmup: int, global_batch: int) -> None:
        super().__init__(*update)
        self.critic, self.value_step, self.warmup, self.global_batch = critic, value_step, warmup, global_batch

    def optimize(self, parts: Sequence[Rows], call: TrainStep, done: int, version: int) -> Stepped:
        """Megatron's step of the critic, and of the policy unless the critic warms up alone."""
        critic = self.critic
        metrics = {"lr": learning_rate(call.args[OPTIMIZER]), "critic/lr": learning_rate(critic.optimizer)}
        self.value_step.prepare(parts)
        mine = (critic.model, critic.optimizer, critic.scheduler, critic.config)
        result = self.value_step.run(call.function, (*mine, *call.args[CONFIG + 1 :]), call.kwargs)
        metrics |= self.value_step.metrics() | grad_norm(result, "critic/")
        if done < self.warmup:
            call.args[SCHEDULER].step(increment=self.global_batch)  # the policy's learning rate goes by the iteration
            return result, metrics
        result, policy = super().optimize(parts, call, done, version)
        return result, metrics | policy


class PairUpdate(Update):
    """The same on pairs."""

    def optimize(self, parts: Sequence[Rows], call: TrainStep, done: int, version: int) -> Stepped:
        """Megatron's step on micro-batches of whole pairs."""
        metrics = {"lr": learning_rate(call.args[OPTIMIZER])}
        self.trainer.prepare(parts)
        result = self.trainer.run(call.function, call.args[2:], call.kwargs)
        metrics |= {name if name == "loss" else f"dpo/{name}": v for name, v in self.trainer.metrics().items()}
        return result, metrics | grad_norm(result)


def learning_rate(optimizer: Any) -> float:
    """Learning rate of the first parameter group."""
    return float(optimizer.param_groups[0]["lr"])


def grad_norm(result: Sequence[Any], whose: str = "") -> dict[str, float]:
    """What Megatron's step measured itself; whose: "critic/", or the policy's."""
    return {} if result[GRAD_NORM] is None else {f"{whose}grad_norm": float(result[GRAD_NORM])}
