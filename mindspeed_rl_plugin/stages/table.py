"""The stage table: which stages an algorithm has, in the order in which a row passes them.

docs/stages.md shows it. Pairs (DPO) have two stages: pairs, which writes tokens, loss_mask and the reference's
log-probs, and update. The dock's columns, worker states and consumers are derived from this table.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_rl_plugin.algorithms import Algorithm
from mindspeed_rl_plugin.stages import advantages, generate, logprobs, measure, pairs, prompts, reward, select, update
from mindspeed_rl_plugin.stages.stage import StageSpec, resolved


def stage_table(
    algorithm: Algorithm, graders: int, *, dump: bool = False, own: Sequence[StageSpec] = ()
) -> list[StageSpec]:
    """The stages of an algorithm. graders: number of rewards; dump: whether rollouts are written to files; own: a
    user's stages, which come after reward and before select."""
    if algorithm.from_pairs:
        return resolved([pairs.SPEC, update.pair_spec()])
    added = tuple(name for spec in own for name in spec.written)
    specs = [
        prompts.SPEC,
        generate.SPEC,
        reward.spec(graders),
        *own,
        select.spec(algorithm, reads_valid="valid" in added),
        *logprobs.specs(algorithm),
        advantages.spec(algorithm),
        measure.spec(algorithm, dump, added),
        update.spec(algorithm),
    ]
    return resolved(specs)
