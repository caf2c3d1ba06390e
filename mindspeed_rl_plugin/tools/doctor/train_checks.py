"""The checks of trainer and engine together: small jobs through the user's own Megatron or MindSpeed."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl_plugin.checkpoints.checkpoint_files import TRACKER
from mindspeed_rl_plugin.layout.parallel import Parallel
from mindspeed_rl_plugin.monitor.run_files import METRICS_FILE, read_metrics
from mindspeed_rl_plugin.tools.convert import to_megatron
from mindspeed_rl_plugin.tools.convert.arguments import flags, megatron_arguments
from mindspeed_rl_plugin.tools.doctor import compare, small_models
from mindspeed_rl_plugin.tools.doctor.engine_checks import LOGP_LIMITS, TELL_US
from mindspeed_rl_plugin.tools.doctor.nodes import Nodes
from mindspeed_rl_plugin.tools.doctor.result import Check, Result
from mindspeed_rl_plugin.tools.rehearse.capture import Done, run
from mindspeed_rl_plugin.tools.rehearse.command_line import Flags
from mindspeed_rl_plugin.tools.rehearse.outcome import reason
from mindspeed_rl_plugin.tools.rehearse.substitutes import VARIED, make_tokenizer

# Largest distance of a ratio from 1: the pass before the update runs the same kernels.
RATIO_LIMITS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.03}
_check = partial(Check, "trainer")
ARRIVE = _check(
    "weights arrive",
    "digests of trainer and engine are equal",
    f"a transfer loses, misplaces or changes weights; try the other --rl-reshard, and {TELL_US}",
    True,
)
FINITE = _check(
    "weights are finite",
    "no NaN, no infinity",
    "the trainer's own weights are broken, not the transfer: look at the optimizer and at the kernels of the update",
    True,
)
RUNS = _check("GRPO iterations", "they run to their end", "the message says why not", True)
WHERE = _check(
    "where they part",
    "nowhere: at most {noise:g} of a token's norm",
    "what computes this first place differs: its weights, its flags in the launch script, its kernel in the engine",
    True,
)
AGREE = _check(
    "log-probs of trainer and engine",
    "at most {nats:g} nats (mean)",
    "trainer and engine agree on one prompt and not on many: look at sampling (temperature, top-p) and at batches",
    True,
)
RATIO = _check(
    "ratio of the first update",
    "1 +- {ratio:g}",
    "the update computes other log-probs than the pass before it: is dropout on, or a kernel not deterministic?",
    True,
)
GROWTH = _check("memory of successive iterations", "at most +{mib} MiB", f"memory is not given back: {TELL_US}")
RESUME = _check(
    "save and resume",
    "iterations 2 and 3 have the same numbers",
    f"a checkpoint does not restore everything: {TELL_US}",
    True,
)
KILLED = _check(
    "a rank killed in a transfer",
    "the job ends within {seconds} s and names rank {rank}",
    "nothing tells the other ranks that one is gone: is a proxy or firewall between the machines?",
)
TRAIN_CHECKS = (ARRIVE, FINITE, RUNS, WHERE, AGREE, RATIO, GROWTH, RESUME, KILLED)

# Model -> axes by which its trainer is divided, each in a job of its own; all but the first only with --full.
LAYOUTS = {"dense": ("tp", "pp", "dp"), "experts": ("ep", "tp"), "latent attention": ("pp", "tp")}
_SPREAD = "--rl-generate-tp {0} --rl-generate-ep {0}"  # flags of engines that divide the experts; {0}: ranks
_FIXED = """
    --transformer-impl local --seq-length 64 --micro-batch-size 2 --train-iters 4 --lr 1e-3
    --lr-decay-style constant --weight-decay 0 --seed 1 --log-interval 1 --eval-iters 0 --eval-interval 1000
    --save-interval 1 --ckpt-format torch --use-distributed-optimizer --tokenizer-type HuggingFaceTokenizer
    --attention-dropout 0 --hidden-dropout 0 --rl-algorithm grpo --rl-samples-per-prompt 4 --rl-max-prompt-length 16
    --rl-max-response-length 16 --rl-kv-cache-gb 0.05 --rl-reward-workers 1 --rl-old-logprobs pass --no-rl-progress
    --rl-verify-weights --rl-wait-timeout 60 --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion --no-bias-dropout-fusion
    --attention-backend unfused
