"""What differs in a job of the command `replay`: rollouts come from dumps, and one step is recorded token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl_plugin.dock import ColumnSpec
from mindspeed_rl_plugin.environment import replayed
from mindspeed_rl_plugin.forward.call import swapped
from mindspeed_rl_plugin.forward.collate import to_rows
from mindspeed_rl_plugin.loop.megatron_trainer import MegatronTrainer
from mindspeed_rl_plugin.loop.rank_parts import RankParts
from mindspeed_rl_plugin.loop.schedules.schedule import Job, RolloutSchedule
from mindspeed_rl_plugin.monitor.dump import read_rollout
from mindspeed_rl_plugin.monitor.run_files import dump_file, to_json
from mindspeed_rl_plugin.ranks import on_rank_0
from mindspeed_rl_plugin.rows import Column, Ragged, Rows, SampleId, pack_json, spread
from mindspeed_rl_plugin.stages.measure import Rollout
from mindspeed_rl_plugin.stages.stage import Stages, StageSpec, columns_of
from mindspeed_rl_plugin.stages.update import GRAD_NORM, OPTIMIZER, Stepped, TrainStep
from mindspeed_rl_plugin.weights.storages import unwrap


def columns_behind_groups(table: Sequence[StageSpec]) -> list[ColumnSpec]:
    """The columns that the stages before `groups` write and those behind it read."""
    at = [spec.name for spec in table].index("groups")
    read = {spec.stored.get(name, name) for spec in table[at + 1 :] for name in spec.reads}
    return [column for column in columns_of(table[:at]) if column.name in read]


def dumped_rows(path: Path, needed: Sequence[ColumnSpec]) -> Rows:
    """The rows of a dump with these columns. Raises ValueError, with the names, for columns that it lacks."""
    import pyarrow.parquet as pq

    rows, table = read_rollout(path), pq.read_table(path)
    have: dict[str, Column] = {
        **rows.columns,
        "length": rows["tokens"].lengths,
        "response_length": torch.tensor([int(mask.sum()) for mask in rows["loss_mask"].rows()]),
        "weights_digest": torch.zeros(len(rows), dtype=torch.int64),  # read only where an engine got weights
        "meta": pack_json([{}] * len(rows)),  # read only for the texts of dumps
    }
    # A stage of the user that writes `valid` leaves `valid@stage`. The last `valid` has the same effect.
    sources = {spec: spec.name.partition("@")[0] for spec in needed}
    if lacking := [name for name in sources.values() if name not in have.keys() | {*table.column_names}]:
        raise ValueError(f"{path} has no column {', '.join(lacking)}, which the stages after the rewards read")
    columns = {s.name: have[n] if n in have else _column(table[n].to_pylist(), s) for s, n in sources.items()}
    return Rows(rows.ids, columns)


def _column(values: Sequence[Any], spec: ColumnSpec) -> Column:
    """A column of a user's stage."""
    if not spec.ragged:
        return torch.tensor(values, dtype=spec.dtype)
    cells = [torch.tensor(value, dtype=spec.dtype).reshape(-1, *spec.trailing) for value in values]
    return Ragged.from_rows(cells, spec.dtype)


class ReplayedSchedule(RolloutSchedule):
    """Takes each rollout from its dump, without engine and graders. table: stages of the recorded schedule."""

    def __init__(self, job: Job, stages: Stages, table: Sequence[StageSpec]) -> None:
        super().__init__(job, stages, 0)
        self.needed, self.dumps = columns_behind_groups(table), replayed()["dumps"]

    def collect(self, done: int) -> Rollout:
        """The rollout that the recorded job trained after `done` iterations."""
        job, plan, held = self.job, self.job.plan, list[Rows]()

        def read() -> tuple[tuple[SampleId, ...], list[int]]:
            held.append(rows := dumped_rows(dump_file(self.dumps, done), self.needed))
            return rows.ids, rows["length"].tolist()

        ids, lengths = on_rank_0(read)
        length_of = dict(zip(starmap(SampleId, ids), lengths, strict=True))
        groups = tuple(dict.fromkeys(i[:2] for i in length_of))
        if list(length_of) != plan.ids(groups) or len(groups) != plan.sizes.prompts:
            raise ValueError(
                f"the dump of the rollout after {done} iterations has {len(ids)} rows of {len(groups)} groups, not "
                f"{plan.sizes.samples} of {plan.sizes.prompts}: replay with the sizes of the recorded run"
            )
        plan.lengths |= {group: tuple(length_of[i] for i in plan.ids([group])) for group in groups}
        for epoch in sorted({epoch for epoch, _ in groups} - plan.rounds.keys()):
            plan.rounds[epoch] = plan.sizes.prompts
            job.dock.open(epoch, plan.sizes.prompts, plan.sizes.members)
        for rows in held:
            shared = {spec.name for spec in self.needed if spec.level == "group"}
            firsts = rows.take(range(0, len(rows), plan.sizes.members))
            job.dock.put(Rows(firsts.ids, {name: firsts[name] for name in shared}))
            job.dock.put(Rows(rows.ids, {name: c for name, c in rows.columns.items() if name not in shared}))
        plan.use(groups, plan.plan(groups))
        return self._prepare(done, None, {})

    def evaluate(self, done: int) -> None:
        """Nothing is evaluated."""


