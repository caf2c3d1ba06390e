"""The process in which graders run: it takes calls from a connection, and answers each with the outcome of every item.

First message in: (specs, seconds of one call of each, regex of the regex grader, device of reward models); first out:
(what its graders are, None) or ((), error). Then calls `(grader, items)`. The time limit is the parent's: it kills
this process group. Imports no torch, so that it starts in a moment.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from mindspeed_rl_plugin.reward.builtin import make_builtin
from mindspeed_rl_plugin.reward.calling import Grader, number
from mindspeed_rl_plugin.reward.reward_model import RewardModel
from mindspeed_rl_plugin.reward.specs import Spec
from mindspeed_rl_plugin.workers.child import Outcome, Parent, describe, outcome, why_not_loaded
from mindspeed_rl_plugin.workers.user_files import load_function

Items = list[dict[str, Any]]


class Kind(NamedTuple):
    """What the parent asks of a grader: how it is called, and which fields of the data it cannot do without."""

    batch: bool
    asynchronous: bool
    fields: tuple[str, ...]


def main(connection: int, lifeline: int) -> None:
    """Serve until the parent closes its end. Arguments: file descriptors."""
    parent = Parent(connection, lifeline)
    specs, timeouts, regex, device = parent.receive()
    graders = []
    for spec in specs:
        loaded, error = outcome(_load, spec, regex, device)
        if error:
            parent.send(((), f"reward {spec.given!r} cannot be loaded: {why_not_loaded(error)}"))
            return
        graders.append(loaded)
    parent.send(([Kind(g.batch, g.asynchronous, g.fields) for g in graders], None))
    while True:
        grader, items = parent.receive()
        parent.send(grade(graders[grader], items, timeouts[grader]))


def grade(grader: Grader, items: Items, timeout: float) -> list[Outcome]:
    """The outcome of each item; those of an asynchronous grader are awaited together."""
    if grader.batch:
        values, error = outcome(_values, grader, items, timeout)
        return [(None, error)] * len(items) if error else [outcome(number, value) for value in values]
    if grader.asynchronous:
        return asyncio.run(_together(grader, items, timeout))
    return [outcome(lambda item=item: number(_settled(grader.single(item), timeout))) for item in items]


def _values(grader: Grader, items: Items, timeout: float) -> list[Any]:
    values = _settled(grader.many(items), timeout)
    if isinstance(values, (str, bytes)) or not (isinstance(values, Sequence) or hasattr(values, "tolist")):
        raise ValueError(
            f"it returned {values!r:.80} of type {type(values).__name__}; give a list, a tuple or a 1-d array: one "
            "number for each response, in order"
        )
    values = list(values)
    if len(values) != len(items):
        raise ValueError(f"it returned {len(values)} values for {len(items)} samples")
    return values


async def _together(grader: Grader, items: Items, timeout: float) -> list[Outcome]:
    async def one(item: dict[str, Any]) -> Outcome:
        try:
            return number(await asyncio.wait_for(grader.single(item), timeout)), None
        except BaseException as error:  # noqa: BLE001 - whatever user code raises is reported to the parent
            return None, describe(error)

    return await asyncio.gather(*map(one, items))


def _settled(value: Any, timeout: float) -> Any:
    return asyncio.run(asyncio.wait_for(value, timeout)) if inspect.isawaitable(value) else value


def _load(spec: Spec, regex: str | None, device: str) -> Grader:
    if spec.is_model:
        return Grader(spec.name, RewardModel(spec.file, device))
    if spec.file is None:
        return Grader(spec.name, make_builtin(spec.name, regex))
    return Grader(spec.name, load_function(spec.file, spec.function))
