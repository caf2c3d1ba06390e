"""Mutations: a line of the package is made wrong, and the tests named beside it must fail.

    .venv/bin/python tests/mutate.py                 # all of tests/mutations.toml
    .venv/bin/python tests/mutate.py --case F1       # one of them; may be given again
    .venv/bin/python tests/mutate.py --tier quick    # by what tests/run.sh --quick runs, and not by the tests named

Each mutation is made in a copy of the tree. Exit code 1 where one survives: its tests passed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tomllib

sys.path.append(str(Path(__file__).parent))
from golden import ROOT, copied  # noqa: E402

TABLE = Path(__file__).with_name("mutations.toml")
ORDINARY = "not slow and not upstream and not gpu"
TIMEOUT = 1200  # seconds of the tests of one mutation


@dataclass(frozen=True)
class Mutation:
    """One line that is made wrong."""

    name: str
    fault: str  # what a user would meet
    file: str  # from the root of the repository
    old: str  # occurs once in the file
    new: str
    tests: list[str]  # arguments of pytest

    def text(self, tree: Path) -> str:
        """The file with the fault. Raises ValueError where the line is not there, or there twice."""
        text = (tree / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has {text.count(self.old)} times {self.old!r}, not once")
        return text.replace(self.old, self.new)


def mutations() -> dict[str, Mutation]:
    rows = tomllib.loads(TABLE.read_text())["mutation"]
    return {row["name"]: Mutation(**row) for row in rows}


def table() -> str:
    """The table of docs/development.md."""
    rows = [f"| {m.name} | {m.fault} | {' '.join(m.tests).replace('tests/', '')} |" for m in mutations().values()]
    return "\n".join(["| | fault | seen by, in tests/ |", "|---|---|---|", *rows])


def is_seen(mutation: Mutation, tree: Path, words: Sequence[str]) -> bool:
    """Whether tests fail under a mutation. Raises RuntimeError where pytest could not run them."""
    whole = (tree / mutation.file).read_text()
    (tree / mutation.file).write_text(mutation.text(tree))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *words]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=TIMEOUT, env=_env(tree))
    finally:
        (tree / mutation.file).write_text(whole)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{mutation.name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}")
    return done.returncode == 1


def _env(tree: Path) -> dict[str, str]:
    fixed = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return os.environ | fixed | {"PYTHONPATH": str(tree)}


def main(argv: Sequence[str] | None = None) -> int:
    known = mutations()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", action="append", choices=known, help="only this one; may be given again")
    parser.add_argument(
        "--tier", choices=("named", "quick"), default="named", help="which tests (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    survived, named = 0, args.tier == "named"
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        tree = copied(ROOT, Path(folder) / "tree")
        for name in args.case or known:
            begin, words = time.monotonic(), ["-m", ORDINARY, *known[name].tests] if named else ["-m", "quick"]
            seen = is_seen(known[name], tree, words)
            survived += not seen
            took = f"{time.monotonic() - begin:.0f} s"
            print(f"{name}: {'seen' if seen else 'SURVIVED'}, {took}: {known[name].fault}", flush=True)
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
