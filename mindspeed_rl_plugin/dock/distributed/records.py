"""What a warehouse tells about one commit: which cells are there, where they lie, who has acknowledged what.

Records only ever add (cells appear, rows are acknowledged, groups are cleared), so that applying them twice or
in another order leads to the same end. They are the journal on disk and the broadcast to the controllers alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mindspeed_rl_plugin.dock.distributed.frames import FrameError, Message, encode


class Cells(NamedTuple):
    """Cells of one column, n each. slots: row numbers (group numbers for a group column); segment and offset in
    bytes: where a cell begins; length: its entries."""

    slots: np.ndarray
    segment: np.ndarray
    offset: np.ndarray
    length: np.ndarray


class Sheet(NamedTuple):
    """Cells of columns that were written for the same rows. names: C columns; slots: `[n]`; at: the same as an index;
    segment, offset, length: `[C, n]` each."""

    names: tuple[str, ...]
    slots: np.ndarray
    at: slice | np.ndarray
    segment: np.ndarray
    offset: np.ndarray
    length: np.ndarray

    @classmethod
    def of(cls, columns: Mapping[str, Cells]) -> Sheet:
        """Columns with equal slots."""
        slots = next(iter(columns.values())).slots
        parts = zip(*(cells[1:] for cells in columns.values()), strict=True)
        return cls(tuple(columns), slots, places(slots), *map(np.array, parts))


def places(slots: np.ndarray) -> slice | np.ndarray:
    """`slots` as an index: a slice where they follow each other, which numpy takes ten times faster."""
    if len(slots) and int(slots[-1]) - int(slots[0]) == len(slots) - 1 and (slots[1:] > slots[:-1]).all():
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return slots


class Shape(NamedTuple):
    """Ids of one epoch: groups x members; row number = group * members + member."""

    groups: int
    members: int


@dataclass(frozen=True)
class Record:
    """One commit of a warehouse.

    warehouse, incarnation, seq: whose, since which start of it, and its running number (of all commits of that
    warehouse, from 1, rising over restarts); columns: new cells; acks: state -> rows that it is done with;
    cleared: groups whose cells are gone; versions: weight version of rows, where the cells carry one.
    """

    warehouse: int
    incarnation: int
    seq: int
    epoch: int
    shape: Shape
    columns: Mapping[str, Cells] = field(default_factory=dict)
    acks: Mapping[str, np.ndarray] = field(default_factory=dict)
    cleared: np.ndarray | None = None
    versions: tuple[np.ndarray, np.ndarray] | None = None

    def without(self, refused: np.ndarray, grouped: Collection[str], members: int) -> Record:
        """The same but for some groups, `[groups]` bool. grouped: columns that are numbered by group."""
        columns = {}
        for name, cells in self.columns.items():
            kept = ~refused[cells.slots if name in grouped else cells.slots // members]
            columns[name] = Cells(*(part[kept] for part in cells))
        acks = {state: rows[~refused[rows // members]] for state, rows in self.acks.items()}
        versions = self.versions
        if versions is not None:
            kept = ~refused[versions[0] // members]
            versions = versions[0][kept], versions[1][kept]
        return replace(self, columns=columns, acks=acks, versions=versions)

    def only_acknowledges(self, but: str) -> bool:
        """Whether it says no more than that states other than `but` are done with rows."""
        return not self.columns and self.cleared is None and self.versions is None and but not in self.acks

    @cached_property
    def sheets(self) -> list[Sheet]:
        """The new cells, columns of the same rows together: made once for all controllers of a process."""
        together: dict[int, dict[str, Cells]] = {}
        for name, cells in self.columns.items():
            together.setdefault(id(cells.slots), {})[name] = cells
        return [Sheet.of(columns) for columns in together.values()]

    @cached_property
    def encoded(self) -> bytes:
        """As it travels and lies in the journal, made once for all of them."""
        return b"".join(encode(self.to_message()))

    def to_message(self) -> Message:
        """As it travels and lies in the journal."""
        arrays = {}
        for k, sheet in enumerate(self.sheets):
            arrays[f"{k}.slots"], arrays[f"{k}.segment"] = sheet.slots, sheet.segment
            arrays[f"{k}.offset"], arrays[f"{k}.length"] = sheet.offset, sheet.length
        arrays.update({f"ack.{state}": rows for state, rows in self.acks.items()})
        if self.cleared is not None:
            arrays["cleared"] = self.cleared
        if self.versions is not None:
            arrays["versions.slots"], arrays["versions.value"] = self.versions
        note = {
            "warehouse": self.warehouse,
            "incarnation": self.incarnation,
            "seq": self.seq,
            "epoch": self.epoch,
            "shape": list(self.shape),
            "columns": [sheet.names for sheet in self.sheets],
            "acks": list(self.acks),
        }
        return Message("record", note, arrays)

    @classmethod
    def from_message(cls, message: Message) -> Record:
        """Inverse of `to_message`. Raises FrameError for a message that is no record."""
        note, arrays = message.note, message.arrays
        try:
            columns = {}
            for k, names in enumerate(note["columns"]):
                slots, *parts = (arrays[f"{k}.{field}"] for field in Cells._fields)
                if any(part.shape != (len(names), *slots.shape) for part in parts) or slots.ndim != 1:
                    raise FrameError("a record's cells have parts of different lengths")
                columns.update({n: Cells(slots, *cells) for n, *cells in zip(names, *parts, strict=True)})
            return cls(
                note["warehouse"],
                note["incarnation"],
                note["seq"],
                note["epoch"],
                Shape(*note["shape"]),
                columns,
                {s: arrays[f"ack.{s}"] for s in note["acks"]},
                arrays.get("cleared"),
                (arrays["versions.slots"], arrays["versions.value"]) if "versions.slots" in arrays else None,
            )
        except (KeyError, TypeError) as error:
            raise FrameError(f"malformed record: {error!r}") from error


class EpochSet:
    """Epochs that are over: all below a mark, and some above it. Epochs begin at 0."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._below, self._above = 0, set[int]()
        for number in numbers:
            self.add(number)

    def __contains__(self, number: int) -> bool:
        return number < self._below or number in self._above

    def add(self, number: int) -> None:
        """Add one epoch."""
        self._above.add(number)
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1

    def update(self, other: EpochSet) -> None:
        """Add all of another set."""
        below, *above = other.to_list()
        self._above |= {n for n in range(self._below, below)} | {n for n in above if n >= self._below}
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1

    def to_list(self) -> list[int]:
        """The mark, then what lies above it."""
        return [self._below, *sorted(self._above)]

    @classmethod
    def from_list(cls, numbers: Sequence[int]) -> EpochSet:
        """Inverse of `to_list`."""
        found = cls()
        found._below, found._above = numbers[0], set(numbers[1:])
        return found


def slots_of_groups(groups: np.ndarray, members: int) -> np.ndarray:
    """Row numbers of whole groups, in order."""
    return (np.asarray(groups, np.int64)[:, None] * members + np.arange(members)).reshape(-1).astype(np.int32)
