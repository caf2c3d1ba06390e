"""Rehearse an Ascend launch script: run it on this machine, shrunk, for one iteration.

The script runs, but its torchrun is only recorded. Commands that delete, copy, kill, log in or install are listed, not
run. All other commands run; with Landlock (Linux 5.13) they can write only in the rehearsal's folders. Files and
folders in the arguments are replaced; if MindSpeed or MindSpeed-LLM is not used, flags that need it are replaced or
removed, too. Then the arguments, for the script's number of ranks, go through the parsers and the validation of
MindSpeed, Megatron and the plugin. Then ranks, model and batches become smaller, and one iteration is trained on CPU:
of RL, with evaluation, dump, save and resume, if --rl-algorithm is given; else of pretraining. Checkpoints to load are
generated. Python modules that MindSpeed lacks here get stand-ins. At the end two lists are printed: changed arguments
with the reasons, and what was not tested. Words after --, such as --rl-* flags, are added to the training arguments.
MEGATRON_LM_PATH (folders separated by colons), MINDSPEED_PATH and MINDSPEED_LLM_PATH name checkouts to use.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from mindspeed_rl_plugin.tools.rehearse import absent_modules, outcome
from mindspeed_rl_plugin.tools.rehearse.absent_modules import ACCEPTED, UNKNOWN
from mindspeed_rl_plugin.tools.rehearse.capture import CapturedLaunch, Done, capture, run, torchrun
from mindspeed_rl_plugin.tools.rehearse.command_line import Flags
from mindspeed_rl_plugin.tools.rehearse.entry_script import ROOT, Entry, find_entry, pretraining
from mindspeed_rl_plugin.tools.rehearse.shrink import ranks_of_split, remove_unavailable, replace_mindspeed_llm, shrink
from mindspeed_rl_plugin.tools.rehearse.substitutes import converted, substitute

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


def main(argv: list[str]) -> int:
    """Rehearse a launch script. Returns 0 if its arguments were accepted and the iteration was trained."""
    at = argv.index("--") if "--" in argv else len(argv)
    options = _parser().parse_args(argv[:at])
    scratch = Path(tempfile.mkdtemp(prefix="rehearse-"))
    facts = outcome.Facts()
    try:
        if options.ranks is not None and (options.ranks < 1 or options.ranks & (options.ranks - 1)):
            raise ValueError(f"--ranks {options.ranks}: give a power of two")
        return 0 if _rehearse(options, argv[at + 1 :], scratch, facts) else 1
    except ValueError as error:
        facts.failed = [str(error)]
        print(f"rehearse: {error}", file=sys.stderr)
        return 1
    finally:
        if options.json:
            options.json.write_text(json.dumps(asdict(facts)).replace(str(scratch), "SCRATCH"))
        if options.keep:
            _say(f"logs, checkpoints and generated files are in {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m mindspeed_rl_plugin rehearse", description=__doc__)
    parser.add_argument("script", type=Path, help="launch script (bash)")
    ranks = "processes to train on, a power of two (default: 2; 4 if the script has several parallel sizes above 1)"
    parser.add_argument("--ranks", type=int, help=ranks)
    parser.add_argument("--timeout", type=float, default=600.0, help="limit of each step [seconds] (default: 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write to FILE what worked, was removed, and failed")
    parser.add_argument("--keep", action="store_true", help="keep logs, checkpoints and generated files")
    return parser


def _rehearse(options: argparse.Namespace, added: list[str], scratch: Path, facts: outcome.Facts) -> bool:
    launch = capture(options.script.resolve(), scratch, options.timeout)
    entry = find_entry(launch, options.script, scratch)
    sizes = f"--nproc-per-node={launch.nproc} --nnodes={launch.nnodes}"
    _say(f"{options.script} starts torchrun {sizes} {launch.script} with {len(launch.arguments)} words of arguments")
    if "--rl-algorithm" in launch.arguments and not launch.attached and "mindspeed_rl" not in entry.script.read_text():
        _say(f"note: a real run needs -m mindspeed_rl_plugin before {launch.script}")
    for note in filter(None, (entry.note, f"running {entry.script} on {entry.platform}")):
        _say(note)
    flags = Flags.parse([*launch.arguments, *added])
    rehearsal = _Rehearsal(options, scratch, launch, entry, flags, facts)
    if not rehearsal.accepted():
        print(outcome.changes("\nchanged before this check", flags, scratch))
        return False
    if entry.mindspeed:
        remove_unavailable(flags, mindspeed=True)
    options.ranks = options.ranks or ranks_of_split(flags)
    shrink(flags, options.ranks)
    facts.removed = outcome.removed(flags)
    trained = rehearsal.trained()
    print(outcome.changes("\nchanged arguments", flags, scratch), "\nnot exercised:", sep="\n")
    missed = outcome.not_exercised(launch, entry, flags, options.ranks, facts.modules)
    print("\n".join(f"  - {line}" for line in missed))
    return trained


@dataclass(frozen=True)
class _Rehearsal:
    """Runs the processes of a rehearsal, each with a deadline and a log file in `scratch`."""

    options: argparse.Namespace
    scratch: Path
    launch: CapturedLaunch
    entry: Entry
    flags: Flags
    facts: outcome.Facts

    def accepted(self) -> bool:
        """Run the original arguments through parsers and validation, as rank 0 of the original world."""
        flags, entry, world = self.flags, self.entry, self.launch.world
        substitute(flags, self.scratch, entry.mindspeed_llm)
        if not entry.mindspeed_llm:
            replace_mindspeed_llm(flags)
        if not entry.mindspeed:
            # `remove_unavailable` makes the context parallel size 1. The number of ranks becomes smaller by the same
            # factor: so the data parallel size stays the same, and still divides the batch.
            world //= flags.number("--context-parallel-size", 1)
            remove_unavailable(flags, mindspeed=False)
        ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": self.launch.nproc}
        ranks |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 1}
        # This process builds no engine, so the KV cache's size only limits lengths; 1e6 GiB allow every length.
        cache = ["--rl-kv-cache-gb", "1e6"] if "--rl-algorithm" in flags else []
        options = ["--accept"] if entry.mindspeed_llm else ["--accept", "--any-flag"]
        command = ["-m", absent_modules.__name__, *options, str(entry.script)]
        done = self._run("arguments", [*command, *flags.argv(), *cache], **ranks)
        unknown = (line.removeprefix(UNKNOWN) for line in done.lines if line.startswith(UNKNOWN))
        flags.apply(f"no flag of {entry.platform}", next(unknown, ""))
        return self._show(f"arguments as written, for {self.launch.world} ranks", done, ACCEPTED in done.lines)

    def trained(self) -> bool:
        """Train one iteration and, for RL with --save, resume for one more. A checkpoint to load is made first."""
        flags, rl = self.flags, "--rl-algorithm" in self.flags
        if "--save" in flags:
            flags.apply("so that saving is rehearsed", "--save-interval=1")
        if "--load" in flags:
            if not rl:  # the run continues from the checkpoint of iteration 1, so it trains iteration 2
                name = "--train-samples" if "--train-samples" in flags else "--train-iters"
                flags.set(name, 2 * flags.number(name, 1), why="one iteration after the checkpoint's")
            if not self._checkpoint_made(rl):
                return False
        what = f"one RL iteration ({flags.get('--rl-algorithm')})" if rl else "one pretraining iteration"
        if not rl or "--save" not in flags:
            return self._iterated(what, "training", flags)
        first = Flags(dict(flags.values))
        first.set("--exit-interval", 1, why="")
        return self._iterated(what, "training", first) and self._iterated("one more after a resume", "resume", flags)

    def _iterated(self, what: str, name: str, flags: Flags) -> bool:
        """Run a process that must log an iteration."""
        done = self._train(name, flags)
        lines = outcome.iterations(done, "--rl-algorithm" in flags)
        trained = self._show(f"{what} on {self.options.ranks} ranks", done, bool(lines))
        self.facts.shown += outcome.shown(name, lines, flags)
        print("\n".join(f"  {line}" for line in lines))
        return trained

    def _checkpoint_made(self, rl: bool) -> bool:
        """Make the checkpoint of `--load` by a first run."""
        flags, to_convert = self.flags, converted(self.flags)
        load = Path(flags.get("--load") or "")
        saved = self.scratch / "pretrained" if to_convert else load
        first = Flags({f: v for f, v in flags.values.items() if not f.startswith("--rl-") and f != "--load"})
        first.apply("", "--enable-hf2mg-convert --enable-mg2hf-convert")
        first.apply("", "--save={0} --save-interval=1 --exit-interval=1", saved)
        script = pretraining(self.entry.script, first)
        what = f"a checkpoint to load, made by {script.name}{' without RL' if rl else ''}"
        if not self._show(what, self._train("checkpoint", first, script), True):
            return False
        if not to_convert:
            return True
        shutil.rmtree(load)
        tokenizer = ["--tokenizer", str(self.scratch / "tokenizer")]
        export = ["-m", "mindspeed_rl_plugin", "export", "--load", str(saved), "--out", str(load), *tokenizer]
        made = self._show("this checkpoint as a Hugging Face model, to be converted", self._run("export", export), True)
        self.facts.shown += ["conversion"] if made else []
        return made

    def _show(self, what: str, done: Done, reached: bool) -> bool:
        """Print the result of a process, with the end of the log if it failed. reached: whether its log shows that
        it did its work."""
        if done.ok and not reached:
            done.code = 1
        _say(f"{what}: {'ok' if done.ok else 'FAILED'} ({done.seconds:.0f} s)")
        self.facts.seconds[done.name] = round(done.seconds, 1)
        if not done.ok:
            print(failed := outcome.tail(done))
            self.facts.failed = failed.splitlines()
        return done.ok

    def _train(self, name: str, flags: Flags, script: Path | None = None) -> Done:
        """Run `script`, or else the entry script, on `--ranks` processes, through the plugin or `absent_modules`."""
        module = absent_modules.__name__ if self.entry.mindspeed else "mindspeed_rl_plugin"
        words = ["-m", module, str(script or self.entry.script), *flags.argv()]
        return self._run(name, torchrun(self.options.ranks, *words))

    def _run(self, name: str, arguments: list[str], **more: object) -> Done:
        env = {"OMP_NUM_THREADS": "1"} | {k: v for k, v in self.launch.env.items() if k not in _RANK_VARIABLES}
        path = os.pathsep.join(map(str, (*self.entry.path, ROOT)))
        env |= {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        env |= {k: str(v) for k, v in more.items()}
        python = os.environ.get("PYTHON_EXEC", sys.executable)  # as torchrun does for its ranks
        command, log = [python, *arguments], self.scratch / f"{name}.log"
        done = run(command, log, self.options.timeout, env=env, cwd=self.launch.cwd)
        self.facts.modules = sorted({*self.facts.modules, *outcome.absent_modules(done.lines)})
        return done


def _say(text: str) -> None:
    print(f"rehearse: {text}", flush=True)
