"""The columns and worker states of the loop, declared by who uses them; the dock knows none of them.

Levels: "group" one entry a prompt, "sample" one a response, "token" aligned with `tokens` (see types).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl_plugin.algorithms import Algorithm, Moments, RewardBatch, group_index, whiten
from mindspeed_rl_plugin.algorithms.advantages import returns as value_targets
from mindspeed_rl_plugin.algorithms.selection import carries_signal
from mindspeed_rl_plugin.dock import ColumnSpec, StateSpec
from mindspeed_rl_plugin.reward import GradeItem, RewardPool
from mindspeed_rl_plugin.rows import Column, Prompt, Ragged, Rows, SampleId, pack_json, unpack_json


def grpo_columns(graders: int) -> list[ColumnSpec]:
    """Columns of GRPO; `graders` is the number of rewards, the width of `reward_parts`."""
    f32, i64 = torch.float32, torch.int64
    return [
        ColumnSpec("prompt", torch.int32, "group", ragged=True),
        ColumnSpec("meta", torch.uint8, "group", ragged=True),  # JSON: fields of a `Prompt`
        ColumnSpec("tokens", torch.int32, "token", ragged=True),  # P prompt + R response ids
        ColumnSpec("loss_mask", torch.uint8, "token", ragged=True),
        ColumnSpec("logp_rollout", f32, "token", ragged=True),  # 0.0 where loss_mask is 0
        ColumnSpec("length", i64, "sample", ragged=False),  # L = P + R
        ColumnSpec("response_length", i64, "sample", ragged=False),
        ColumnSpec("finish", torch.int8, "sample", ragged=False),  # 0 stop, 1 length, 2 abort
        ColumnSpec("version", i64, "sample", ragged=False),  # optimizer updates behind the oldest weights that drew it
        ColumnSpec("weights", i64, "sample", ragged=False),  # digest of the weights that drew it, 0: not verified
        ColumnSpec("segments", i64, "sample", ragged=True, trailing=(2,), longest=64),  # (first token, version) parts
        ColumnSpec("reward", f32, "sample", ragged=False),
        ColumnSpec("reward_parts", f32, "sample", ragged=False, trailing=(graders,)),
        ColumnSpec("graded", torch.int8, "sample", ragged=False),  # 0 where a grader failed and the sample is dropped
        ColumnSpec("grader_error", torch.int8, "sample", ragged=False),  # 1 where one failed; counted by who grades
        ColumnSpec("logp_old", f32, "token", ragged=True),
        ColumnSpec("logp_ref", f32, "token", ragged=True),
        ColumnSpec("values", f32, "token", ragged=True),  # of the critic, before each trained token
        ColumnSpec("returns", f32, "token", ragged=True),  # what the critic learns
        ColumnSpec("advantage", f32, "sample", ragged=False),
        ColumnSpec("advantages", f32, "token", ragged=True),  # in the place of `advantage` where tokens differ
        ColumnSpec("times", torch.int32, "sample", ragged=False),  # how often filtration drew the response, from 0
        ColumnSpec("kept", torch.int8, "sample", ragged=False),  # 0: trained nowhere, counted in no denominator
    ]


# One rank reads these of all rows: single numbers, so that it never becomes the place where all data goes.
MEASURED = ("length", "response_length", "finish", "version", "weights")
MEASURED += ("reward", "reward_parts", "kept")
DUMPED = ("prompt", "meta", "tokens", "loss_mask", "logp_rollout", "logp_old")


def grpo_states(algorithm: Algorithm, dump: bool = False) -> list[StateSpec]:
    """Worker states of an algorithm, in order; dump: also what is only dumped."""
    states = [
        StateSpec(
            "generate",
            ("prompt",),
            ("tokens", "loss_mask", "logp_rollout", "length", "response_length")
            + ("finish", "version", "weights", "segments"),
        ),
        # whole groups: a batch grader sees all responses of a prompt in one call, on however many ranks
        StateSpec(
            "reward",
            ("tokens", "loss_mask", "meta"),
            ("reward", "reward_parts", "graded", "grader_error"),
            whole_groups=True,
        ),
        StateSpec("advantage", advantage_reads(algorithm), advantage_writes(algorithm), whole_groups=True),
        StateSpec("measure", measure_reads(algorithm, dump), ()),
        StateSpec("update", update_reads(algorithm), ()),
    ]
    passes = {
        "logp_old": algorithm.old_logps,
        "values": algorithm.needs_critic,
        "logp_ref": algorithm.needs_reference,
    }
    states[2:2] = [StateSpec(name, ("tokens", "loss_mask"), (name,)) for name, needed in passes.items() if needed]
    return states


def advantage_name(algorithm: Algorithm) -> str:
    """Column of the advantages: one number a sample, or one a token."""
    return "advantages" if algorithm.per_token else "advantage"


def advantage_writes(algorithm: Algorithm) -> tuple[str, ...]:
    """Columns of the advantage state; with a critic also what it is to learn, under filtration how often."""
    more = (("returns",) if algorithm.needs_critic else ()) + (("times",) if algorithm.filters else ())
    return (advantage_name(algorithm), "kept", *more)


def advantage_reads(algorithm: Algorithm) -> tuple[str, ...]:
    """Columns that the estimator needs of every row: token columns only where it looks at tokens."""
    reads = ("reward", "graded", "response_length")
    if algorithm.per_token or algorithm.kl_reward_coef:
        reads += ("loss_mask",)
    reads += ("values",) if algorithm.needs_critic else ()
    return reads + (("logp_old", "logp_ref") if algorithm.kl_reward_coef else ())


def measure_reads(algorithm: Algorithm, dump: bool) -> tuple[str, ...]:
    """Columns that the metrics need of every row, and the dump where asked."""
    dumped = DUMPED + (advantage_name(algorithm),) + (("logp_ref",) if algorithm.needs_reference else ())
    filtered = ("times",) if algorithm.filters else ()
    return MEASURED + filtered + (dumped if dump else ())


def update_reads(algorithm: Algorithm) -> tuple[str, ...]:
    """Columns that the update needs of every row."""
    reads = ("tokens", "loss_mask", "logp_rollout", advantage_name(algorithm), "kept", "version")
    reads += ("logp_old",) if algorithm.old_logps else ()
    reads += ("values", "returns") if algorithm.needs_critic else ()
    reads += ("times",) if algorithm.filters else ()
    return reads + (("logp_ref",) if algorithm.needs_reference else ())


def of_stage(reads: Sequence[str], last: bool) -> tuple[str, ...]:
    """Which of a state's columns a pipeline stage reads: what feeds the model, and on the last stage all."""
    return tuple(c for c in reads if last or c in ("tokens", "loss_mask", "kept", "times"))


