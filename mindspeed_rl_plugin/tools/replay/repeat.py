"""The command `replay`: starts a job again at a checkpoint, with rollouts from its dumps, and compares one iteration.

The job works in a temporary folder with a link to the checkpoint, and saves nothing: the recorded run is only read.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from mindspeed_rl_plugin.checkpoints.checkpoint_files import TRACKER, has_state, iteration_dir, split_iteration_dir
from mindspeed_rl_plugin.config.flag import flag_name
from mindspeed_rl_plugin.config.rl_config import group_types
from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.environment import REPLAY
from mindspeed_rl_plugin.launch.lr_schedule import FLAG_OF
from mindspeed_rl_plugin.monitor.dump import lacking
from mindspeed_rl_plugin.monitor.run_files import dump_file, dumps_owner, read_jsonl, read_metrics, read_run
from mindspeed_rl_plugin.rows import SampleId
from mindspeed_rl_plugin.tools.doctor.nodes import Nodes
from mindspeed_rl_plugin.tools.rehearse.capture import end_by_signals, run
from mindspeed_rl_plugin.tools.rehearse.command_line import Flags
from mindspeed_rl_plugin.tools.rehearse.outcome import tail
from mindspeed_rl_plugin.tools.rehearse.substitutes import WRITES
from mindspeed_rl_plugin.tools.replay import compared

STARTS = "--load --pretrained-checkpoint --ckpt-step --enable-hf2mg-convert"
NEW_SCHEDULE, SAVED_SCHEDULE = "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"
# Groups of flags, and single ones, that a replay reads again; of the rest some only made the rollout.
_READ_GROUPS, _READ_AGAIN = ("algorithm", "forward", "monitor"), {"--rl-temperature", "--rl-tokenizer", "--rl-stage"}
_OF_ROLLOUT = re.compile(r"--(no-)?rl-(overlong|dynamic-sampling|filtration)")
OTHER_LAYOUT = 1e-4  # relative; a number may differ by this on another layout


def recorded(save: Path, run_dir: Path, iteration: int, dumps: str | None = None) -> tuple[dict, dict, int, list[dict]]:
    """What a job recorded of an iteration: run.json, its metrics, the nearest checkpoint before it (0: what the job
    started from), and the rows of its rollout in the dump. Raises ValueError for what a replay lacks."""
    import pyarrow.parquet as pq

    about, old = read_run(run_dir), "an older version wrote it: replay an iteration that this version has run"
    if not about:
        raise ValueError(f"{run_dir} has no run.json: give the --save of a job (and its --rl-run-dir as --run-dir)")
    if "launch" not in about:
        raise ValueError(f"{run_dir}/run.json has no `launch`, the command of the job; {old}")
    lines = {line["iteration"]: line for line in read_metrics(run_dir)}
    if "loss" not in lines.get(iteration, {}):
        raise ValueError(
            f"the job has no update in iteration {iteration}: it has iterations 1 to {max(lines, default=0)}"
        )
    numbers = [int(p.name[5:]) for p in save.glob("iter_*") if p.name[5:].isdigit()]
    nearest = max((number for number in numbers if number < iteration and has_state(str(save), number)), default=0)
    if not nearest and (begun := about["reference"]) and not Path(begun).is_dir():
        why = f"{save} has no checkpoint before iteration {iteration}, and {begun}, with which the job began, is gone"
        raise ValueError(f"{why}: put it back, or give a later iteration")
    if not (folder := dumps or about.get("dump_dir")):
        raise ValueError("the job wrote no dumps, which hold its rollouts: give it --rl-dump-dir DIR")
    if dumps_owner(folder).get("id", about["id"]) != about["id"]:
        raise ValueError(f"{folder} holds the rollouts of another run than {run_dir}: give the --save of that run")
    starts = [number - 1 for number in lines if number <= iteration and "groups/dropped" in lines[number]]
    needed = [dump_file(folder, start) for start in starts if start >= nearest or start == starts[-1]]
    for path in needed:
        try:
            lacks = sorted(lacking(pq.read_schema(path).names))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path}, a rollout that the replay needs, cannot be read: {error}; put it back, or "
                "give --dumps DIR, the --rl-dump-dir that the job had then"
            ) from error
        if lacks:
            raise ValueError(f"{path} has no column {', '.join(lacks)}; {old}")
    return about, lines[iteration], nearest, pq.read_table(needed[-1]).to_pylist()


def command(about: dict, nearest: int, ranks: int, iteration: int, flags: Sequence[str], view: str) -> list[str]:
    """The command of the replay. about, nearest: as in `recorded`; flags: of the user; view: --save of the replay."""
    script, *words = about["launch"]["words"]
    given, asked = Flags.parse(words), Flags.parse(flags)
    given.apply("", WRITES if nearest else f"{WRITES} {STARTS}")
    if not nearest and about["reference"]:
        folder, step = split_iteration_dir(about["reference"])
        given.values |= {"--load": (folder,)} | ({} if step == "release" else {"--ckpt-step": (str(step),)})
    scheduled = [flag for flag in asked.values if any(flag in names.split() for names in FLAG_OF.values())]
    if scheduled and not {NEW_SCHEDULE, SAVED_SCHEDULE} & asked.values.keys():
        given.values.pop(SAVED_SCHEDULE, None)
        given.values[NEW_SCHEDULE] = ()
        print(f"with {NEW_SCHEDULE}: without it {scheduled[0]} is refused or has no effect", file=sys.stderr)
    groups = (group for name, group in group_types().items() if name not in _READ_GROUPS)
    made = {flag_name(f.name) for group in groups for f in fields(group)} - _READ_AGAIN
    if idle := [flag for flag in asked.values if flag.replace("--no-", "--") in made or _OF_ROLLOUT.match(flag)]:
        print(f"without effect, since the rollout is the recorded one: {', '.join(idle)}", file=sys.stderr)
    # A job that writes dumps computes old log-probs by a pass of their own.
    own = ["--save", view, "--rl-run-dir", f"{view}/rl", "--exit-interval", str(iteration)]
    own += ["--rl-old-logprobs", "pass", *(["--rl-generators", "0"] if "--rl-generators" in given else [])]
    return Nodes(ranks).torchrun("-m", "mindspeed_rl_plugin", script, *given.argv(), *own, *flags)


def follow(log: Path, ended: threading.Event) -> None:
    """Print lines of the job on stderr, one for each iteration, until it has ended."""
    shown, over = 0, False
    while not over:
        over = ended.wait(0.5)
        lines = log.read_text(errors="replace").split("\n")[:-1] if log.exists() else []
        said = [line for line in lines if line.startswith(("rl ", "[rl] ready"))]
        for line in said[shown:]:
            print(line, file=sys.stderr, flush=True)
        shown = len(said)


def replay(args: argparse.Namespace, flags: Sequence[str]) -> str:
    """Run an iteration again, and compare. Raises ValueError, with the reason in its log, if the job fails."""
    save, number = args.save.absolute(), args.iteration
    about, numbers, nearest, dumped = recorded(save, args.run_dir or save / "rl", number, args.dumps)
    ids = [SampleId(*(row[name] for name in SampleId._fields)) for row in dumped]
    if args.sample and args.sample not in ids:
        raise ValueError(
            f"--sample {','.join(map(str, args.sample))} is no row of the rollout; {','.join(map(str, ids[0]))} is one"
        )
    launch, device = about["launch"], get_device()
    ranks = launch["ranks"] if args.ranks is None else args.ranks
    here = math.inf if device.is_cpu else device.api.device_count()
    if not 1 <= ranks <= here:
        most = "" if device.is_cpu else f" to {here}"
        fits = f"give --ranks N from 1{most} and, after --, the parallel sizes that fit it"
        raise ValueError(f"the job trained on {launch['ranks']} ranks, and {ranks} cannot run here: {fits}")
    begun = about["reference"] or "random weights, which other parallel sizes would make otherwise"
    begin = f"the checkpoint of {nearest}" if nearest else f"the job's start ({begun})"
    print(f"iteration {number}, from {begin}; {number - nearest - 1} steps in between are repeated", flush=True)
    ended = threading.Event()
    with tempfile.TemporaryDirectory(prefix="rl-replay-") as view:
        if nearest:
            os.symlink(iteration_dir(str(save), nearest), iteration_dir(view, nearest))
            Path(view, TRACKER).write_text(str(nearest))
        asked = {
            "dumps": os.path.abspath(args.dumps or about["dump_dir"]),
            "iteration": number,
            "sample": args.sample,
            "out": view,
        }
        environment = {**os.environ, REPLAY: json.dumps(asked), "TMPDIR": view}
        words, log = command(about, nearest, ranks, number, flags, view), Path(view, "log")
        (watch := threading.Thread(target=follow, args=(log, ended), daemon=True)).start()
        try:
            done = run(words, log, float("inf"), env=environment, cwd=Path(launch["directory"]))
        finally:
            ended.set()
            watch.join()
        tokens = [token for path in sorted(Path(view).glob("tokens-rank*.jsonl")) for token in read_jsonl(path)]
        if not done.ok or not tokens:
            raise ValueError(f"the job ended with status {done.code}:\n{tail(done)}")
        again = {line["iteration"]: line for line in read_metrics(f"{view}/rl")}[number]
    same = ranks == launch["ranks"] and not any("parallel" in flag for flag in flags)
    if flags:
        print(f"with other flags than the job: {shlex.join(flags)}")
    told = compared.report(numbers, again, tokens, dumped, 0.0 if same else OTHER_LAYOUT, args.sample)
    if flags and re.search(r"^(\d+) of \1 numbers are equal", told, re.M):
        print("they change nothing here, as a clip changes nothing where every ratio is 1")
    return told


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
    parser.add_argument("--dumps", metavar="DIR", help="the job's --rl-dump-dir then (default: that of its last start)")
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="the job's --rl-run-dir (default: SAVE/rl)")
    end_by_signals()
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
    try:
        return SampleId(*map(int, text.split(",")))
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"{text}: give three numbers with commas, as 0,3,1") from None
