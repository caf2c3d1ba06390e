"""One GRPO iteration of this project beside TRL's GRPOTrainer: tokens per second, stage by stage, and peak memory.

    python benchmarks/end_to_end.py --json OUT.json [--cases short] [--arms ours,ours-async,trl] [--iterations 6]

All arms: two processes with one thread each, the same random-weight model in fp32, the same prompts, the same imposed
length of each response (an end token cannot come by itself), the same rows in an optimizer step, the same micro-batch,
no KL. The first iterations warm up and are left out. Memory is the peak over time of the proportional set size,
summed over all processes of an arm. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import operator
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "training"))

import workload  # noqa: E402

RANKS = 2
APART = "--rl-schedule async --rl-generators 1 --rl-correction truncate"  # one process trains, one generates
# This project's arms -> flags of their schedule.
OURS = {"ours": (), "ours-streamed": ("--rl-schedule", "streamed"), "ours-async": tuple(APART.split())}
TRLS = ("trl", "trl-vllm")  # the second with vLLM for the rollout, as this project has
KNOWN = (*OURS, *TRLS)
ARMS = ("ours", "ours-async", "trl")  # by default
DRIFT = 1e-3  # most difference of log-probs between TRL's engine and its trainer, both fp32
WARM_UP = 2  # iterations that are not counted
SAMPLE_SECONDS = 0.5
UNITS = {"tokens_per_second": "tokens/s", "iteration": "s", "peak_memory": "MiB"}
# (case, metric) -> bound of this project's value over TRL's: of tokens per second with its best schedule, of memory
# with the default one
TARGETS = {
    ("short", "tokens_per_second"): (">=", 1.1),
    **{(case, "tokens_per_second"): (">", 1.0) for case in ("vocabulary", "vocabulary-short")},
    ("long-tailed", "tokens_per_second"): (">=", 2.0),
    ("long-prompts", "tokens_per_second"): (">=", 2.5),
    **{(case, "peak_memory"): ("<=", 0.5) for case in ("vocabulary", "vocabulary-short")},
}
HOLDS = {">": operator.gt, ">=": operator.ge, "<=": operator.le}
TRL = ("trl==1.16.0", "accelerate==1.15.0")
MODEL_FLAGS = (
    "--attention-dropout 0 --hidden-dropout 0 --transformer-impl local --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion "
    "--no-bias-dropout-fusion --ckpt-format torch --eval-interval 1000000 --eval-iters 0 --log-interval 1 --seed 1 "
    "--distributed-backend gloo --use-distributed-optimizer --tokenizer-type HuggingFaceTokenizer "
    "--lr 1e-6 --lr-decay-style constant --save-interval 1000000 --make-vocab-size-divisible-by 128"
)
RL_FLAGS = (
    "--rl-algorithm grpo --rl-kl-loss-coef 0 --rl-ignore-eos --rl-kv-cache-gb 0.1 --rl-reward-workers 1 "
    "--no-rl-progress --rl-answer-key= --rl-wait-timeout 600 --rl-swap grads"
)


class Peak:
    """Most memory that a process and its descendants had at one time, sampled meanwhile. MiB."""

    def __init__(self, pid: int) -> None:
        self.mib = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(psutil.Process(pid),), daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """End the sampling; the peak."""
        self._end.set()
        self._thread.join()
        return self.mib

    def _watch(self, root: psutil.Process) -> None:
        while not self._end.wait(SAMPLE_SECONDS):
            total = 0
            with contextlib.suppress(psutil.Error):
                for process in [root, *root.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):
                        total += process.memory_full_info().pss
            self.mib = max(self.mib, total / 2**20)


def run_ours(case: workload.Case, folder: Path, iterations: int, *more: str, even: bool = True) -> dict[str, float]:
    """This project: metric -> value. more: flags; even: whether each iteration trains all responses of the case. Raises
    CalledProcessError when the job fails."""
    checkpoint, model = imported(folder)
    save = Path(tempfile.mkdtemp(dir=folder))
    longest = case.prompt + case.limit
    command = [
        *torchrun(sys.executable),
        *(str(HERE / "training" / "ours.py"), "--workload", str(folder)),
        *model,
        *MODEL_FLAGS.split(),
        *RL_FLAGS.split(),
        *("--seq-length", str(longest), "--micro-batch-size", str(case.micro_batch)),
        *("--global-batch-size", str(case.samples), "--train-iters", str(iterations), "--load", str(checkpoint)),
        *("--save", str(save), "--tokenizer-model", str(folder / "tokenizer")),
        # As many tokens as TRL's micro-batch has where a row is as long as any.
        *("--rl-max-tokens-per-microbatch", str(case.micro_batch * longest)),
        *("--rl-prompt-data", str(folder / "prompts.jsonl"), "--rl-reward", f"{folder / 'grader.py'}:grade"),
        *("--rl-samples-per-prompt", str(case.members), "--rl-max-prompt-length", str(case.prompt)),
        *("--rl-max-response-length", str(case.limit), *more),
        *(("--rl-share-prompts",) if case.shared else ()),
    ]
    peak = run_job(command, folder / "ours.log")
    lines = [json.loads(line) for line in (save / "rl" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] == "train"][WARM_UP:]
    made = [(line["response/length_mean"] + case.prompt) * case.samples for line in lines]
    if even:
        _same_work(case, set(made))
    # Of engines apart there are shares of idle time, too.
    steps = [
        {k.removeprefix("seconds/"): v for k, v in line.items() if k.startswith(("seconds/", "idle/"))}
        for line in lines
    ]
    return _measured(case, steps, peak) if even else _of_uneven(case, steps, made, peak)


def imported(folder: Path) -> tuple[Path, list[str]]:
    """The checkpoint of `folder/model`, made where it is not there yet, and the flags of its shape."""
    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        command = [sys.executable, "-m", "mindspeed_rl_plugin", "import", "--load", str(folder / "model")]
        asked = subprocess.run(
            [*command, "--out", str(checkpoint), "--train", "tp1"],
            check=True,
            capture_output=True,
            text=True,
            env=environment(),
        ).stdout
        (folder / "flags").write_text(asked.splitlines()[-1])
    return checkpoint, shlex.split((folder / "flags").read_text())


def run_trl(case: workload.Case, folder: Path, iterations: int, *engine: str, graders: int = 1) -> dict[str, float]:
    """TRL: metric -> value. engine: "vllm", or transformers generates; graders: of each process.

    Raises CalledProcessError when it cannot be installed or fails, RuntimeError when its engine lags behind.
    """
    out = folder / "trl.json"
    command = [*torchrun(str(interpreter())), str(HERE / "training" / "trl_arm.py")]
    command += [str(folder), str(iterations), str(out), str(graders), *engine]
    peak = run_job(command, folder / "trl.log")
    measured = json.loads(out.read_text())
    _same_work(case, set(measured["tokens"]))
    if not measured["drift"] <= DRIFT:
        raise RuntimeError(f"log-probs of TRL's engine differ by {measured['drift']} from its trainer's, bound {DRIFT}")
    steps = measured["steps"][WARM_UP:]
    for step in steps:  # what is no rollout is the update
        step["update"] = step["iteration"] - step.pop("rollout")
    return _measured(case, steps, peak)


def _measured(case: workload.Case, steps: Sequence[dict[str, float]], peak: float) -> dict[str, float]:
    """Medians over the iterations that count."""
    median = {k: statistics.median(s.get(k, 0.0) for s in steps) for k in steps[0]}
    return {"tokens_per_second": workload.tokens(case) / median["iteration"], "peak_memory": peak, **median}


def _of_uneven(
    case: workload.Case, steps: Sequence[dict[str, float]], made: Sequence[float], peak: float
) -> dict[str, float]:
    """Seconds in which as many tokens are trained as a case has: of all iterations that count, for one may train short
    responses and leave long ones to the next. made: tokens that each trained."""
    share = workload.tokens(case) / sum(made)
    seconds = {name: share * sum(step.get(name, 0.0) for step in steps) for name in steps[0]}
    return _measured(case, [seconds], peak)


def _same_work(case: workload.Case, lengths: set[float]) -> None:
    if any(abs(n - workload.tokens(case)) > 1 for n in lengths):
        raise RuntimeError(f"an arm made {sorted(lengths)} tokens per iteration, not {workload.tokens(case)}")


def torchrun(python: str) -> list[str]:
    """The launcher of an arm's processes."""
    return [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]


