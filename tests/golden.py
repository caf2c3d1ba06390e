"""Golden runs: the tree as it stands trains as a former commit did, bit for bit.

Small jobs run on both trees, on one machine and with one Python, and every number of their metrics.jsonl is compared,
but for those that the machine's state decides (`IGNORED`). Both trees are driven by their command lines only, and
share data, graders and the checkpoint that some cases start from.

    .venv/bin/python tests/golden.py                             # all cases: commit db917938 against this tree
    .venv/bin/python tests/golden.py --case grpo-tp2 --case ppo  # two of them; --list names all
    .venv/bin/python tests/golden.py --record DIR                # run the former commit only, keep its numbers in DIR
    .venv/bin/python tests/golden.py --baseline DIR              # run this tree only, against those numbers

Numbers of floats depend on the processor: a baseline is compared on the machine that recorded it. Exit code 1 where a
number differs or is gone; a metric that only this tree has is named and is no difference.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).with_name("warm")))
from ports import free_port  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
FORMER = "db917938"
# Times, rates, and what depends on the machine or on how the dock moves rows. With generators: shares of time, and what
# engines had reported when the trainers looked, which is earlier or later in their work from run to run.
IGNORED = re.compile(
    r"time|seconds/.*|.*[_/]seconds|(engines/)?tokens_per_second.*|dock/.*|peak_bytes/.*|reshard/temporary_bytes"
    r"|idle/.*|engines/length_mean|weights/bytes_pulled"
)
TIMEOUT = 600  # seconds of one launch
SHOWN = 5  # differences of a case
SAID = re.compile(r"^\[rl\]|Error|^Traceback|error:")  # lines of a log that tell why a launch failed

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 128 --seq-length 32 --max-position-embeddings 32 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --transformer-impl local --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion "
    "--no-bias-dropout-fusion"
)
DENSE = "--add-qkv-bias"
EXPERTS = (
    "--qk-layernorm --kv-channels 32 --num-experts 4 --moe-ffn-hidden-size 48 --moe-router-topk 2 "
    "--moe-token-dispatcher-type alltoall --moe-layer-freq [0]+[1]*1"
)
TRAIN = (
    "--micro-batch-size 2 --global-batch-size 16 --lr 3e-3 --lr-decay-style constant --ckpt-format torch "
    "--eval-interval 1000 --eval-iters 0 --log-interval 1 --save-interval 100 --seed 1 --distributed-backend gloo "
    "--use-distributed-optimizer --tokenizer-type HuggingFaceTokenizer --tokenizer-model {shared}/data/tokenizer"
)
ROLLOUT = (
    "--rl-prompt-data {shared}/data/prompts.jsonl --rl-reward {shared}/graders.py:by_characters "
    "--rl-samples-per-prompt 4 --rl-max-prompt-length 16 --rl-max-response-length 8 --rl-kv-cache-gb 0.05 "
    "--rl-wait-timeout 120 --rl-reward-workers 1 --no-rl-progress"
)
EVALUATE = "--rl-eval-data {shared}/data/heldout.jsonl --rl-eval-every 2 --rl-eval-pass-k 4"
# An untrained model ends a response, or a turn, by one token in four: some are short, some reach the limit.
STOPS = f"--rl-stop-token-ids {' '.join(map(str, range(0, 97, 4)))}"
CARRY = (
    f"{STOPS} --rl-schedule streamed --rl-carry-unfinished --rl-oversample 1.5 --rl-correction truncate "
    "--rl-rollout-prompts 8 --rl-max-response-length 16 --rl-max-running 12"
)
EPISODES = (
    f"{STOPS} --seq-length 64 --max-position-embeddings 64 --rl-max-response-length 30 --rl-max-turn-length 8 "
    "--rl-max-turns 4 --rl-environment {shared}/graders.py:Talk --rl-environment-workers 1 --rl-environment-lockstep "
    "--rl-tools {shared}/graders.py:shout --rl-tool-parser {shared}/graders.py:calls "
    "--rl-reward environment {shared}/graders.py:by_characters=0.5"
)
PAIRS = (
    "--rl-prompt-data {shared}/prompts-pairs.jsonl --rl-eval-data {shared}/heldout-pairs.jsonl --no-rl-progress "
    "--rl-max-prompt-length 16 --rl-max-response-length 8"
)
GRADERS = Path(__file__).with_name("golden_graders.py")


@dataclass(frozen=True)
class Case:
    """A job of two ranks."""

    flags: str  # beside MODEL and TRAIN
    stop: int | None = None  # iteration at which it exits and is resumed
    saved_by: str | None = None  # commit whose tree runs to `stop`; both trees go on from that checkpoint


CASES = {
    "quickstart": Case(""),
    "grpo-tp2": Case(
        f"{DENSE} {ROLLOUT} --rl-algorithm grpo --tensor-model-parallel-size 2 --rl-generate-tp 2 --rl-verify-weights "
        "--rl-old-logprobs pass --train-iters 4"
    ),
    "grpo-pp2": Case(
        f"{DENSE} {ROLLOUT} --rl-algorithm grpo --pipeline-model-parallel-size 2 --rl-generate-tp 1 "
        "--rl-verify-weights --rl-old-logprobs pass --train-iters 4"
    ),
    "grpo-dp2": Case(
        f"{DENSE} {ROLLOUT} {EVALUATE} --rl-algorithm grpo --load {{shared}}/pretrained --rl-kl-loss-coef 0.05 "
        "--rl-rollout-prompts 8 --rl-ppo-epochs 2 --micro-batch-size 4 --rl-verify-weights --train-iters 8"
    ),
    "grpo-ep2": Case(
        f"{EXPERTS} {ROLLOUT} --rl-algorithm grpo --expert-model-parallel-size 2 --rl-generate-tp 2 "
        "--rl-generate-ep 2 --rl-verify-weights --train-iters 4"
    ),
    "dapo-resume": Case(
        f"{DENSE} {ROLLOUT} --rl-algorithm dapo --rl-reward {{shared}}/graders.py:odd_only --rl-rollout-prompts 8 "
        "--rl-overlong-buffer 4 --train-iters 6 --save-interval 1",
        stop=3,
    ),
    "ppo": Case(
        f"{DENSE} {ROLLOUT} --rl-algorithm ppo --rl-critic-lr 3e-3 --rl-rollout-prompts 8 --train-iters 6 "
        "--save-interval 1",
        stop=3,
    ),
    "dpo": Case(f"{DENSE} {PAIRS} --rl-algorithm dpo --rl-eval-every 2 --train-iters 6 --save-interval 1", stop=3),
    "old-resume": Case(
        f"{DENSE} {ROLLOUT} --rl-algorithm dapo --rl-reward {{shared}}/graders.py:odd_only --rl-rollout-prompts 8 "
        "--rl-kl-loss-coef 0.05 --load {shared}/pretrained --train-iters 6 --save-interval 1",
        stop=3,
        saved_by="bca148e",
    ),
    "streamed": Case(
        f"{DENSE} {ROLLOUT} {EVALUATE} --rl-algorithm dapo --rl-reward {{shared}}/graders.py:odd_only "
        "--rl-schedule streamed --rl-rollout-prompts 8 --rl-verify-weights --train-iters 6"
    ),
    "partial": Case(
        f"{DENSE} {ROLLOUT} {EVALUATE} {CARRY} --rl-algorithm grpo --rl-kl-loss-coef 0.05 --load {{shared}}/pretrained "
        "--rl-verify-weights --train-iters 8 --save-interval 1",
        stop=3,
    ),
    "async-strict": Case(
        f"{DENSE} {ROLLOUT} {EVALUATE} --rl-algorithm grpo --rl-schedule async --rl-generators 1 "
        "--rl-async-order strict --rl-max-staleness 1 --rl-correction truncate --rl-rollout-prompts 8 "
        "--rl-verify-weights --train-iters 10 --save-interval 5",
        stop=5,
    ),
    "episodes": Case(
        f"{DENSE} {ROLLOUT} {EVALUATE} {EPISODES} --rl-algorithm grpo --rl-rollout-prompts 8 --rl-verify-weights "
        "--train-iters 6 --save-interval 1",
        stop=3,
    ),
    "torch-dist": Case(
        f"{DENSE} {ROLLOUT} --rl-algorithm ppo --rl-critic-lr 3e-3 --ckpt-format torch_dist "
        "--tensor-model-parallel-size 2 --rl-generate-tp 2 --rl-rollout-prompts 8 --train-iters 6 --save-interval 3",
        stop=3,
    ),
    "resume-455e3d5": Case(
        f"{DENSE} {ROLLOUT} {CARRY} --rl-algorithm dapo --rl-reward {{shared}}/graders.py:odd_only "
        "--rl-verify-weights --train-iters 6 --save-interval 1",
        stop=3,
        saved_by="455e3d5",
    ),
}


# trees and launches


def unpacked(commit: str, folder: Path) -> Path:
    """A commit of this repository, in `folder`."""
    folder.mkdir(parents=True)
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", commit], check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed, check=True)
    return without_setup(folder)


def copied(tree: Path, folder: Path) -> Path:
    """A copy of a tree as it stands, so that it may be edited while this runs."""
    listed = ["git", "-C", str(tree), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (tree / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, folder / name)
    return without_setup(folder)


def without_setup(tree: Path) -> Path:
    """Make it ready for quickstart.sh: this Python is its environment, and there is nothing to set up."""
    (tree / "setup.sh").write_text("exit 0\n")
    (tree / ".venv").symlink_to(sys.prefix)
    return tree


def execute(tree: Path, command: Sequence[str], log: Path) -> None:
    """Run a command of `tree` in it. Raises RuntimeError with the end of its log where it fails."""
    fixed = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    env = os.environ | fixed | {"PYTHONPATH": str(tree), "MASTER_PORT": str(free_port())}
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as file:
        done = subprocess.run(command, cwd=tree, env=env, stdout=file, stderr=subprocess.STDOUT, timeout=TIMEOUT)
    if done.returncode:
        said = [line[:400] for line in log.read_text().splitlines() if SAID.search(line)]
        raise RuntimeError("\n".join([f"exit code {done.returncode} ({log}, with --keep)", *said[-20:]]))


def train(tree: Path, flags: str, save: Path) -> None:
    """One launch of Megatron's script with the plugin; its log is `save`/launch.log."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    words = ["-m", "mindspeed_rl_plugin", "examples/pretrain_gpt.py", *flags.split(), "--save", str(save)]
    execute(tree, [*torchrun, *words], save / "launch.log")


