"""The program of one rank of `doctor`, and `run`, which starts it on the ranks of this machine. A rank writes a line
before each check and a line for each result to the file rank-N.jsonl."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.device.device import Device, get_device
from mindspeed_rl_plugin.environment import environment_apart, flush_output, launch_env
from mindspeed_rl_plugin.generators.launcher_ranks import init_group, store
from mindspeed_rl_plugin.ranks import gather_all, wait_at_most
from mindspeed_rl_plugin.tools.doctor.links import COLLECTIVES, POINT_TO_POINT, SPEED, link_checks
from mindspeed_rl_plugin.tools.doctor.machine import CLOCK, HELD, OWN_DEVICE, PORTS, device_checks
from mindspeed_rl_plugin.tools.doctor.memory_checks import BANDWIDTH, COPIES, FREED, memory_checks
from mindspeed_rl_plugin.tools.doctor.nodes import Nodes
from mindspeed_rl_plugin.tools.doctor.result import FAIL, NOT_RUN, PASS, Result
from mindspeed_rl_plugin.tools.rehearse.capture import run as run_command

RANKS_START = "start of the ranks"
DIED, HUNG, FAILED_WITH, WAITED = "died", "hung", "raised", "waited"  # first words of figures
GRACE_SECONDS = 3.0  # for the results of the other ranks; then this rank ends, and torchrun ends them
ANSWER, OUTPUT_FIX = "an answer in time", "read this rank's lines in the output of the ranks"
_LEADING = re.compile(r"(\d+(\.\d+)?)?")  # in front of a figure
_REASON = re.compile(rf"(ranks? [\d, ]+: )?({DIED}|{HUNG}|{FAILED_WITH})")
_EXIT_STATUS = re.compile(r"rank\s*: (\d+) \(local_rank.*?exitcode\s*: (-?\d+)", re.DOTALL)  # in torchrun's last lines
RANK_CHECKS = {"machine": (OWN_DEVICE, HELD), "memory": (FREED, *COPIES, BANDWIDTH)}
RANK_CHECKS |= {"links": (RANKS_START, SPEED, POINT_TO_POINT, *COLLECTIVES)}
# check -> checks whose failure explains that it fails, for `explained`
CAUSES: dict[str, Sequence[str]] = dict.fromkeys(RANK_CHECKS["memory"], (OWN_DEVICE,))
CAUSES |= {name: (OWN_DEVICE, HELD) for name in (SPEED, BANDWIDTH)}
CAUSES |= {POINT_TO_POINT: (OWN_DEVICE, HELD, SPEED), CLOCK: (PORTS,)}
CAUSES |= {name: (OWN_DEVICE, HELD, SPEED, POINT_TO_POINT) for name in COLLECTIVES}


def main(folder: str, deadline: str) -> int:
    """Run the checks of this rank. Returns 1 if one between ranks raised an error: they may not be in step then."""
    faulthandler.dump_traceback_later(float(deadline), exit=True)  # also if the caller was killed
    with open(Path(folder, f"rank-{launch_env()['rank']}.jsonl"), "w", buffering=1) as file:
        for part, name, call in _steps(get_device(), float(deadline) / 5):
            print(json.dumps({"begins": name, "part": part, "at": time.time()}), file=file)
            broken = False
            try:
                found = call()
            except (RuntimeError, ValueError, OSError, MemoryError) as error:
                broken, late = part != "memory", isinstance(error, TimeoutError | ConnectionError)
                how = f"{WAITED if late else FAILED_WITH}: " if broken else ""
                text = f"{how}{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                found = Result(part, name, FAIL, text, ANSWER, OUTPUT_FIX)
            for one in found if isinstance(found, list) else [found]:
                print(json.dumps({"at": time.time(), "result": asdict(one)}), file=file)
            if broken:
                time.sleep(GRACE_SECONDS)
                return 1
    return 0


def _steps(device: Device, limit: float) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """(part, check, function) of each check. limit: seconds of each wait."""

    def start() -> Result:
        wait_at_most(limit)
        init_group(store(), timedelta(seconds=limit))
        return Result("links", RANKS_START, PASS)

    yield "links", RANKS_START, start
    yield "machine", OWN_DEVICE, lambda: device_checks(device, launch_env()["local_rank"], gather_all)
    yield from (("memory", *row) for row in memory_checks(device).items())
    yield from (("links", *row) for row in link_checks(device, limit).items())


def run(nodes: Nodes, folder: Path, deadline: float) -> list[Result]:
    """Results of the ranks of this machine; afterwards none of them runs. deadline: in seconds; folder: for the files
    of ranks and torchrun, one for each call."""
    environment, first, lines = environment_apart() | {"TMPDIR": str(folder)}, time.time(), {}
    try:
        command = nodes.torchrun("-m", __name__, str(folder), str(deadline))
        done = run_command(command, folder / "ranks.log", deadline, env=environment)
    finally:
        for rank in range(nodes.index * nodes.ranks, (nodes.index + 1) * nodes.ranks):
            lines[rank] = [{"begins": RANKS_START, "part": "links", "at": first}]
            with contextlib.suppress(OSError, ValueError), open(folder / f"rank-{rank}.jsonl") as file:
                lines[rank] += map(json.loads, file)
    found = [(rank, line) for rank, mine in lines.items() for line in mine if "result" in line]
    found = [(rank, Result(**line["result"])) for rank, line in sorted(found, key=lambda pair: pair[1]["at"])]
    status = {int(rank): code for rank, code in _EXIT_STATUS.findall("\n".join(done.lines))}
    results = merge([*found, *_unfinished({rank: mine[-1] for rank, mine in lines.items()}, status)])
    ran, every = {r.check for r in results}, [(part, name) for part, names in RANK_CHECKS.items() for name in names]
    return results + [Result(*check, NOT_RUN, "an earlier check failed") for check in every if check[1] not in ran]


def _unfinished(last: dict[int, dict[str, Any]], status: dict[int, str]) -> Iterator[tuple[int, Result]]:
    """Failures of the ranks that died or hung in a check. last: last line of each rank; status: exit status of ranks
    that torchrun names. When a rank has died or failed, torchrun ends the others by SIGTERM (-15)."""
    inside = {rank: line for rank, line in last.items() if "begins" in line}
    died = {rank for rank in inside if status.get(rank, "-15") != "-15"}
    raised = [line for line in last.values() if line.get("result", {}).get("figure", "").startswith(FAILED_WITH)]
    for rank in died or ({} if raised else inside):
        line, code = inside[rank], status.get(rank)
        seconds = f"{time.time() - line['at']:.0f} s"
        figure = f"{DIED} after {seconds} with exit status {code}" if rank in died else f"{HUNG} for {seconds}"
        yield rank, Result(line["part"], line["begins"], FAIL, figure, ANSWER, OUTPUT_FIX)


def merge(found: Sequence[tuple[int | None, Result]]) -> list[Result]:
    """One result for each check and place, with the figure of the worst rank, and with all ranks that fail. A rank that
    only waited is left out if another one died, hung or raised an error. rank None: the result names ranks itself."""
    known = any(r.verdict == FAIL and _REASON.match(r.figure) for _, r in found)
    groups: dict[tuple[str, str, str], list[tuple[int | None, Result]]] = {}
    for rank, r in found:
        if not (known and r.figure.startswith(WAITED)):
            groups.setdefault((r.part, r.check, r.where), []).append((rank, r))
    return [_worst([one for one in group if one[1].verdict == FAIL] or group) for group in groups.values()]


def _worst(some: list[tuple[int | None, Result]]) -> Result:
    sign = -1 if some[0][1].limit.startswith("at least") else 1
    worst = max((r for _, r in some), key=lambda r: sign * float(_LEADING.match(r.figure)[0] or 0))
    ranks, many = sorted({rank for rank, _ in some if rank is not None}), "; ".join({r.figure: 0 for _, r in some})
    judged = worst.check in (OWN_DEVICE, SPEED, POINT_TO_POINT) and not _REASON.match(worst.figure)
    if worst.verdict != FAIL or judged or worst.figure.startswith(WAITED):  # these name ranks themselves
        return worst
    own = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {worst.figure}"
    return replace(worst, figure=own if ranks else many)


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    flush_output()
    os._exit(status)  # threads of communication libraries may hang at the end of the interpreter
