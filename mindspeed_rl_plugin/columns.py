"""The columns and worker states of the loop, declared by who uses them; the dock knows none of them.

Levels: "group" one entry a prompt, "sample" one a response, "token" aligned with `tokens` (see types).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mindspeed_rl_plugin.algorithms import Algorithm, RewardBatch, group_index
from mindspeed_rl_plugin.dock import ColumnSpec, StateSpec
from mindspeed_rl_plugin.reward import GradeItem, RewardPool
from mindspeed_rl_plugin.types import Column, Prompt, Ragged, Rows, pack_json, unpack_json


def grpo_columns(graders: int) -> list[ColumnSpec]:
    """Columns of GRPO; `graders` is the number of rewards, the width of `reward_parts`."""
    f32, i64 = torch.float32, torch.int64
    return [
        ColumnSpec("prompt", torch.int32, "group", ragged=True),
        ColumnSpec("meta", torch.uint8, "group", ragged=True),  # JSON: text, answer, row, record
        ColumnSpec("tokens", torch.int32, "token", ragged=True),  # P prompt + R response ids
        ColumnSpec("loss_mask", torch.uint8, "token", ragged=True),
        ColumnSpec("logp_rollout", f32, "token", ragged=True),  # 0.0 where loss_mask is 0
        ColumnSpec("response_length", i64, "sample", ragged=False),
        ColumnSpec("finish", torch.int8, "sample", ragged=False),  # 0 stop, 1 length, 2 abort
        ColumnSpec("version", i64, "sample", ragged=False),  # optimizer updates behind the weights that drew it
        ColumnSpec("reward", f32, "sample", ragged=False),
        ColumnSpec("reward_parts", f32, "sample", ragged=False, trailing=(graders,)),
        ColumnSpec("graded", torch.int8, "sample", ragged=False),  # 0 where a grader failed and the sample is dropped
        ColumnSpec("grader_error", torch.int8, "sample", ragged=False),  # 1 where a grader failed
        ColumnSpec("logp_old", f32, "token", ragged=True),
        ColumnSpec("logp_ref", f32, "token", ragged=True),
        ColumnSpec("advantage", f32, "sample", ragged=False),
        ColumnSpec("kept", torch.int8, "sample", ragged=False),  # 0: trained nowhere, counted in no denominator
    ]


def grpo_states(reference: bool) -> list[StateSpec]:
    """Worker states of GRPO in order; `reference` adds the frozen reference's log-probs."""
    states = [
        StateSpec(
            "generate",
            ("prompt",),
            ("tokens", "loss_mask", "logp_rollout", "response_length", "finish", "version"),
        ),
        # whole groups: a batch grader sees all responses of a prompt in one call, on however many ranks
        StateSpec(
            "reward",
            ("tokens", "loss_mask", "meta"),
            ("reward", "reward_parts", "graded", "grader_error"),
            whole_groups=True,
        ),
        StateSpec("logp_old", ("tokens", "loss_mask"), ("logp_old",)),
        StateSpec("advantage", ("reward", "graded"), ("advantage", "kept"), whole_groups=True),
        StateSpec("update", update_reads(reference), ()),
    ]
    if reference:
        states.insert(3, StateSpec("logp_ref", ("tokens", "loss_mask"), ("logp_ref",)))
    return states


def update_reads(reference: bool) -> tuple[str, ...]:
    """Columns that the update needs of every row."""
    columns = ("tokens", "loss_mask", "logp_rollout", "logp_old", "advantage", "kept", "version")
    return columns + ("logp_ref",) if reference else columns


def prompt_columns(prompts: Sequence[Prompt]) -> dict[str, Column]:
    """Group columns of G prompts."""
    tokens = [torch.tensor(p.tokens, dtype=torch.int32) for p in prompts]
    meta = [{"text": p.text, "answer": p.answer, "row": p.row, "record": dict(p.record)} for p in prompts]
    return {"prompt": Ragged.from_rows(tokens), "meta": pack_json(meta)}


def reward_columns(rows: Rows, pool: RewardPool, decode: Callable[[Sequence[int]], str]) -> Rows:
    """Grade B responses. decode: response token ids to the text that graders see."""
    items = []
    for i, meta in enumerate(unpack_json(rows["meta"])):
        response = rows["tokens"].row(i)[rows["loss_mask"].row(i).bool()]
        items.append(GradeItem(meta["text"], decode(response.tolist()), meta["answer"], meta["record"], rows.ids[i]))
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


def advantage_columns(rows: Rows, algorithm: Algorithm) -> Rows:
    """Advantages of whole groups; a group with a dropped sample is kept out of training altogether."""
    groups = group_index(rows.ids)
    advantage = algorithm.advantages(RewardBatch(rows["reward"], groups))
    broken = groups[rows["graded"] == 0].unique()
    kept = ~torch.isin(groups, broken)
    return Rows(rows.ids, {"advantage": torch.where(kept, advantage, 0.0), "kept": kept.to(torch.int8)})
