"""What the loop tells about itself: metrics of a rollout, of an evaluation and of an iteration, and the dumps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rl_plugin.algorithms import spread
from mindspeed_rl_plugin.critic.critic import Critic
from mindspeed_rl_plugin.dock import Moved
from mindspeed_rl_plugin.loop import megatron_globals as megatron
from mindspeed_rl_plugin.loop.context import Parts
from mindspeed_rl_plugin.monitor import rollout_metrics as metrics
from mindspeed_rl_plugin.monitor.dump import discard_dumps_after, dump_rollout
from mindspeed_rl_plugin.monitor.names import Metric
from mindspeed_rl_plugin.monitor.run_files import claim_dumps, dump_files, set_aside
from mindspeed_rl_plugin.reshard.resharder import Transfer
from mindspeed_rl_plugin.reward import GradeItem, solved
from mindspeed_rl_plugin.rows import Completion, Prompt, Rows, SampleId
from mindspeed_rl_plugin.stages.evaluate import EvalCounts, evaluate
from mindspeed_rl_plugin.stages.generate import weights_number

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
    "grad_norm": "grad_norm",
    "value_loss": "critic/loss",
    "value_clip_fraction": "critic/clip_fraction",
    "value_mean": "critic/value_mean",
    "return_mean": "critic/return_mean",
    "explained_variance": "critic/explained_variance",
    "critic_grad_norm": "critic/grad_norm",
    "critic_lr": "critic/lr",
    "lr": "lr",
    "rollout_kl": "rollout/kl",
    "rollout_weight_mean": "rollout/weight_mean",
    "rollout_weight_max": "rollout/weight_max",
    "rollout_stale": "rollout/stale",
    "rollout_weight_outside": "rollout/weight_outside",
    "rollout_sequence_weight_mean": "rollout/sequence_weight_mean",
    "rollout_sequence_weight_outside": "rollout/sequence_weight_outside",
}
GRAD_NORM = 5  # place in what Megatron's train_step returns, the same in 0.12.1, 0.16.1 and 0.19


@dataclass
class Rollout:
    """Metrics of the rollout in use, the tokens in it, and the seconds that its iterations took so far.

    seconds: of the slowest rank of each iteration, evaluations left out. logged: its metrics are in metrics.jsonl.
    """

    metrics: dict[str, Metric]
    tokens: int
    seconds: float = 0.0
    logged: bool = False


def rollout(
    p: Parts, ids: Sequence[SampleId], done: int, transfer: Transfer, drawn: Mapping[str, Metric] | None = None
) -> Rollout:
    """Measure a rollout that is ready to train on, and dump it where asked. Collective.

    transfer: what bringing the weights to the engine for it took on this rank; drawn: what choosing its groups
    measured.
    """
    moved = _moved(p.gather(transfer))
    dump_dir = p.inputs.config.monitor.dump_dir
    # Waits for what the other ranks still write.
    lease = p.dock_of_rank.lease("measure", ids=ids if p.topology.leader else [], deadline=p.deadline)
    rows = lease.rows
    measured: tuple[dict[str, Metric], int] = ({}, 0)
    if p.topology.leader:
        kept = rows["kept"].nonzero().flatten().tolist()
        _check_weights(rows, done, transfer.digest)
        found = dict(metrics.rollout_metrics(rows.take(kept), solved=_solved(p, rows["reward_parts"][kept].tolist())))
        found |= metrics.grader_metrics(rows["reward_parts"][kept], p.inputs.graders.names)
        found |= _overlong(p, rows.take(kept)) | moved | (drawn or {})
        if "times" in rows.columns:
            found |= metrics.filtration_metrics(rows["times"], rows["reward"])
        found["groups/dropped"] = 1.0 - len(kept) / len(rows)
        measured = found, metrics.token_count(rows)
        if dump_dir:
            if "advantages" not in rows.columns:
                rows = rows.with_columns(advantages=spread(rows["advantage"], rows["loss_mask"]))
            dump_rollout(dump_dir, rows, p.inputs.decode, iteration=done + 1, graders=p.inputs.graders.names)
    p.dock_of_rank.commit(lease)
    return Rollout(*p.share(measured))


def _overlong(p: Parts, rows: Rows) -> dict[str, Metric]:
    """What DAPO's penalty on length takes from the rewards, where it is on."""
    limit = p.inputs.config.rollout.max_response_length
    if not p.algorithm.buffer(limit):
        return {}
    penalty = p.algorithm.shaped(torch.zeros(len(rows)), rows["response_length"], limit)
    return {"reward/overlong": float(penalty.mean()), "response/overlong": float((penalty < 0).double().mean())}


def _moved(transfers: Sequence[Transfer]) -> dict[str, Metric]:
    """Bytes of one reshard summed over ranks, seconds of the slowest, and the digest where weights were verified."""
    found: dict[str, Metric] = {
        "reshard/bytes_copied": sum(t.copied for t in transfers),
        "reshard/bytes_sent": sum(t.sent for t in transfers),
        "reshard/bytes_received": sum(t.received for t in transfers),
        "reshard/temporary_bytes": max(t.temporary for t in transfers),
        "reshard/transfer_seconds": max(t.seconds for t in transfers),
    }
    digest = transfers[0].digest  # all ranks compared the same tables
    return found if digest is None else found | {"weights/digest": digest}