def prepare(tree: Path, shared: Path) -> None:
    """Make what both trees read: data, graders, preference pairs, and a model that was pretrained a little."""
    made = ["--out", str(shared / "data"), "--documents", "2000", "--prompts", "64", "--heldout", "16"]
    execute(tree, [sys.executable, "examples/arithmetic/prepare.py", *made], shared / "prepare.log")
    shutil.copy(GRADERS, shared / "graders.py")
    for name in ("prompts", "heldout"):
        rows = [json.loads(line) for line in (shared / "data" / f"{name}.jsonl").read_text().splitlines()]
        pairs = [{"prompt": r["prompt"], "chosen": r["answer"], "rejected": str(int(r["answer"]) - 10)} for r in rows]
        (shared / f"{name}-pairs.jsonl").write_text("".join(json.dumps(p) + "\n" for p in pairs))
    data = f"--data-path {shared}/data/corpus --split 100,0,0 --num-workers 0 --train-iters 20 --save-interval 20"
    train(tree, f"{MODEL} {DENSE} {TRAIN.format(shared=shared)} {data}", shared / "pretrained")


# cases


def run_case(name: str, tree: Path, baseline: Path, save: Path) -> Path:
    """Run a case on `tree`, from start to end, or from the checkpoint in `baseline`; returns its metrics.jsonl."""
    shared, case = baseline / "shared", CASES[name]
    if name == "quickstart":
        shutil.rmtree(tree / "runs", ignore_errors=True)
        execute(tree, ["bash", "examples/quickstart.sh", "--smoke"], save / "quickstart.log")
        return tree / "runs" / "quickstart-smoke" / "tuned" / "rl" / "metrics.jsonl"
    if case.saved_by:
        shutil.copytree(baseline / name / "stopped", save)
    elif case.stop:
        run_to_stop(name, tree, shared, save)
    train(tree, launch_flags(name, shared), save)
    return save / "rl" / "metrics.jsonl"


