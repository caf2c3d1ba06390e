"""The loop: one RL iteration as a list of steps, each one call into one room.

Megatron's own train loop calls `Loop.train_step` once an iteration. One Megatron iteration is one
optimizer step; when no rows are left to train on, a rollout (steps 1 to 7) comes first and serves
the steps after it. Every rank runs the same calls in the same order.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mindspeed_rl_plugin.algorithms.presets import learns_from_pairs
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.critic.critic import Critic
from mindspeed_rl_plugin.dock import Lease
from mindspeed_rl_plugin.forward import Step
from mindspeed_rl_plugin.loop import resume as resuming
from mindspeed_rl_plugin.loop.context import Inputs, Parts, host_memory_budget
from mindspeed_rl_plugin.loop.pair_loop import PairLoop
from mindspeed_rl_plugin.loop.start import TRAINED, Start
from mindspeed_rl_plugin.reshard.offload import HostWeights, gathered
from mindspeed_rl_plugin.reshard.resharder import Transfer
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId
from mindspeed_rl_plugin.stages import columns
from mindspeed_rl_plugin.stages import measure as reporting
from mindspeed_rl_plugin.stages import select as drawing
from mindspeed_rl_plugin.stages.generate import run_generation
from mindspeed_rl_plugin.stages.logprobs import compute_logps

_loop: Loop | PairLoop | None = None


def current() -> Loop | PairLoop:
    """The loop of this process, made on first use: that of given pairs where the algorithm learns from them."""
    global _loop
    if _loop is None:
        from megatron.training import get_args

        _loop = PairLoop() if learns_from_pairs(get_args().rl_algorithm) else Loop()
    return _loop


class Loop:
    """RL behind Megatron's `train_step`.

    epoch: rounds of generation, counted from 0, -1 before the first; groups: those of the current rollout, in training
    order; carried: drawn, graded and kept in the dock for the next rollout; steps: optimizer steps left; trained:
    whether the policy has taken one, which it has not while the critic warms up.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.groups: tuple[drawing.Group, ...] = ()
        self.carried: tuple[drawing.Group, ...] = ()
        self.lengths: dict[drawing.Group, tuple[int, ...]] = {}
        self.steps: list[Step] = []
        self.trained = False
        self.inputs: Inputs | None = None
        self.parts: Parts | None = None
        self._reference: HostWeights | None = None
        self._critic: Critic | None = None
        self._restored: Mapping[str, Any] | None = None
        self._rollout: reporting.Rollout | None = None
        self._planned: tuple[tuple[drawing.Group, ...], list[Step]] = ((), [])
        self._failed: set[str] = set()  # graders whose first failure in this rollout was told

    # what startup calls, in this order

    def before_model(self, args: argparse.Namespace) -> None:
        """Read and check tokenizer, prompts and graders before Megatron builds anything."""
        self.inputs = Inputs.read(args, RLConfig.from_args(args))
        atexit.register(self.close)

    def on_reference_loaded(self, model: Any) -> None:
        """Keep a host copy of the reference, which the model holds right now."""
        self._reference = HostWeights.capture(model, budget=host_memory_budget(self.inputs.config))

    def on_critic_built(self, critic: Critic) -> None:
        """Take the critic, loaded; only where the advantage needs one."""
        self._critic = critic

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the RL state of a checkpoint, or refuse it; applied once the parts are built.

        Its `dock` is an outline; on the leader `rows` is the whole.
        """
        resuming.check(self.inputs, state, state["dock"]["epochs"])
        self._restored = state

    def on_checkpoint_loaded(self, model: Any, optimizer: Any, start: Start) -> None:
        """Build the parts around the loaded models, and put the saved state into them."""
        assert self.inputs is not None
        self.parts = Parts.build(self.inputs, model, optimizer, self._reference, start, self._critic)
        if self._restored is not None:
            self._restore(self._restored)
            self._restored = None  # the dock's rows are in it
        reporting.prepare_dumps(self.parts, self.epoch, start.kind == "resume")

    def close(self) -> None:
        """End the graders' processes, close the files of the run, and end the engine of a run that ended well.

        After an error ranks wait for each other, so nothing is done that could wait too. Nothing outlives the process
        in any case: whatever has a name outside of it lost it when it was built.
        """
        self.inputs.graders.close()
        if self.parts is not None:
            self.parts.monitor.close()
            if not hasattr(sys, "last_value"):  # of an exception that nobody caught
                self.parts.close()

    def state_dict(self) -> dict[str, Any]:
        """RL state of a checkpoint: prompt cursor, round counter, the rollout in use and the groups carried over, with
        their rows, and the metrics."""
        p = self.parts
        if p.train_state.off_device:
            raise RuntimeError(
                f"a checkpoint now would lack {', '.join(sorted(p.train_state.off_device))}, which are on the host for "
                "generation; save between iterations"
            )
        p.resharder.refuse_broken(p.model)
        return {
            "epoch": self.epoch,
            "groups": list(map(list, self.groups)),
            "carried": list(map(list, self.carried)),
            TRAINED: self.trained,
            "lengths": [list(self.lengths[group]) for group in (*self.groups, *self.carried)],
            "steps_left": len(self.steps),
            "cut": resuming.cut(p.inputs),
            "choices": resuming.choices(p.algorithm),
            "rollout": dataclasses.asdict(self._rollout) if self._rollout else None,
            "cursor": p.inputs.prompts.state(),
            "dock": p.dock.snapshot(),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        p, left, rounds = self.parts, state["steps_left"], state["dock"]["epochs"]
        self.groups, self.carried = (tuple(map(tuple, state[name])) for name in ("groups", "carried"))
        p.rounds.update(resuming.rounds_of(rounds))
        used = self.groups if left else ()
        resuming.check_room(p, used, self.carried)
        self.epoch, self.trained = state["epoch"], state.get(TRAINED, True)
        p.inputs.prompts.load_state(state["cursor"])
        p.dock.restore(state.get("rows", state["dock"]))
        p.forget(resuming.gone(rounds, (*used, *self.carried)))  # of which the rows tell the leader alone
        self.lengths = dict(zip((*self.groups, *self.carried), map(tuple, state["lengths"]), strict=True))
        if not p.algorithm.dynamic_sampling:  # which nothing takes up any more
            p.forget(self.carried)
            self.carried = ()
        if left:
            every = self._plan() * p.algorithm.ppo_epochs
            self.steps = every[len(every) - left :]
        if state["rollout"] is not None:
            self._rollout = reporting.Rollout(**state["rollout"])

    def _round(self) -> tuple[drawing.Group, ...]:
        """Groups of the round that is being drawn."""
        return drawing.of_epoch(self.epoch, self.parts.sizes.prompts)

    def _plan(self) -> list[Step]:
        """Optimizer steps of one pass over the rollout in use."""
        if self._planned[0] != self.groups:
            self._planned = self.groups, self.parts.plan(self.groups, self.lengths)
        return self._planned[1]

    def _of_rank(self, groups: Sequence[drawing.Group]) -> list[SampleId]:
        """Those of the groups that this rank grades and compares, whole."""
        p = self.parts
        return p.ids(p.placement.graded_by(p.topology.rank, groups, p.home))

    def train_iterator(self) -> Any:
        """What stands in for the pretraining iterator: nothing, for `train_step` brings the rows of its step."""
        return None

    # one Megatron iteration

    def train_step(self, original: Callable[..., tuple], args: tuple, kwargs: Mapping[str, Any]) -> tuple:
        """One optimizer step with a rollout before it when one is due; returns what Megatron's step returns."""
        p = self.parts
        done = p.iterations_done()
        p.monitor.begin(done + 1)
        if not self.steps:
            self._collect(done)
        elif p.evaluation_due(done):
            self._evaluate_alone(done)
        result = self._update(done, original, args, kwargs)
        if done + 1 == p.total_iterations and p.evaluation_due(done + 1):
            self._evaluate_alone(done + 1)
        return result

    def _evaluate_alone(self, done: int) -> None:
        """An evaluation while no rollout is due: the engine wakes for nothing else, so all of it is evaluation."""
        with self.parts.monitor.stage("evaluate"):
            with self._engine_awake(done):
                reporting.evaluation(self.parts, done)
            self.parts.train_state.onload()

    def _collect(self, done: int) -> None:
        """Steps 1 to 7, and an evaluation where one is due."""
        p, stage = self.parts, self.parts.monitor.stage
        p.start_offload()
        with stage("prompts"):
            self._open_rollout()
        with self._engine_awake(done) as transfer:
            if p.evaluation_due(done):
                with stage("evaluate"):
                    reporting.evaluation(p, done)
            drawn = self._draw()
        p.meet("log-probs")
        if p.algorithm.old_logps:
            with stage("logp_old"):
                self._per_token("logp_old", compute_logps, p.model)
        if p.reference is not None:
            with stage("logp_ref"), p.reference.swapped_into(p.model):
                self._per_token("logp_ref", compute_logps, p.model)
        if p.critic is not None:
            with stage("values"):
                self._per_token("values", p.critic.values)
        with stage("advantage"):
            self._advantages()
        self._rollout = reporting.rollout(p, p.ids(self.groups), done, transfer, drawn)

    def _draw(self) -> dict[str, float]:
        """Steps 3 and 4, in as many rounds as it takes: with dynamic sampling until enough groups carry signal, else
        until no optimizer step is left without a row that could be graded. Returns metrics of that."""
        p, stage, dynamic = self.parts, self.parts.monitor.stage, self.parts.algorithm.dynamic_sampling
        rounds = p.inputs.config.algorithm.dynamic_sampling_rounds if dynamic else drawing.PLAIN_ROUNDS
        tally = drawing.Tally(brought=len(self.carried))
        self._failed.clear()
        for attempt in range(1, rounds + 1):
            with stage("generate"):
                self._generate()
            with stage("reward"):
                found = self._grade()
            tally.add(found)
            last = dynamic and attempt == rounds
            choice = drawing.choose(self.carried, found, p.sizes.prompts, dynamic=dynamic, last=last)
            p.forget(choice.dropped)
            self.carried = choice.carried
            self.lengths |= {group: verdict.lengths for group, verdict in found.items()}
            steps = p.plan(choice.trained, self.lengths) if choice.trained else []
            empty = drawing.idle_steps(steps, choice.idle)
            if steps and not empty:
                self.groups, self.steps = choice.trained, steps * p.algorithm.ppo_epochs
                self.lengths = {group: self.lengths[group] for group in (*self.groups, *self.carried)}
                return tally.metrics(choice, dynamic)
            broken = sum(v.broken for v in found.values())
            if not dynamic and p.topology.leader:
                told = drawing.useless(broken, p.sizes.prompts, empty)
                print(f"[rl] rollout {self.epoch} is dropped: {told}", flush=True)
            if attempt < rounds:
                with stage("prompts"):
                    p.forget(choice.trained)
                    self._open_rollout()
        raise tally.exhausted(empty, broken, p.sizes.prompts, dynamic)

    def _open_rollout(self) -> None:
        """Step 1: the next prompts go to the dock."""
        p, sizes = self.parts, self.parts.sizes
        self.epoch += 1
        prompts = p.inputs.prompts.next(sizes.prompts)
        p.dock.open(self.epoch, sizes.prompts, sizes.members)
        ids = tuple(SampleId(*group, 0) for group in self._round())
        p.dock.put(Rows(ids, columns.prompt_columns(prompts)) if p.topology.leader else None)

    @contextmanager
    def _engine_awake(self, version: int) -> Iterator[Transfer]:
        """Steps 2 and 5: weights to the engine and training state to the host; and all of it back.

        Yields what this rank transferred.
        """
        p = self.parts
        with p.monitor.stage("reshard"):
            with gathered(p.model):
                # First what the transfer does not need, so that both sides' weights fit beside each other.
                p.finish_offload()
                p.engine.wake(("weights",))
                # The copy to the host reads what the transfer reads, so that both may run.
                p.train_state.start_offload(set(p.offloaded) & {"params"})
                with p.monitor.stage("transfer"):
                    transfer = p.resharder.to_engine(p.model, p.engine.parameters(), version)
                p.engine.update_weights(version, transfer.digest)
                # Before the cache of torch's allocator is emptied: the KV cache takes its memory beside it.
                p.resharder.release()
                p.train_state.finish_offload()
            p.engine.wake(("kv_cache",))
        yield transfer
        with p.monitor.stage("swap_back"):
            p.engine.sleep()
            p.train_state.onload(set(p.offloaded) & {"params"})
            p.resharder.check_return(p.model)
            if p.critic is not None:
                p.critic.onload()
        # Its copies pass while log-probs are taken; `_update` waits for them, and takes memory for gradients.
        p.train_state.start_onload(set(p.offloaded) & {"optimizer"})

    def _generate(self) -> None:
        """Step 3: every engine takes its share of the prompts from the dock and writes responses back."""
        p = self.parts
        mine = p.placement.drawn_by(p.topology.engine, p.ids(self._round()), p.homes(self.epoch))
        with p.monitor.progress(len(mine)) as bar:
            run_generation(
                p.dock_of_engine,
                p.engine,
                ids=mine,
                sampling=p.sampling,
                seed_base=p.response_seed,
                deadline=p.deadline,
                on_progress=lambda done, *_: bar.set(done),
            )

    def _grade(self) -> dict[drawing.Group, drawing.Verdict]:
        """Step 4: every rank grades a share; a failed grader stops the run unless told otherwise.

        Returns the verdict on each group of the whole round.
        """
        p = self.parts
        lease = p.dock_of_rank.lease("reward", ids=self._of_rank(self._round()), deadline=p.deadline)
        rows = columns.reward_columns(lease.rows, p.inputs.graders, p.inputs.decode) if len(lease) else None
        p.dock_of_rank.commit(lease, rows)
        found = drawing.verdicts(rows, lease.rows["tokens"]) if rows is not None else {}
        parts = p.gather((found, p.inputs.graders.take_failures()))
        reporting.failures(p, [failed for _, failed in parts], self._failed)
        return {group: verdict for found, _ in parts for group, verdict in found.items()}

    def _per_token(self, state: str, compute: Callable[..., list[Ragged] | None], *model: Any) -> None:
        """Step 6: a column over the update's own micro-batches, so that its first ratio is exactly 1.

        compute: takes `model`, the rows of each micro-batch and how they are padded.
        """
        p = self.parts
        batches = [ids for step in self._plan() for ids in step.of_rank(p.topology.dp_rank)]
        lease = self._rows_of(state, batches)
        found = compute(*model, [lease.rows.select(ids) for ids in batches], p.forward)
        rows = None
        if p.topology.writer:
            rows = Rows(lease.rows.ids, {state: Ragged.from_rows([row for part in found for row in part.rows()])})
        p.dock.commit(lease, rows)

    def _rows_of(self, state: str, batches: Sequence[Sequence[SampleId]]) -> Lease:
        """Rows of some micro-batches, with the columns that this rank's pipeline stage needs."""
        p = self.parts
        reads = next(s.reads for s in columns.grpo_states(p.algorithm) if s.name == state)
        needed = columns.of_stage(reads, p.topology.last_stage)
        return p.dock.lease(state, ids=[i for ids in batches for i in ids], deadline=p.deadline, columns=needed)

    def _advantages(self) -> None:
        """Step 7: whole groups, as they were graded; a group with a failed grade is trained nowhere."""
        p = self.parts
        lease = p.dock_of_rank.lease("advantage", ids=self._of_rank(self.groups), deadline=p.deadline)
        limit = p.inputs.config.rollout.max_response_length
        steps = {i: n for n, step in enumerate(self._plan()) for i in step.ids}
        draws = {"seed": p.response_seed, "steps": steps}
        found = columns.advantage_columns(lease.rows, p.algorithm, limit, p.gather, **draws)
        p.dock_of_rank.commit(lease, found)

    def _update(self, done: int, original: Callable[..., tuple], args: tuple, kwargs: Mapping[str, Any]) -> tuple:
        """Step 8: Megatron's own train_step on the dock's rows, with our forward step."""
        p = self.parts
        step, last_pass = self.steps.pop(0), len(self.steps) < len(self._plan())
        batches = step.of_rank(p.topology.dp_rank)
        with p.monitor.stage("update"):
            p.train_state.onload()
            lease = self._rows_of("update", batches)
            result, update = self._optimize(done, [lease.rows.select(ids) for ids in batches], original, args, kwargs)
            # Rows are acknowledged by the last pass over them; until then the state is handed back.
            (p.dock.commit if last_pass else p.dock.release)(lease)
            if not self.steps:
                p.forget(self.groups)
        if not self.steps and (done + 1 < p.total_iterations or p.evaluation_due(done + 1)):
            p.start_offload()  # while this iteration is logged and saved
        reporting.iteration(p, done + 1, self._rollout, update, last_step=not self.steps)
        self._rollout = self._rollout if self.steps else None
        return result

    def _optimize(
        self, done: int, batches: Sequence[Rows], original: Callable[..., tuple], args: tuple, kwargs: Mapping[str, Any]
    ) -> tuple[tuple, dict[str, float]]:
        """Megatron's step of the critic, where there is one, and of the policy, unless the critic warms up alone.

        Returns the result of the last of them, and the metrics of all.
        """
        p, found = self.parts, reporting.rates(args[3], self.parts.critic)
        if p.critic is not None:
            p.value_update.prepare(batches)
            critic = (p.critic.model, p.critic.optimizer, p.critic.scheduler, p.critic.config)
            result = p.value_update.run(original, (*critic, *args[6:]), kwargs)
            found |= p.value_update.metrics() | reporting.of_step(result, "critic_")
            if done < p.inputs.config.algorithm.critic_warmup:
                args[4].step(increment=p.sizes.global_batch)  # the policy's learning rate goes by the iteration
                return result, found
        taken = len(self._plan()) * p.algorithm.ppo_epochs - len(self.steps) - 1
        p.update.prepare(batches, measured=columns.update_reads(p.algorithm), version=done - taken)
        result = p.update.run(original, args[2:], kwargs)
        self.trained = True
        return result, found | reporting.of_step(result) | p.update.metrics()
