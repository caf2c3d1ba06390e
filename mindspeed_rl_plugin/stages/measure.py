"""Measure: metrics of a rollout and of an iteration, and the dumps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mindspeed_rl_plugin.algorithms import Algorithm
from mindspeed_rl_plugin.dock import Dock, Moved
from mindspeed_rl_plugin.engine.response_kind import ONE_TURN, ResponseKind
from mindspeed_rl_plugin.monitor import rollout_metrics as metrics
from mindspeed_rl_plugin.monitor.dump import discard_dumps_after, dump_rollout
from mindspeed_rl_plugin.monitor.monitor import Monitor
from mindspeed_rl_plugin.monitor.names import Metric
from mindspeed_rl_plugin.monitor.run_files import claim_dumps, dump_files, set_aside
from mindspeed_rl_plugin.ranks import Collectives
from mindspeed_rl_plugin.reward import solved
from mindspeed_rl_plugin.rows import Rows, SampleId, digest_number, spread
from mindspeed_rl_plugin.stages import advantages
from mindspeed_rl_plugin.stages.context import RankContext
from mindspeed_rl_plugin.stages.stage import Stage, StageSpec
from mindspeed_rl_plugin.weights.resharder import Transfer


def spec(algorithm: Algorithm, dump: bool = False, own: Sequence[str] = (), kind: ResponseKind = ONE_TURN) -> StageSpec:
    """dump: whether rollouts are written to files; own: columns of a user's stages, which are dumped too; kind: of the
    responses."""
    # One rank reads these columns of all rows, so none of them has a value per token.
    reads = ("length", "response_length", "finish", "version", "weights_digest", "reward", "reward_parts", "valid")
    if_written, own = ("multiplicity", *kind.measured), tuple(name for name in own if name not in reads)
    if dump:
        reads += ("prompt", "meta", "tokens", "loss_mask", "logp_rollout", "logp_old", "segments", "graded")
        reads += (advantages.column_name(algorithm),)
        if_written = tuple(dict.fromkeys((*if_written, "logp_ref", "routes", *kind.dumped, *own)))
    built = partial(Measure, own=own)
    return StageSpec("measure", reads, (), resource="leader", if_written=if_written, build=built)


@dataclass
class Rollout:
    """Metrics of the rollout in use."""

    metrics: dict[str, Metric]
    tokens: int  # of prompts and responses
    seconds: float = 0.0  # of the slowest rank, summed over the rollout's iterations so far, without evaluations
    logged: bool = False  # whether its metrics are in metrics.jsonl


class Measure(Stage):
    """own: columns that only a user's stages write; they are dumped too."""

    def __init__(self, spec: StageSpec, context: RankContext, own: Sequence[str] = ()) -> None:
        super().__init__(spec, context)
        self.own, self.meter = own, context.responses.meter()

    def run(
        self,
        ids: Sequence[SampleId],
        done: int,
        transfer: Transfer | None,
        sampling: Mapping[str, Metric] | None = None,
    ) -> Rollout:
        """Measure a rollout that is ready to train on, and dump it if asked. Collective.

        done: iterations before this rollout.
        transfer: this rank's part in the copy of weights to the engine; None if other processes generate.
        sampling: metrics of sampling and selecting its groups.
        """
        ranks, leader = self.context.ranks, self.context.leader
        moved = {} if transfer is None else transfer_metrics(ranks.gather(transfer))
        lease = self.lease(ids if leader else [])  # waits until the other ranks have written
        measured: tuple[dict[str, Metric], int] = ({}, 0)
        if leader:
            if transfer is not None:
                check_weights(lease.rows, done, transfer.digest)
            measured = self.metrics(lease.rows) | moved | (sampling or {}), int(lease.rows["length"].sum())
            if folder := self.context.config.monitor.dump_dir:
                self._dump(lease.rows, folder, done + 1)
        self.commit(lease)
        return Rollout(*ranks.broadcast(measured))

    def metrics(self, rows: Rows) -> dict[str, Metric]:
        """Metrics of valid rows, and the share of the others. Metrics of filtration and of episodes count all rows."""
        valid = rows["valid"].nonzero().flatten().tolist()
        parts = rows["reward_parts"][valid]
        graders = self.context.graders
        right = [solved(row, graders.weights) for row in parts.tolist()]
        result: dict[str, Metric] = dict(metrics.rollout_metrics(rows.take(valid), right))
        result |= metrics.grader_metrics(parts, graders.names) | self._overlong(rows.take(valid))
        if "multiplicity" in rows.columns:
            result |= metrics.filtration_metrics(rows["multiplicity"], rows["reward"])
        return result | self.meter(rows) | {"groups/dropped": 1.0 - len(valid) / len(rows)}

    def _overlong(self, rows: Rows) -> dict[str, Metric]:
        """Metrics of DAPO's length penalty, if it is used."""
        algorithm, limit = self.context.algorithm, self.context.longest
        if not algorithm.buffer(limit):
            return {}
        penalty = algorithm.shaped(torch.zeros(len(rows)), advantages.limited_lengths(rows), limit)
        return {"reward/overlong": float(penalty.mean()), "response/overlong": float((penalty < 0).double().mean())}

    def _dump(self, rows: Rows, folder: str, iteration: int) -> None:
        if "advantages" not in rows.columns:
            rows = rows.with_columns(advantages=spread(rows["advantage"], rows["loss_mask"]))
        names, own = self.context.graders.names, (*self.own, *self.context.responses.dumped)
        dump_rollout(folder, rows, self.context.decode, iteration=iteration, graders=names, own=own)


