"""A command line as flags that can be looked up and changed, with a record of every change and its reason."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from typing import NamedTuple

_RULE = re.compile(r"([^=~<]+)(=|~|<=|)(.*)")


class Change(NamedTuple):
    """One changed argument."""

    flag: str
    old: str | None  # value as written; None: the flag was not given
    new: str | None  # value as written; None: the flag is removed
    why: str


class Flags:
    """Flag -> its values as written, in order. As in argparse, the last occurrence of a flag counts."""

    def __init__(self, values: dict[str, tuple[str, ...]]) -> None:
        self.values, self._before = values, dict(values)
        self._why: dict[str, str] = {}  # of each flag that was changed

    @classmethod
    def parse(cls, argv: Iterable[str]) -> Flags:
        """Split tokens into flags (they begin with `--`) and values. Raises ValueError if the first is no flag."""
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
        return [token for flag, values in self.values.items() for token in (flag, *values)]

    def __contains__(self, flag: str) -> bool:
        return flag in self.values

    def get(self, flag: str) -> str | None:
        """The flag's values as written, "" for a switch, None if it is missing."""
        values = self.values.get(flag)
        return None if values is None else " ".join(values)

    def number(self, flag: str, default: int) -> int:
        """The flag's value as an integer. Raises ValueError for another value."""
        text = self.get(flag)
        try:
            return default if text is None else int(text)
        except ValueError:
            raise ValueError(f"{flag} {text}: a whole number is needed here") from None

    def set(self, flag: str, *values: object, why: str) -> None:
        """Set the flag's values. A flag that was not given is added at the end."""
        if self.values.get(flag) != (new := tuple(map(str, values))):
            self.values[flag], self._why[flag] = new, why

    def apply(self, why: str, rules: str, *values: object) -> None:
        """Change flags by rules, separated by spaces. These rules change only given flags: FLAG removes the flag,
        FLAG~VALUE changes its value, FLAG<=N lowers a larger value to N; `*` in FLAG matches any text. FLAG=VALUE sets
        the flag, given or not; FLAG= sets it as a switch. `{0}` in a rule is replaced by the first of `values`."""
        for pattern, sign, value in (_RULE.fullmatch(rule).groups() for rule in rules.split()):
            value = value.format(*values)
            for flag in [pattern] if sign == "=" else fnmatch.filter(self.values, pattern):
                if not sign:
                    del self.values[flag]
                    self._why[flag] = why
                elif sign == "<=":
                    self.set(flag, min(int(value), self.number(flag, 0)), why=why)
                else:
                    self.set(flag, *filter(None, [value]), why=why)

    @property
    def changes(self) -> list[Change]:
        """All changes, one row per flag, with the last reason."""
        before = Flags(self._before)
        rows = [Change(f, before.get(f), self.get(f), why) for f, why in self._why.items()]
        return [row for row in rows if row.old != row.new]
