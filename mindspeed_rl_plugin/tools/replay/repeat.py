"""The command `replay`: starts a job again at a checkpoint, with rollouts from its dumps, and compares one iteration.

The job works in a temporary folder with a link to the checkpoint, and saves nothing: the recorded run is only read.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mindspeed_rl_plugin.checkpoints.checkpoint_files import TRACKER, has_state, iteration_dir
from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.environment import REPLAY
from mindspeed_rl_plugin.monitor.dump import REPLAYED
from mindspeed_rl_plugin.monitor.run_files import OWNER_FILE, dump_file, read_jsonl, read_metrics, read_run
from mindspeed_rl_plugin.rows import SampleId
from mindspeed_rl_plugin.tools.rehearse.capture import run
from mindspeed_rl_plugin.tools.replay import compared

# Flags of places where a job writes.
DROPPED = ("--rl-dump-dir", "--tensorboard-dir", "--wandb-project", "--rl-trace")
OTHER_LAYOUT = 1e-4  # relative; a number may differ by this on another layout


def recorded(save: Path, run_dir: Path, iteration: int) -> tuple[dict, dict, int, list[dict]]:
    """What a job recorded of an iteration: run.json, its metrics, the nearest checkpoint before it, and the rows of its
    rollout in the dump. Raises ValueError for what a replay lacks."""
    import pyarrow.parquet as pq

    about, old = read_run(run_dir), "an older version wrote it: replay an iteration that this version has run"
    if not about:
        raise ValueError(f"{run_dir} has no run.json: give the --save of a job (and its --rl-run-dir as --run-dir)")
    if "launch" not in about:
        raise ValueError(f"{run_dir}/run.json has no `launch`, the command of the job; {old}")
    lines = {line["iteration"]: line for line in read_metrics(run_dir)}
    if "loss" not in lines.get(iteration, {}):
        raise ValueError(f"the job has no update in iteration {iteration}: its metrics end at {max(lines, default=0)}")
    numbers = [int(p.name[5:]) for p in save.glob("iter_*") if p.name[5:].isdigit()]
    saved = sorted(number for number in numbers if has_state(str(save), number))
    if not (before := [number for number in saved if number < iteration]):
        raise ValueError(f"{save} has no checkpoint before iteration {iteration}, only {saved}: give a later iteration")
    if not (folder := about.get("dump_dir")):
        raise ValueError("the job wrote no dumps, which hold its rollouts: give it --rl-dump-dir DIR")
    owner = Path(folder, OWNER_FILE)
    if owner.exists() and json.loads(owner.read_text(encoding="utf-8")).get("id") != about["id"]:
        raise ValueError(f"{folder} holds the rollouts of another run than {run_dir}: give the --save of that run")
    starts = [number - 1 for number in lines if number <= iteration and "groups/dropped" in lines[number]]
    needed = [dump_file(folder, start) for start in starts if start >= before[-1] or start == starts[-1]]
    for path in needed:
        if not path.exists():
            raise ValueError(f"{path}, a rollout that the replay needs, is missing: put it back")
        try:
            names = pq.read_schema(path).names
        except OSError as error:
            raise ValueError(f"{path} is damaged ({error}): put an undamaged copy there") from error
        if lacking := [name for name in REPLAYED if name not in names]:
            raise ValueError(f"{path} has no column {', '.join(lacking)}; {old}")
        if "turns" in names:
            raise ValueError(f"{path} has responses of several turns: a replay repeats responses of one turn only")
    return about, lines[iteration], before[-1], pq.read_table(needed[-1]).to_pylist()


def command(words: Sequence[str], view: str, ranks: int, iteration: int, overrides: Sequence[str]) -> list[str]:
    """The command of the replay. words: script and arguments of the job; view: --save of the replay."""
    kept, dropped = list[str](), False
    for word in words:
        if word.startswith("--"):
            dropped = word.partition("=")[0] in DROPPED
        kept += [] if dropped else [word]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    # A job that writes dumps computes old log-probs by a pass of their own.
    own = ["--save", view, "--rl-run-dir", f"{view}/rl", "--exit-interval", str(iteration), "--rl-old-logprobs", "pass"]
    own += ["--rl-generators", "0"] if any(word.startswith("--rl-generators") for word in words) else []
    return [*torchrun, "-m", "mindspeed_rl_plugin", *kept, *own, *overrides]


def replay(args: argparse.Namespace, flags: Sequence[str]) -> str:
    """Run an iteration again, and compare. Raises ValueError, with the reason in its log, if the job fails."""
    save, number = args.save.absolute(), args.iteration
    about, numbers, checkpoint, dumped = recorded(save, args.run_dir or save / "rl", number)
    launch, steps = about["launch"], number - checkpoint - 1
    ranks, device = args.ranks or launch["ranks"], get_device()
    if ranks < 1:
        raise ValueError(f"--ranks {ranks}: give 1 or more")
    if not device.is_cpu and ranks > device.api.device_count():
        raise ValueError(f"the job had {ranks} ranks, and here are {device.api.device_count()} devices: give --ranks N")
    print(f"iteration {number}, from the checkpoint of {checkpoint}; {steps} steps in between are repeated", flush=True)
    with tempfile.TemporaryDirectory(prefix="rl-replay-") as view:
        os.symlink(iteration_dir(str(save), checkpoint), iteration_dir(view, checkpoint))
        Path(view, TRACKER).write_text(str(checkpoint))
        asked = {"dumps": about["dump_dir"], "iteration": number, "sample": args.sample, "out": view}
        environment = {**os.environ, REPLAY: json.dumps(asked), "TMPDIR": view}
        words, folder = command(launch["words"], view, ranks, number, flags), Path(launch["directory"])
        done = run(words, Path(view, "log"), float("inf"), env=environment, cwd=folder)
        rows = [row for path in sorted(Path(view).glob("rows-rank*.jsonl")) for row in read_jsonl(path)]
        if not done.ok or not rows:
            said = [line for line in done.lines if line.startswith(("[rl]", "  - "))] or done.lines
            why = next((i for i, line in enumerate(said) if "RL cannot run" in line or " stops: " in line), -12)
            raise ValueError("\n".join([f"the job ended with status {done.code}:", *said[why:][:12]]))
        again = {line["iteration"]: line for line in read_metrics(f"{view}/rl")}[number]
    same = ranks == launch["ranks"] and all(flag.startswith("--rl-") for flag in flags if flag.startswith("--"))
    return compared.report(numbers, again, rows, dumped, 0.0 if same else OTHER_LAYOUT, args.sample)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m mindspeed_rl_plugin replay SAVE --iteration K [-- FLAGS]`. Returns 1, with a message, if it fails."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    usage = "%(prog)s SAVE --iteration K [options] [-- flags of the job that shall differ, from the checkpoint on]"
    parser = argparse.ArgumentParser(prog="mindspeed_rl_plugin replay", usage=usage, description=__doc__)
    parser.add_argument("save", metavar="SAVE", type=Path, help="the --save of the job, which had --rl-dump-dir")
    parser.add_argument("--iteration", metavar="K", type=int, required=True, help="the iteration to run again")
    parser.add_argument("--sample", metavar="ROLLOUT,GROUP,MEMBER", type=sample_id, help="a response to show in full")
    parser.add_argument("--ranks", metavar="N", type=int, help="ranks, on this machine (default: as the job trained)")
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="the job's --rl-run-dir (default: SAVE/rl)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the job's processes are ended
    try:
        print(replay(parser.parse_args(words[:at]), words[at + 1 :]))
    except KeyboardInterrupt:
        print("replay: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 1
    return 0


def sample_id(text: str) -> SampleId:
    """Three numbers with commas, as the columns `epoch`, `group`, `member` of a dump."""
    return SampleId(*map(int, text.split(",")))
