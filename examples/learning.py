"""Every preset on the arithmetic task: what it learns on two ranks, and the table of docs/learning-results.md.

    python examples/learning.py                                     # all presets, seed 0
    python examples/learning.py --presets ppo dapo --seeds 0 1 2
    python examples/learning.py --presets grpo --seeds 0 1 2 --schedules streamed "async 0" "async 1"
    python examples/learning.py --table docs/learning-results.md    # and the rows into the table

A seed's data and pretrained checkpoint are the quickstart's: those under runs/quickstart are taken where they are,
else made once under runs/learning. A preset is the launch script with `RL_ARGS` and the flags of `PRESETS`: half the
quickstart's rollout, about a quarter of its steps, a larger learning rate. Accuracy is greedy, on held-out numbers.
DPO gets pairs in the place of a reward, the careful pupil's answer and the careless one's, and is measured by the
margin of held-out pairs.
A schedule `async K` has one rank that trains and one that generates, at most K publications ahead.
Exits 1 when a run ends without a clear rise (`RISE`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from mindspeed_rl_plugin.monitor.run_files import read_metrics
from mindspeed_rl_plugin.monitor.run_summary import column

ROOT = Path(__file__).resolve().parents[1]
RISE = {"accuracy": 0.2, "margin": 0.5}  # least rise of what is measured
ITERATIONS = 16

# Flags beside `RL_ARGS`; later ones win.
PRESETS: dict[str, tuple[str, ...]] = {
    "ppo": ("--rl-critic-lr", "1e-3"),
    "grpo": (),
    "dapo": (),
    "pf-ppo": ("--rl-critic-lr", "1e-3"),
    "dr-grpo": (),
    "rloo": (),
    "reinforce++": (),
    "gspo": (),
    "cispo": (),
    "dpo": ("--lr", "6e-4"),
}
APART = "--rl-schedule async --rl-generators 1 --rl-correction truncate --rl-max-staleness"
SCHEDULES: dict[str, tuple[str, ...]] = {"sync": (), "streamed": ("--rl-schedule", "streamed")}
SCHEDULES |= {f"async {k}": (*APART.split(), str(k)) for k in (0, 1, 2, 4)}
RL_ARGS = (
    "--rl-max-prompt-length 16 --rl-max-response-length 8 --global-batch-size 256 --micro-batch-size 32 "
    "--lr 2.5e-4 --min-lr 0 --lr-decay-style linear --lr-warmup-iters 0 --weight-decay 0 --log-interval 1000 "
)
GENERATION_ARGS = "--rl-reward exact --rl-rollout-prompts 16 --rl-samples-per-prompt 16 --rl-kv-cache-gb 0.1"
BEGIN, END = "<!-- rows: written by examples/learning.py -->", "<!-- end of rows -->"


@dataclass(frozen=True)
class Outcome:
    """One run. schedule: of `SCHEDULES`; measure: accuracy (share of held-out prompts) or margin (nats, beta x
    difference of gains); before and after: its first and last held-out value; iterations: optimizer steps."""

    preset: str
    seed: int
    measure: str
    before: float
    after: float
    iterations: int
    schedule: str = "sync"

    @property
    def learned(self) -> bool:
        """Whether the rise is clear."""
        return self.after - self.before >= RISE[self.measure]


def launch(log: Path, data: Path, save: Path, flags: list[str]) -> None:
    """`examples/launch.sh` with these flags, its output in `log`. Raises SystemExit with the log's end if it fails."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    env |= {"DATA": str(data), "SAVE": str(save), "MASTER_PORT": str(port)}
    env |= {"TORCHRUN": str(Path(sys.executable).with_name("torchrun"))}
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as out:
        command = ["bash", str(ROOT / "examples" / "launch.sh"), *flags]
        code = subprocess.run(command, env=env, stdout=out, stderr=subprocess.STDOUT).returncode
    if code:
        raise SystemExit(f"{log.read_text()[-6000:]}\nlearning: {' '.join(command)} ended with {code}; log: {log}")


def pretrained(out: Path, seed: int, iterations: int | None = None) -> Path:
    """Directory with `data` and `pretrained` of a seed: the quickstart's, or made as it does. iterations: of
    pretraining, None: the launch script's."""
    quickstart = ROOT / "runs" / ("quickstart" if seed == 0 else f"quickstart-seed{seed}")
    for made in (quickstart, out / f"seed{seed}"):
        if (made / "pretrained" / "latest_checkpointed_iteration.txt").exists():
            return made
    prepare = [sys.executable, str(ROOT / "examples" / "arithmetic" / "prepare.py"), "--out", str(made / "data")]
    subprocess.run([*prepare, "--seed", str(seed)], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    flags = ["--seed", str(1234 + seed), *(["--train-iters", str(iterations)] if iterations else [])]
    launch(made / "pretrain.log", made / "data", made / "pretrained", flags)
    return made


def write_pairs(numbers: Path, pairs: Path) -> None:
    """Preference pairs of a file of prompts: the right answer, and the one ten too small that the careless pupil gives
    where the last digit carries. Numbers without that carry are left out."""
    rows = [json.loads(line) for line in numbers.read_text().splitlines()]
    wrong = [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": str(int(row["answer"]) - 10)}
        for row in rows
        if int(row["answer"]) // 2 % 10 >= 5
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in wrong))


