"""Rows of prompt files, each as the dictionary that the file holds.

Parquet files and saved dataset directories store types. JSON does not, and a reader that infers types turns
"2020-01-01" into a date, and 1 into 1.0 if another row has 2.5, so that the ground truth is wrong. Therefore each line
of JSONL is parsed separately; then an error can also name its line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".json", ".parquet")


class Source:
    """The rows of one path. `len()`, `row(i)` -> dict, `where(i)` -> place of row i, for errors. fills: whether the
    format adds null fields to objects, so that all objects of a list have the same fields."""

    def __init__(
        self, path: str, count: int, get: Callable[[int], Any], where: Callable[[int], str], fills: bool = False
    ) -> None:
        self.path, self.fills, self._count, self._get, self._where = path, fills, count, get, where

    def __len__(self) -> int:
        return self._count

    def row(self, i: int) -> dict[str, Any]:
        """Fields of row i. Raises ValueError if it is not a JSON object."""
        value = self._get(i)
        if not isinstance(value, dict):
            raise ValueError(f"{self.where(i)} is {value!r:.80}, not an object with a field for the prompt")
        return value

    def where(self, i: int) -> str:
        """File and row, as a user finds it."""
        return f"{self.path} {self._where(i)}"


def open_source(path: str) -> Source:
    """Open a JSONL, JSON or Parquet file or a saved dataset directory.

    Raises ValueError, with the file and if possible the line, if the path is none of these, is empty, or is not UTF-8
    or JSON. A line of JSONL is parsed by `row`, which raises ValueError if it is no JSON.
    """
    place = Path(path)
    if place.is_dir():
        source = _saved(path)
    elif place.suffix not in SUFFIXES:
        raise ValueError(
            f"prompt data {path!r} ends in {place.suffix!r}; known: {', '.join(SUFFIXES)} or a saved dataset directory"
        )
    elif place.stat().st_size == 0:
        raise ValueError(f"prompt data {path!r} is empty")
    else:
        source = {".jsonl": _lines, ".json": _document, ".parquet": _parquet}[place.suffix](path)
    if not len(source):
        raise ValueError(f"prompt data {path!r} holds no rows")
    return source


def _lines(path: str) -> Source:
    lines = [(i, line) for i, line in enumerate(_text(path), 1) if line.strip("\ufeff \t\r\n")]

    def get(i: int) -> Any:
        number, line = lines[i]
        try:
            return json.loads(line.lstrip("\ufeff"))
        except ValueError as error:
            raise ValueError(f"{path} line {number} is not JSON: {error}; {line!r:.80}") from error

    return Source(path, len(lines), get, lambda i: f"line {lines[i][0]}")


def _document(path: str) -> Source:
    try:
        document = json.loads("".join(_text(path)).lstrip("\ufeff"))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # a .json file with one object per line
            return _lines(path)
        raise ValueError(f"{path} is not JSON: {error}") from error
    if isinstance(document, dict):
        lists = [k for k, v in document.items() if isinstance(v, list)]
        hint = f"; its field {lists[0]!r} is a list: save only this list" if lists else ""
        raise ValueError(f"{path} holds one object; expected a list of objects{hint}")
    if not isinstance(document, list):
        raise ValueError(f"{path} holds {document!r:.80}; expected a list of objects")
    return Source(path, len(document), document.__getitem__, lambda i: f"entry {i}")


def _parquet(path: str) -> Source:
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path).read()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error
    return Source(path, len(table), lambda i: table.slice(i, 1).to_pylist()[0], lambda i: f"row {i}", fills=True)


def _saved(path: str) -> Source:
    import datasets

    try:
        data = datasets.load_from_disk(path)
    except FileNotFoundError as error:
        raise ValueError(f"directory {path!r} is no saved dataset (Dataset.save_to_disk): {error}") from error
    if isinstance(data, datasets.DatasetDict):
        names = sorted(data)
        one = f"{path.rstrip('/')}/{names[0]}"
        raise ValueError(f"directory {path!r} holds the splits {', '.join(names)}; name one of them: {one}")
    return Source(path, len(data), data.__getitem__, lambda i: f"row {i}", fills=True)


def _text(path: str) -> list[str]:
    """Lines of a file, with their line ends."""
    lines = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                lines.append(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} line {number} is not UTF-8: {error}; convert the file") from error
    return lines
