"""The loop: one RL iteration as a list of steps, each one call into one room.

Megatron's own train loop calls `Loop.train_step` once an iteration. One Megatron iteration is one
optimizer step; when no rows are left to train on, a rollout (steps 1 to 7) comes first and serves
the steps after it. Every rank runs the same calls in the same order.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mindspeed_rl_plugin import columns, reporting
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.forward import Step
from mindspeed_rl_plugin.logprobs.compute import compute_logps
from mindspeed_rl_plugin.reshard.swap import HostWeights, gathered
from mindspeed_rl_plugin.rollout.generate import run_generation
from mindspeed_rl_plugin.startup.start import Start
from mindspeed_rl_plugin.types import Ragged, Rows, SampleId
from mindspeed_rl_plugin.wiring import Inputs, Parts

_loop: Loop | None = None


def current() -> Loop:
    """The loop of this process, made on first use."""
    global _loop
    if _loop is None:
        _loop = Loop()
    return _loop


class Loop:
    """RL behind Megatron's `train_step`.

    epoch: rollout counter, -1 before the first; steps: optimizer steps left of the current rollout.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.steps: list[Step] = []
        self.inputs: Inputs | None = None
        self.parts: Parts | None = None
        self._reference: HostWeights | None = None
        self._restored: Mapping[str, Any] | None = None
        self._rollout: reporting.Rollout | None = None

    # what startup calls, in this order

    def before_model(self, args: argparse.Namespace) -> None:
        """Read and check tokenizer, prompts and graders before Megatron builds anything."""
        self.inputs = Inputs.read(args, RLConfig.from_args(args))

    def on_reference_loaded(self, model: Any) -> None:
        """Keep a host copy of the reference, which the model holds right now."""
        self._reference = HostWeights.capture(model)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the RL state of a checkpoint; applied once the parts are built."""
        self._restored = state

    def on_checkpoint_loaded(self, model: Any, optimizer: Any, start: Start) -> None:
        """Build the parts around the loaded model, and put the saved state into them."""
        assert self.inputs is not None
        self.parts = Parts.build(self.inputs, model, optimizer, self._reference, start)
        if self._restored is not None:
            self._restore(self._restored)
            self._restored = None  # the dock's rows are in it
        atexit.register(self.close)
        reporting.prepare_dumps(self.parts, self.epoch, start.kind == "resume")

    def close(self) -> None:
        """End the graders' processes and close the files of the run."""
        self.inputs.graders.close()
        self.parts.monitor.close()

    def state_dict(self) -> dict[str, Any]:
        """RL state of a checkpoint: prompt cursor, rollout counter, the rollout in use with its rows and metrics."""
        p = self.parts
        return {
            "epoch": self.epoch,
            "steps_left": len(self.steps),
            "cut": self._cut(),
            "rollout": dataclasses.asdict(self._rollout) if self._rollout else None,
            "cursor": p.inputs.prompts.state(),
            "dock": p.dock.snapshot(),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        p, left = self.parts, state["steps_left"]
        if left and state["cut"] != self._cut():
            raise ValueError(
                f"the checkpoint holds a rollout with {left} optimizer steps left, cut as {state['cut']}; these flags "
                f"cut rollouts as {self._cut()}: resume with the former values, at least until iteration "
                f"{p.inputs.args.iteration + left}"
            )
        self.epoch = state["epoch"]
        p.inputs.prompts.load_state(state["cursor"])
        p.dock.restore(state["dock"])
        if left:
            every = p.plan(self._ids()) * p.algorithm.ppo_epochs
            self.steps = every[len(every) - left :]
        if state["rollout"] is not None:
            self._rollout = reporting.Rollout(**state["rollout"])

    def _cut(self) -> dict[str, int]:
        """What decides how a rollout is cut into optimizer steps; a half-used rollout cannot change it."""
        sizes = self.parts.sizes
        return {
            "--rl-rollout-prompts": sizes.prompts,
            "--rl-samples-per-prompt": sizes.members,
            "--global-batch-size": sizes.global_batch,
            "--rl-ppo-epochs": sizes.epochs,
        }

    def _ids(self) -> list[SampleId]:
        """All samples of the current rollout, in id order."""
        sizes = self.parts.sizes
        return [SampleId(self.epoch, g, m) for g in range(sizes.prompts) for m in range(sizes.members)]

    def train_iterator(self) -> Any:
        """What stands in for the pretraining iterator: nothing, for `train_step` brings the rows of its step."""
        return None

    # one Megatron iteration

    def train_step(self, original: Callable[..., tuple], args: tuple, kwargs: Mapping[str, Any]) -> tuple:
        """One optimizer step with a rollout before it when one is due; returns what Megatron's step returns."""
        p = self.parts
        done = p.iterations_done()
        p.monitor.begin(done + 1)
        if not self.steps or p.evaluation_due(done):
            self._collect(done)
        result = self._update(done, original, args, kwargs)
        if done + 1 == p.total_iterations and p.evaluation_due(done + 1):
            with self._engine_awake(done + 1):
                reporting.evaluation(p, done + 1)
        return result

    def _collect(self, done: int) -> None:
        """Steps 1 to 7; or an evaluation alone, where rows are left to train on."""
        p, stage = self.parts, self.parts.monitor.stage
        fresh = not self.steps
        if fresh:
            with stage("prompts"):
                self._open_rollout()
        with self._engine_awake(done):
            if p.evaluation_due(done):
                reporting.evaluation(p, done)
            if fresh:
                with stage("generate"):
                    self._generate()
                with stage("reward"):
                    self._grade()
        if fresh:
            with stage("logp_old"):
                self._logps("logp_old")
            if p.reference is not None:
                with stage("logp_ref"), p.reference.swapped_into(p.model):
                    self._logps("logp_ref")
            with stage("advantage"):
                self._advantages()
            self._rollout = reporting.rollout(p, self._ids(), done)

    def _open_rollout(self) -> None:
        """Step 1: the next prompts go to the dock."""
        p, sizes = self.parts, self.parts.sizes
        self.epoch += 1
        prompts = p.inputs.prompts.next(sizes.prompts)
        ids = tuple(SampleId(self.epoch, group, 0) for group in range(sizes.prompts))
        p.dock.open(self.epoch, sizes.prompts, sizes.members)
        p.dock.put(Rows(ids, columns.prompt_columns(prompts)) if p.topology.leader else None)
        self.steps = p.plan(self._ids()) * p.algorithm.ppo_epochs

    @contextmanager
    def _engine_awake(self, version: int) -> Iterator[None]:
        """Steps 2 and 5: weights to the engine and training state to the host; and all of it back."""
        p = self.parts
        with p.monitor.stage("reshard"):
            with gathered(p.model):
                # First what the transfer does not need, so that both sides' weights fit beside each other.
                p.train_state.swap_out(set(p.swapped) - {"params"})
                p.engine.wake(("weights",))
                p.resharder.to_engine(p.model, p.engine.parameters(), version)
                p.engine.update_weights(version)
                p.train_state.swap_out(set(p.swapped) & {"params"})
            p.engine.wake(("kv_cache",))
        yield
        with p.monitor.stage("swap_back"):
            p.engine.sleep()
            p.train_state.swap_in()

    def _generate(self) -> None:
        """Step 3: every engine takes its share of the prompts from the dock and writes responses back."""
        p = self.parts
        share = p.sizes.samples // p.topology.engines
        with p.monitor.progress(share) as bar:
            run_generation(
                p.dock_of_engine,
                p.engine,
                sampling=p.sampling,
                seed_base=p.response_seed,
                deadline=p.deadline,
                on_progress=lambda done, *_: bar.set(done),
            )

    def _grade(self) -> None:
        """Step 4: every rank grades a share; a failed grader stops the run unless told otherwise."""
        p = self.parts
        lease = p.dock_of_rank.lease("reward", deadline=p.deadline)
        rows = columns.reward_columns(lease.rows, p.inputs.graders, p.inputs.decode) if len(lease) else None
        p.dock_of_rank.commit(lease, rows)

    def _logps(self, state: str) -> None:
        """Step 6: log-probs over the update's own micro-batches, so that its first ratio is exactly 1."""
        p = self.parts
        batches = [ids for step in p.plan(self._ids()) for ids in step.of_rank(p.topology.dp_rank)]
        lease = p.dock.lease(state, ids=[i for ids in batches for i in ids], deadline=p.deadline)
        logps = compute_logps(p.model, [lease.rows.select(ids) for ids in batches], p.forward)
        rows = None
        if p.topology.writer:
            rows = Rows(lease.rows.ids, {state: Ragged.from_rows([row for part in logps for row in part.rows()])})
        p.dock.commit(lease, rows)

    def _advantages(self) -> None:
        """Step 7: whole groups, dealt out over the ranks; a group with a failed grade is trained nowhere."""
        p = self.parts
        lease = p.dock_of_rank.lease("advantage", deadline=p.deadline)
        p.dock_of_rank.commit(lease, columns.advantage_columns(lease.rows, p.algorithm) if len(lease) else None)

    def _update(self, done: int, original: Callable[..., tuple], args: tuple, kwargs: Mapping[str, Any]) -> tuple:
        """Step 8: Megatron's own train_step on the dock's rows, with our forward step."""
        p = self.parts
        step, last_pass = self.steps.pop(0), len(self.steps) < len(p.plan(self._ids()))
        batches = step.of_rank(p.topology.dp_rank)
        with p.monitor.stage("update"):
            lease = p.dock.lease("update", ids=[i for ids in batches for i in ids], deadline=p.deadline)
            p.update.prepare([lease.rows.select(ids) for ids in batches])
            result = original(p.update.forward_step, p.update.iterator(), *args[2:], **kwargs)
            update = p.update.metrics()
            # Rows are acknowledged by the last pass over them; until then the state is handed back.
            (p.dock.commit if last_pass else p.dock.release)(lease)
            if not self.steps:
                p.dock.clear(self.epoch)
        reporting.iteration(p, done + 1, self._rollout, args[3], result, update, last_step=not self.steps)
        self._rollout = self._rollout if self.steps else None
        return result