def interpreter() -> Path:
    """Python with TRL, in the environment of the benchmarks, which sees everything installed here.

    Raises CalledProcessError where the packages cannot be had.
    """
    place = HERE / ".venv"
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
        own = next(place.glob("lib/python*/site-packages"))
        (own / "inherited.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")) + "\n")
    if subprocess.run([str(python), "-c", "import trl, accelerate"], capture_output=True).returncode:
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", *TRL], check=True, timeout=600)
    return python


def environment() -> dict[str, str]:
    """Of the variables of a job: one thread, no network."""
    path = os.pathsep.join([str(HERE.parent), str(HERE / "training")])
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **quiet, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": path}


def run_job(command: Sequence[str], log: Path, memory: bool = True) -> float:
    """Run a job to its end; its peak memory in MiB, if asked for. A failed one shows the end of its log."""
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment())
        peak = Peak(process.pid) if memory else None
        try:
            process.wait(1800)
        finally:
            process.kill()
            mib = peak.stop() if peak else 0.0
    if process.returncode:
        print(log.read_text()[-6000:], file=sys.stderr)
        raise subprocess.CalledProcessError(process.returncode, shlex.join(command[:8]))
    return mib


def run(arms: Sequence[str], cases: Sequence[str], iterations: int, repeats: int) -> Iterator[list[dict[str, Any]]]:
    """Rows of the result after each arm's job: medians over the repeats so far."""
    seen: dict[tuple[str, str, str], list[float]] = {}
    runner = {arm: lambda *case, flags=flags: run_ours(*case, *flags) for arm, flags in OURS.items()}
    runner |= {"trl": run_trl, "trl-vllm": lambda *case: run_trl(*case, "vllm")}
    with tempfile.TemporaryDirectory(prefix="end-to-end-") as directory:
        for name in cases:
            workload.write(Path(directory) / name, workload.CASES[name])
        for repeat in range(repeats):
            for name in cases:
                turn = repeat % len(arms)
                for arm in (*arms[turn:], *arms[:turn]):
                    begin = time.monotonic()
                    metrics = runner[arm](workload.CASES[name], Path(directory) / name, iterations)
                    for metric, value in metrics.items():
                        seen.setdefault((arm, name, metric), []).append(value)
                    shown = {k: round(v, 3) for k, v in metrics.items()}
                    took = f"{time.monotonic() - begin:.0f} s"
                    print(f"{repeat + 1}/{repeats} {arm} {name} {took} {shown}", file=sys.stderr, flush=True)
                    yield [
                        {
                            **{"arm": a, "case": c, "metric": m, "unit": unit(m)},
                            **{"value": statistics.median(v), "range": [min(v), max(v)]},
                        }
                        for (a, c, m), v in seen.items()
                    ]