def _check_weights(rows: Rows, version: int, digest: str | None) -> None:
    """Rows of this version were drawn with the weights that were verified for it."""
    mine = rows["version"] == version
    wrong = (rows["weights"][mine] != weights_number(digest)).nonzero().flatten().tolist()
    if wrong:
        ids = [i for i, own in zip(rows.ids, mine.tolist(), strict=True) if own]
        raise RuntimeError(
            f"sample {ids[wrong[0]]} of weight version {version} was drawn with other weights than those that were "
            f"verified, digest {digest}"
        )


def _solved(p: Parts, parts: Sequence[Sequence[float]]) -> list[bool]:
    """Whether each response is solved, from its grades one by one."""
    return [solved(row, p.inputs.graders.weights) for row in parts]


def failures(p: Parts, found: Iterable[Mapping[str, str]], told: set[str], what: str = "this rollout") -> None:
    """Print the first failure of each grader that is not among those `told`, to which it is added; found: of each rank,
    by grader."""
    for name, text in (pair for part in found for pair in part.items()):
        if name not in told and p.topology.leader:
            print(f"[rl] warning: a grader failed, for the first time in {what}: {text}", flush=True)
        told.add(name)


def evaluation(p: Parts, done: int) -> None:
    """Greedy accuracy, and pass@k where asked, on the held-out prompts with the engine's weights. Collective.

    Its time is booked by the caller, as stage "evaluate" together with whatever was done for it alone.
    """
    k = p.inputs.config.monitor.eval_pass_k
    failed, texts = torch.zeros(1, dtype=torch.int64), {}

    def grade(answers: Sequence[tuple[Prompt, Completion]]) -> list[bool]:
        items = [
            GradeItem(q.text, p.inputs.decode(a.tokens), q.answer, dict(q.record), a.id, q.messages) for q, a in answers
        ]
        grades = p.inputs.graders.grade(items)
        failed[0] += sum(g.error is not None for g in grades)
        texts.update(p.inputs.graders.take_failures())
        return _solved(p, [g.parts for g in grades])

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
    failures(p, p.gather(texts), set(), "the evaluation")
    found = EvalCounts.from_tensor(total).metrics(k)
    p.monitor.log_eval(done, found | ({"eval/errors": int(failed)} if failed else {}))


def iteration(
    p: Parts,
    number: int,
    rollout: Rollout | None,
    update: Mapping[str, float],
    *,
    last_step: bool,
) -> None:
    """Log one iteration: the update's metrics, and with the first and last step of a rollout those of it.

    Stages are those of their slowest rank. Collective.
    """
    found: dict[str, Metric] = {UPDATE_NAMES[k]: v for k, v in update.items() if k in UPDATE_NAMES}
    moved = p.dock.traffic.take() if last_step else []
    ranks = p.gather((found, p.monitor.stage_metrics(), _totals(moved)))
    found, stages = ranks[0][0], metrics.largest([measured for _, measured, _ in ranks])
    if rollout is not None:
        if not rollout.logged:
            found |= {k: v for k, v in rollout.metrics.items() if not k.startswith("logp_diff")}
            rollout.logged = True
        rollout.seconds += stages["seconds/iteration"]
        if last_step:
            found |= metrics.throughput(rollout.tokens, devices=p.topology.world, seconds=rollout.seconds)
            found |= {f"dock/bytes_{k}": sum(total[k] for *_, total in ranks) for k in _totals(())}
            p.monitor.log_dock(number, {"moved": [list(m) for m in moved], **p.dock.served})
    p.monitor.log(number, metrics.merge(found, stages))


def rates(optimizer: Any, critic: Critic | None) -> dict[str, float]:
    """Learning rates of the step to come, which leaves those of the next behind."""
    found = {"lr": megatron.learning_rate(optimizer)}
    return found if critic is None else found | {"critic_lr": megatron.learning_rate(critic.optimizer)}


def of_step(result: Sequence[Any], whose: str = "") -> dict[str, float]:
    """What Megatron's step measured itself; whose: "critic_", or the policy's."""
    return {} if result[GRAD_NORM] is None else {f"{whose}grad_norm": float(result[GRAD_NORM])}


def _totals(moved: Sequence[Moved]) -> dict[str, int]:
    """Bytes read, written, and of both what was not in this machine's memory."""
    return {
        "read": sum(m.nbytes for m in moved if m.way == "read"),
        "written": sum(m.nbytes for m in moved if m.way == "written"),
        "remote": sum(m.nbytes for m in moved if m.where == "remote"),
    }


def prepare_dumps(p: Parts, epoch: int, resumed: bool) -> None:
    """Dumps that a resumed run draws again are removed; those of its start before, which saved no checkpoint, become
    `.old` like its metrics. Another run's were refused at start (`startup.checks`)."""
    dump_dir = p.inputs.config.monitor.dump_dir
    if not dump_dir or not p.topology.leader:
        return
    if resumed:
        discard_dumps_after(dump_dir, epoch)
    else:
        for path in dump_files(dump_dir).values():
            set_aside(path)
    claim_dumps(dump_dir, p.monitor.run_dir)
