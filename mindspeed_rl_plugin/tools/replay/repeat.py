"""The command `replay`: starts a job again at a checkpoint, with rollouts from its dumps, and compares one iteration.

The job works in a temporary folder with a link to the checkpoint, and saves nothing: the recorded run is only read.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.checkpoints.checkpoint_files import TRACKER, has_state, iteration_dir
from mindspeed_rl_plugin.environment import REPLAY
from mindspeed_rl_plugin.monitor.dump import REPLAYED
from mindspeed_rl_plugin.monitor.run_files import OWNER_FILE, dump_file, read_jsonl, read_metrics, read_run
from mindspeed_rl_plugin.rows import SampleId
from mindspeed_rl_plugin.tools.rehearse.capture import run
from mindspeed_rl_plugin.tools.replay.compared import report

PLACES = ("--tensorboard-dir", "--wandb-project")  # flags of places where a job writes; a replay writes to none


@dataclass(frozen=True)
class Recorded:
    """An iteration that a job has recorded, and what a replay of it needs."""

    run: dict[str, Any]  # run.json
    save: Path
    iteration: int
    checkpoint: int  # the nearest one before the iteration
    numbers: dict[str, Any]  # metrics of the iteration
    rollout: int  # iterations before the rollout that the iteration trains

    @property
    def dump(self) -> Path:
        return dump_file(self.run["dump_dir"], self.rollout)

    @classmethod
    def of(cls, save: Path, run_dir: Path, iteration: int) -> Recorded:
        """Read and check the files of a job. Raises ValueError for what is missing."""
        run = read_run(run_dir)
        if not run:
            raise ValueError(
                f"{run_dir} has no run.json: give the --save of a job, and --run-dir if the job had --rl-run-dir"
            )
        if "launch" not in run:
            raise ValueError(
                f"{run_dir}/run.json has no 'launch', the command of the job: an older version of the plugin wrote it. "
                "Resume the job with this version, then iterations from that resume on can be replayed"
            )
        lines = {line["iteration"]: line for line in read_metrics(run_dir)}
        if "loss" not in lines.get(iteration, {}):
            raise ValueError(f"--iteration {iteration} is not in {run_dir}/metrics.jsonl, which ends at {max(lines)}")
        found = [int(path.name[5:]) for path in save.glob("iter_*") if path.name[5:].isdigit()]
        found = sorted(each for each in found if has_state(str(save), each))
        if not (before := [each for each in found if each < iteration]):
            least = f"give an iteration above {found[0]}" if found else "it needs --save-interval"
            raise ValueError(
                f"{save} has no checkpoint before iteration {iteration} (it has {found or 'none'}); {least}"
            )
        starts = [number - 1 for number in lines if number <= iteration and "groups/dropped" in lines[number]]
        recorded = cls(run, save, iteration, before[-1], lines[iteration], max(starts))
        recorded._check_dumps([start for start in starts if start >= before[-1]])
        return recorded

    def _check_dumps(self, starts: Sequence[int]) -> None:
        """starts: iterations before each rollout that the replay needs. Raises ValueError for dumps that lack one."""
        import pyarrow.parquet as pq

        if not (folder := self.run.get("dump_dir")):
            raise ValueError("the job wrote no dumps, which hold its rollouts: give it --rl-dump-dir DIR")
        owner = Path(folder) / OWNER_FILE
        if owner.exists() and json.loads(owner.read_text(encoding="utf-8")).get("id") != self.run.get("id"):
            raise ValueError(
                f"{folder} holds the rollouts of another run than {self.save}; give the --save of that run"
            )
        for path in (dump_file(folder, start) for start in starts):
            if not path.exists():
                raise ValueError(f"{path} is missing: the replay of iteration {self.iteration} needs this rollout")
            names = pq.read_schema(path).names
            if lacking := [name for name in (*REPLAYED, "segments") if name not in names]:
                raise ValueError(
                    f"{path} has no column {', '.join(lacking)}: an older version of the plugin wrote it; replay an "
                    "iteration that this version has run"
                )
            if "turns" in names:
                raise ValueError(f"{path} has responses of several turns, which a replay cannot repeat yet")

    def check_sample(self, sample: Sequence[int]) -> None:
        """Raises ValueError if the iteration's rollout has no such row."""
        import pyarrow.parquet as pq

        ids = [pq.read_table(self.dump, columns=[name])[name].to_pylist() for name in SampleId._fields]
        if tuple(sample) not in (rows := [*zip(*ids, strict=True)]):
            shown = " to ".join(",".join(map(str, row)) for row in (rows[0], rows[-1]))
            raise ValueError(f"--sample {','.join(map(str, sample))} is not in the rollout, whose rows are {shown}")

    def command(self, view: Path, ranks: int, overrides: Sequence[str]) -> list[str]:
        """The command of the replay. view: its --save."""
        launch = self.run["launch"]
        own = ["--save", view, "--rl-run-dir", view / "rl", "--rl-dump-dir", view / "dump"]
        own += ["--exit-interval", self.iteration]
        given = {word.partition("=")[0] for word in launch["arguments"]}
        own += [word for flag in PLACES if flag in given for word in (flag, "")]
        own += ["--rl-generators", "0"] if "--rl-generators" in given else []
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        words = [*torchrun, "-m", "mindspeed_rl_plugin", launch["script"], *launch["arguments"], *own, *overrides]
        return [*map(str, words)]

    def story(self) -> str:
        """Where the replay begins."""
        between = range(self.checkpoint + 1, self.iteration)
        steps = f"repeats {len(between)} steps ({', '.join(map(str, between))}) through the dumps" if between else ""
        return f"iteration {self.iteration}, from the checkpoint of iteration {self.checkpoint}" + (
            steps and f"; {steps}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m mindspeed_rl_plugin replay SAVE --iteration K [...] [-- FLAGS]`. Returns 1, with a message, if it is not
    possible."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="mindspeed_rl_plugin replay",
        usage="%(prog)s SAVE --iteration K [options] [-- FLAGS of the job that shall differ]",
        description="Runs log-probs, advantages and update of an iteration again, from its checkpoint and its dump, and "
        "shows each number beside the recorded one. Call it in the environment of the launch script.",
    )
    parser.add_argument("save", metavar="SAVE", type=Path, help="the --save of the job, which had --rl-dump-dir")
    parser.add_argument("--iteration", metavar="K", type=int, required=True, help="the iteration to run again")
    parser.add_argument("--sample", metavar="ROLLOUT,GROUP,MEMBER", type=_sample, help="also show one response")
    parser.add_argument("--ranks", metavar="N", type=int, help="ranks, on this machine (default: as the job trained)")
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="the job's --rl-run-dir (default: SAVE/rl)")
    parser.add_argument("--timeout", type=float, default=3600.0, help="longest time of the replay [s] (default: 3600)")
    args = parser.parse_args(words[:at])
    try:
        recorded = Recorded.of(args.save.absolute(), args.run_dir or args.save / "rl", args.iteration)
        if args.sample:
            recorded.check_sample(args.sample)
        print(recorded.story(), flush=True)
        print(
            replay(recorded, args.ranks or recorded.run["launch"]["ranks"], args.sample, words[at + 1 :], args.timeout)
        )
    except (ValueError, OSError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 1
    return 0


def replay(recorded: Recorded, ranks: int, sample: Sequence[int] | None, flags: Sequence[str], timeout: float) -> str:
    """Run the iteration again, and compare. Raises ValueError, with the end of the log, if the job fails."""
    launch = recorded.run["launch"]
    with tempfile.TemporaryDirectory(prefix="rl-replay-") as folder:
        view, number = Path(folder), recorded.checkpoint
        (view / "rl").mkdir()
        os.symlink(iteration_dir(str(recorded.save), number), iteration_dir(folder, number))
        (view / TRACKER).write_text(str(number))
        asked = {"dumps": recorded.run["dump_dir"], "iteration": recorded.iteration, "sample": sample, "out": folder}
        env = {**os.environ, REPLAY: json.dumps(asked)}
        done = run(recorded.command(view, ranks, flags), view / "log", timeout, env=env, cwd=Path(launch["directory"]))
        rows = [row for path in sorted(view.glob("rows-rank*.jsonl")) for row in read_jsonl(path)]
        if not done.ok or not rows:
            told = [line for line in done.lines if line.startswith(("[rl]", "  - "))] or done.lines
            raise ValueError("\n".join([f"the replay ended with status {done.code}; the end of its log:", *told[-12:]]))
        again = {line["iteration"]: line for line in read_metrics(view / "rl")}[recorded.iteration]
    same = ranks == launch["ranks"] and all(flag.startswith("--rl-") for flag in flags if flag.startswith("--"))
    return report(recorded.numbers, again, rows, recorded.dump, same, sample)


def _sample(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if len(words) != 3 or not all(word.isdigit() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROLLOUT,GROUP,MEMBER, as 811,3,0 (columns of the dump)")
    return tuple(map(int, words))
