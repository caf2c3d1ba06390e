"""What the loop tells about itself: metrics of a rollout, of an evaluation and of an iteration, and the dumps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rl_plugin.algorithms import spread
from mindspeed_rl_plugin.monitor import metrics
from mindspeed_rl_plugin.monitor.dump import discard_dumps_after, dump_rollout
from mindspeed_rl_plugin.monitor.files import dump_files, set_aside
from mindspeed_rl_plugin.reward import GradeItem
from mindspeed_rl_plugin.rollout.evaluate import EvalCounts, evaluate
from mindspeed_rl_plugin.startup import megatron
from mindspeed_rl_plugin.types import Completion, Prompt, Rows, SampleId
from mindspeed_rl_plugin.wiring import Parts

# Names that the update uses, and the register's.
UPDATE_NAMES = {
    "loss": "loss",
    "pg_loss": "loss/policy",
    "kl_loss": "loss/kl",
    "ratio_mean": "ratio/mean",
    "ratio_max": "ratio/max",
    "clip_fraction": "clip_fraction",
    "entropy_loss": "loss/entropy",
    "ratio_min": "ratio/min",
    "entropy": "entropy",
    "trained_tokens": "trained/tokens",
    "trained_sequences": "trained/sequences",
    "kl": "kl/ref",
    "kl_old": "kl/old",
    "logp_diff_mean": "logp_diff/mean",
    "logp_diff_max": "logp_diff/max",
}
GRAD_NORM = 5  # place in what Megatron's train_step returns, the same in 0.12.1, 0.16.1 and 0.19
MEASURED = ("tokens", "loss_mask", "finish", "version", "reward", "grader_error", "kept")
DUMPED = ("prompt", "meta", "reward_parts", "advantage", "logp_rollout", "logp_old")


@dataclass
class Rollout:
    """Metrics of the rollout in use, the tokens in it, and the seconds that its iterations took so far."""

    metrics: dict[str, float]
    tokens: int
    seconds: float = 0.0
    logged: bool = False


def rollout(p: Parts, ids: Sequence[SampleId], done: int) -> Rollout:
    """Measure a rollout that is ready to train on, and dump it where asked. Collective."""
    dump_dir = p.inputs.config.monitor.dump_dir
    names = MEASURED + (DUMPED + (("logp_ref",) if p.reference else ()) if dump_dir else ())
    rows = p.dock.read(ids if p.topology.leader else [], names)
    measured: tuple[dict[str, float], int] = ({}, 0)
    if p.topology.leader:
        kept = rows["kept"].nonzero().flatten().tolist()
        _refuse_empty(rows, kept)
        found = metrics.rollout_metrics(rows.take(kept), correct_at=p.inputs.full_marks)
        found["reward/errors"] = float(rows["grader_error"].sum())
        found["groups/dropped"] = 1.0 - len(kept) / len(rows)
        measured = found, metrics.token_count(rows)
        if dump_dir:
            rows = rows.with_columns(advantages=spread(rows["advantage"], rows["loss_mask"]))
            dump_rollout(dump_dir, rows, p.inputs.decode, iteration=done + 1, graders=p.inputs.graders.names)
    return Rollout(*p.share(measured))


def _refuse_empty(rows: Rows, kept: Sequence[int]) -> None:
    """Optimizer steps on nothing would still move the weights, by momentum and weight decay."""
    if not kept:
        raise ValueError(
            f"graders failed on {int(rows['grader_error'].sum())} of {len(rows)} samples, so every group of this "
            "rollout is dropped and there is nothing to train on; repair the grader and resume from the last checkpoint"
        )


def evaluation(p: Parts, done: int) -> None:
    """Greedy accuracy, and pass@k where asked, on the held-out prompts with the engine's weights. Collective."""
    k = p.inputs.config.monitor.eval_pass_k
    failed = torch.zeros(1, dtype=torch.int64)

    def grade(answers: Sequence[tuple[Prompt, Completion]]) -> list[bool]:
        items = [GradeItem(q.text, p.inputs.decode(a.tokens), q.answer, dict(q.record), a.id) for q, a in answers]
        grades = p.inputs.graders.grade(items)
        failed[0] += sum(g.error is not None for g in grades)
        return [g.total >= p.inputs.full_marks - 1e-6 for g in grades]

    with p.monitor.stage("evaluate"):
        _, counts = evaluate(
            p.engine,
            p.inputs.held_out,
            grade=grade,
            sampling=p.sampling,
            samples=k,
            seed_base=p.response_seed,
            deadline=p.deadline,
        )
        total = counts.to_tensor()
        dist.all_reduce(total, group=p.group)
        dist.all_reduce(failed, group=p.group)
    found = EvalCounts.from_tensor(total).metrics(k)
    p.monitor.log_eval(done, found | ({"eval/errors": int(failed)} if failed else {}))


def iteration(
    p: Parts,
    number: int,
    rollout: Rollout | None,
    optimizer: Any,
    result: Sequence[Any],
    update: Mapping[str, float],
    *,
    last_step: bool,
) -> None:
    """Log one iteration: the update's metrics, and with the first and last step of a rollout those of it."""
    found = {UPDATE_NAMES[k]: v for k, v in update.items() if k in UPDATE_NAMES}
    found |= {"lr": megatron.learning_rate(optimizer)}
    if result[GRAD_NORM] is not None:
        found["grad_norm"] = float(result[GRAD_NORM])
    stages = p.monitor.stage_metrics()
    if rollout is not None:
        if not rollout.logged:
            found |= {k: v for k, v in rollout.metrics.items() if not k.startswith("logp_diff")}
            rollout.logged = True
        rollout.seconds += stages["seconds/iteration"]
        if last_step:
            found |= metrics.throughput(rollout.tokens, devices=p.topology.world, seconds=rollout.seconds)
    p.monitor.log(number, p.share(metrics.merge(found, stages)))


def prepare_dumps(p: Parts, epoch: int, resumed: bool) -> None:
    """Dumps that a resumed run draws again are removed; those that another run left are set aside as `.old`."""
    dump_dir = p.inputs.config.monitor.dump_dir
    if not dump_dir or not p.topology.leader:
        return
    if resumed:
        discard_dumps_after(dump_dir, epoch)
    else:
        for path in dump_files(dump_dir).values():
            set_aside(path)