def prompt_columns(prompts: Sequence[Prompt]) -> dict[str, Column]:
    """Group columns of G prompts."""
    tokens = [torch.tensor(p.tokens, dtype=torch.int32) for p in prompts]
    meta = [
        {"text": p.text, "answer": p.answer, "row": p.row, "record": dict(p.record), "messages": p.messages}
        for p in prompts
    ]
    return {"prompt": Ragged.from_rows(tokens), "meta": pack_json(meta)}


def reward_columns(rows: Rows, pool: RewardPool, decode: Callable[[Sequence[int]], str]) -> Rows:
    """Grade B responses. decode: response token ids to the text that graders see."""
    items = []
    for i, meta in enumerate(unpack_json(rows["meta"])):
        response = rows["tokens"].row(i)[rows["loss_mask"].row(i).bool()]
        text = decode(response.tolist())
        item = GradeItem(meta["text"], text, meta["answer"], meta["record"], rows.ids[i], meta.get("messages"))
        items.append(item)
    grades = pool.grade(items)
    return Rows(
        rows.ids,
        {
            "reward": torch.tensor([g.total for g in grades], dtype=torch.float32),
            "reward_parts": torch.tensor([g.parts for g in grades], dtype=torch.float32).reshape(len(grades), -1),
            "graded": torch.tensor([not g.dropped for g in grades], dtype=torch.int8),
            "grader_error": torch.tensor([g.error is not None for g in grades], dtype=torch.int8),
        },
    )


