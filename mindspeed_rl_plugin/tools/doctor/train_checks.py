"""The checks of trainer and engine together: small jobs through the user's own Megatron or MindSpeed."""

from __future__ import annotations

import contextlib
import io
import json
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
from mindspeed_rl_plugin.tools.doctor.engine_checks import LIMITS
from mindspeed_rl_plugin.tools.doctor.nodes import Nodes
from mindspeed_rl_plugin.tools.doctor.result import Check, Result
from mindspeed_rl_plugin.tools.rehearse.capture import Done, run
from mindspeed_rl_plugin.tools.rehearse.outcome import tail
from mindspeed_rl_plugin.tools.rehearse.substitutes import VARIED, make_tokenizer

RATIO_LIMITS = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.02}
_check, _REPORT = partial(Check, "trainer"), "report this with the file of --out"
ARRIVE = _check(
    "weights arrive",
    "digests of trainer and engine are equal",
    "a transfer loses, misplaces or changes weights; try the other --rl-reshard, and " + _REPORT,
)
FINITE = _check(
    "weights are finite",
    "no NaN, no infinity",
    "the trainer's own weights are broken, not the transfer: look at the optimizer and at the kernels of the update",
)
RUNS = _check("three GRPO iterations", "3 iterations", "the message says why the job ended", (ARRIVE, FINITE))
WHERE = _check(
    "where they part",
    "nowhere: at most {noise:g} of the root mean square",
    "what computes this first place differs: its weights, its flags in the launch script, its kernel in the engine",
    (ARRIVE, FINITE),
)
AGREE = _check(
    "log-probs of trainer and engine",
    "at most {nats:g} nats (mean)",
    "trainer and engine agree on one prompt and not on many: look at sampling (temperature, top-p) and at batches",
    (ARRIVE, FINITE, WHERE),
)
RATIO = _check(
    "ratio of the first update",
    "1 +- {ratio:g}",
    "the update computes other log-probs than the pass before it: is dropout on, or a kernel not deterministic?",
    (ARRIVE, FINITE),
)
MEMORY = _check("memory of successive iterations", "at most +{mib} MiB", f"memory is not given back: {_REPORT}")
RESUME = _check(
    "save and resume",
    "iteration 3 has the same numbers",
    f"a checkpoint does not restore everything: {_REPORT}",
    (RUNS, RATIO),
)
KILLED = _check(
    "a rank killed in a transfer",
    "the job ends within {seconds} s and names rank {rank}",
    "nothing tells the other ranks that one is gone: is a proxy or firewall between the machines?",
    (RUNS, RESUME),
)
CHECKS = (ARRIVE, FINITE, RUNS, WHERE, AGREE, RATIO, MEMORY, RESUME, KILLED)

# Model -> the axis by which its trainer is divided, and flags of its engines; {0}: ranks.
LAYOUTS = {
    "dense": ("tp", "--rl-generate-tp 1"),
    "experts": ("ep", "--rl-generate-tp {0} --rl-generate-ep {0}"),
    "latent attention": ("pp", "--rl-generate-tp 1"),
}
_FIXED = """
    --transformer-impl local --seq-length 64 --micro-batch-size 2 --global-batch-size 16 --train-iters 4 --lr 1e-3
    --lr-decay-style constant --weight-decay 0 --seed 1 --log-interval 1 --eval-iters 0 --eval-interval 1000
    --save-interval 2 --ckpt-format torch --use-distributed-optimizer --tokenizer-type HuggingFaceTokenizer
    --attention-dropout 0 --hidden-dropout 0 --rl-algorithm grpo --rl-samples-per-prompt 4 --rl-max-prompt-length 16
    --rl-max-response-length 16 --rl-kv-cache-gb 0.05 --rl-reward-workers 1 --rl-old-logprobs pass --no-rl-progress
    --rl-verify-weights --rl-wait-timeout 60
"""
_ON_A_HOST = """
    --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --no-rope-fusion --no-bias-dropout-fusion --attention-backend unfused --distributed-backend gloo
"""
_DTYPES = {"bfloat16": ["--bf16"], "float16": ["--fp16"], "float32": []}
# Metrics that differ between equal steps.
_TIMES = re.compile(r"time|seconds/.*|.*seconds|tokens_per_second.*|dock/.*|peak_bytes/.*|reshard/.*|idle/.*")
_BROKEN = re.compile(r"(WeightMismatch|BrokenWeights): (.*)")
_TIMEOUT = 300.0  # seconds of one job
_ENDS_WITHIN = 60  # seconds from the end of a rank to the end of its job
_GROWTH = {True: 128 << 20, False: 16 << 20}  # bytes; on a host they are those of the process