def transfer_metrics(transfers: Sequence[Transfer]) -> dict[str, Metric]:
    """Bytes of a reshard, summed over ranks; largest temporary bytes and seconds of a rank; digest, if verified."""
    result: dict[str, Metric] = {
        "reshard/bytes_copied": sum(t.copied for t in transfers),
        "reshard/bytes_sent": sum(t.sent for t in transfers),
        "reshard/bytes_received": sum(t.received for t in transfers),
        "reshard/temporary_bytes": max(t.temporary for t in transfers),
        "reshard/transfer_seconds": max(t.seconds for t in transfers),
    }
    digest = transfers[0].digest  # all ranks compared the same tables
    return result if digest is None else result | {"weights/digest": digest}


def check_weights(rows: Rows, version: int, digest: str | None) -> None:
    """Raise RuntimeError if rows of this version were sampled with other weights than those verified for it."""
    mine = rows["version"] == version
    wrong = (rows["weights_digest"][mine] != digest_number(digest)).nonzero().flatten().tolist()
    if wrong:
        ids = [i for i, own in zip(rows.ids, mine.tolist(), strict=True) if own]
        raise RuntimeError(
            f"sample {ids[wrong[0]]} of weight version {version} was sampled with other weights than those that were "
            f"verified, digest {digest}"
        )


class IterationLog:
    """The log of every iteration. dock: the dock whose traffic is logged."""

    def __init__(self, monitor: Monitor, ranks: Collectives, dock: Dock) -> None:
        self.monitor, self.ranks, self.dock = monitor, ranks, dock

    def write(self, number: int, rollout: Rollout, update: Mapping[str, float], *, last_step: bool) -> None:
        """Log an iteration: the update's metrics; at a rollout's first step its metrics, at its last step its speed and
        the dock's traffic. The time of a stage is that of the slowest rank. Collective.
        """
        moved = self.dock.traffic.take() if last_step else []
        every = self.ranks.gather((dict(update), self.monitor.stage_metrics(), _totals(moved)))
        result: dict[str, Metric] = every[0][0]
        stages = metrics.largest([measured for _, measured, _ in every])
        if not rollout.logged:
            result |= rollout.metrics
            rollout.logged = True
        rollout.seconds += stages["seconds/iteration"]
        if last_step:
            result |= metrics.throughput(rollout.tokens, devices=self.ranks.world, seconds=rollout.seconds)
            result |= {f"dock/bytes_{k}": sum(total[k] for *_, total in every) for k in _totals(())}
            self.monitor.log_dock(number, {"moved": [list(m) for m in moved], **self.dock.served})
        self.monitor.log(number, result | stages)


def _totals(moved: Sequence[Moved]) -> dict[str, int]:
    """Bytes read, bytes written, and bytes of both kinds that came from or went to another machine."""
    return {
        "read": sum(m.nbytes for m in moved if m.way == "read"),
        "written": sum(m.nbytes for m in moved if m.way == "written"),
        "remote": sum(m.nbytes for m in moved if m.where == "remote"),
    }


def prepare_dumps(dump_dir: str, run_dir: Any, done: int, resumed: bool) -> None:
    """At a resume after `done` iterations, remove the dumps that the run will make again. At a start that is no
    resume, rename earlier dumps to `.old`, like earlier metrics. Dumps of another run were refused already
    (`checks.flag_checks`)."""
    if resumed:
        discard_dumps_after(dump_dir, done)
    else:
        for path in dump_files(dump_dir).values():
            set_aside(path)
    claim_dumps(dump_dir, run_dir)
