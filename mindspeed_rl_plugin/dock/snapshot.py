"""The complete content of a dock as plain tensors. Format 1 is also that of earlier versions of the dock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mindspeed_rl_plugin.dock.api import ANY_VERSION, ColumnSpec, Declared, VersionBound
from mindspeed_rl_plugin.dock.calls import Calls
from mindspeed_rl_plugin.dock.cells import Writer, gather, locate
from mindspeed_rl_plugin.dock.messages import Look
from mindspeed_rl_plugin.dock.places import DONE, ids_tuple, row_ids
from mindspeed_rl_plugin.rows import Ragged, Rows

FORMAT = 1


def check(state: Mapping[str, Any], columns: Mapping[str, ColumnSpec]) -> None:
    """Raise ValueError unless a dock with these columns can restore a snapshot. Columns and states that are not
    declared here are dropped."""
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
    """Every open epoch: its cells by rising row number, and its acknowledged rows. Evaluations, which have negative
    numbers, are left out: they begin again after a resume."""
    return {
        "format": FORMAT,
        "last_epoch": calls.epochs.last,
        "columns": {n: c.describe() for n, c in declared.columns.items()},
        "states": list(declared.states),
        "epochs": [_epoch(calls, declared, n) for n in sorted(calls.epochs.known) if n >= 0],
    }


def _epoch(calls: Calls, declared: Declared, number: int) -> dict[str, Any]:
    epoch, names = calls.epochs.known[number], tuple(declared.columns)
    groups, members, bound = epoch.shape
    ids = row_ids(number, members, np.arange(groups * members))
    status = {}
    # The status is read before the cells. Processes outside of the job may finish a row in between: then the snapshot
    # has the cells of a row that is not done. The reverse would lose the row.
    for state in declared.states:
        done = calls.query(Look, state, ids, True).ids
        status[state] = torch.zeros(len(ids), dtype=torch.uint8)
        status[state][done[:, 1] * members + done[:, 2]] = DONE
    owner, places = locate(calls, names, ids)
    columns = {}
    for i, (name, spec) in enumerate(declared.columns.items()):
        step = members if spec.level == "group" else 1
        slots = (places[0][i, ::step] >= 0).nonzero()[0]
        cells = [place[i : i + 1, slots * step] for place in places]
        column = gather(calls, declared.columns, None, [name], owner[slots * step], cells)[name]
        packed = {"values": column.values, "offsets": column.offsets} if spec.ragged else {"values": column}
        columns[name] = {"slots": torch.from_numpy(slots), **packed}
    sizes = {"number": number, "groups": groups, "members": members}
    if bound != ANY_VERSION:
        sizes["version_bound"] = list(bound)
    alive = torch.from_numpy(np.repeat(epoch.alive, members))
    return {**sizes, "alive": alive, "columns": columns, "status": status}


def bound_of(saved: Mapping[str, Any]) -> VersionBound:
    """Version bound of a saved epoch. Before December 2026 a column of its groups held it: oldest, newest, groups,
    members."""
    former = saved["columns"].get("order", {}).get("values", torch.empty(0))
    if "version_bound" not in saved and len(former) and former.shape[1:] == (4,):
        return VersionBound(*former[0, :2].tolist())
    return VersionBound(*saved.get("version_bound", ()))


def cleared(saved: Mapping[str, Any]) -> list[int]:
    """Groups of a saved epoch that are cleared."""
    return ((~saved["alive"]).nonzero().flatten()[:: saved["members"]] // saved["members"]).tolist()


def write(saved: Mapping[str, Any], declared: Declared, writer: Writer) -> None:
    """Put the cells of a saved epoch, one column after the other, and acknowledge its rows."""
    for name in declared.columns.keys() & saved["columns"].keys():
        column = saved["columns"][name]
        members = 1 if declared.columns[name].level == "group" else saved["members"]
        wanted = row_ids(saved["number"], members, column["slots"].numpy())
        data = Ragged(column["values"], column["offsets"]) if "offsets" in column else column["values"]
        writer.write(Rows(ids_tuple(wanted), {name: data}), None)
    for state in declared.states.keys() & saved["status"].keys():
        rows = (saved["status"][state] == DONE).nonzero().flatten().numpy()
        done = row_ids(saved["number"], saved["members"], rows)
        writer.write(None, state, done, checked=False)