def unit(metric: str) -> str:
    """Of its value."""
    return "share" if metric.startswith("idle/") else UNITS.get(metric, "s")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The result as a Markdown table, a line an arm and case, and the ratios of the arms."""
    value = {(r["arm"], r["case"], r["metric"]): r["value"] for r in rows}
    stages = [m for m in dict.fromkeys(r["metric"] for r in rows) if m not in UNITS]
    metrics = [*UNITS, *stages]  # seconds but for the first and third, and shares of idle time
    spread = {(r["arm"], r["case"]): r["range"] for r in rows if r["metric"] == "tokens_per_second"}
    lines = [f"| case | arm | {' | '.join(metrics)} | tokens_per_second, least to most |"]
    lines += [f"|---|---|{'---|' * len(metrics)}---|"]
    ratios = []
    for case in dict.fromkeys(r["case"] for r in rows):
        for arm in KNOWN:
            if (arm, case, "iteration") in value:
                cells = [f"{value[arm, case, m]:.4g}" if (arm, case, m) in value else "" for m in metrics]
                least, most = spread[arm, case]
                lines.append(f"| {case} | {arm} | {' | '.join(cells)} | {least:.4g} to {most:.4g} |")
        for arm, other in itertools.product(OURS, TRLS):
            speed, memory = (
                [value.get((a, case, metric)) for a in (arm, other)] for metric in ("tokens_per_second", "peak_memory")
            )
            if all(speed):
                faster, larger = speed[0] / speed[1], memory[0] / memory[1]
                ratios.append(f"{case}: {arm} {faster:.2f}x the tokens per second of {other}, {larger:.2f}x its memory")
    return "\n".join([*lines, *ratios])


def targets(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of an arm of this project over TRL for each target of the issues that the rows can tell of."""
    value = {(r["arm"], r["case"], r["metric"]): r["value"] for r in rows}
    reached = []
    for (case, metric), (sign, bound) in TARGETS.items():
        arms = [arm for arm in (OURS if metric == "tokens_per_second" else ("ours",)) if (arm, case, metric) in value]
        if arms and ("trl", case, metric) in value:
            best = max(arms, key=lambda arm: value[arm, case, metric])
            ratio = value[best, case, metric] / value["trl", case, metric]
            row = {"arm": f"{best}/trl", "case": case, "metric": metric, "value": ratio, "unit": "ratio"}
            reached.append({**row, "target": f"{sign} {bound:g}", "reached": HOLDS[sign](ratio, bound)})
    return reached


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file for the rows {arm, case, metric, value, unit}")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"which of {', '.join(KNOWN)}, default %(default)s")
    parser.add_argument("--cases", default=",".join(workload.CASES), help="which to run, default %(default)s")
    parser.add_argument("--iterations", type=int, default=6, help=f"of each job, {WARM_UP} not counted; %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="jobs of each arm and case, default %(default)s")
    args = parser.parse_args()
    arms, cases = args.arms.split(","), args.cases.split(",")
    for given, known in ((arms, KNOWN), (cases, workload.CASES)):
        if unknown := set(given) - set(known):
            parser.error(f"{sorted(unknown)} unknown; known: {', '.join(known)}")
    if args.iterations <= WARM_UP:
        parser.error(f"--iterations {args.iterations}: the first {WARM_UP} are not counted; give more")
    before, rows = os.getloadavg()[0], []
    for rows in run(arms, cases, args.iterations, args.repeats):
        args.json.write_text(json.dumps(rows + targets(rows), indent=1) + "\n")
    print(table(rows))
    for row in targets(rows):
        result = "reached" if row["reached"] else "NOT reached"
        whose = row["arm"].removesuffix("/trl")
        print(f"{row['case']} {row['metric']}: {whose} {row['value']:.2f}x TRL's, asked {row['target']}: {result}")
    load = f"load {before:.1f} before and {os.getloadavg()[0]:.1f} after"
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    print(f"{now}, {os.cpu_count()} cores, {load}, median of {args.repeats} x {args.iterations - WARM_UP} iterations")


if __name__ == "__main__":
    main()
