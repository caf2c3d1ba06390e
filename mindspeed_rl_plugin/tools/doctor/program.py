"""Runs checks in processes of their own. Each process writes a line before each check and a line with its results, so
that a check that hangs or crashes is a result, too."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from mindspeed_rl_plugin.environment import flush_output, launch_env
from mindspeed_rl_plugin.tools.doctor.nodes import Nodes
from mindspeed_rl_plugin.tools.doctor.result import FAIL, Check, Result, merge
from mindspeed_rl_plugin.tools.rehearse.capture import run
from mindspeed_rl_plugin.tools.rehearse.outcome import reason

EARLIER = "an earlier check failed"  # why a check was not run
_ERRORS = (RuntimeError, ValueError, OSError, MemoryError, TypeError, LookupError, AssertionError, AttributeError)
WAITED, HUNG, DIED = 1, 2, 3  # `Result.ended`
GRACE_SECONDS = 3.0  # for the results of the other ranks; then this rank ends, and torchrun ends them
_EXIT_STATUS = re.compile(r"rank\s*: (\d+) \(local_rank.*?exitcode\s*: (-?\d+)", re.DOTALL)  # in torchrun's last lines


@dataclass(frozen=True)
class CheckCall:
    """A check and its function, which returns results, or the first arguments of `Check.result`."""

    check: Check
    call: Callable[[], Sequence[Any]]
    where: str = ""
    limits: Mapping[str, object] = field(default_factory=dict)

    def results(self) -> list[Result]:
        """Call the function. An error is a failure."""
        try:
            found = self.call()
        except _ERRORS as error:
            kind = WAITED if isinstance(error, TimeoutError | ConnectionError) else DIED
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return [self.check.ended(kind, text, self.where)]
        if isinstance(found, list):
            return found
        good, figure, *value = found
        return [self.check.result(good, figure, self.where, *value, **self.limits)]


def work(steps: Callable[..., Iterable[CheckCall]]) -> NoReturn:
    """The program of such a process: FOLDER SECONDS ARGUMENTS. steps: the checks, by SECONDS and ARGUMENTS. Ends with
    status 1 if a check has not come to its end: later ones of its place do not run then."""
    folder, seconds, *arguments = sys.argv[1:]
    faulthandler.dump_traceback_later(float(seconds), exit=True)  # also if the caller was killed
    broken = set[str]()
    with open(Path(folder, f"rank-{launch_env()['rank']}.jsonl"), "w", buffering=1) as file:
        for step in (step for step in steps(float(seconds), *arguments) if step.where not in broken):
            about = {"part": step.check.part, "name": step.check.name, "where": step.where, "at": time.time()}
            print(json.dumps(about), file=file)
            found = step.results()
            print(json.dumps({"results": [asdict(one) for one in found]}), file=file)
            if step.check.part != "memory" and any(one.ended for one in found):
                broken.add(step.where)
    time.sleep(GRACE_SECONDS if broken else 0)
    flush_output()
    os._exit(1 if broken else 0)  # threads of communication libraries may hang at the end of the interpreter


def run_checks(
    program: str,
    table: Sequence[Check],
    nodes: Nodes,
    folder: Path,
    seconds: float,
    env: Mapping[str, str],
    *arguments: str,
) -> list[Result]:
    """Results of this machine's processes; afterwards none of them runs. program: module that calls `work`; table: its
    checks, in their order; folder: a new one for files; seconds: limit for all; arguments: of the program; from the
    third on they are names of models."""
    folder.mkdir()
    places, began, results, inside = arguments[2:] or ("",), time.time(), list[Result](), dict[int, dict[str, Any]]()
    command = nodes.torchrun("-m", program, str(folder), str(seconds), *arguments)
    done = run(command, folder / "log", seconds, env=env, cwd=folder)
    for rank in range(nodes.index * nodes.ranks, (nodes.index + 1) * nodes.ranks):
        line = {"part": table[0].part, "name": table[0].name, "where": places[0], "at": began}
        with contextlib.suppress(OSError, ValueError), open(folder / f"rank-{rank}.jsonl") as file:
            for line in map(json.loads, file):  # noqa: B007 - the last one is used
                results += [_of_rank(rank, Result.of(row)) for row in line.get("results", ())]
        inside |= {rank: line} if "at" in line else {}
    first = max((r for r in results if r.ended), key=lambda r: r.value, default=None)
    late = first is not None and first.figure.startswith("TimeoutError")  # the rank that ended first has lost no other
    kind = HUNG if first is None or late else WAITED
    status = {int(rank): code for rank, code in _EXIT_STATUS.findall("\n".join(done.lines))}
    for rank, line in inside.items():
        (check,) = (c for c in table if (c.part, c.name) == (line["part"], line["name"]))
        code, after = status.get(rank, "-15"), f"{time.time() - line['at']:.0f} s"
        died = f"died after {after} with exit status {code}: {reason(done)}"
        by_torchrun = code == "-15" or late and code == "-9"  # by the latter it ends a rank that is stopped
        how = (kind, f"hung for {after}") if by_torchrun else (DIED, died)
        results.append(_of_rank(rank, check.ended(*how, line["where"])))
    ran = {(r.check, place) for r in results for place in (r.where, "")}
    left = [check.not_run(EARLIER, p) for p in places for check in table if (check.name, p) not in ran]
    if not done.ok and all(r.verdict != FAIL for r in results):  # its end was between two checks
        check, place = next(((c, p) for p in places for c in table if (c.name, p) not in ran), (table[-1], places[-1]))
        left = [check.ended(DIED, f"died before it with exit status {done.code}: {reason(done)}", place), *left[1:]]
    return [*merge(results), *left]


def _of_rank(rank: int, one: Result) -> Result:
    """A failure of a rank names the rank, if it does not name others."""
    return replace(one, ranks=one.ranks or (rank,)) if one.verdict == FAIL and one.part != "engine" else one
