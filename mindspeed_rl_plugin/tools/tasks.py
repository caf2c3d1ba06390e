"""`python -m mindspeed_rl_plugin tasks verifiers:ID`: writes the tasks of a `verifiers` environment to a data file.

Each line has `answer`, `verifiers` (the task; verifiers makes the prompt from it) and `prompt` (for display and length
limits).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.config.episode_flags import VERIFIERS
from mindspeed_rl_plugin.episodes.verifiers_bridge import interpreter
from mindspeed_rl_plugin.monitor.run_files import atomic_write
from mindspeed_rl_plugin.workers.process import Program, Worker, wait_for

LOAD_SECONDS = 3600.0  # limit for loading the tasks, which may include a download


def main(argv: list[str]) -> int:
    """Write the file. Returns 0, or 1 after an error message."""
    parser = argparse.ArgumentParser(prog="python -m mindspeed_rl_plugin tasks", description=__doc__.splitlines()[0])
    parser.add_argument("environment", help=f"{VERIFIERS}ID or {VERIFIERS}FILE.toml, as for --rl-environment")
    parser.add_argument("--python", help="Python in which verifiers is installed (default: this one)")
    parser.add_argument("--out", required=True, help="the file to write, FILE.jsonl, for --rl-prompt-data")
    parser.add_argument("--limit", type=int, help="largest number of tasks (default: all)")
    options = parser.parse_args(argv)
    try:
        if not options.environment.startswith(VERIFIERS):
            raise ValueError(f"{options.environment!r} is no environment of verifiers; give {VERIFIERS}ID")
        if options.limit is not None and options.limit < 1:
            raise ValueError(f"--limit {options.limit}: give 1 or more")
        count = write(options.environment.removeprefix(VERIFIERS), options.python, options.out, options.limit)
    except ValueError as error:
        print(f"tasks: {error}", file=sys.stderr)
        return 1
    print(f"{count} tasks in {options.out}; train on them with --rl-prompt-data {options.out}")
    return 0


def write(environment: str, python: str | None, path: str, most: int | None) -> int:
    """Write the file atomically. Returns the number of rows. Raises ValueError if this is not possible."""
    count = 0

    def fill(part: Path) -> None:
        nonlocal count
        with part.open("w", encoding="utf-8") as file:
            for row in rows(environment, python, most):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
        if not count:
            raise ValueError(f"{environment!r} has no tasks")

    try:
        atomic_write(path, fill)
    except OSError as error:
        raise ValueError(f"--out {path}: {error}") from error
    return count


def rows(environment: str, python: str | None, most: int | None) -> Iterator[dict[str, Any]]:
    """Rows to write to the data file, from a process of the Python in which verifiers is installed. Raises ValueError
    for an environment that cannot be used."""
    main = "mindspeed_rl_plugin.gateway.verifiers_load:main"
    then = tuple[list[dict[str, Any]] | None, str | None]
    program = Program(main, str | None, then, "verifiers' process", ValueError, interpreter(python))
    worker, end = Worker(program, (environment, most), environment), time.monotonic() + LOAD_SECONDS
    try:
        while not worker.ready():
            _wait(worker, end)
        while some := _next(worker, end):
            yield from some
    finally:
        worker.close()


def _next(worker: Worker, end: float) -> list[dict[str, Any]]:
    worker.call("next", LOAD_SECONDS)
    while (answer := worker.answer()) is None:
        _wait(worker, end)
    some, error = (None, answer) if isinstance(answer, str) else answer
    if error:
        raise ValueError(f"the process that reads the tasks {error}")
    return some


def _wait(worker: Worker, end: float) -> None:
    if not wait_for([worker], end):
        raise ValueError(f"the tasks were not loaded within {LOAD_SECONDS:g} s")
