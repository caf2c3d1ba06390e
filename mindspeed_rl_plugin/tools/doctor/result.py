"""The checks of `doctor`, what they find, which failures follow from another one, and the table of all."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_rl_plugin.monitor.names import METRICS
from mindspeed_rl_plugin.tools.text_table import aligned

PASS, FAIL, NOT_RUN = "pass", "FAIL", "not run"
# Texts that belong to the user: addresses, folders, and names of machines in errors of sockets. What has a slash is a
# path or the name of a model, if it is no fraction, rate or metric.
_NO_PATH = rf"(?:\d+/\d+|[\w.]+/s|input/output|{'|'.join(map(re.escape, METRICS))})(?!\.?[\w/-])"
_PRIVATE = re.compile(
    r"\w+://\S+|[\w.+-]+@[\w.-]+|\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?|(?<=[A-Z_]=)\S+"
    rf"|(?<![\w.<])~?/[\w.@+-][^:,;)'\"<>]*|(?<![\w./])(?!{_NO_PATH})(?:[\w.+-]+/)+[\w.+-]*"
    r"|\[?\b[0-9a-f]{1,4}:[0-9a-f:]*:[0-9a-f:]+\]?"
)
_OF_MODELS = ("engine", "trainer")  # parts whose results belong to a model
_MOST_RANKS = 8  # named in a line


@dataclass(frozen=True)
class Result:
    """The result of one check."""

    part: str  # "machine" | "memory" | "links" | "engine" | "trainer"
    check: str  # name of the check
    verdict: str  # PASS | FAIL | NOT_RUN
    figure: str = ""  # what was measured, with its unit; the reason why a check was not run
    limit: str = ""  # which figures pass
    fix: str = ""  # what to do if it fails
    where: str = ""  # the model, link or machine, if there are several
    ranks: tuple[int, ...] = ()  # those that failed; (): it concerns no single rank
    value: float = 0.0  # `merge` shows the result with the largest one
    ended: int = 0  # it has not come to its end: 1: it waited for another rank; 2: it hung; 3: it died, or an error
    follows: str = ""  # the failed check that may explain this failure

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Result:
        """The inverse of `dataclasses.asdict`, also after JSON."""
        return cls(**{**row, "ranks": tuple(row["ranks"])})

    @property
    def name(self) -> str:
        return f"{self.check} ({self.where})" if self.where else self.check

    @property
    def told(self) -> str:
        """The figure, and the ranks to which it belongs."""
        shown = ", ".join(map(str, self.ranks[:_MOST_RANKS])) + ", ..." * (len(self.ranks) > _MOST_RANKS)
        return f"rank{'s' * (len(self.ranks) > 1)} {shown}: {self.figure}" if self.ranks else self.figure


@dataclass(frozen=True)
class Check:
    """A check and its texts."""

    part: str
    name: str
    limit: str = ""
    fix: str = ""
    explains: str = ""  # parts in which its failure may explain those of later checks

    def result(
        self, good: bool | None, figure: str = "", where: str = "", value: float = 0.0, **limits: object
    ) -> Result:
        """The result of this check. good: whether it passed; None: it was not run, and the figure says why. limits:
        values for the fields of its texts."""
        if good is None:
            return self.not_run(figure, where)
        limit, fix = self.limit.format(**limits), self.fix.format(**limits)
        return Result(self.part, self.name, PASS if good else FAIL, figure, limit, fix, where, value=value)

    def not_run(self, why: str, where: str = "") -> Result:
        return Result(self.part, self.name, NOT_RUN, why, where=where)

    def ended(self, kind: int, how: str, where: str = "") -> Result:
        """The failure of a check that has not come to its end; of several, the earliest is shown. kind: `Result.ended`;
        how: in words."""
        at = -time.time()
        return Result(self.part, self.name, FAIL, how, "an answer in time", self.fix, where, value=at, ended=kind)


def merge(results: Iterable[Result]) -> list[Result]:
    """One result for each check and place, from those of several ranks or machines. It is a failure, if there
    is one, else a pass, else a check that was not run; of several that with the largest `value`. A failure names all
    ranks that failed. Of checks that have not come to their end only those with the largest `ended` count."""
    groups, results = dict[tuple[str, str, str], list[Result]](), list(results)
    for r in results:
        if not 0 < r.ended < max(one.ended for one in results if (one.part, one.where) == (r.part, r.where)):
            groups.setdefault((r.part, r.check, r.where), []).append(r)
    merged = []
    for group in groups.values():
        some = [r for r in group if r.verdict == FAIL] or [r for r in group if r.verdict == PASS] or group
        ranks = tuple(sorted({rank for r in some for rank in r.ranks}))
        merged.append(replace(max(some, key=lambda r: r.value), ranks=ranks))
    return merged


def explained(results: Sequence[Result], checks: Sequence[Check]) -> list[Result]:
    """The results; a failure that may follow from another one names it: the first failed check of the table that
    explains this part. checks: the table. A failure of one model explains only failures of this model."""
    order = {(check.part, check.name): i for i, check in enumerate(checks)}
    causes = {(check.part, check.name): check.explains.split() for check in checks}
    failed = [r for r in results if r.verdict == FAIL and (r.part, r.check) in causes]
    failed.sort(key=lambda r: order[r.part, r.check])

    def cause(one: Result) -> str:
        at = order.get((one.part, one.check), len(order))
        for other in failed:
            same = other.part not in _OF_MODELS or other.where.partition(",")[0] in ("", one.where.partition(",")[0])
            if order[other.part, other.check] < at and same and one.part in causes[other.part, other.check]:
                return f"{other.part}: {other.name}"
        return ""

    return [replace(r, follows=cause(r)) if r.verdict == FAIL else r for r in results]


def guilty(results: Iterable[Result]) -> list[Result]:
    """The failures that follow from no other one."""
    return [r for r in results if r.verdict == FAIL and not r.follows]


def table(results: Sequence[Result]) -> str:
    """The results as a table of text; below it, for each failure, what to do."""
    rows = [(r.part, r.name, r.verdict, _short(r.told), r.limit) for r in results]
    lines = aligned([("part", "check", "result", "figure", "limit"), *rows], 5)
    for r in results:
        if r.verdict == FAIL:
            whole = "" if _short(r.told) == r.told else f"{r.told}\n"
            what = f"may follow from {r.follows}: mend that first" if r.follows else r.fix
            lines.append(f"\n{r.part}: {r.name}: {whole}{what}")
    return "\n".join(lines)


def _short(figure: str) -> str:
    """A figure for the table, at most 70 characters in one line."""
    line = " ".join(figure.split())
    return line if len(line) <= 70 else line[:67] + "..."


def without_private(text: str, names: Iterable[str] = ()) -> str:
    """A text for a bug report, without addresses, folders and these names."""
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "...", text)
    return _PRIVATE.sub("...", text)
