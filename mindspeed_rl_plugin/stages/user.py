"""A user's own stages (`--rl-stage path.py:Class`): after reward, before groups, on TensorDicts.

docs/stages.md has an example. A stage may write `reward`, `valid` (int8, 0: the row is not trained) and columns of its
own, declared as `ColumnSpec`. Later stages and the dumps read these.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl_plugin.dock import ColumnSpec, from_tensordict, to_tensordict
from mindspeed_rl_plugin.engine.response_kind import ONE_TURN, ResponseKind
from mindspeed_rl_plugin.rows import (
    Completion,
    GenerateRequest,
    Prompt,
    Ragged,
    Rows,
    SampleId,
    Sampling,
)
from mindspeed_rl_plugin.stages import generate, prompts, reward, select
from mindspeed_rl_plugin.stages.context import RankContext
from mindspeed_rl_plugin.stages.stage import Stage, StageSpec
from mindspeed_rl_plugin.workers.child import describe
from mindspeed_rl_plugin.workers.user_files import load_function

WRITABLE = {column.name: column for column in (reward.REWARD, select.VALID)}
# Errors that a user's code may raise at the start.
RAISED = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError, RuntimeError,
    SyntaxError, TypeError, ValueError,
)  # fmt: skip


def load_stages(words: Sequence[str], graders: int, kind: ResponseKind = ONE_TURN) -> list[tuple[StageSpec, Any]]:
    """The stages of `--rl-stage`, in their order: declaration, and instance. kind: of the responses.

    Raises ValueError for a missing file or class, and for invalid declarations.
    """
    known = {c.name for spec in (prompts.SPEC, generate.spec(kind), reward.spec(graders)) for c in spec.writes}
    stages: list[tuple[StageSpec, Any]] = []
    for word in words:
        try:
            spec, instance = _load(word)
            if unknown := [name for name in spec.reads if name not in known]:
                raise ValueError(f"no stage before it writes {unknown}; it may read {', '.join(sorted(known))}")
        except RAISED as error:
            text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"--rl-stage {word}: {text}") from error
        known |= set(spec.written)
        stages.append((spec, instance))
    return stages


def _load(word: str) -> tuple[StageSpec, Any]:
    path, _, name = word.rpartition(":")
    if not path or not Path(path).is_file():
        raise ValueError(f"give path/to/file.py:Class; there is no file {path or word!r}")
    instance = load_function(str(Path(path).resolve()), name)()
    if lacking := [a for a in ("reads", "writes", "compute") if not hasattr(instance, a)]:
        raise ValueError(f"{name} has no {', '.join(lacking)}")
    if unknown := [c for c in instance.writes if not isinstance(c, ColumnSpec) and c not in WRITABLE]:
        raise ValueError(f"declare the stage's own columns as ColumnSpec, not {unknown}")
    writes = tuple(c if isinstance(c, ColumnSpec) else WRITABLE[c] for c in instance.writes)
    if differ := [c.name for c in writes if WRITABLE.get(c.name, c) != c]:
        raise ValueError(f"declare {', '.join(differ)} by name only, because it is a column of the plugin")
    if not instance.reads or not writes:
        raise ValueError("a stage reads at least one column and writes at least one")
    stage_name = getattr(instance, "name", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    if (unit := getattr(instance, "unit", "row")) not in ("row", "group"):
        raise ValueError(f"unit {unit!r} is unknown; known: row, group")
    built, whole = partial(UserStage, instance), unit == "group"
    return StageSpec(stage_name, tuple(instance.reads), writes, "cpu", whole_groups=whole, build=built), instance


def try_once(
    stages: Sequence[tuple[StageSpec, Any]],
    prompt: Prompt,
    response: Sequence[int],
    members: int,
    graders: int,
    where: str,
    kind: ResponseKind = ONE_TURN,
) -> None:
    """Call each stage, as a trial, on a group made from a row of the data, with rewards 1, 0, 1, ...

    stages: not the instances of the run, since these may have state; response: token ids of every response;
    graders: number of rewards; where: the row's place in the data; kind: of the responses. Raises ValueError for errors
    and wrong results of a stage.
    """
    rows = _as_sampled(prompt, response, members, graders, kind)
    for spec, instance in stages:
        try:
            with torch.random.fork_rng(devices=()):
                given = Rows(rows.ids, {name: rows[name] for name in spec.reads})
                written = computed(spec, instance, given)
            for column in spec.writes:
                column.check(written[column.name])
        except RAISED as error:
            raise ValueError(f"--rl-stage {spec.name} {describe(error)}\n  when it was tried on {where}") from error
        rows = rows.with_columns(**written.columns)


def _as_sampled(prompt: Prompt, response: Sequence[int], members: int, graders: int, kind: ResponseKind) -> Rows:
    """A group with all columns that a user's stage may read."""
    ids = [SampleId(0, 0, member) for member in range(members)]
    requests = [GenerateRequest(i, prompt.tokens, Sampling(len(response)), 0) for i in ids]
    answers = [Completion(i, tuple(response), (-1.0,) * len(response), "stop", ((0, 0),)) for i in ids]
    answers = [kind.completed(answer, prompt) for answer in answers]
    right = (torch.arange(members) + 1) % 2
    graded = {"reward": right, "reward_parts": right[:, None].expand(-1, graders), "graded": right | 1}
    columns = {c.name: graded.get(c.name, right * 0).to(c.dtype) for c in reward.spec(graders).writes}
    columns |= prompts.prompt_rows(0, [prompt]).take([0] * members).columns
    return generate.completion_rows(requests, answers).with_columns(**columns)


class UserStage(Stage):
    """The stage on this rank. instance: the user's object."""

    def __init__(self, instance: Any, spec: StageSpec, context: RankContext) -> None:
        super().__init__(spec, context)
        self.instance = instance

    def compute(self, rows: Rows) -> Rows | None:
        return computed(self.spec, self.instance, rows) if len(rows) else None


def computed(spec: StageSpec, instance: Any, rows: Rows) -> Rows:
    """The result of the user's `compute` for these rows. Raises ValueError if it does not fit the declaration."""
    if (given := instance.compute(to_tensordict(rows))) is None:
        raise ValueError(f"--rl-stage {spec.name}: compute returned None; return a TensorDict")
    given["ids"] = torch.tensor(rows.ids, dtype=torch.int64).reshape(-1, 3)
    written = from_tensordict(given)
    lacking = [c.name for c in spec.writes if c.name not in written.columns]
    if lacking or len(written) != len(rows):
        raise ValueError(
            f"--rl-stage {spec.name}: compute returned {sorted(written.columns)} for {len(written)} rows; "
            f"declared: {list(spec.written)}, given: {len(rows)} rows"
        )
    return Rows(rows.ids, {c.name: _as_declared(written[c.name], c) for c in spec.writes})


def _as_declared(column: Any, spec: ColumnSpec) -> Any:
    if isinstance(column, Ragged):
        return Ragged(column.values.to(spec.dtype), column.offsets)
    return column.to(spec.dtype)
