"""A command line as flags that can be looked up and changed, with a record of every change and its reason."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import NamedTuple


class Change(NamedTuple):
    """One changed argument. old, new: its values as written; None where the flag was, or is, not there."""

    flag: str
    old: str | None
    new: str | None
    why: str


class Flags:
    """Flag -> its values as written, in order. As in argparse the last occurrence of a flag counts."""

    def __init__(self, values: dict[str, tuple[str, ...]]) -> None:
        self.values, self._before = values, dict(values)
        self._why: dict[str, str] = {}  # of each flag that was changed

    @classmethod
    def parse(cls, argv: Iterable[str]) -> Flags:
        """Split at tokens that begin with `--`; `--flag=value` counts too. Positional tokens are a ValueError."""
        values: dict[str, tuple[str, ...]] = {}
        flag = ""
        for token in argv:
            if token.startswith("--"):
                flag, equals, value = token.partition("=")
                values[flag] = (value,) if equals else ()
            elif not flag:
                raise ValueError(f"the training arguments begin with {token!r}, which is no flag")
            else:
                values[flag] += (token,)
        return cls(values)

    def argv(self) -> list[str]:
        """The command line again."""
        return [token for flag, values in self.values.items() for token in (flag, *values)]

    def __contains__(self, flag: str) -> bool:
        return flag in self.values

    def get(self, flag: str) -> str | None:
        """The flag's values as written, "" for a switch, None when it is not there."""
        return _shown(self.values.get(flag))

    def number(self, flag: str, default: int) -> int:
        """The flag's value as an integer. Raises ValueError for another value."""
        text = self.get(flag)
        try:
            return default if text is None else int(text)
        except ValueError:
            raise ValueError(f"{flag} {text}: the rehearsal needs a whole number to make it smaller") from None

    def set(self, flag: str, *values: object, why: str) -> None:
        """Give the flag these values, where it stood or at the end."""
        if self.values.get(flag) != (new := tuple(map(str, values))):
            self.values[flag], self._why[flag] = new, why

    def replace(self, flags: str, value: object, why: str) -> None:
        """Give the value to those of the flags that are there. flags, here and below: `--a --b --c-*`."""
        for flag in self._there(flags):
            self.set(flag, value, why=why)

    def at_most(self, flags: str, limit: int, why: str) -> None:
        """Lower the values of the flags that are there and greater."""
        for flag in self._there(flags):
            self.set(flag, min(limit, self.number(flag, 0)), why=why)

    def drop(self, flags: str, why: str) -> None:
        """Take the flags out."""
        for flag in self._there(flags):
            del self.values[flag]
            self._why[flag] = why

    def _there(self, flags: str) -> list[str]:
        return [flag for pattern in flags.split() for flag in fnmatch.filter(self.values, pattern)]

    @property
    def changes(self) -> list[Change]:
        """What differs from the start, one row a flag, with the last reason."""
        rows = [Change(f, _shown(self._before.get(f)), self.get(f), why) for f, why in self._why.items()]
        return [row for row in rows if row.old != row.new]


def _shown(values: tuple[str, ...] | None) -> str | None:
    return None if values is None else " ".join(values)