def run(
    preset: str,
    seed: int,
    base: Path,
    out: Path,
    iterations: int,
    schedule: str = "sync",
    more: tuple[str, ...] = (),
) -> Outcome:
    """Train a preset from a pretrained checkpoint. base: of `pretrained`; out: replaced; more: further flags."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    data = base / "data"
    kind = "prompts"
    generation = GENERATION_ARGS.split()
    if preset == "dpo":
        kind, generation = "pairs", []
        for name in ("prompts", "heldout"):
            write_pairs(data / f"{name}.jsonl", out / f"{name}-pairs.jsonl")
    files = {
        "prompts": (data / "prompts.jsonl", data / "heldout.jsonl"),
        "pairs": (out / "prompts-pairs.jsonl", out / "heldout-pairs.jsonl"),
    }[kind]
    flags = ["--load", str(base / "pretrained"), "--rl-algorithm", preset, "--seed", str(1 + seed)]
    flags += ["--rl-prompt-data", str(files[0]), "--rl-eval-data", str(files[1]), "--rl-eval-every", str(iterations)]
    flags += ["--train-iters", str(iterations), *RL_ARGS.split(), *generation, *PRESETS[preset]]
    flags += [*SCHEDULES[schedule], *more]
    launch(out / "tune.log", data, out / "tuned", flags)
    measure, name = ("margin", "eval/dpo_margin") if preset == "dpo" else ("accuracy", "eval/accuracy")
    rows = read_metrics(out / "tuned" / "rl")
    values = column(rows, name)
    steps = max(row["iteration"] for row in rows)
    return Outcome(preset, seed, measure, values[0], values[-1], steps, schedule)


def record(outcomes: list[Outcome], table: Path) -> None:
    """Put the rows of these runs into a table, in the place of those of the same preset, schedule and seed. The rows
    stand beside it as JSON lines, from which the table is made. Raises ValueError for a file without the two marks."""
    rows_file = table.with_suffix(".jsonl")
    known = [Outcome(**json.loads(line)) for line in rows_file.read_text().splitlines()] if rows_file.exists() else []
    merged = {(o.preset, o.schedule, o.seed): o for o in [*known, *outcomes]}
    presets, schedules = list(PRESETS), list(SCHEDULES)
    every = sorted(merged.values(), key=lambda o: (presets.index(o.preset), schedules.index(o.schedule), o.seed))
    text = table.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{table} lacks the marks {BEGIN} and {END}; put them where the rows belong")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    rows_file.write_text("".join(json.dumps(asdict(o)) + "\n" for o in every))
    table.write_text(f"{before}{BEGIN}\n{render(every)}{END}{after}")


def render(outcomes: list[Outcome]) -> str:
    """The rows as a table in Markdown."""
    head = "| preset | schedule | seed | measured | before | after | steps |\n|---|---|---|---|---|---|---|\n"
    return head + "".join(
        f"| {o.preset} | {o.schedule} | {o.seed} | {o.measure} | {o.before:.3f} | {o.after:.3f} | {o.iterations} |\n"
        for o in outcomes
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS), metavar="PRESET")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=["sync"], metavar="SCHEDULE")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="optimizer steps of a run")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "learning", help="where runs go")
    parser.add_argument("--table", type=Path, help="Markdown file whose table gets the rows of these runs")
    args, more = parser.parse_known_args()
    args.out = args.out.resolve()
    outcomes = []
    for seed in args.seeds:
        base = pretrained(args.out, seed)
        for preset, schedule in itertools.product(args.presets, args.schedules):
            place = args.out / f"seed{seed}" / preset / schedule.replace(" ", "")
            outcomes.append(run(preset, seed, base, place, args.iterations, schedule, tuple(more)))
            print(json.dumps(asdict(outcomes[-1])), flush=True)
            if args.table:
                record(outcomes[-1:], args.table)
    flat = [
        f"{o.preset} {o.schedule} seed {o.seed}: {o.measure} {o.before} -> {o.after}" for o in outcomes if not o.learned
    ]
    for line in flat:
        print(f"learning: no clear rise: {line}", file=sys.stderr)
    return bool(flat)


if __name__ == "__main__":
    sys.exit(main())
