"""The stage table: which stages an algorithm has, in the order in which a row passes them.

docs/stages.md shows it. Pairs (DPO) have two stages: pairs, which writes tokens, loss_mask and the reference's
log-probs, and update. The dock's columns, worker states and consumers are derived from this table, and schedules run
its stages.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from mindspeed_rl_plugin.algorithms import ALGORITHMS, Algorithm, resolve
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.dock import ColumnSpec
from mindspeed_rl_plugin.engine.response_kind import ONE_TURN, ResponseKind
from mindspeed_rl_plugin.monitor.dump import DUMP_FIELDS
from mindspeed_rl_plugin.stages import (
    advantages,
    generate,
    groups,
    logprobs,
    measure,
    pairs,
    prompts,
    reward,
    select,
    update,
)
from mindspeed_rl_plugin.stages.stage import StageSpec, resolved
from mindspeed_rl_plugin.stages.user import WRITABLE

# Columns of checkpoints before November 2026 -> their names now.
RENAMED = {"kept": "valid", "times": "multiplicity", "weights": "weights_digest"}


def stage_table(
    algorithm: Algorithm,
    graders: int,
    *,
    by_group: bool = True,
    dump: bool = False,
    own: Sequence[StageSpec] = (),
    kind: ResponseKind = ONE_TURN,
    routes: tuple[str, ColumnSpec] | None = None,
) -> list[StageSpec]:
    """The stages of an algorithm. graders: number of rewards; by_group: whether a grader is called with groups; dump:
    whether rollouts are written to files; own: a user's stages, which come after reward and before groups; kind: of
    the responses; routes: the stage that chooses experts for later passes, and their column. Raises ValueError for
    names that are in use."""
    if algorithm.from_pairs:
        return resolved([pairs.SPEC, update.spec(algorithm)])
    added = tuple(name for spec in own for name in spec.written)
    specs = [
        prompts.SPEC,
        generate.spec(kind),
        reward.spec(graders, by_group),
        *own,
        groups.SPEC,
        *logprobs.specs(algorithm),
        select.spec(algorithm),
        advantages.spec(algorithm, kind),
        measure.spec(algorithm, dump, added, kind),
        update.spec(algorithm),
    ]
    specs = specs if routes is None else [_replaying(spec, *routes) for spec in specs]
    for spec in own:
        others = [other for other in specs if other is not spec]
        if spec.name in {other.name for other in others}:
            raise ValueError(f"--rl-stage: two stages are named {spec.name!r}; give yours another `name`")
        theirs = taken_names().union(*(other.written for other in others)) - WRITABLE.keys()
        if taken := theirs.intersection(spec.written):
            raise ValueError(
                f"--rl-stage {spec.name} writes {', '.join(sorted(taken))}, used by the plugin or another stage; "
                "it may write reward, valid, and columns of its own with other names"
            )
    return resolved(specs)


def _replaying(spec: StageSpec, chooses: str, column: ColumnSpec) -> StageSpec:
    """The stage, which writes the experts that it chooses, or reads those of the stage that does."""
    if spec.name == chooses:
        return replace(spec, writes=(*spec.writes, column))
    parts = ["segments"] if chooses == generate.SPEC.name else []  # which weights chose
    return replace(spec, reads=(*spec.reads, column.name, *parts)) if spec.name in ("logp_old", "update") else spec


@functools.cache
def taken_names() -> frozenset[str]:
    """Column names in use: of stages under any algorithm that samples, of dumps, and of old checkpoints."""
    presets = [resolve(AlgorithmConfig(algorithm=name)) for name in ALGORITHMS]
    tables = [stage_table(each, graders=1) for each in presets if not each.from_pairs]
    return frozenset({*(name for table in tables for spec in table for name in spec.written), *DUMP_FIELDS, *RENAMED})