"""
# Flags of a launch that `compare_launch` removes.
_NOT_COMPARED = "--save --rl-run-dir --rl-dump-dir --rl-eval-data --rl-eval-every --rl-generators --async-save"
_DTYPE_FLAGS = {"bfloat16": ["--bf16"], "float16": ["--fp16"], "float32": []}
# Metrics that differ between equal steps.
_TIMES = re.compile(r"time|seconds/.*|.*seconds|tokens_per_second.*|dock/.*|peak_bytes/.*|reshard/.*|idle/.*")
_BROKEN = re.compile(r"(WeightMismatch|BrokenWeights): (.*)")
_ENDS_WITHIN = 60  # seconds from the end of a rank to the end of its job
_GROWTH_LIMITS = {True: 128 << 20, False: 64 << 20}  # bytes; on a host they are those of the process


@dataclass(frozen=True)
class TrainBench:
    """Where and how the jobs run. host: without an accelerator."""

    nodes: Nodes
    scratch: Path
    script: Path  # entry script
    env: Mapping[str, str]  # of the ranks, with the PYTHONPATH of Megatron
    dtype: str = "float32"
    host: bool = True
    seconds: float = 300.0  # limit of a job
    cwd: Path | None = None  # None: a folder of the job

    def prepare(self) -> list[str]:
        """Write tokenizer, prompts and a grader. Returns the flags of all jobs."""
        rows = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a in range(8) for b in range(4)]
        (prompts := self.scratch / "prompts.jsonl").write_text("\n".join(rows))
        (grader := self.scratch / "varied.py").write_text(VARIED)
        tokenizer = make_tokenizer(self.scratch / "tokenizer")
        data = ["--tokenizer-model", tokenizer, "--rl-prompt-data", prompts, "--rl-reward", f"{grader}:grade"]
        own = ["--global-batch-size", str(8 * self.nodes.ranks)]
        own += ["--distributed-backend", "gloo"] if self.host else []
        return [*_FIXED.split(), *own, *_DTYPE_FLAGS[self.dtype], *map(str, data)]

    def model(self, name: str, axis: str, folder: Path) -> list[str]:
        """Write a small model as a checkpoint, in a new folder. Returns its flags, those of its layout, and --load."""
        ranks = min(2, self.nodes.ranks)
        (hf := folder / "hf").mkdir(parents=True)
        small_models.write_model(name, small_models.random_weights(name, 0, getattr(torch, self.dtype)), hf)
        sizes = {} if axis == "dp" else {axis: ranks}
        train = ",".join(f"{axis}{size}" for axis, size in sizes.items()) or "tp1"
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            if to_megatron.main(["--load", str(hf), "--out", str(folder / "weights"), "--train", train]):
                raise ValueError(f"the small model cannot be written: {said.getvalue()}")
        layout = Parallel(world=ranks, **sizes)
        args = megatron_arguments(small_models.shape_of_model(name), layout, small_models.config_of(name))
        engine = _SPREAD.format(ranks) if axis == "ep" else "--rl-generate-tp 1"
        return [*flags(args), "--load", str(folder / "weights"), *engine.split()]

    def job(self, folder: Path, argv: Sequence[str], **env: str) -> Done:
        """Run a job that compares trainer and engine, in a new folder."""
        folder.mkdir()
        command = self.nodes.torchrun("-m", compare.__name__, str(folder), str(self.script), *argv)
        return run(command, folder / "log", self.seconds, env={**self.env, **env}, cwd=self.cwd or folder)


def check_model(name: str, axis: str, bench: TrainBench, fixed: Sequence[str], full: bool) -> Iterator[Result]:
    """Three iterations of a model; of the dense one also a resume and a lost rank, with `full` of all. axis: by which
    the trainer is divided; fixed: `TrainBench.prepare`."""
    where, folder = name if axis == LAYOUTS[name][0] else f"{name}, {axis}", bench.scratch / f"{name} {axis}"
    save = folder / "save"
    argv = [*fixed, *bench.model(name, axis, folder), "--save", str(save)]
    done = bench.job(folder / "job", [*argv, "--exit-interval", "3"])
    lines = _metrics(save)
    yield from _ran(where, done, lines)
    if lines:
        yield from _agreement(where, lines, folder, argv, bench)
        names, limit = ("ratio/min", "ratio/max"), RATIO_LIMITS[bench.dtype]
        moved = max(abs(_number(name, line) - 1) for name in names for line in lines)
        yield RATIO.result(moved <= limit, f"1 +- {moved:.2g}", where, ratio=limit)
    if len(lines) == 3:
        worst, grown = _worst_growth(lines)
        most = _GROWTH_LIMITS[bench.host]
        yield GROWTH.result(grown <= most, f"{grown / 2**20:+.0f} MiB in {worst}", where, mib=most >> 20)
        if full or name == "dense" and axis == LAYOUTS[name][0]:
            yield from _resumed(where, folder, argv, bench)


def compare_launch(bench: TrainBench, argv: Sequence[str]) -> Iterator[Result]:
    """One iteration of the user's own launch. argv: of its entry script; those that would write to the user's folders,
    or would let other processes generate, are replaced."""
    given = Flags.parse(argv)
    for flag, most in (("--context-parallel-size", 1), ("--noop-layers", 0)):
        if given.number(flag, most) > most:
            raise ValueError(f"--compare with {flag} {given.get(flag)}: leave it out, the places have no counterparts")
    given.apply("", _NOT_COMPARED)
    (folder := bench.scratch / "launch").mkdir()
    words = [*given.argv(), "--save", str(folder / "save"), "--rl-schedule", "sync", "--exit-interval", "1"]
    done = bench.job(folder / "job", words, **{compare.SAVES_NOT: "1"})
    lines = _metrics(folder / "save")
    yield RUNS.result(done.ok, f"{done.seconds:.0f} s" if done.ok else reason(done), "your launch")
    if bench.nodes.index and done.ok:  # the first machine has the metrics
        yield _where("your launch", [folder / "job"], False)
    elif lines:
        yield from _agreement("your launch", lines[:1], folder, words, bench)


def _number(name: str, line: Mapping[str, Any]) -> float:
    """A metric; NaN and infinity, which metrics.jsonl has as null, as infinity."""
    return math.inf if line[name] is None else line[name]


def _metrics(save: Path) -> list[dict[str, Any]]:
    return read_metrics(save / "rl") if (save / "rl" / METRICS_FILE).exists() else []


def _agreement(
    where: str, lines: Sequence[Mapping[str, Any]], folder: Path, argv: Sequence[str], bench: TrainBench
) -> Iterator[Result]:
    """Where trainer and engine part, and how far their log-probs are from each other. An engine with graphs hides its
    places: if the log-probs differ, an iteration runs once more without graphs."""
    far, limit = max(map(partial(_number, "logp_diff/mean"), lines)), LOGP_LIMITS[bench.dtype]
    if far > limit and not bench.host and bench.nodes.count == 1:
        again = [*argv, "--save", str(folder / "eager-save"), "--exit-interval", "1"]
        bench.job(folder / "eager", again, **{compare.EAGER: "1"})
    yield _where(where, [folder / "job", folder / "eager"], far > limit)
    yield AGREE.result(far <= limit, f"{far:.2g} nats", where, nats=limit)


def _ran(where: str, done: Done, lines: Sequence[Mapping[str, Any]]) -> Iterator[Result]:
    trained = done.ok and len(lines) == 3
    kind, message = found.groups() if (found := _BROKEN.search("\n".join(done.lines))) else ("", "")
    for check, error in ((ARRIVE, "WeightMismatch"), (FINITE, "BrokenWeights")):
        if kind == error:
            yield check.result(False, message, where)
        else:
            yield check.result(True, "", where) if trained else check.not_run("the job ended before", where)
    yield RUNS.result(trained, f"{done.seconds:.0f} s" if trained else reason(done), where)


def _where(where: str, folders: Sequence[Path], differ: bool) -> Result:
    """The first place where trainer and engine part. differ: whether their log-probs differ too much."""
    files = [file for folder in folders for file in sorted(folder.glob(f"{compare.PARTS_FILES}*"))]
    rows = [
        (json.loads(line), file.stem.rpartition("-")[2]) for file in files for line in file.read_text().splitlines()
    ]
    if not rows:
        return WHERE.not_run("the engine's graphs hide its places; the log-probs agree", where)
    noise = rows[0][0]["noise"]
    parted = [(row, rank) for row, rank in rows if row["first"]]
    if not parted and differ and folders[-1].exists():
        return WHERE.result(False, "only with captured graphs", where, noise=noise)
    if not parted:
        worst = max(max(row["far"].values()) for row, _ in rows)
        return WHERE.result(True, f"largest difference {worst:.2g}", where, noise=noise)
    row, rank = min(parted, key=lambda one: (one[0]["version"], compare.depth(one[0]["first"]["place"])))
    place, token = row["first"]["place"], row["first"]["token"]
    when = "of the prompt" if token < row["first"]["of_prompt"] else "in decoding"
    figure = f"{place}: {row['far'][place]:.2g} on rank {rank}, token {token} {when}, weights {row['version']}"
    return WHERE.result(False, figure, where, noise=noise)


def _worst_growth(lines: Sequence[Mapping[str, Any]]) -> tuple[str, int]:
    """The stage whose peak grew most from iteration 2 to 3, and by how many bytes; the first iteration allocates what
    is kept."""
    grown = {"": 0} | {n: lines[2][n] - lines[1][n] for n in lines[1] if n.startswith("peak_bytes/") and n in lines[2]}
    worst = max(grown, key=grown.__getitem__)
    return worst.partition("/")[2], grown[worst]


def _resumed(where: str, folder: Path, argv: Sequence[str], bench: TrainBench) -> Iterator[Result]:
    """Resume from iteration 1, compare the next two, and kill the last rank in the transfer after them."""
    save, again_in = folder / "save", folder / "resume"
    before = read_metrics(save / "rl")[1:3]
    for late in (2, 3):
        shutil.rmtree(save / f"iter_{late:07d}")
    (save / TRACKER).write_text("1")
    last, began = bench.nodes.ranks - 1, time.time()
    done = bench.job(again_in, argv, **{compare.KILLS: f"{last}:3"})
    again = [line for line in read_metrics(save / "rl") if line["iteration"] in (2, 3) and line["time"] > began]
    if len(again) < 2:
        yield RESUME.result(False, reason(done), where)
        return
    pairs = [(n, one[n], two.get(n)) for one, two in zip(before, again, strict=True) for n in one]
    differ = [(n, a, b) for n, a, b in pairs if a != b and not _TIMES.fullmatch(n)]
    figure = "{}: {}, resumed {}".format(*differ[0]) if differ else "equal"
    yield RESUME.result(not differ, figure, where)
    if not last:
        yield KILLED.not_run("there is one rank", where)
        return
    killed = float((again_in / compare.KILLED_FILE).read_text()) if (again_in / compare.KILLED_FILE).exists() else began
    ended = began + done.seconds - killed
    said = next((line for line in done.lines if re.search(rf"\brank {last}\b", line) and "[rl]" in line), "")
    good = done.code not in (0, None) and bool(said) and ended <= _ENDS_WITHIN
    text = f"after {ended:.0f} s: {said or f'no line names rank {last}'}"
    yield KILLED.result(good, text, where, seconds=_ENDS_WITHIN, rank=last)