@dataclass(frozen=True)
class TrainBench:
    """Where and how the jobs run. host: without an accelerator."""

    nodes: Nodes
    scratch: Path
    script: Path  # entry script
    env: Mapping[str, str]  # of the ranks, with the PYTHONPATH of Megatron
    dtype: str = "float32"
    host: bool = True

    def prepare(self) -> list[str]:
        """Write tokenizer, prompts and a grader. Returns the flags of all jobs."""
        rows = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a in range(8) for b in range(4)]
        (prompts := self.scratch / "prompts.jsonl").write_text("\n".join(rows))
        (grader := self.scratch / "varied.py").write_text(VARIED)
        tokenizer = make_tokenizer(self.scratch / "tokenizer")
        data = ["--tokenizer-model", tokenizer, "--rl-prompt-data", prompts, "--rl-reward", f"{grader}:grade"]
        host = _ON_A_HOST.split() if self.host else []
        return [*_FIXED.split(), *host, *_DTYPES[self.dtype], *map(str, data)]

    def model(self, name: str) -> list[str]:
        """Write a small model as a checkpoint. Returns its flags, those of its layout, and --load."""
        axis, engine = LAYOUTS[name]
        ranks = min(2, self.nodes.ranks * self.nodes.count)
        (hf := self.scratch / f"{name}-hf").mkdir()
        small_models.write_model(name, small_models.random_weights(name, 0, getattr(torch, self.dtype)), hf)
        out = self.scratch / f"{name}-weights"
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            if to_megatron.main(["--load", str(hf), "--out", str(out), "--train", f"{axis}{ranks}"]):
                raise ValueError(f"the small model cannot be written: {said.getvalue()}")
        layout = Parallel(**{"world": ranks, axis: ranks})
        args = megatron_arguments(small_models.shape_of_model(name), layout, small_models.config_of(name))
        return [*flags(args), "--load", str(out), *engine.format(ranks).split()]

    def job(self, name: str, argv: Sequence[str], **env: str) -> tuple[Done, Path]:
        """Run a job that compares trainer and engine. Returns its end, and the folder of its comparisons."""
        (folder := self.scratch / name).mkdir()
        command = self.nodes.torchrun("-m", compare.__name__, str(folder), str(self.script), *argv)
        done = run(command, self.scratch / f"{name}.log", _TIMEOUT, env={**self.env, **env}, cwd=self.scratch)
        return done, folder


def check_model(name: str, bench: TrainBench, fixed: Sequence[str]) -> Iterator[Result]:
    """Three iterations of a model; of the dense one also a resume and a lost rank. fixed: `TrainBench.prepare`."""
    save = bench.scratch / f"{name}-save"
    argv = [*fixed, *bench.model(name), "--save", str(save)]
    done, folder = bench.job(name, [*argv, "--exit-interval", "3"])
    lines = read_metrics(save / "rl") if (save / "rl" / METRICS_FILE).exists() else []
    yield from _ran(name, done, lines)
    if lines:
        yield from _numbers(name, lines, folder, bench)
    if len(lines) == 3:
        worst, grown = _growth(lines)
        most = _GROWTH[bench.host]
        yield MEMORY.result(grown <= most, f"{grown / 2**20:+.0f} MiB in {worst}", name, mib=most >> 20)
        if name == "dense":
            yield from _resumed(name, save, argv, bench)