@dataclass
class RecordingTrainer(MegatronTrainer):
    """Writes, for the iteration that is asked for, what the update made of each row: one line of `rows-rankR.jsonl`."""

    at: RankParts | None = None

    def step(self, micro_batches: Sequence[Rows], call: TrainStep, *, version: int) -> Stepped:
        asked, job = replayed(), self.at.job
        if self.at.inputs.args.curr_iteration + 1 != asked["iteration"]:
            return super().step(micro_batches, call, version=version)
        norm = self._norm_of(SampleId(*asked["sample"]), micro_batches, call, version) if asked["sample"] else None
        seen: dict[int, tuple[Ragged, list[float]]] = {}

        def watch(batch: Any, logp: torch.Tensor, weights: torch.Tensor) -> None:
            rows = to_rows(torch.where(batch.mask, logp, 0.0).cpu(), batch.lengths, packed=self.settings.packed)
            seen[batch.index] = rows, weights.tolist()

        self.policy.watch = watch
        stepped = super().step(micro_batches, call, version=version)
        if job.topology.writer:
            with open(Path(asked["out"]) / f"rows-rank{job.topology.rank}.jsonl", "w", encoding="utf-8") as file:
                for index, part in enumerate(micro_batches):
                    file.writelines(to_json({**row, "norm": norm}) for row in self._rows(part, *seen[index]))
        return stepped

    def _rows(self, rows: Rows, now: Ragged, weights: Sequence[float]) -> list[dict[str, Any]]:
        """For each row that counts in the loss its id and weight, and for each of its trained tokens: place in the
        response, text, log-probs of the engine, of the trainer before the rollout's first step (`old`), and in this
        step (`now`), and advantage."""
        mask, decode, found = rows["loss_mask"], self.at.inputs.tokenizer.decode, []
        advantages = rows["advantages"] if "advantages" in rows.columns else spread(rows["advantage"], mask)
        old = rows.columns.get("logp_old", now)
        counted = [rows[name] > 0 for name in ("valid", "multiplicity") if name in rows.columns]
        for i in torch.stack(counted).all(0).nonzero().flatten().tolist():
            places = mask.row(i).nonzero().flatten()
            columns = {"engine": rows["logp_rollout"], "old": old, "now": now, "advantage": advantages}
            texts = [decode([token]) for token in rows["tokens"].row(i)[places].tolist()]
            first = int(places[0]) if len(places) else 0
            values = {name: column.row(i)[places].tolist() for name, column in columns.items()}
            found.append({"id": list(rows.ids[i]), "weight": weights[i], "place": (places - first).tolist()} | values)
            found[-1]["text"] = texts
        return found

    def _norm_of(self, sample: SampleId, micro_batches: Sequence[Rows], call: TrainStep, version: int) -> float:
        """Norm of the gradient if only this row had a weight, with the denominators of the whole batch. Changes neither
        weights nor the optimizer's state. Collective."""
        optimizer, policy = call.args[OPTIMIZER], self.policy
        kept = [(buffer, buffer.clone()) for chunk in self.model for buffer in unwrap(chunk).buffers()]

        def measured() -> tuple[bool, float | None, None]:
            optimizer.prepare_grads()
            return False, optimizer.get_grad_norm(), None

        policy.prepare(micro_batches, version=version)
        policy.only(sample, micro_batches)
        with swapped(vars(optimizer), step=measured):
            norm = policy.run(call.function, call.args[2:], call.kwargs)[GRAD_NORM]
        for buffer, value in kept:
            buffer.copy_(value)
        return float(norm)
