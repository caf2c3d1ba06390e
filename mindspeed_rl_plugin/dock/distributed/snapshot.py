"""The whole content of a dock as plain tensors, in the form of `LocalDock.snapshot`: media can be changed on resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mindspeed_rl_plugin.dock.api import ColumnSpec, StateSpec
from mindspeed_rl_plugin.dock.distributed import cells
from mindspeed_rl_plugin.dock.distributed.connections import Connections
from mindspeed_rl_plugin.dock.distributed.frames import Message
from mindspeed_rl_plugin.dock.distributed.manifests import unpacked
from mindspeed_rl_plugin.dock.distributed.records import Record, slots_of_groups
from mindspeed_rl_plugin.dock.epoch import DONE
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId


def collect(net: Connections, columns: Mapping[str, ColumnSpec], states: Mapping[str, StateSpec]) -> list[dict]:
    """Every open epoch: its cells by rising row number, and what is acknowledged."""
    parts: dict[int, list[Record]] = {number: [] for number in net.shapes}
    dead: dict[int, list[int]] = {number: [] for number in net.shapes}
    grouped = {name for name, spec in columns.items() if spec.level == "group"}
    net.health(next(iter(states)))  # learns where groups are that were put anew
    for warehouse in net.living():
        _, gone, records = unpacked(net.warehouse(warehouse, Message("manifest")))
        for record in records:
            if (older := net.older(record.epoch, warehouse)) is not None:
                record = record.without(older, grouped, record.shape.members)
            parts.setdefault(record.epoch, []).append(record)
        for number in net.shapes:
            if number in gone:
                dead[number] += (net.homes(number) == warehouse).nonzero()[0].tolist()
    return [
        _epoch(net, number, found, dead[number], columns, states)
        for number, found in sorted(parts.items())
        if number in net.shapes
    ]


def _epoch(
    net: Connections,
    number: int,
    records: list[Record],
    dead: list[int],
    columns: Mapping[str, ColumnSpec],
    states: Mapping[str, StateSpec],
) -> dict[str, Any]:
    shape = net.shapes[number]
    alive = torch.ones(shape.groups * shape.members, dtype=torch.bool)
    status = {name: torch.zeros(len(alive), dtype=torch.uint8) for name in states}
    for record in records:
        dead = dead + ([] if record.cleared is None else record.cleared.tolist())
        for state, rows in record.acks.items():
            status[state][torch.from_numpy(rows.astype(np.int64))] = DONE
    alive[torch.from_numpy(slots_of_groups(np.array(dead, np.int64), shape.members).astype(np.int64))] = False
    return {
        "number": number,
        "groups": shape.groups,
        "members": shape.members,
        "alive": alive,
        "columns": {name: _column(net, spec, records) for name, spec in columns.items()},
        "status": status,
    }


def _column(net: Connections, spec: ColumnSpec, records: list[Record]) -> dict[str, torch.Tensor]:
    slots, lengths, parts = [], [], []
    for record in records:
        found = record.columns.get(spec.name)
        if found is None:
            continue
        nbytes = found.length.astype(np.int64) * cells.entry_bytes(spec)
        for low, high in cells.portions(nbytes):
            spans = cells.runs(found.segment[low:high], found.offset[low:high], nbytes[low:high])
            data = net.fetch(record.warehouse, spans, net.settings.patience)
            column = cells.as_column(spec, data.copy(), found.length[low:high])
            parts += column.rows() if spec.ragged else list(column.unbind())
        slots += found.slots.tolist()
        lengths += found.length.tolist()
    order = sorted(range(len(slots)), key=slots.__getitem__)
    out = {"slots": torch.tensor([slots[i] for i in order], dtype=torch.int64)}
    if spec.ragged:
        packed = Ragged.from_rows([parts[i] for i in order], dtype=spec.dtype)
        values = packed.values if order else torch.empty(0, *spec.trailing, dtype=spec.dtype)
        return out | {"values": values, "offsets": packed.offsets}
    empty = torch.empty(0, *spec.trailing, dtype=spec.dtype)
    return out | {"values": torch.stack([parts[i] for i in order]) if order else empty}


def rows_of(saved: Mapping[str, Any], columns: Mapping[str, ColumnSpec]) -> list[Rows]:
    """The cells of a saved epoch, one `Rows` a column that is declared here."""
    out = []
    for name in columns.keys() & saved["columns"].keys():
        column = saved["columns"][name]
        slots = column["slots"].tolist()
        members = 1 if columns[name].level == "group" else saved["members"]
        ids = tuple(SampleId(saved["number"], s // members, s % members) for s in slots)
        data = Ragged(column["values"], column["offsets"]) if "offsets" in column else column["values"]
        out.append(Rows(ids, {name: data}))
    return out
