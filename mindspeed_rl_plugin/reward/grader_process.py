"""The process in which graders run: it receives calls and answers each with the outcome of every item.

The first message is (specs, limit of a call of each grader [seconds], regex of the regex grader, device of reward
models, whether their code may run). The answer is (`Kind` of each grader, None) or (None, error). Then calls `(grader,
items)` follow. At the limit a coroutine is cancelled here; if the call still runs then, the parent kills this process
group. This module does not import torch, so that it starts fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mindspeed_rl_plugin.reward.builtin import make_builtin
from mindspeed_rl_plugin.reward.calling import Grader, number
from mindspeed_rl_plugin.reward.reward_model import RewardModel
from mindspeed_rl_plugin.reward.specs import Spec
from mindspeed_rl_plugin.workers.call_loop import CallLoop, TooLong, settled
from mindspeed_rl_plugin.workers.child import Parent, ValueOrError, describe, outcome
from mindspeed_rl_plugin.workers.user_files import load_function

Items = list[dict[str, Any]]


class Kind(NamedTuple):
    """What the parent must know of a grader: how it is called, and which fields of the data it requires."""

    batch: bool
    asynchronous: bool
    fields: tuple[str, ...]


def main(connection: int, lifeline: int) -> None:
    """Answer calls until the parent closes the connection. Arguments: file descriptors."""
    parent = Parent(connection, lifeline)
    calls = CallLoop(parent)
    specs, timeouts, regex, *of_models = parent.receive()
    graders = [
        parent.load(f"reward {spec.given!r} cannot be loaded: ", _load, spec, regex, *of_models) for spec in specs
    ]
    parent.send(([Kind(g.batch, g.asynchronous, g.fields) for g in graders], None))
    calls.serve(lambda grader, items: grade(graders[grader], items, timeouts[grader]))


async def grade(grader: Grader, items: Items, timeout: float) -> list[ValueOrError]:
    """The outcome of each item of a call. items: one, or a group for a batch grader. Raises TooLong."""
    try:
        value = await settled(grader.many(items) if grader.batch else grader.single(*items), timeout)
        values = _values(value, len(items)) if grader.batch else [value]
    except TooLong:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever user code raises is reported to the parent
        return [(None, describe(error))] * len(items)
    return [outcome(number, value) for value in values]


def _values(values: Any, wanted: int) -> list[Any]:
    if isinstance(values, (str, bytes)) or not (isinstance(values, Sequence) or hasattr(values, "tolist")):
        raise ValueError(
            f"it returned {values!r:.80} of type {type(values).__name__}; give a list, a tuple or a 1-d array: one "
            "number for each response, in order"
        )
    if len(values) != wanted:
        raise ValueError(f"it returned {len(values)} values for {wanted} samples")
    return list(values)


def _load(spec: Spec, regex: str | None, device: str, trust_remote_code: bool) -> Grader:
    if spec.is_model:
        return Grader(spec.name, RewardModel(spec.file, device, trust_remote_code))
    if spec.file is None:
        return Grader(spec.name, make_builtin(spec.name, regex))
    return Grader(spec.name, load_function(spec.file, spec.function))
