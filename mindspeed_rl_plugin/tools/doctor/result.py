"""What the checks of `doctor` find: results, which of them explain others, and the table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mindspeed_rl_plugin.tools.text_table import aligned

PASS, FAIL, NOT_RUN = "pass", "FAIL", "not run"
# Texts that belong to the user: addresses, folders, and names of machines in errors of sockets.
_PRIVATE = re.compile(
    r"\w+://\S+|[\w.+-]+@[\w.-]+|\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?|(?<=[A-Z_]=)\S+"
    r"|(?<![\w.<])~?/[\w.@+-][^:,;)'\"<>]*|\b(?:[\w.-]+/){2,}[\w.-]+|\[?\b[0-9a-f]{1,4}:[0-9a-f:]*:[0-9a-f:]+\]?"
)


@dataclass(frozen=True)
class Result:
    """The result of one check."""

    part: str  # "machine" | "memory" | "links" | "engine" | "trainer"
    check: str  # name of the check
    verdict: str  # PASS | FAIL | NOT_RUN
    figure: str = ""  # what was measured, with its unit; the reason why a check was not run
    limit: str = ""  # which figures pass
    fix: str = ""  # what to do if it fails
    where: str = ""  # the model, rank, link or machine, if there are several
    follows: str = ""  # the failed check that explains this failure


@dataclass(frozen=True)
class Check:
    """A check: its texts, and the checks whose failure explains a failure of it, the most likely first."""

    part: str
    name: str
    limit: str
    fix: str
    causes: tuple[Check, ...] = ()

    def result(self, good: bool, figure: str = "", where: str = "", **limits: object) -> Result:
        """The result of this check. good: whether it passed; limits: values for the fields of the limit's text."""
        return result(self.part, self.name, good, figure, self.limit.format(**limits), self.fix, where)

    def not_run(self, why: str, where: str = "") -> Result:
        return Result(self.part, self.name, NOT_RUN, why, where=where)


def result(part: str, check: str, good: bool, figure: str, limit: str, fix: str, where: str = "") -> Result:
    """The result of a check that ran. good: whether it passed."""
    return Result(part, check, PASS if good else FAIL, figure, limit, fix, where)


def causes_of(checks: Iterable[Check]) -> dict[str, list[str]]:
    """Check -> names of the checks whose failure explains its failure."""
    return {check.name: [cause.name for cause in check.causes] for check in checks}


def explained(results: Sequence[Result], causes: Mapping[str, Sequence[str]]) -> list[Result]:
    """The results; failures that follow from another one name it. causes: check -> checks whose failure explains its
    failure, the most likely first. A failure of one model explains only failures of this model."""
    failed = [r for r in results if r.verdict == FAIL]

    def cause(one: Result) -> str:
        for name in causes.get(one.check, ()):
            for other in failed:
                if other.check == name and (not other.where or not one.where or other.where == one.where):
                    return f"{other.part}: {_named(other)}"
        return ""

    return [replace(r, follows=cause(r)) if r.verdict == FAIL else r for r in results]


def guilty(results: Iterable[Result]) -> list[Result]:
    """The failures that follow from no other one."""
    return [r for r in results if r.verdict == FAIL and not r.follows]


def table(results: Sequence[Result]) -> str:
    """The results as a table of text; below it, for each failure, what to do."""
    rows = [(r.part, _named(r), r.verdict, _short(r.figure), r.limit) for r in results]
    lines = aligned([("part", "check", "result", "figure", "limit"), *rows], 5)
    for r in results:
        if r.verdict == FAIL:
            whole = "" if _short(r.figure) == r.figure else f"{r.figure}\n"
            lines.append(f"\n{r.part}: {_named(r)}: {whole}{f'follows from {r.follows}' if r.follows else r.fix}")
    return "\n".join(lines)


def _short(figure: str) -> str:
    """A figure for the table, at most 70 characters in one line."""
    line = " ".join(figure.split())
    return line if len(line) <= 70 else line[:67] + "..."


def without_private(text: str) -> str:
    """A text for a bug report, without addresses and folders."""
    return _PRIVATE.sub("...", text)


def _named(r: Result) -> str:
    return f"{r.check} ({r.where})" if r.where else r.check


class ResultFile:
    """A file to which a process writes its results, a JSON line each, so that they survive its end."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def add(self, results: Iterable[Result | str]) -> None:
        """Write results, and the names of checks that begin, as they come."""
        with self.path.open("a", encoding="utf-8") as file:
            for one in results:
                file.write(json.dumps({"begins": one} if isinstance(one, str) else asdict(one)) + "\n")
                file.flush()

    def read(self) -> tuple[list[Result], str]:
        """The results, and the check that has begun and not ended, "" if there is none."""
        results, open_check = [], ""
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else ():
            row = json.loads(line)
            open_check = row.get("begins", "")
            results += [] if open_check else [Result(**row)]
        return results, open_check
