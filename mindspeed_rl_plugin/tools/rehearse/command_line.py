"""A command line as flags that can be looked up and changed, with a record of every change and its reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Change(NamedTuple):
    """One changed argument. old, new: its values as written; None where the flag was, or is, not there."""

    flag: str
    old: str | None
    new: str | None
    why: str


@dataclass
class Flags:
    """`--flag value ...` groups in order. As in argparse the last occurrence of a flag counts."""

    items: list[tuple[str, tuple[str, ...]]]
    _reasons: dict[str, tuple[str | None, str]] = field(default_factory=dict)  # of each flag: what it was, why not now

    @classmethod
    def parse(cls, argv: Iterable[str]) -> Flags:
        """Split at tokens that begin with `--`; `--flag=value` counts too. Positional tokens are a ValueError."""
        items: list[tuple[str, tuple[str, ...]]] = []
        for token in argv:
            if token.startswith("--"):
                flag, equals, value = token.partition("=")
                items.append((flag, (value,) if equals else ()))
            elif not items:
                raise ValueError(f"the training arguments begin with {token!r}, which is no flag")
            else:
                flag, values = items[-1]
                items[-1] = (flag, (*values, token))
        return cls(items)

    def argv(self) -> list[str]:
        """The command line again."""
        return [token for flag, values in self.items for token in (flag, *values)]

    def __contains__(self, flag: str) -> bool:
        return any(name == flag for name, _ in self.items)

    def get(self, flag: str) -> str | None:
        """The flag's values as written, "" for a switch, None when it is not there."""
        return next((" ".join(values) for name, values in reversed(self.items) if name == flag), None)

    def number(self, flag: str, default: int) -> int:
        """The flag's value as an integer. Raises ValueError for another value."""
        text = self.get(flag)
        try:
            return default if text is None else int(text)
        except ValueError:
            raise ValueError(f"{flag} {text}: the rehearsal needs a whole number to make it smaller") from None

    def set(self, flag: str, *values: object, why: str) -> None:
        """Give the flag these values, where it stood or at the end. No change is recorded when they are the same."""
        new, old = tuple(map(str, values)), self.get(flag)
        if old != " ".join(new):
            at = max((i for i, (name, _) in enumerate(self.items) if name == flag), default=len(self.items))
            self.items[at : at + 1] = [(flag, new)]
            self._changed(flag, old, why)

    def at_most(self, flag: str, limit: int, why: str) -> None:
        """Lower the flag's value to `limit`, if it is there and greater."""
        if flag in self and self.number(flag, 0) > limit:
            self.set(flag, limit, why=why)

    def drop(self, flags: str, why: str) -> None:
        """Take every occurrence of these flags out. flags: one or several with spaces between them."""
        for flag in flags.split():
            if flag in self:
                self._changed(flag, self.get(flag), why)
                self.items = [item for item in self.items if item[0] != flag]

    def _changed(self, flag: str, old: str | None, why: str) -> None:
        self._reasons[flag] = (self._reasons.get(flag, (old,))[0], why)

    @property
    def changes(self) -> list[Change]:
        """What differs from the start, one row a flag, with the last reason."""
        rows = [Change(flag, old, self.get(flag), why) for flag, (old, why) in self._reasons.items()]
        return [row for row in rows if row.old != row.new]
