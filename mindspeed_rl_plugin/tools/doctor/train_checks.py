"""The checks of trainer and engine together: small jobs through the user's own Megatron or MindSpeed."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.checkpoints.checkpoint_files import TRACKER
from mindspeed_rl_plugin.config.flag import flag_name
from mindspeed_rl_plugin.config.rl_config import group_types
from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.monitor.names import NOT_REPEATED
from mindspeed_rl_plugin.monitor.run_files import METRICS_FILE, read_metrics
from mindspeed_rl_plugin.tools.doctor import compare, small_models
from mindspeed_rl_plugin.tools.doctor.engine_checks import LOGP_LIMITS, TELL_US
from mindspeed_rl_plugin.tools.doctor.nodes import Nodes
from mindspeed_rl_plugin.tools.doctor.result import Check, Result
from mindspeed_rl_plugin.tools.rehearse.capture import Done, run
from mindspeed_rl_plugin.tools.rehearse.command_line import Flags
from mindspeed_rl_plugin.tools.rehearse.entry_script import Entry
from mindspeed_rl_plugin.tools.rehearse.outcome import reason, tail
from mindspeed_rl_plugin.tools.rehearse.shrink import MEMBERS, remove_unavailable, replace_mindspeed_llm
from mindspeed_rl_plugin.tools.rehearse.substitutes import WRITES, substitute

# Largest distance of a ratio from 1: the pass before the update runs the same kernels.
RATIO_LIMITS = {"float32": 1e-3, "bfloat16": 0.01}
_check, _cause = partial(Check, "trainer"), partial(Check, "trainer", explains="trainer")
ARRIVE = _cause(
    "weights arrive",
    "digests of trainer and engine are equal",
    f"a transfer loses, misplaces or changes weights; try the other --rl-reshard, and {TELL_US}",
)
FINITE = _cause(
    "weights are finite",
    "no NaN, no infinity",
    "the trainer's own weights are broken, not the transfer: look at the optimizer and at the kernels of the update",
)
RUNS = _cause("GRPO iterations", "they run to their end", "the message says why not")
WHERE = _cause(
    "where they part",
    "nowhere: at most {noise:g} of a token's norm",
    "the two sides differ first here: compare its weights, its flags in the launch script and its kernel in the engine",
)
AGREE = _cause(
    "log-probs of trainer and engine",
    "at most {nats:g} nats (mean)",
    "trainer and engine agree on one prompt and not on many: look at sampling (temperature, top-p) and at batches",
)
RATIO = _cause(
    "ratio of the first update",
    "1 +- {ratio:g}",
    "the update computes other log-probs than the pass before it: is dropout on, or a kernel not deterministic?",
)
GROWTH = _check("memory of successive iterations", "at most +{mib} MiB", f"memory is not given back: {TELL_US}")
RESUME = _cause(
    "save and resume",
    "iterations 2 and 3 have the same numbers",
    f"a checkpoint does not restore everything: {TELL_US}",
)
KILLED = _check(
    "a rank killed in a transfer",
    "the job ends within {seconds} s and names rank {rank}",
    "nothing tells the other ranks that one is gone: is there a proxy that keeps connections open?",
)
TRAIN_CHECKS = (ARRIVE, FINITE, RUNS, WHERE, AGREE, RATIO, GROWTH, RESUME, KILLED)

# Model -> axes by which its trainer is divided, each in a job of its own; all but the first only with --full.
LAYOUTS = {
    "dense": ("tp", "pp", "dp"),
    "experts": ("ep", "tp", "pp", "dp"),
    "latent attention": ("pp", "tp", "ep", "dp"),
}
_DTYPE_FLAGS = {"bfloat16": ["--bf16"], "float32": []}
# A launch without SCRIPT.sh.
_NO_SCRIPT = """
    --transformer-impl local --use-distributed-optimizer --ckpt-format torch --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --attention-backend unfused --eval-interval 1000
