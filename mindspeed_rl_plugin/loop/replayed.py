"""The job of the command `replay`: its rollouts come from dumps, and one update is recorded token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl_plugin.environment import replayed
from mindspeed_rl_plugin.forward import router_replay
from mindspeed_rl_plugin.forward.call import swapped
from mindspeed_rl_plugin.loop.megatron_trainer import MegatronTrainer
from mindspeed_rl_plugin.loop.rank_parts import RankParts
from mindspeed_rl_plugin.loop.schedules.schedule import Job, RolloutSchedule
from mindspeed_rl_plugin.monitor.dump import read_rollout
from mindspeed_rl_plugin.monitor.run_files import dump_file, to_json
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId, spread
from mindspeed_rl_plugin.stages.measure import Rollout
from mindspeed_rl_plugin.stages.stage import Stages, StageSpec, columns_of
from mindspeed_rl_plugin.stages.update import GRAD_NORM, OPTIMIZER, Stepped, TrainStep
from mindspeed_rl_plugin.weights.storages import unwrap


class ReplayedSchedule(RolloutSchedule):
    """Takes each rollout from its dump, without engine and graders. table: stages of the job."""

    def __init__(self, job: Job, stages: Stages, table: Sequence[StageSpec]) -> None:
        super().__init__(job, stages, 0)
        at = [spec.name for spec in table].index("groups")
        read = {spec.stored.get(name, name) for spec in table[at + 1 :] for name in spec.reads}
        self.needed = [column for column in columns_of(table[:at]) if column.name in read]

    def collect(self, done: int) -> Rollout:
        """The rollout that the recorded job trained after `done` iterations."""
        job, plan, sizes = self.job, self.job.plan, self.job.plan.sizes
        # `valid@STAGE`, of a user's stage, has the effect of the last `valid`.
        names = {column: column.name.partition("@")[0] for column in self.needed}
        rows = read_rollout(dump_file(replayed()["dumps"], done), names.values())
        groups = tuple(dict.fromkeys(i[:2] for i in rows.ids))
        if list(rows.ids) != plan.ids(groups) or len(rows) != sizes.samples:
            raise ValueError(
                f"the dump has {len(rows)} rows, a rollout {sizes.samples}: replay with the recorded sizes"
            )
        plan.read(groups, rows)
        for epoch in sorted({epoch for epoch, _ in groups} - plan.rounds.keys()):  # not in the checkpoint's dock
            plan.rounds[epoch] = sizes.prompts
            job.dock.open(epoch, sizes.prompts, sizes.members)
        columns = {spec.name: rows[name] if spec.ragged else rows[name].to(spec.dtype) for spec, name in names.items()}
        job.dock.put(Rows(rows.ids, columns) if job.topology.leader else None)
        plan.use(groups, plan.plan(groups))
        return self._prepare(done, None, {})

    def evaluate(self, done: int) -> None:
        """A replay evaluates nothing."""


@dataclass
class RecordingTrainer(MegatronTrainer):
    """Writes what one update makes of each row that counts in its loss, as lines of tokens-rankR.jsonl."""

    at: RankParts | None = None

    def step(self, micro_batches: Sequence[Rows], call: TrainStep, *, version: int) -> Stepped:
        asked, topology = replayed(), self.at.job.topology
        if self.at.inputs.args.curr_iteration + 1 != asked["iteration"]:
            return super().step(micro_batches, call, version=version)
        with router_replay.uncounted():
            norm = self._norm_of(SampleId(*asked["sample"]), micro_batches, call, version) if asked["sample"] else None
            now = self.forward(micro_batches)
        stepped = super().step(micro_batches, call, version=version)
        if topology.writer:
            parts = zip(micro_batches, now, self.policy.weights, strict=True)
            lines = [to_json({**row, "norm": norm}) for part in parts for row in self._recorded(*part)]
            Path(asked["out"], f"tokens-rank{topology.rank}.jsonl").write_text("".join(lines), encoding="utf-8")
        return stepped

    def _recorded(self, rows: Rows, now: Ragged, weights: Tensor) -> Iterator[dict[str, Any]]:
        """Of each token its row's id, its place in the response, weight in the loss, text, advantage, and log-probs: of
        the engine, of the trainer before the rollout (`old`), in this step (`now`)."""
        mask, decode = rows["loss_mask"], self.at.inputs.tokenizer.decode
        columns = {"text": rows["tokens"], "engine": rows["logp_rollout"], "now": now}
        columns["old"] = rows.columns.get("logp_old", now)
        columns["advantage"] = rows["advantages"] if "advantages" in rows.columns else spread(rows["advantage"], mask)
        for i, weight in enumerate(weights.tolist()):
            if all(bool(rows[name][i]) for name in ("valid", "multiplicity") if name in rows.columns):
                of_row, places = {"id": list(rows.ids[i]), "weight": weight}, mask.row(i).nonzero().flatten().tolist()
                values = {name: column.row(i).tolist() for name, column in columns.items()}
                for place in places:
                    of_token = {name: column[place] for name, column in values.items()}
                    yield {**of_row, **of_token, "place": place - places[0], "text": decode([of_token["text"]])}

    def _norm_of(self, sample: SampleId, micro_batches: Sequence[Rows], call: TrainStep, version: int) -> float:
        """Norm of the gradient if only this row had a weight. Changes neither weights nor optimizer. Collective."""
        optimizer, policy = call.args[OPTIMIZER], self.policy
        kept = [(buffer, buffer.clone()) for chunk in self.model for buffer in unwrap(chunk).buffers()]

        def measured() -> tuple[bool, float | None, None]:
            optimizer.prepare_grads()
            return False, optimizer.get_grad_norm(), None

        policy.prepare(micro_batches, version=version)
        for part, weights in zip(micro_batches, policy.weights, strict=True):
            weights *= torch.tensor([i == sample for i in part.ids], device=weights.device)
        with swapped(vars(optimizer), step=measured):
            norm = policy.run(call.function, call.args[2:], call.kwargs)[GRAD_NORM]
        for buffer, value in kept:
            buffer.copy_(value)
        return float(norm)
