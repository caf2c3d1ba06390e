"""RL in this process, from the first check to the end of the job. `launch` calls the methods of `Run` in this order.

before_model(inputs)             once, before Megatron builds anything
check_state(state, iteration)    only at a resume, also before Megatron builds anything
on_reference_loaded(model)       only if a reference is used: the model holds its weights
on_critic_built(critic)          only if the advantage needs a critic
load_state_dict(state)           only at a resume
on_checkpoint_loaded(model, optimizer, start)   the model holds the actor's weights
train_step(...), state_dict()    once per iteration, once per checkpoint
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_rl_plugin.critic.critic import Critic
from mindspeed_rl_plugin.loop import resume
from mindspeed_rl_plugin.loop.build import build_loop
from mindspeed_rl_plugin.loop.build_pairs import Reference, build_pair_loop, reference_of
from mindspeed_rl_plugin.loop.inputs import Inputs
from mindspeed_rl_plugin.loop.loop import Loop
from mindspeed_rl_plugin.loop.start import TRAINED, Start
from mindspeed_rl_plugin.rows import Group
from mindspeed_rl_plugin.stages.measure import Rollout, prepare_dumps
from mindspeed_rl_plugin.stages.stage import columns_of
from mindspeed_rl_plugin.stages.update import TrainStep


@functools.cache
def current() -> Run:
    """The run of this process, made on first use."""
    return Run()


class Run:
    """inputs: what was read before the model was built; loop: None until the models are loaded."""

    def __init__(self) -> None:
        self.inputs: Inputs | None = None
        self.loop: Loop | None = None
        self._reference: Any = None  # what swaps the reference's weights in, or `Reference`
        self._critic: Critic | None = None
        self._restored: Mapping[str, Any] | None = None

    def before_model(self, inputs: Inputs) -> None:
        self.inputs = inputs
        atexit.register(self.close)

    def on_reference_loaded(self, model: Any) -> None:
        """Copy the reference's weights, which the model has. For pairs, log-probs on disk, if any, replace the copy."""
        if self.inputs.algorithm.from_pairs:
            self._reference = Reference.of_model(self.inputs, model)
        else:
            self._reference = reference_of(self.inputs, model)

    def on_critic_built(self, critic: Critic) -> None:
        self._critic = critic

    def check_state(self, state: Mapping[str, Any], iteration: int) -> None:
        """Raise ValueError if these flags cannot continue with the RL state of the checkpoint of `iteration`."""
        algorithm = self.inputs.algorithm
        resume.check_adapter(state, resume.adapter(self.inputs.config.lora), iteration)
        self.inputs.data.check_state(state["cursor"])
        if not algorithm.from_pairs:
            names = {spec.name for spec, _ in self.inputs.own_stages}
            # Columns of the user's stages, and columns of stages before them that are stored as `name@stage`.
            table = self.inputs.table()
            written = ((spec.name in names, c.name) for spec in table for c in columns_of([spec]))
            own = [column for theirs, column in written if theirs or "@" in column]
            resume.check(state, self._cut(), algorithm, table, iteration, own)
            resume.check_ahead(state, self._cut(), self.inputs.config.schedule, iteration, algorithm.dynamic_sampling)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the RL state of a checkpoint, checked already, until the loop is built. Its `dock` is an outline
        (without rows); on the leader the state's `rows` has the dock's complete snapshot."""
        self._restored = state

    def on_checkpoint_loaded(self, model: Any, optimizer: Any, start: Start) -> None:
        """Build the loop around the loaded models, and put the saved state into it."""
        if self.inputs.algorithm.from_pairs:
            self.loop = build_pair_loop(self.inputs, model, self._reference, start)
        else:
            self.loop = build_loop(self.inputs, model, optimizer, self._reference, start, self._critic)
        self._reference = None
        if self._restored is not None:
            self._restore(self._restored)
            self._restored = None  # frees the memory of the dock's rows
        dump_dir, job = self.inputs.config.monitor.dump_dir, self.loop.job
        if dump_dir and job.topology.leader:
            prepare_dumps(dump_dir, job.monitor.run_dir, start.iteration, start.kind == "resume")

    def train_iterator(self) -> Any:
        """A replacement for the pretraining iterator, without data: `train_step` reads its rows from the dock."""
        return None

    def train_step(self, original: Callable[..., tuple], args: tuple, kwargs: Mapping[str, Any]) -> tuple:
        return self.loop.train_step(TrainStep(original, args, kwargs))

    def state_dict(self) -> dict[str, Any]:
        """RL state of a checkpoint: the data's cursor, the rollout in use with its metrics, the deferred groups, the
        schedule's state and, on the leader, the dock with its rows."""
        loop = self.loop
        loop.schedule.settle()
        return {
            **loop.schedule.state(),
            **loop.job.plan.state(),
            TRAINED: loop.trained,
            "cut": self._cut(),
            "adapter": resume.adapter(self.inputs.config.lora),
            "choices": resume.choices(self.inputs.algorithm),
            "rollout": dataclasses.asdict(loop.rollout) if loop.rollout and loop.job.plan.steps else None,
            "cursor": self.inputs.data.state(),
            "dock": loop.job.dock.snapshot(),
        }

    def close(self) -> None:
        """End the processes of graders and environments, close the files of the run and, if the run ended without an
        error, end the engine.

        After an error other ranks may hang, so this rank does nothing that could wait for them. Nothing remains after
        the process even then, because files of shared memory are unlinked as soon as they are made.
        """
        if self.loop is not None:
            self.loop.schedule.stop()
        if self.inputs.graders is not None:
            self.inputs.graders.close()
        self.inputs.responses.close()
        if self.loop is not None:
            self.loop.job.monitor.close()
            if not hasattr(sys, "last_value"):  # set by an uncaught exception
                self.loop.schedule.close()
                self.loop.job.dock.close()

    def _cut(self) -> dict[str, Any]:
        return resume.cut(self.inputs.sizes, self.inputs.algorithm, self.inputs.config.forward)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.inputs.data.load_state(state["cursor"])
        self.loop.trained = state.get(TRAINED, True)
        if "dock" not in state:  # a checkpoint of pairs by a version that had no dock for pairs
            return
        job, rounds, left = self.loop.job, resume.rounds_of(state["dock"]), state["steps_left"]
        job.plan.load(state, rounds)
        used, deferred = job.plan.groups if left else (), job.plan.deferred
        if not self.inputs.algorithm.from_pairs:
            self._check_size(used, deferred)
        job.dock.restore(resume.renamed(state.get("rows", state["dock"])))
        if not self.inputs.algorithm.dynamic_sampling:  # then deferred groups are no longer used
            job.plan.deferred = ()
        kept = (*used, *job.plan.deferred, *resume.ahead(state))
        job.forget(resume.gone(rounds, kept))  # on all ranks: `restore` clears groups on the leader only
        self.loop.schedule.load(state)
        job.plan.resume(left)
        if state["rollout"] is not None:
            self.loop.rollout = Rollout(**state["rollout"])

    def _check_size(self, used: Sequence[Group], deferred: Sequence[Group]) -> None:
        plan = self.loop.job.plan
        machines = (np.array([plan.owner(g) for g in groups], np.int64) for groups in (used, deferred))
        self.inputs.dock_size().check_resumed(*machines, plan.owners_of_round())
