"""The content of a dock, without evaluations, as plain tensors. Snapshots of earlier versions can be restored."""

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
    """Raise ValueError unless a dock with these columns can restore a snapshot. `write` drops columns and states
    that the dock does not declare."""
    if state.get("format") != FORMAT:
        raise ValueError(f"the dock snapshot has format {state.get('format')!r}, but this dock reads format {FORMAT}")
    declared = {n: c.describe() for n, c in columns.items()}
    saved = state["columns"].items() if state["epochs"] else ()
    wrong = [f"column {n!r} ({d}, here {declared[n]})" for n, d in saved if declared.get(n, d) != d]
    if wrong:
        raise ValueError(
            f"the dock snapshot is of another algorithm: {'; '.join(wrong)}; resume with the flags of that run, at "
            "least until its rollout is used up"
        )


def collect(calls: Calls, declared: Declared) -> dict[str, Any]:
    """All open epochs: their cells by rising row number, and their acknowledged rows. Evaluations (negative epochs) are
    left out, since they begin again after a resume."""
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
    # The status is read before the cells. A process outside of the job may finish a row in between: then the snapshot
    # has cells of a row that is not done. In the reverse order the row could be done without cells, and so be lost.
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
    """Version bound of a saved epoch. Before December 2026 it was in a group column `order`, with cells `[4]`: oldest,
    newest, groups, members."""
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