"""
# Flags of a launch that small jobs do not have, and RL's flags that they have too.
_NOT_SMALL = """
    --context-parallel-* --cp-* --ulysses-* --load --pretrained-checkpoint --finetune --no-load-* --no-save-*
    --use-checkpoint-args --no-initialization --exit-* --train-samples --*-samples --lr-* --min-lr --profile*
    --enable-hf2mg-convert --enable-mg2hf-convert
"""
_RL_KEPT = re.compile(
    r"--(no-)?rl-(reshard|swap|pack|share-p|max-tokens|logprob-chunk|request-seeds|temperature|generate-).*"
)
# Random experts differ between MindSpeed's replicas of them without --data-parallel-random-init, which broadcasts them.
_FIXED = """
    --data-parallel-random-init --train-iters 4 --lr 1e-3 --lr-decay-style constant --weight-decay 0 --seed 1
    --save-interval 1 --attention-dropout 0 --hidden-dropout 0 --rl-old-logprobs pass --no-rl-progress
    --rl-verify-weights --rl-wait-timeout 60
"""
# Flags of a launch that `compare_launch` removes: what writes, evaluates, or belongs to another schedule than sync.
_OTHER_SCHEDULES = (flag_name(f.name) for f in fields(group_types()["schedule"]) if f.metadata["reader"])
_NOT_COMPARED = " ".join(("--save --rl-eval-data --rl-eval-every --rl-generators", WRITES, *_OTHER_SCHEDULES))
_COMPARED_TOKENS = 64  # most of a response in a launch that is compared, except with --rl-tools or --rl-environment
_BROKEN = re.compile(r"(WeightMismatch|BrokenWeights): (.*)")
_ENDS_WITHIN = 60  # seconds from the end of a rank to the end of its job
_GROWTH_LIMITS = {True: 160 << 20, False: 64 << 20}  # bytes; on a host they are those of the process


@dataclass(frozen=True)
class TrainBench:
    """Where and how the jobs run."""

    nodes: Nodes
    scratch: Path
    entry: Entry
    env: Mapping[str, str]  # of the ranks, with the PYTHONPATH of Megatron
    dtype: str
    arguments: Sequence[str] = ()  # of the launch; (): there is none
    seconds: float = 600.0  # limit of a job
    cwd: Path | None = None  # None: a folder of the job

    def prepare(self) -> Flags:
        """Write tokenizer, prompts and a grader. Returns the flags of all jobs, without those of a model."""
        given = Flags.parse(self.arguments or [*_NO_SCRIPT.split(), *_DTYPE_FLAGS[self.dtype]])
        flags = Flags(
            {f: v for f, v in given.values.items() if not f.startswith(("--rl-", "--no-rl-")) or _RL_KEPT.fullmatch(f)}
        )
        flags.apply("", f"{_NOT_SMALL} --rl-algorithm=grpo --rl-reward=exact")
        substitute(flags, self.scratch, self.entry.mindspeed_llm)
        flags.apply("", "--rl-eval-* --rl-dump-dir")
        if not self.entry.mindspeed_llm:
            replace_mindspeed_llm(flags)
        if not self.arguments or get_device().is_cpu:
            remove_unavailable(flags, mindspeed=self.entry.mindspeed)
        return flags

    def argv(self, prepared: Flags, model: str, axis: str) -> list[str]:
        """The arguments of a job of a small model."""
        flags = small_models.small_flags(prepared, model, axis, min(2, self.nodes.ranks))
        flags.set("--global-batch-size", MEMBERS * self.nodes.ranks, why="")
        theirs = small_models.IN_MINDSPEED_LLM.get(model, "") if self.entry.mindspeed_llm else ""
        return [*flags.argv(), *theirs.split(), *_FIXED.split()]

    def job(self, folder: Path, argv: Sequence[str], **env: str) -> Done:
        """Run a job that compares trainer and engine, in a new folder."""
        folder.mkdir(parents=True)
        small = compare.OWN_LAUNCH not in env and get_device().is_cpu and not self.entry.mindspeed_llm
        words = [str(folder), *["--any-flag"] * small, str(self.entry.script), *argv]
        command = self.nodes.torchrun("-m", compare.__name__, *words)
        return run(command, folder / "log", self.seconds, env={**self.env, **env}, cwd=self.cwd or folder)


def check_model(
    name: str, axis: str, bench: TrainBench, prepared: Flags, *, first: bool, full: bool
) -> Iterator[Result]:
    """Three iterations of a model; of the dense one also a resume and a lost rank, with `full` of all. axis: by which
    the trainer is divided; prepared: `TrainBench.prepare`; first: whether the model is named without its axis."""
    where, folder = name if first else f"{name}, {axis}", bench.scratch / f"{name} {axis}"
    save = folder / "save"
    argv = [*bench.argv(prepared, name, axis), "--save", str(save)]
    done = bench.job(folder / "job", [*argv, "--exit-interval", "3"])
    lines = _metrics(save)
    yield from _ran(where, done, lines, bool(bench.arguments))
    if lines:
        yield from _agreement(where, lines, folder / "job", bench)
        names, limit = ("ratio/min", "ratio/max"), RATIO_LIMITS[bench.dtype]
        moved = max(abs(_number(name, line) - 1) for name in names for line in lines)
        yield RATIO.result(moved <= limit, f"1 +- {moved:.2g}", where, ratio=limit)
    if len(lines) == 3:
        grown = _growth(lines)
        most = _GROWTH_LIMITS[get_device().is_cpu]
        yield GROWTH.result(grown <= most, f"{grown / 2**20:+.0f} MiB", where, mib=most >> 20)
        if full or name == "dense" and first:
            yield from _resumed(where, folder, argv, bench)


def compare_launch(bench: TrainBench) -> Iterator[Result]:
    """One iteration of the user's own launch. Flags by which it would write to the user's folders, or let other
    processes generate, are replaced."""
    given = Flags.parse(bench.arguments)
    if given.number("--context-parallel-size", 1) > 1:
        raise ValueError(
            f"--compare with --context-parallel-size {given.get('--context-parallel-size')}: its ranks have parts of a "
            "sequence, which are not compared; leave it out"
        )
    folder = bench.scratch / "launch"
    given.apply("", _NOT_COMPARED)
    long = given.number("--rl-max-response-length", 0) > _COMPARED_TOKENS
    if long and not {"--rl-tools", "--rl-environment"} & given.values.keys():
        given.apply("", f"--rl-overlong-* --rl-max-response-length={_COMPARED_TOKENS}")  # the rollout is not compared
        print(f"doctor: responses of the rollout have at most {_COMPARED_TOKENS} tokens here", file=sys.stderr)
    given.apply("", "--save={0} --save-interval=1 --rl-schedule=sync --exit-interval=1", folder / "save")
    done = bench.job(folder / "job", given.argv(), **{compare.OWN_LAUNCH: "1"})
    yield RUNS.result(done.ok, f"{done.seconds:.0f} s" if done.ok else _why(done, users=True), "your launch")
    if lines := _metrics(folder / "save"):
        yield from _agreement("your launch", lines[:1], folder / "job", bench)
    else:  # another machine has the metrics, or the job ended after the comparison
        yield _where("your launch", folder / "job")


def _number(name: str, line: Mapping[str, Any]) -> float:
    """A metric; NaN and infinity, which metrics.jsonl has as null, as infinity."""
    return math.inf if line[name] is None else line[name]


def _metrics(save: Path) -> list[dict[str, Any]]:
    return read_metrics(save / "rl") if (save / "rl" / METRICS_FILE).exists() else []


def _agreement(where: str, lines: Sequence[Mapping[str, Any]], job: Path, bench: TrainBench) -> Iterator[Result]:
    """Where trainer and engine part, and how far their log-probs are from each other."""
    far, limit = max(map(partial(_number, "logp_diff/mean"), lines)), LOGP_LIMITS[bench.dtype]
    yield _where(where, job)
    graphs = "" if get_device().is_cpu else ", without captured graphs"
    yield AGREE.result(far <= limit, f"{far:.2g} nats{graphs}", where, nats=limit)


def _why(done: Done, users: bool) -> str:
    """Why a job failed. users: it has flags of the user, so its message may have texts of the user: it is printed, and
    the result has only the type of its error."""
    if not users:
        return reason(done)
    print(tail(done), file=sys.stderr)
    kind = re.match(r"(?:\w+\.)*(\w*(?:Error|Exception))\b", reason(done))
    return f"{kind[1] if kind else 'it ended'}: its message is printed above"


def _ran(where: str, done: Done, lines: Sequence[Mapping[str, Any]], users: bool = False) -> Iterator[Result]:
    trained = done.ok and len(lines) == 3
    kind, message = found.groups() if (found := _BROKEN.search("\n".join(done.lines))) else ("", "")
    for check, error in ((ARRIVE, "WeightMismatch"), (FINITE, "BrokenWeights")):
        if kind == error:
            yield check.result(False, message, where)
        else:
            yield check.result(True, "", where) if trained else check.not_run("the job ended before", where)
    yield RUNS.result(trained, f"{done.seconds:.0f} s" if trained else _why(done, users), where)


def _where(where: str, job: Path) -> Result:
    """The first place where trainer and engine part."""
    rows = [
        (json.loads(line), file.stem.rpartition("-")[2])
        for file in sorted(job.glob(f"{compare.PARTS_FILES}*"))
        for line in file.read_text().splitlines()
    ]
    if not rows:
        return WHERE.not_run("the job ended before", where)
    noise = rows[0][0]["noise"]
    if not (parted := [(row, rank) for row, rank in rows if row["first"]]):
        worst = max(max(row["far"].values()) for row, _ in rows)
        return WHERE.result(True, f"largest difference {worst:.2g}", where, noise=noise)
    row, rank = min(parted, key=lambda one: (one[0]["version"], compare.depth(one[0]["first"]["place"])))
    place, token = row["first"]["place"], row["first"]["token"]
    when = "of the prompt" if token < len(compare.PROMPT) else "in decoding"
    figure = f"{place}: {row['far'][place]:.2g} on rank {rank}, token {token} {when}, weights {row['version']}"
    return WHERE.result(False, figure, where, noise=noise)


def _growth(lines: Sequence[Mapping[str, Any]]) -> int:
    """By how many bytes the peaks of all stages grew at least, from iteration 2 to 3: by what is not given back. The
    first iteration allocates what is kept."""
    return min(
        (lines[2][n] - lines[1][n] for n in lines[1] if n.startswith("peak_bytes/") and n in lines[2]), default=0
    )


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
        yield RESUME.result(False, _why(done, bool(bench.arguments)), where)
        return
    pairs = [(n, one[n], two.get(n)) for one, two in zip(before, again, strict=True) for n in one]
    differ = [(n, a, b) for n, a, b in pairs if a != b and not NOT_REPEATED.fullmatch(n)]
    figure = "{}: {}, resumed {}".format(*differ[0]) if differ else "equal"
    yield RESUME.result(not differ, figure, where)
    if not last:
        yield KILLED.not_run("there is one rank", where)
        return
    killed = again_in / compare.KILLED_FILE
    ended = done.seconds - (killed.stat().st_mtime - began if killed.exists() else 0)
    said = next((line for line in done.lines if re.search(rf"\brank {last}\b", line) and "[rl]" in line), "")
    good = done.code not in (0, None) and bool(said) and ended <= _ENDS_WITHIN
    text = f"after {ended:.0f} s: {said or f'no line names rank {last}'}"
    yield KILLED.result(good, text, where, seconds=_ENDS_WITHIN, rank=last)