def run_to_stop(name: str, tree: Path, shared: Path, save: Path) -> None:
    train(tree, f"{launch_flags(name, shared)} --exit-interval {CASES[name].stop}", save)


def launch_flags(name: str, shared: Path) -> str:
    return f"{MODEL} {TRAIN} {CASES[name].flags}".format(shared=shared)


def record(name: str, tree: Path, baseline: Path, work: Path) -> None:
    """Run a case on the former tree; keep its numbers, and the checkpoint where both trees go on from a saved one."""
    kept, saved_by = baseline / name, CASES[name].saved_by
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    if saved_by:
        run_to_stop(name, unpacked(saved_by, work / f"{name}-saved-by"), baseline / "shared", kept / "stopped")
    shutil.copy(run_case(name, tree, baseline, work / name), kept / "metrics.jsonl")
    (kept / "flags.txt").write_text(launch_flags(name, Path("DIR")))


def compare(name: str, tree: Path, baseline: Path, work: Path) -> Differences:
    """Run a case on the current tree and compare it with what was recorded. Raises ValueError for a stale baseline."""
    flags = baseline / name / "flags.txt"
    if not flags.is_file() or flags.read_text() != launch_flags(name, Path("DIR")):
        raise ValueError(f"{baseline} has no run of {name} with today's flags: --record {baseline} --case {name}")
    metrics = run_case(name, tree, baseline, work / name)
    return Differences.of(read(baseline / name / "metrics.jsonl"), read(metrics))


