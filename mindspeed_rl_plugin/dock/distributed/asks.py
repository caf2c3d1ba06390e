"""A lease's question and answer as messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from mindspeed_rl_plugin.dock.distributed.controller import Controller, Grant
from mindspeed_rl_plugin.dock.distributed.frames import Message
from mindspeed_rl_plugin.dock.distributed.picking import Ask
from mindspeed_rl_plugin.dock.distributed.records import Shape

DEFAULTS = {f.name: f.default for f in dataclasses.fields(Ask) if f.name != "ids"}


def ask_message(
    state: str,
    ask: Ask,
    columns: Sequence[str],
    *,
    epochs: Mapping[int, Shape],
    after: Mapping[int, int],
    deadline: float,
    waited: float,
    more: bool,
    lease_seconds: float,
) -> Message:
    """epochs: those that the asker knows open; after: records by warehouse that must be known before the answer;
    deadline: seconds until one must come; waited: seconds before this message; more: the asker would ask again."""
    changed = {name: getattr(ask, name) for name, default in DEFAULTS.items() if getattr(ask, name) != default}
    note = {
        "state": state,
        "ask": changed,
        "columns": list(columns),
        "epochs": [[n, *shape] for n, shape in epochs.items()],
        "after": after,
        "deadline": deadline,
        "waited": waited,
        "more": more,
        "lease_seconds": lease_seconds,
    }
    return Message("lease", note, {} if ask.ids is None else {"ids": ask.ids})


def ask_from(message: Message) -> Ask:
    """The ask inside a message."""
    note = dict(message.note["ask"])
    for name in ("share", "join"):
        if name in note:
            note[name] = tuple(note[name])
    return Ask(ids=message.arrays.get("ids"), **note)


def grant_message(controller: Controller, grant: Grant, columns: Sequence[str]) -> Message:
    """Ids and homes of B rows, and `[C, B]` segment, offset and length of the cells of C `columns`."""
    arrays = {"ids": controller.ids(grant.rows), "home": controller.homes(grant)}
    arrays.update(zip(("segment", "offset", "length"), controller.locations(grant, columns), strict=True))
    return Message("grant", {"token": grant.token}, arrays)
