"""How a user's grader is called, which its signature decides; docs/data-and-rewards.md lists the parameters that it may
have. A batch grader is called with the samples of one group, so results do not depend on how calls are distributed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from difflib import get_close_matches
from typing import Any

from mindspeed_rl_plugin.workers.call_loop import is_async

SINGLE = ("prompt", "response", "answer", "record")
BATCH = ("prompts", "responses", "answers", "records")
ANSWERED = ("conversation", "environment")  # parameters for samples with tools or an environment
CONVERSATIONS = "conversations"
CHAT = "messages"  # further parameter of batch graders of this package: chat messages of the data
# Names of these parameters in other libraries (verl's compute_score, TRL's reward functions).
FOREIGN = {
    "solution_str": "response",
    "ground_truth": "answer",
    "extra_info": "record",
    "completion": "response",
    "completions": "responses",
}


class Grader:
    """A callable. batch: it gets a group of samples; asynchronous: it is a coroutine; fields: the fields of a row that
    it requires."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function
        parameters = inspect.signature(function).parameters.values()
        by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if any(p.kind == p.POSITIONAL_ONLY for p in parameters):
            raise ValueError(f"{name}: its parameters are passed by name, none may be positional-only")
        self.names = {p.name for p in by_name}
        self.required = {p.name for p in by_name if p.default is p.empty}
        self.rest = any(p.kind == p.VAR_KEYWORD for p in parameters)
        self.batch = bool(self.names & set(BATCH))
        self.asynchronous = is_async(function)
        known = BATCH if self.batch else (*SINGLE, *ANSWERED)
        strange = self.required - {*BATCH, CHAT, CONVERSATIONS}
        if self.batch and strange:
            raise ValueError(
                f"{name}: a batch grader takes {', '.join(BATCH)}, not {', '.join(sorted(strange))}{hint(strange)}"
            )
        if not self.names & set(known) and not self.rest:
            raise ValueError(f"{name}: it takes none of {', '.join(SINGLE)} (or {', '.join(BATCH)}){hint(self.names)}")
        needed = self.required & {CONVERSATIONS} if self.batch else self.required - set(SINGLE)
        self.fields = tuple(ANSWERED[0] if name == CONVERSATIONS else name for name in sorted(needed))

    def single(self, item: dict[str, Any]) -> Any:
        """Call with one sample. Raises ValueError for a required parameter that sample and record lack."""
        given = {**item["record"], **{k: item[k] for k in SINGLE}}
        given |= {k: item[k] for k in ANSWERED if item.get(k) is not None}
        missing = sorted(self.required - set(given))
        if missing:
            raise ValueError(f"{self.name} asks for {missing}; the record of this row has {sorted(item['record'])}")
        if not self.rest:
            given = {k: v for k, v in given.items() if k in self.names}
        elif "record" not in self.names:
            del given["record"]  # **record already passes its fields
        return self.function(**given)

    def many(self, items: Sequence[dict[str, Any]]) -> Any:
        """Call with the samples of one group."""
        columns = {name: [item[name[:-1]] for item in items] for name in BATCH}
        more = {CHAT: [item[CHAT] for item in items], CONVERSATIONS: [item.get(ANSWERED[0]) for item in items]}
        columns |= {name: column for name, column in more.items() if name in self.names}
        return self.function(**{k: v for k, v in columns.items() if k in self.names or self.rest})


def hint(names: Iterable[str]) -> str:
    """A hint with our names for parameters of other libraries; "" without such parameters."""
    known = [f"{name} is {FOREIGN[name]} here" for name in sorted(names) if name in FOREIGN]
    return "; " + ", ".join(known) if known else ""


def lacking(fields: Sequence[str], rows: Mapping[str, Set[str]], own: Sequence[str] = SINGLE) -> str | None:
    """Why a callable that requires `fields` cannot be called for some row; None: it can for all. rows: place in the
    data -> fields of the record; own: parameters that it may have in addition to these fields."""
    for where, there in rows.items():
        for name in fields:
            if name not in there:
                known = ("prompt", "answer", *sorted(there))
                close = [FOREIGN[name]] if name in FOREIGN else get_close_matches(name, {*own, *known}, 1)
                meant = f"; did you mean {close[0]}?" if close else "."
                return (
                    f"has a parameter {name!r}, but {where} has no such field (its fields: {', '.join(known)}){meant} "
                    f"Allowed: {', '.join(own)}, a field of the row, or a parameter with a default"
                )
    return None


def number(value: Any) -> float:
    """A grader's result as a finite float. Raises ValueError for anything else, strings included."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise ValueError(f"it returned {value!r:.80} of type {type(value).__name__}, not a number")
    result = float(value)
    if not math.isfinite(result):
        raise ValueError(f"it returned {result}, not a finite number")
    return result
