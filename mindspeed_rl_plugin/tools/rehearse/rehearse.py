"""Rehearse an Ascend launch script: run it on this machine, shrunk, for one iteration.

The script runs up to its torchrun: commands that delete, copy, kill, log in or install are listed and not run; the
rest is run, and where the kernel has no Landlock (Linux 5.13) that may write where the script says. The arguments, as
written and for the world as written, go through the parsers and the validation of MindSpeed, Megatron and the plugin;
only paths of files that are not here are replaced. Then world, model and batches are made smaller and one iteration is
trained on CPU: of RL where --rl-algorithm is among the arguments, else of pretraining. Where the script loads a
checkpoint, one is made first, by the same script without RL. Every argument that was changed is printed with the
reason, and everything that was not exercised. Everything after -- is added to the training arguments, for example the
--rl-* flags that the script shall get.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from mindspeed_rl_plugin.tools.rehearse import outcome, unavailable
from mindspeed_rl_plugin.tools.rehearse.capture import capture
from mindspeed_rl_plugin.tools.rehearse.command_line import Flags
from mindspeed_rl_plugin.tools.rehearse.entry_script import find_entry
from mindspeed_rl_plugin.tools.rehearse.passes import Passes
from mindspeed_rl_plugin.tools.rehearse.shrink import shrink
from mindspeed_rl_plugin.tools.rehearse.substitutes import substitute


def main(argv: list[str]) -> int:
    """Rehearse a launch script. Returns 0 when its arguments were accepted and the iteration was trained."""
    at = argv.index("--") if "--" in argv else len(argv)
    options = _parser().parse_args(argv[:at])
    scratch = Path(tempfile.mkdtemp(prefix="rehearse-"))
    try:
        if options.ranks < 1 or options.ranks & (options.ranks - 1):
            raise ValueError(f"--ranks {options.ranks}: give a power of two")
        return _rehearse(options, argv[at + 1 :], scratch)
    except ValueError as error:
        print(f"rehearse: {error}", file=sys.stderr)
        return 1
    finally:
        if options.keep:
            _say(f"logs, checkpoints and generated files are in {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m mindspeed_rl_plugin rehearse", description=__doc__)
    parser.add_argument("script", type=Path, help="launch script (bash)")
    parser.add_argument("--ranks", type=int, default=2, help="processes to train on, a power of two (default: 2)")
    parser.add_argument("--timeout", type=float, default=600.0, help="limit of each step [seconds] (default: 600)")
    parser.add_argument("--keep", action="store_true", help="keep logs, checkpoints and generated files")
    return parser


def _rehearse(options: argparse.Namespace, added: list[str], scratch: Path) -> int:
    launch = capture(options.script.resolve(), scratch, options.timeout)
    entry = find_entry(launch, options.script, scratch)
    _say(f"{options.script} starts {launch} with {len(launch.arguments)} words of arguments")
    for note in filter(None, (entry.note, f"running {entry.script} on {entry.platform}")):
        _say(note)

    passes = Passes(launch, entry, scratch, options.timeout)
    flags = Flags.parse([*launch.arguments, *added])
    substitute(flags, scratch, entry.mindspeed_llm)
    world = launch.world
    if not entry.mindspeed_llm:
        unavailable.of_mindspeed_llm(flags)
    if not entry.mindspeed:
        # Without context parallelism on as many fewer ranks: what a batch is divided by stays the script's.
        world //= flags.number("--context-parallel-size", 1)
        unavailable.remove(flags, mindspeed=False)
    accepted, unknown = passes.accept(flags.argv(), world)
    flags.drop(unknown, f"no flag of {entry.platform}")
    _say(f"arguments as written, for {launch.world} ranks: {accepted.verdict}")
    if not accepted.ok:
        print(f"{outcome.tail(accepted)}\n\n{outcome.changes('replaced before', flags, scratch)}")
        return 1

    if entry.mindspeed:
        unavailable.remove(flags, mindspeed=True)
    shrink(flags, options.ranks)
    done = _train(passes, flags, options.ranks)
    print(outcome.changes("\nchanged arguments", flags, scratch), "\nnot exercised:", sep="\n")
    print("\n".join(f"  - {line}" for line in outcome.not_exercised(launch, entry, flags, options.ranks)))
    return 0 if done else 1


def _train(passes: Passes, flags: Flags, ranks: int) -> bool:
    """One iteration; before it, where the script loads a checkpoint, one that makes that checkpoint."""
    rl = "--rl-algorithm" in flags
    if "--save" in flags:
        flags.set("--save-interval", 1, why="so that saving is rehearsed")
    if "--load" in flags:
        if not rl:  # goes on after the checkpoint's iteration, so its one iteration is the second
            name = "--train-samples" if "--train-samples" in flags else "--train-iters"
            flags.set(name, 2 * flags.number(name, 1), why="one iteration after the checkpoint's")
        first = Flags({f: values for f, values in flags.values.items() if not f.startswith("--rl-") and f != "--load"})
        for flag, value in (("--save", flags.get("--load")), ("--save-interval", 1), ("--exit-interval", 1)):
            first.set(flag, value, why="")
        made = passes.train("checkpoint", ranks, first.argv())
        _say(f"a checkpoint to load, made by the same script{' without RL' if rl else ''}: {made.verdict}")
        if not made.ok:
            print(outcome.tail(made))
            return False
    done = passes.train("training", ranks, flags.argv())
    if done.ok and not outcome.trained(done, rl):
        done.code = 1
    what = f"one RL iteration ({flags.get('--rl-algorithm')})" if rl else "one pretraining iteration"
    _say(f"{what} on {ranks} ranks: {done.verdict}")
    print("\n".join(f"  {line}" for line in outcome.iteration_lines(done)) if done.ok else outcome.tail(done))
    return done.ok


def _say(text: str) -> None:
    print(f"rehearse: {text}", flush=True)