def advantage_columns(
    rows: Rows,
    algorithm: Algorithm,
    limit: int,
    gather: Callable[[Any], Iterable[Any]],
    *,
    seed: int = 0,
    steps: Mapping[SampleId, int] | None = None,
) -> Rows | None:
    """Advantages of whole groups; a group with a dropped sample is kept out of training altogether, and under dynamic
    sampling one whose task rewards are all equal.

    rows: those of this rank, maybe none; limit: longest response [tokens]; gather: every rank's value, collective,
    called where advantages are whitened and where whole batches are filtered, on ranks without rows too; seed: of the
    draws of filtration; steps: optimizer step of every row of the rollout, needed where whole batches are filtered.
    None where there are no rows.
    """
    found = _estimated(rows, algorithm, limit) if len(rows) else None
    returns = None
    if found is not None and algorithm.needs_critic:
        returns = value_targets(Ragged(found.values, rows["loss_mask"].offsets), rows["values"], rows["loss_mask"])
        returns = Ragged(returns.values.float(), returns.offsets)
    if algorithm.whitened:
        # Over the whole rollout, of which this rank sees a part.
        moments = Moments.merged(gather(Moments.of(found.values, found.counts) if found else Moments()))
        if found is not None:
            found = dataclasses.replace(found, values=whiten(found.values, moments))
    times = _times(rows, found, algorithm, gather, seed, steps) if algorithm.filters else {}
    if found is None:
        return None
    values = torch.where(found.counts > 0, found.values, 0.0).float()
    advantages = Ragged(values, rows["loss_mask"].offsets) if algorithm.per_token else values
    written = {advantage_name(algorithm): advantages, "kept": found.kept.to(torch.int8), **times}
    return Rows(rows.ids, written | ({} if returns is None else {"returns": returns}))


@dataclasses.dataclass(frozen=True)
class _Estimate:
    """values: `[B]` a sample or `[T]` a token, float64; counts: of the same shape, trained tokens that have the value;
    kept: `[B]` bool, False where the sample's group is dropped."""

    values: Tensor
    counts: Tensor
    kept: Tensor


def _times(
    rows: Rows,
    found: _Estimate | None,
    algorithm: Algorithm,
    gather: Callable[[Any], Iterable[Any]],
    seed: int,
    steps: Mapping[SampleId, int] | None,
) -> dict[str, Tensor]:
    """How often each row is trained; rows of dropped groups neither draw nor are drawn."""
    kept = [] if found is None else found.kept.nonzero().flatten().tolist()
    ids, reward = [rows.ids[i] for i in kept], rows["reward"][kept] if kept else torch.empty(0)
    if algorithm.filtration_whole_batch:
        # A pool is an optimizer step, whose rows lie on all ranks.
        parts = list(gather((ids, reward.tolist())))
        every = [i for theirs, _ in parts for i in theirs]
        values = torch.tensor([r for _, theirs in parts for r in theirs], dtype=torch.float32)
        drawn = algorithm.times(values, torch.tensor([steps[i] for i in every], dtype=torch.int64), every, seed)
        times = dict(zip(every, drawn.tolist(), strict=True))
    else:
        times = dict(zip(ids, algorithm.times(reward, group_index(ids), ids, seed).tolist(), strict=True))
    return {"times": torch.tensor([times.get(i, 0) for i in rows.ids], dtype=torch.int32)}


def _estimated(rows: Rows, algorithm: Algorithm, limit: int) -> _Estimate:
    groups = group_index(rows.ids)
    kept = ~torch.isin(groups, groups[rows["graded"] == 0].unique())
    if algorithm.dynamic_sampling:
        kept &= carries_signal(rows["reward"], groups)
    mask = rows.columns.get("loss_mask")
    cost = algorithm.kl_cost(rows["logp_old"], rows["logp_ref"], mask) if algorithm.kl_reward_coef else None
    rewards = algorithm.shaped(rows["reward"], rows["response_length"], limit)
    found = algorithm.advantages(RewardBatch(rewards, groups, mask, cost, rows.columns.get("values")))
    if isinstance(found, Ragged):
        return _Estimate(found.values, mask.values * kept.repeat_interleave(mask.lengths), kept)
    return _Estimate(found.double(), torch.where(kept, rows["response_length"], 0), kept)
