"""Counts the walks of docs/stages.md: the files of the package that one process of a small job enters, and how often
the way turns back.

    .venv/bin/python tests/walks.py                # this tree: sync, episodes, and an engine that joins a job
    .venv/bin/python tests/walks.py --tree FOLDER  # another one, such as a worktree of a former commit

Rank 0 is counted from its first `train_step` to its end, an engine from start to end. Calls within a file do not count,
nor do the stand-ins of `host/`. A few calls depend on timing: two runs may differ by one or two.
"""

from __future__ import annotations

import argparse
import atexit
import os
import re
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import golden

CASES = {
    "sync": f"{golden.DENSE} {golden.ROLLOUT} {golden.EVALUATE} --rl-algorithm grpo --rl-kl-loss-coef 0.05 "
    "--train-iters 4",
    "episodes": golden.CASES["episodes"].flags,
    "joined": f"{golden.DENSE} {golden.ROLLOUT} --rl-algorithm grpo --rl-schedule async --rl-generators 0 "
    "--rl-correction truncate --rl-wait-timeout 600 --train-iters 6",
}
INVITED = re.compile(r"generate --join (\S+) --secret-file (\S+)")


def count(out: str, start: str, words: list[str]) -> None:
    """Run the package with these arguments. The file `out` gets its calls from file to file, in the order of the first
    of each: caller, called file, function. start: name of the function that counting begins with."""
    package = os.path.join(os.getcwd(), "mindspeed_rl_plugin", "")
    stand_ins = os.path.join(package, "host", "")  # of accelerators, on this machine only
    calls: dict[tuple[str, str], str] = {}
    begun = threading.Event()

    def ours(frame) -> bool:
        return frame.f_code.co_filename.startswith(package) and not frame.f_code.co_filename.startswith(stand_ins)

    def look(frame, event: str, arg: object) -> None:
        if event != "call" or not ours(frame) or not (begun.is_set() or frame.f_code.co_name == start):
            return
        begun.set()
        called, caller = frame.f_code, frame.f_back
        while caller and not ours(caller):
            caller = caller.f_back
        # Who imports a file does not call it.
        if called.co_name == "<module>" or caller is None or caller.f_code.co_name == "<module>":
            return
        if caller.f_code.co_filename != called.co_filename:
            pair = (caller.f_code.co_filename.removeprefix(package), called.co_filename.removeprefix(package))
            calls.setdefault(pair, called.co_qualname)

    def write() -> None:
        Path(out).write_text("".join(f"{a} {b} {name}\n" for (a, b), name in calls.items()))

    sys.argv = ["mindspeed_rl_plugin", *words]
    if os.environ.get("RANK", "0") == "0":
        atexit.register(write)  # runs after what the package registers later
        threading.settrace(look)
        sys.settrace(look)
    runpy.run_module("mindspeed_rl_plugin", run_name="__main__", alter_sys=True)


def walk(name: str, tree: Path, shared: Path, save: Path) -> list[tuple[str, str, str]]:
    """Run a job, or a job and an engine that joins it. Returns the calls of the counted process, as `count` writes
    them. Raises RuntimeError where the job fails."""
    save.mkdir()
    joins, out, log = name == "joined", save / "calls", save / "launch.log"
    env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    counted = [__file__, "--count", str(out)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1" if joins else "2"]
    launch += ["--master-addr", "127.0.0.1", "--master-port", str(golden.free_port())]
    launch += ["-m", "mindspeed_rl_plugin"] if joins else [*counted, "train_step"]
    flags = f"{golden.MODEL} {golden.TRAIN} {CASES[name]} --save {save}".format(shared=shared).split()
    with open(log, "w") as file:
        said = {"cwd": tree, "env": env, "stdout": file, "stderr": subprocess.STDOUT}
        job = subprocess.Popen([*launch, "examples/pretrain_gpt.py", *flags], **said)
        try:
            invited = None
            while joins and invited is None and job.poll() is None:
                time.sleep(0.2)
                invited = INVITED.search(log.read_text())
            if invited:
                join = ["generate", "--join", invited[1], "--secret-file", invited[2]]
                subprocess.run([sys.executable, *counted, "main", *join], check=True, timeout=600, **said)
            if job.wait(600):
                raise RuntimeError(f"{name} failed: {log.read_text()[-3000:]}")
        finally:
            job.terminate()  # no effect on one that has ended
            job.wait(60)
    return [tuple(line.split()) for line in out.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tree", type=Path, default=golden.ROOT, help="the tree to count (default: that of this file)")
    parser.add_argument("--calls", type=Path, metavar="DIR", help="leave the calls of each walk in this folder")
    parser.add_argument("--walk", action="append", choices=CASES, help="only this one; may be given again")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="walks-") as temporary:
        work, tree = Path(temporary), args.tree.resolve()
        golden.prepare(tree, work / "shared")
        for name in args.walk or CASES:
            calls = walk(name, tree, work / "shared", work / name)
            entered = {called for _, called, _ in calls}
            returns = len(calls) - len(entered)
            print(f"{name}: {len(entered)} files, {len(calls)} pairs, {returns} returns", flush=True)
            if args.calls:
                args.calls.mkdir(exist_ok=True)
                (args.calls / name).write_text("".join(" ".join(call) + "\n" for call in calls))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--count"]:
        count(*sys.argv[2:4], sys.argv[4:])
    else:
        main()
