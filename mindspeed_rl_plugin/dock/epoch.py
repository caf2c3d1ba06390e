"""One rollout inside a dock: its cells, and how far each state is with each of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl_plugin.dock.api import ColumnSpec, StateSpec
from mindspeed_rl_plugin.dock.store import ColumnStore, pack
from mindspeed_rl_plugin.rows import Column, Ragged, SampleId

FREE, LEASED, DONE = 0, 1, 2
UNKNOWN = -1


class Epoch:
    """Rows are numbered `slot = group * members + member`; a group column is stored by group."""

    def __init__(
        self,
        number: int,
        groups: int,
        members: int,
        columns: Mapping[str, ColumnSpec],
        states: Mapping[str, StateSpec],
    ) -> None:
        self.number, self.groups, self.members = number, groups, members
        self.states = states
        self.cells = {n: ColumnStore(c, groups if c.level == "group" else groups * members) for n, c in columns.items()}
        self.lengths = torch.full((groups * members,), UNKNOWN, dtype=torch.int64)
        self.status = {name: torch.zeros(groups * members, dtype=torch.uint8) for name in states}
        self.alive = torch.ones(groups * members, dtype=torch.bool)

    def slot(self, sample: SampleId) -> int:
        """Row number of an id. Raises ValueError for an id that was not opened."""
        if not (0 <= sample.group < self.groups and 0 <= sample.member < self.members):
            raise ValueError(
                f"id {tuple(sample)} was not opened: epoch {self.number} has groups 0..{self.groups - 1} "
                f"of members 0..{self.members - 1}"
            )
        return sample.group * self.members + sample.member

    def ids(self, slots: Iterable[int]) -> list[SampleId]:
        """Inverse of `slot`."""
        return [SampleId(self.number, s // self.members, s % self.members) for s in slots]

    def present(self, column: str) -> Tensor:
        """`[groups * members]` bool: rows for which the column is committed."""
        cells = self.cells[column]
        return cells.present.repeat_interleave(self.members) if cells.spec.level == "group" else cells.present

    def available(self, state: str) -> Tensor:
        """`[groups * members]` bool: rows that the state can take now."""
        spec = self.states[state]
        mask = self.alive & (self.status[state] == FREE)
        for column in spec.reads:
            mask &= self.present(column)
        if spec.whole_groups:
            mask = mask.view(self.groups, self.members).all(1).repeat_interleave(self.members)
        return mask

    def count(self, state: str, *statuses: int) -> int:
        """Rows not cleared that are in one of `statuses`."""
        status = self.status[state]
        return sum(int((self.alive & (status == s)).sum()) for s in statuses)

    def plan_write(
        self, column: str, data: Column, slots: Sequence[int], lengths: Tensor
    ) -> tuple[list[int], list[int]]:
        """Which rows of `data` (row i belongs to `slots[i]`) are new: their indices and the cells they fill.

        lengths: `[groups * members]` token lengths known so far in this put, updated in place. Raises ValueError
        where a token column disagrees with the other token columns of its row. Nothing is stored.
        """
        cells = self.cells[column]
        present, index, targets = cells.present.tolist(), [], []
        for i, slot in enumerate(slots):
            target = slot // self.members if cells.spec.level == "group" else slot
            if not present[target]:
                present[target] = True
                index.append(i)
                targets.append(target)
        if cells.spec.level == "token" and index:
            assert isinstance(data, Ragged)
            got, known = data.lengths[index], lengths[targets]
            wrong = ((known != UNKNOWN) & (known != got)).nonzero().flatten().tolist()
            if wrong:
                w = wrong[0]
                raise ValueError(
                    f"column {column!r} has {int(got[w])} entries for id {tuple(self.ids([targets[w]])[0])}, the other "
                    f"token columns of that row have {int(known[w])}; {len(wrong)} rows disagree"
                )
            lengths[targets] = got
        return index, targets

    def gather(self, column: str, slots: Sequence[int]) -> Column:
        """Cells of rows; a group cell is repeated for each of its rows."""
        cells = self.cells[column]
        return cells.gather([s // self.members for s in slots] if cells.spec.level == "group" else slots)

    def drop(self, groups: Iterable[int]) -> None:
        """Forget groups and free their cells."""
        gone = [g for g in groups if self.alive[g * self.members]]
        if not gone:
            return
        slots = [g * self.members + m for g in gone for m in range(self.members)]
        self.alive[slots] = False
        for cells in self.cells.values():
            cells.drop(gone if cells.spec.level == "group" else slots)

    def snapshot(self) -> dict[str, Any]:
        """Plain tensors; cells are packed in row order, whatever commits they came by."""
        columns = {}
        for name, cells in self.cells.items():
            slots = cells.present.nonzero().flatten().tolist()
            data = cells.gather(slots)
            ragged = isinstance(data, Ragged)
            columns[name] = {"slots": torch.tensor(slots, dtype=torch.int64), "values": data.values if ragged else data}
            if ragged:
                columns[name]["offsets"] = data.offsets
        status = {name: torch.where(s == DONE, DONE, FREE).to(torch.uint8) for name, s in self.status.items()}
        return {
            "number": self.number,
            "groups": self.groups,
            "members": self.members,
            "alive": self.alive.clone(),
            "columns": columns,
            "status": status,
        }

    def fill(self, saved: dict[str, Any]) -> None:
        """Take over what `snapshot` returned for this epoch, as far as it is declared here."""
        self.alive = saved["alive"].clone()
        for name in self.status.keys() & saved["status"].keys():
            self.status[name] = saved["status"][name].clone()
        for name in self.cells.keys() & saved["columns"].keys():
            column = saved["columns"][name]
            cells, slots = self.cells[name], column["slots"].tolist()
            data = Ragged(column["values"], column["offsets"]) if "offsets" in column else column["values"]
            cells.write(slots, data)
            if cells.spec.level == "token":
                self.lengths[slots] = data.lengths


def empty(spec: ColumnSpec) -> Column:
    """A column with no rows."""
    return pack([], spec) if spec.ragged else torch.empty(0, *spec.trailing, dtype=spec.dtype)