# numbers

Numbers = dict[tuple[str, int, str], str]


def read(metrics: Path) -> Numbers:
    """Each compared value by kind of line, iteration and name; 1e-06 and 1e-6 are one. Raises ValueError where a line
    is written twice."""
    out: Numbers = {}
    for text in metrics.read_text().splitlines():
        line = json.loads(text, parse_float=lambda digits: repr(float(digits)), parse_int=str, parse_constant=str)
        kind, iteration = line.pop("kind"), int(line.pop("iteration"))
        numbers = {(kind, iteration, name): value for name, value in line.items() if not IGNORED.fullmatch(name)}
        if numbers.keys() & out.keys():
            raise ValueError(f"{metrics} has two lines of kind {kind} for iteration {iteration}")
        out |= numbers
    return out


@dataclass
class Differences:
    """Of the numbers of one case: how many were compared, in how many iterations; what differs; new names."""

    values: int
    iterations: int
    lines: list[str]
    added: list[str]

    @classmethod
    def of(cls, former: Numbers, current: Numbers) -> Differences:
        known = {name for *_, name in former}
        differ = [k for k in former.keys() | current.keys() if k[2] in known and former.get(k) != current.get(k)]
        lines = [
            f"{kind} {iteration} {name}: {former.get(key, 'not there')} -> {current.get(key, 'not there')}"
            for key in sorted(differ, key=lambda k: (k[1], k))
            for kind, iteration, name in [key]
        ]
        added = {name for *_, name in current} - known
        return cls(len(former), len({k[1] for k in former if k[0] == "train"}), lines, sorted(added))


def report(name: str, act: Callable[[], Differences | None]) -> bool:
    """Do one case, say what came of it in a line or a few; whether it is as it should be."""
    begin = time.monotonic()
    try:
        result = act()
    except (RuntimeError, ValueError, OSError, subprocess.TimeoutExpired) as error:
        print(f"{name}: FAILS: {error}", flush=True)
        return False
    took = f"{time.monotonic() - begin:.0f} s"
    if result is None:
        print(f"{name}: recorded, {took}", flush=True)
        return True
    outcome = f"{len(result.lines)} DIFFER" if result.lines else "equal"
    print(f"{name}: {result.values} values of {result.iterations} iterations, {outcome}, {took}", flush=True)
    for line in result.lines[:SHOWN] + ([f"new here: {', '.join(result.added)}"] if result.added else []):
        print(f"  {line}", flush=True)
    return not result.lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", action="append", choices=CASES, help="only this one; may be given again")
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    parser.add_argument("--commit", default=FORMER, help="the former commit (default: %(default)s)")
    parser.add_argument("--before", type=Path, help="a folder with the former tree, instead of --commit")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the tree to compare (default: that of this file)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--record", type=Path, metavar="DIR", help="run the former tree only, keep its numbers in DIR")
    where.add_argument("--baseline", type=Path, metavar="DIR", help="compare with the numbers that --record kept")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time (default: %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the runs here, an empty folder, for a look")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    names = args.case or list(CASES)
    if args.list:
        print("\n".join(names))
        return 0
    with tempfile.TemporaryDirectory(prefix="golden-") as temporary:
        work = (args.keep or Path(temporary)).resolve()
        steps = plan(args, work)
        with ThreadPoolExecutor(args.jobs) as pool:
            good = list(pool.map(lambda name: all(report(name, lambda s=step: s(name)) for step in steps), names))
    return 0 if all(good) else 1


def plan(args: argparse.Namespace, work: Path) -> list[Callable[[str], Differences | None]]:
    """Make the trees ready; returns what is done with a case, one after the other."""
    baseline = (args.baseline or args.record or work / "baseline").resolve()
    steps: list[Callable[[str], Differences | None]] = []
    if not args.baseline:
        former = copied(args.before, work / "former") if args.before else unpacked(args.commit, work / "former")
        if not (baseline / "shared").is_dir():
            prepare(former, baseline / "shared")
        steps.append(lambda name: record(name, former, baseline, work / "of-former"))
    if not args.record:
        current = copied(args.tree, work / "current")
        steps.append(lambda name: compare(name, current, baseline, work / "of-current"))
    return steps


if __name__ == "__main__":
    sys.exit(main())