def _ran(name: str, done: Done, lines: Sequence[Mapping[str, Any]]) -> Iterator[Result]:
    trained = done.ok and len(lines) == 3
    kind, message = found.groups() if (found := _BROKEN.search("\n".join(done.lines))) else ("", "")
    for check, error in ((ARRIVE, "WeightMismatch"), (FINITE, "BrokenWeights")):
        if kind == error:
            yield check.result(False, message, name)
        else:
            yield check.result(True, "", name) if trained else check.not_run("the job ended before", name)
    yield RUNS.result(trained, f"{done.seconds:.0f} s" if trained else tail(done, 6), name)


def _numbers(name: str, lines: Sequence[Mapping[str, Any]], folder: Path, bench: TrainBench) -> Iterator[Result]:
    yield _where(name, folder)
    far, limit = max(line["logp_diff/mean"] for line in lines), LIMITS[bench.dtype]
    yield AGREE.result(far <= limit, f"{far:.2g} nats", name, nats=limit)
    moved, limit = max(abs(line["ratio/mean"] - 1) for line in lines), RATIO_LIMITS[bench.dtype]
    yield RATIO.result(moved <= limit, f"1 +- {moved:.2g}", name, ratio=limit)


def _where(name: str, folder: Path) -> Result:
    files = sorted(folder.glob("parts-*.jsonl"))
    rows = [(json.loads(line), file.stem.partition("-")[2]) for file in files for line in file.read_text().splitlines()]
    if not rows:
        return WHERE.not_run("no rollout was compared", name)
    noise = rows[0][0]["noise"]
    parted = [(row, rank) for row, rank in rows if row["first"]]
    if not parted:
        worst = max(max(row["far"].values()) for row, _ in rows)
        return WHERE.result(True, f"largest difference {worst:.2g}", name, noise=noise)
    row, rank = min(parted, key=lambda one: one[0]["version"])
    place, token = row["first"]["place"], row["first"]["token"]
    when = "of the prompt" if token < row["first"]["of_prompt"] else "in decoding"
    figure = f"{place}: {row['far'][place]:.2g} on rank {rank}, token {token} {when}, weights {row['version']}"
    return WHERE.result(False, figure, name, noise=noise)


def _growth(lines: Sequence[Mapping[str, Any]]) -> tuple[str, int]:
    """The stage whose peak grew most from iteration 2 to 3, and by how many bytes; the first iteration allocates what
    is kept."""
    grown = {n: lines[2][n] - lines[1][n] for n in lines[1] if n.startswith("peak_bytes/") and n in lines[2]}
    worst = max(grown, key=grown.__getitem__)
    return worst.partition("/")[2], grown[worst]


def _resumed(name: str, save: Path, argv: Sequence[str], bench: TrainBench) -> Iterator[Result]:
    """Resume from iteration 2, compare the third iteration, and kill the last rank in the next transfer."""
    before = read_metrics(save / "rl")[2]
    shutil.rmtree(save / "iter_0000003")
    (save / TRACKER).write_text("2")
    last, began = bench.nodes.ranks * bench.nodes.count - 1, time.time()
    done, folder = bench.job(f"{name}-resume", argv, **{compare.KILLS: f"{last}:3"})
    again = next((line for line in read_metrics(save / "rl")[2:] if line["time"] > began), None)
    if again is None:
        yield RESUME.result(False, tail(done, 6), name)
        return
    differ = [n for n in before if not _TIMES.fullmatch(n) and again.get(n) != before[n]]
    figure = f"{differ[0]}: {before[differ[0]]}, resumed {again.get(differ[0])}" if differ else "equal"
    yield RESUME.result(not differ, figure, name)
    if not last:
        yield KILLED.not_run("there is one rank", name)
        return
    killed = float((folder / compare.KILLED_FILE).read_text()) if (folder / compare.KILLED_FILE).exists() else began
    ended = began + done.seconds - killed
    said = next((line for line in done.lines if re.search(rf"\brank {last}\b", line) and "[rl]" in line), "")
    good = done.code not in (0, None) and bool(said) and ended <= _ENDS_WITHIN
    text = f"after {ended:.0f} s: {said or f'no line names rank {last}'}"
    yield KILLED.result(good, text, name, seconds=_ENDS_WITHIN, rank=last)
