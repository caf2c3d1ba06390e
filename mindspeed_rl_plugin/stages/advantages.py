"""Advantages of complete groups, from their rewards; with a critic also the returns that it learns."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_rl_plugin.algorithms import Algorithm, Moments, RewardBatch, whiten
from mindspeed_rl_plugin.algorithms.estimators import returns as value_targets
from mindspeed_rl_plugin.algorithms.rewards import rows_of
from mindspeed_rl_plugin.dock import ColumnSpec
from mindspeed_rl_plugin.engine.response_kind import ONE_TURN, ResponseKind
from mindspeed_rl_plugin.reward.specs import ENVIRONMENT
from mindspeed_rl_plugin.rows import Ragged, Rows, group_index, longest_responses
from mindspeed_rl_plugin.stages.stage import Stage, StageSpec


def column_name(algorithm: Algorithm) -> str:
    """Name of the column of the advantages: "advantage" has one number per sample, "advantages" one per token."""
    return "advantages" if algorithm.per_token else "advantage"


def spec(algorithm: Algorithm, kind: ResponseKind = ONE_TURN) -> StageSpec:
    """The stage. It reads token columns only if the algorithm needs them. kind: of the responses."""
    reads = ("reward", "valid", "response_length")
    reads += kind.limited if algorithm.buffer(1) else ()  # for the length penalty
    if algorithm.per_token or algorithm.kl_reward_coef:
        reads += ("loss_mask",)
    reads += ("logp_old", "logp_ref") if algorithm.kl_reward_coef else ()
    level = "token" if algorithm.per_token else "sample"
    writes = [ColumnSpec(column_name(algorithm), torch.float32, level, ragged=algorithm.per_token)]
    if algorithm.needs_critic:
        writes.append(ColumnSpec("returns", torch.float32, "token", ragged=True))
    return StageSpec(
        "advantage",
        reads,
        tuple(writes),
        resource="cpu",
        whole_groups=True,
        if_written=("values", *(("turns", "turn_reward") if algorithm.per_token else ())),
        flags=("--rl-advantage",),
        build=Advantages,
    )


class Advantages(Stage):
    """The stage on this rank."""

    def compute(self, rows: Rows) -> Rows | None:
        """Advantages of this rank's groups; None without groups. Collective if advantages are whitened."""
        context, algorithm, values, moments = self.context, self.context.algorithm, None, None
        if len(rows):
            # Turn rewards have the weight of the grader that returns the environment's reward; 0 without it.
            weights = dict(zip(context.graders.names, context.graders.weights, strict=True))
            values, counts = _estimated(rows, algorithm, context.longest, weights.get(ENVIRONMENT, 0.0))
        if algorithm.whitened:  # over the complete rollout, whose groups are on all ranks
            mine = Moments() if values is None else Moments.of(values, counts)
            moments = Moments.merged(context.ranks.gather(mine))
        if values is None:
            return None
        columns: dict[str, Ragged] = {}
        if algorithm.needs_critic:
            mask = rows["loss_mask"]
            returns = value_targets(Ragged(values, mask.offsets), rows["values"], mask)
            columns["returns"] = Ragged(returns.values.float(), returns.offsets)
        if moments is not None:
            values = whiten(values, moments)
        values = torch.where(counts > 0, values, 0.0).float()
        advantages = Ragged(values, rows["loss_mask"].offsets) if algorithm.per_token else values
        return Rows(rows.ids, {column_name(algorithm): advantages, **columns})


def limited_lengths(rows: Rows) -> Tensor:
    """`[B]` tokens that --rl-max-response-length limits: of the response, with the observations between turns, on
    its longest path."""
    if "prompt_length" not in rows.columns:
        return rows["response_length"]
    return longest_responses(rows)


def _estimated(rows: Rows, algorithm: Algorithm, limit: int, turn_weight: float) -> tuple[Tensor, Tensor]:
    """Advantages, float64: `[B]` of samples or `[T]` of tokens. Also, in the same shape, how many trained tokens each
    advantage has."""
    valid, mask = rows["valid"].bool(), rows.columns.get("loss_mask")
    cost = algorithm.kl_cost(rows["logp_old"], rows["logp_ref"], mask) if algorithm.kl_reward_coef else None
    rewards = algorithm.shaped(rows["reward"], limited_lengths(rows), limit)
    turns = _turn_rewards(rows, turn_weight) if "turns" in rows.columns else None
    batch = RewardBatch(rewards, group_index(rows.ids), mask, cost, rows.columns.get("values"), turns)
    advantages = algorithm.advantages(batch)
    if isinstance(advantages, Ragged):
        return advantages.values, mask.values * valid.repeat_interleave(mask.lengths)
    return advantages.double(), torch.where(valid, rows["response_length"], 0)


def _turn_rewards(rows: Rows, weight: float) -> Ragged:
    """Ragged `[L]` float64: the weighted reward of each turn of the model, on its last token."""
    turns, offsets = rows["turns"], rows["loss_mask"].offsets
    ends = offsets[rows_of(turns)] + turns.values[:, 1] - 1
    values = torch.zeros(int(offsets[-1]), dtype=torch.float64)
    values[ends] = weight * rows["turn_reward"].values.double()
    return Ragged(values, offsets)
