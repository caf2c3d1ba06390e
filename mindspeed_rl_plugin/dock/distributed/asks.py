"""A lease's question and answer as messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from mindspeed_rl_plugin.dock.distributed.controller import Controller, Grant
from mindspeed_rl_plugin.dock.distributed.frames import Message
from mindspeed_rl_plugin.dock.distributed.picking import Ask
from mindspeed_rl_plugin.dock.distributed.records import Shape


def ask_message(
    state: str,
    ask: Ask,
    columns: Sequence[str],
    *,
    epochs: Mapping[int, Shape],
    after: Mapping[int, int],
    deadline: float,
    lease_seconds: float,
) -> Message:
    """epochs: those that the asker knows open; after: records by warehouse that must be known before the answer."""
    note = {f.name: getattr(ask, f.name) for f in dataclasses.fields(ask) if f.name != "ids"}
    note = {
        "state": state,
        "ask": note,
        "columns": list(columns),
        "epochs": [[n, *shape] for n, shape in epochs.items()],
        "after": after,
        "deadline": deadline,
        "lease_seconds": lease_seconds,
    }
    return Message("lease", note, {} if ask.ids is None else {"ids": ask.ids})


def ask_from(message: Message) -> Ask:
    """The ask inside a message."""
    note = dict(message.note["ask"])
    for name in ("share", "join"):
        note[name] = None if note[name] is None else tuple(note[name])
    return Ask(ids=message.arrays.get("ids"), **note)


def grant_message(controller: Controller, grant: Grant, columns: Sequence[str]) -> Message:
    """Ids, homes, and the place of every cell of `columns`."""
    arrays = {"ids": controller.ids(grant.rows), "home": controller.homes(grant)}
    tokens = None  # lengths of the rows, the same for all their token columns
    for name in columns:
        parts = controller.locations(grant, name)
        if controller.columns[name].level == "token":
            tokens = parts[2] if tokens is None else tokens
            parts = (*parts[:2], tokens)
        arrays.update({f"{name}.{k}": p for k, p in zip(("segment", "offset", "length"), parts, strict=True)})
    return Message("grant", {"token": grant.token}, arrays)


def places(message: Message, column: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Segment, offset and length of a column's cells in a grant."""
    return tuple(message.arrays[f"{column}.{k}"] for k in ("segment", "offset", "length"))
