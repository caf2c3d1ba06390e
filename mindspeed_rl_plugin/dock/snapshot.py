"""The whole content of a dock as plain tensors. Format 1 is what docks before this one wrote, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mindspeed_rl_plugin.dock import reading
from mindspeed_rl_plugin.dock.api import ColumnSpec, Declared
from mindspeed_rl_plugin.dock.calls import Calls
from mindspeed_rl_plugin.dock.cells import empty, fresh, ids_tuple
from mindspeed_rl_plugin.dock.messages import Manifest, Record
from mindspeed_rl_plugin.dock.places import rows_of_groups
from mindspeed_rl_plugin.dock.views import DONE
from mindspeed_rl_plugin.dock.writing import Writer
from mindspeed_rl_plugin.rows import Column, Ragged, Rows

FORMAT = 1


def check(state: Mapping[str, Any], columns: Mapping[str, ColumnSpec]) -> None:
    """Raise ValueError unless a dock with these columns can take over a snapshot. Columns and states that are not
    declared here are left behind: nobody reads them."""
    if state.get("format") != FORMAT:
        raise ValueError(f"dock snapshot has format {state.get('format')!r}, this dock reads format {FORMAT}")
    declared = {n: c.describe() for n, c in columns.items()}
    saved = state["columns"].items() if state["epochs"] else ()
    wrong = [f"column {n!r} ({d}, here {declared[n]})" for n, d in saved if declared.get(n, d) != d]
    if wrong:
        raise ValueError(
            f"dock snapshot was taken under another algorithm: {'; '.join(wrong)}; resume with the same flags, "
            "at least until the rollout in it is used up"
        )


def collect(calls: Calls, declared: Declared) -> dict[str, Any]:
    """Every open epoch: its cells by rising row number, and what is acknowledged."""
    records: dict[int, list[Record]] = {number: [] for number in calls.epochs.shapes}
    for warehouse in range(len(calls.directory.warehouses)):
        for record in calls.ask_warehouse(warehouse, Manifest()).records:
            records.setdefault(record.epoch, []).append(record)
    return {
        "format": FORMAT,
        "last_epoch": calls.epochs.last,
        "columns": {n: c.describe() for n, c in declared.columns.items()},
        "states": list(declared.states),
        "epochs": [_epoch(calls, declared, n, records[n]) for n in sorted(calls.epochs.shapes)],
    }


def _epoch(calls: Calls, declared: Declared, number: int, records: list[Record]) -> dict[str, Any]:
    shape = calls.epochs.shapes[number]
    alive = torch.ones(shape.groups * shape.members, dtype=torch.bool)
    status = {name: torch.zeros(len(alive), dtype=torch.uint8) for name in declared.states}
    gone = calls.epochs.cleared.get(number, np.zeros(shape.groups, bool)).nonzero()[0]
    alive[torch.from_numpy(rows_of_groups(gone, shape.members).astype(np.int64))] = False
    for record in records:
        if record.state is not None:
            status[record.state][torch.from_numpy(record.rows.astype(np.int64))] = DONE
    columns = {name: _column(calls, spec, records) for name, spec in declared.columns.items()}
    sizes = {"number": number, "groups": shape.groups, "members": shape.members}
    return {**sizes, "alive": alive, "columns": columns, "status": status}


def _column(calls: Calls, spec: ColumnSpec, records: list[Record]) -> dict[str, torch.Tensor]:
    found = [(record.warehouse, c) for record in records for c in record.cells if c.names == (spec.name,)]
    slots = np.concatenate([np.empty(0, np.int64), *(c.slots for _, c in found)])
    order = np.argsort(slots, kind="stable")
    column: Column = empty(spec)
    if len(slots):
        owner = np.concatenate([np.full(len(c.slots), warehouse) for warehouse, c in found])[order]
        places = [np.concatenate([getattr(c, name) for _, c in found], 1)[:, order] for name in PLACES]
        before = calls.traffic.read.copy()  # what a checkpoint reads does not count
        column = reading.gather(calls, {spec.name: spec}, "read", [spec.name], owner, places, fresh)[spec.name]
        calls.traffic.read = before
    values = column.values if isinstance(column, Ragged) else column
    out = {"slots": torch.from_numpy(slots[order].astype(np.int64)), "values": values}
    return out | ({"offsets": column.offsets} if isinstance(column, Ragged) else {})


PLACES = ("segment", "offset", "length")


def cleared(saved: Mapping[str, Any]) -> list[int]:
    """Groups of a saved epoch whose cells are gone."""
    return ((~saved["alive"]).nonzero().flatten()[:: saved["members"]] // saved["members"]).tolist()


def write(saved: Mapping[str, Any], declared: Declared, writer: Writer) -> None:
    """Put the cells of a saved epoch, one column after the other, and what was acknowledged."""

    def ids(slots: torch.Tensor, members: int) -> np.ndarray:
        numbers = slots.numpy().astype(np.int64)
        return np.stack([np.full(len(numbers), saved["number"]), numbers // members, numbers % members], 1)

    for name in declared.columns.keys() & saved["columns"].keys():
        column = saved["columns"][name]
        wanted = ids(column["slots"], 1 if declared.columns[name].level == "group" else saved["members"])
        data = Ragged(column["values"], column["offsets"]) if "offsets" in column else column["values"]
        writer.write(Rows(ids_tuple(wanted), {name: data}), wanted, None)
    for state in declared.states.keys() & saved["status"].keys():
        done = ids((saved["status"][state] == DONE).nonzero().flatten(), saved["members"])
        writer.write(None, done[:0], state, done, checked=False)
