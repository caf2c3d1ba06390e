"""Which part of your stack is at fault: checks of machine, memory, links, engine, and trainer with engine.

`doctor` starts its ranks itself, on the devices of this machine (two on a CPU); on many machines start it by
`torchrun ... -m mindspeed_rl_plugin doctor`. With SCRIPT.sh versions, environment, flags and sizes are those of the
launch script. `--job SAVE` tells where each process of a job that hangs is.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import html
import json
import os
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from mindspeed_rl_plugin.adapters.targets import saved_numel
from mindspeed_rl_plugin.checkpoints.disk import checkpoint_bytes
from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.monitor.run_files import versions, write_text
from mindspeed_rl_plugin.status.status_file import folder_of
from mindspeed_rl_plugin.status.story import tell
from mindspeed_rl_plugin.tools.doctor import engine_checks, machine, rank_checks, small_models, train_checks
from mindspeed_rl_plugin.tools.doctor.nodes import ANSWERS, Nodes
from mindspeed_rl_plugin.tools.doctor.program import EARLIER, run_checks
from mindspeed_rl_plugin.tools.doctor.result import (
    FAIL,
    NOT_RUN,
    Check,
    Result,
    explained,
    guilty,
    table,
    without_private,
)
from mindspeed_rl_plugin.tools.plan.script_args import namespace, read_arguments
from mindspeed_rl_plugin.tools.rehearse.capture import CapturedLaunch, capture, end_by_signals
from mindspeed_rl_plugin.tools.rehearse.command_line import Flags
from mindspeed_rl_plugin.tools.rehearse.entry_script import ROOT, find_entry
from mindspeed_rl_plugin.tools.report.report import embed

ENGINE_SECONDS = 300.0  # limit of a process of the engine checks, and of running SCRIPT.sh
DOCTOR_PARTS = ("machine", "memory", "links", "engine", "trainer")
ALL_CHECKS = (ANSWERS, *machine.MACHINE_CHECKS, *rank_checks.RANK_CHECKS, *engine_checks.ENGINE_CHECKS)
ALL_CHECKS += train_checks.TRAIN_CHECKS


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m mindspeed_rl_plugin doctor`. Returns 1 if a check fails or, with a message, cannot be made; 130 if it
    was interrupted."""
    options = _parser().parse_args(argv)
    try:
        if options.keep and Path(options.keep).exists():
            raise ValueError(f"--keep {options.keep}: it exists; give the name of a new folder")
        if options.stacks and not options.job:
            raise ValueError("--stacks needs --job SAVE")
        if options.compare and not options.script:
            raise ValueError("--compare needs SCRIPT.sh, a launch script with --rl-* flags and --load")
        if options.job:
            print(tell(folder_of(options.job), options.stacks))
            return 0
        if (nodes := Nodes.of_torchrun()) is None:  # another rank of this machine does the work
            return 0
        if options.out and not os.access(Path(options.out).absolute().parent, os.W_OK):
            raise ValueError(f"--out {options.out}: its folder does not exist, or cannot be written")
        results, whole = list[Result](), False
        with contextlib.suppress(KeyboardInterrupt), _folder(options) as folder:
            for one in _Doctor(options, nodes, Path(folder)).results():
                results.append(one)
            whole = True
        results, names = nodes.gather(results)
        results = explained(results, ALL_CHECKS)
    except (ValueError, OSError, RuntimeError) as error:  # of a script, a file, the store of the machines
        print(f"doctor: {error}", file=sys.stderr)
        return 1
    if nodes.index:
        return 0
    bad = guilty(results)
    ran, end = [r for r in results if r.verdict != NOT_RUN], "" if whole else "; interrupted: other checks did not run"
    if idle := [part for part in options.only if whole and not options.compare and part not in {r.part for r in ran}]:
        end = f"; not checked at all: {', '.join(idle)}"
    verdict = f"{len(bad) or 'nothing'} {'is' if len(bad) < 2 else 'are'} at fault"
    verdict = verdict if whole else f"interrupted; so far {verdict}"
    verdict = f"{verdict} ({len(ran)} of {len(results)} checks ran{end})"
    print(table(results), verdict, sep="\n\n")
    if options.out:
        write_text(options.out, page(results, names, verdict))
        print(f"{options.out} has these results for a bug report")
    return 1 if bad else 0 if whole else 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mindspeed_rl_plugin doctor", description=__doc__)
    parser.add_argument("script", nargs="?", type=Path, metavar="SCRIPT.sh", help="launch script to take settings from")
    parser.add_argument("--full", action="store_true", help="each model in every layout, with resume and a lost rank")
    compare = "one prompt through trainer and engine of SCRIPT.sh itself, at its real size: where do they part?"
    parser.add_argument("--compare", action="store_true", help=compare)
    parser.add_argument(
        "--only", nargs="+", choices=DOCTOR_PARTS, default=DOCTOR_PARTS, help="parts to check (default: all)"
    )
    parser.add_argument("--out", metavar="FILE", help="write one HTML file for a bug report, without paths and hosts")
    parser.add_argument("--keep", metavar="DIR", help="keep logs and generated files in a new folder DIR")
    parser.add_argument("--job", metavar="SAVE", help="the --save of a job: where each of its processes is")
    parser.add_argument("--stacks", action="store_true", help="with --job: also Python stacks of its processes here")
    return parser


@dataclasses.dataclass
class _Doctor:
    """The checks of this machine."""

    options: argparse.Namespace
    nodes: Nodes
    folder: Path
    unknown: dict[str, str] = dataclasses.field(default_factory=dict)  # model -> why this engine does not have it

    def results(self) -> Iterator[Result]:
        """All results. A part that raises an error is a failure, and the next part is checked."""
        launch = self._launch()
        if self.options.script and self.nodes.count == 1:  # it may leave devices to others
            self.nodes = dataclasses.replace(self.nodes, ranks=min(self.nodes.ranks, launch.nproc))
        os.environ.update(launch.exported)
        flags = Flags.parse(launch.arguments)
        cpu = get_device().is_cpu
        if "--fp16" in flags:
            raise ValueError(f"{self.options.script} has --fp16, which RL refuses: give --bf16")
        dtype = "bfloat16" if "--bf16" in flags or not (self.options.script or cpu) else "float32"
        if self.options.compare:
            if "--rl-algorithm" not in flags:
                raise ValueError(f"--compare {self.options.script}: it has no --rl-algorithm; add its --rl-* flags")
            if not {"--load", "--pretrained-checkpoint"} & flags.values.keys():
                _say(f"{self.options.script} has no --load: the random weights with which it begins are compared")
            yield from train_checks.compare_launch(self._bench(launch, dtype))
            return
        parts = {
            "machine": lambda: self._machine(launch, flags),
            "memory": lambda: self._ranks((60.0 if cpu else 240.0) + 5.0 * self.nodes.ranks * self.nodes.count),
            "engine": lambda: self._engine(launch, dtype, cpu),
            "trainer": lambda: self._trainer(launch, dtype),
        }
        only = ["memory" if name == "links" else name for name in self.options.only]  # the same processes
        for name in dict.fromkeys(only):
            _say("memory and links" if name == "memory" else name)
            try:
                yield from parts[name]()
            except (ValueError, OSError, RuntimeError, TypeError, LookupError) as error:
                yield Check(name, "doctor itself", fix=engine_checks.TELL_US).ended(
                    3, f"{type(error).__name__}: {error}"
                )

    def _machine(self, launch: CapturedLaunch, flags: Flags) -> Iterator[Result]:
        save = flags.get("--save") or ""
        split = flags.number("--tensor-model-parallel-size", 1) > 1 and not any("fsdp" in flag for flag in flags.values)
        if split and get_device().kind == "cuda":  # Blackwell runs kernels in order by itself
            split = get_device().api.get_device_capability()[0] < 10
        where = str(launch.cwd / save) if save else ""
        saved, bites = self._checkpoint(launch, flags) if where else 0, {machine.ONE_CONNECTION} if split else ()
        yield from machine.machine_results(self.nodes, get_device().kind, where, saved, bites)
        yield from machine.between(self.nodes)

    def _checkpoint(self, launch: CapturedLaunch, flags: Flags) -> int:
        """Bytes of a checkpoint of the launch; 0 if the size of its model is not known."""
        try:
            planned = read_arguments(flags, launch.world, folder=launch.cwd)
        except ValueError as error:
            _say(f"  --save is checked for 1 GiB, since the model is not known: {str(error).partition(';')[0]}")
            return 0
        return checkpoint_bytes(namespace(flags), saved_numel(planned.shape, planned.lora), planned.itemsize)

    def _ranks(self, seconds: float) -> list[Result]:
        program = rank_checks.__name__, rank_checks.RANK_CHECKS
        return run_checks(*program, self.nodes, self.folder / "ranks", seconds, _environment(self.folder))

    def _engine(self, launch: CapturedLaunch, dtype: str, cpu: bool) -> Iterator[Result]:
        """On an accelerator a process for each model: vLLM's sleep mode allows one engine in a process."""
        configs, why = small_models.models_of(launch.arguments)
        (file := self.folder / "models.json").write_text(json.dumps(configs))
        _say(f"  {', '.join(configs)}; a model takes up to a minute or two")
        program, env = (engine_checks.__name__, engine_checks.ENGINE_CHECKS), _environment(self.folder)
        for models in [[*configs]] if cpu else [[name] for name in configs]:
            folder = self.folder / f"engine {models[0]}"
            for r in run_checks(*program, Nodes(1), folder, ENGINE_SECONDS, env, dtype, str(file), *models):
                if r.check == engine_checks.BUILD.name and r.verdict == NOT_RUN and r.figure != EARLIER:
                    self.unknown[r.where] = r.figure
                yield r
        if why:
            yield engine_checks.BUILD.not_run(why, small_models.YOURS)

    def _launch(self) -> CapturedLaunch:
        """The launch of the script or, without one, of Megatron's pretrain_gpt.py on this machine."""
        if self.options.script:
            return capture(self.options.script.resolve(), self.folder, ENGINE_SECONDS)
        ranks, env = self.nodes.ranks, dict(os.environ)
        return CapturedLaunch("pretrain_gpt.py", (), ranks, self.nodes.count, Path.cwd(), env, {}, (), 1)

    def _bench(self, launch: CapturedLaunch, dtype: str) -> train_checks.TrainBench:
        """Raises ValueError if there is no Megatron, or no entry script."""
        entry = find_entry(launch, self.options.script or Path(launch.script), self.folder)
        if get_device().kind == "npu" and not entry.mindspeed:
            raise ValueError(
                "Megatron alone does not run on an NPU: set MEGATRON_LM_PATH and MINDSPEED_PATH to checkouts"
            )
        for note in filter(None, (entry.note, f"trainer and engine on {entry.platform}")):
            _say(note)
        path = os.pathsep.join(map(str, (*entry.path, ROOT)))
        env = _environment(self.folder) | launch.exported | {"PYTHONPATH": path}
        own = (self.folder, entry, env, dtype, launch.arguments)
        if self.options.compare:
            return train_checks.TrainBench(self._nodes_of(launch), *own, 3600.0, launch.cwd)
        return train_checks.TrainBench(Nodes(_even(self.nodes.ranks)), *own)

    def _nodes_of(self, launch: CapturedLaunch) -> Nodes:
        """The ranks of a launch. Raises ValueError for another number of machines, or too few devices."""
        here, device = self.nodes.ranks, get_device()
        if self.nodes.count != launch.nnodes or here < launch.nproc and not device.is_cpu:
            raise ValueError(
                f"{self.options.script} needs {launch.nnodes} machines with {launch.nproc} devices, and here are "
                f"{self.nodes.count} with {here}: start doctor by torchrun on as many machines"
            )
        return dataclasses.replace(self.nodes, ranks=launch.nproc)

    def _trainer(self, launch: CapturedLaunch, dtype: str) -> Iterator[Result]:
        try:
            bench = self._bench(launch, dtype)
        except ValueError as error:
            yield from (check.not_run(str(error)) for check in train_checks.TRAIN_CHECKS)
            return
        layouts, prepared = {n: a for n, a in train_checks.LAYOUTS.items() if n not in self.unknown}, bench.prepare()
        yield from (train_checks.RUNS.not_run(why, name) for name, why in self.unknown.items())
        if why := small_models.models_of(launch.arguments)[1]:
            yield train_checks.RUNS.not_run(why, small_models.YOURS)
        elif launch.arguments:
            layouts[small_models.YOURS] = small_models.axes_of(Flags.parse(launch.arguments))
        for name, axes in layouts.items():
            for axis in axes if self.options.full else axes[:1]:
                _say(f"  {name}, {axis}")
                job = (name, axis, bench, prepared)
                yield from train_checks.check_model(*job, first=axis == axes[0], full=self.options.full)


def _even(ranks: int) -> int:
    """The most ranks for small jobs: at most 8, and an even number, so that two can share a model."""
    return min(ranks - ranks % 2, 8) or 1


def _folder(options: argparse.Namespace) -> contextlib.AbstractContextManager[str]:
    """The folder for generated files, removed at the end, also after a signal, unless --keep names it."""
    end_by_signals()
    if not options.keep:
        return tempfile.TemporaryDirectory(prefix="doctor-", ignore_cleanup_errors=True)
    Path(options.keep).mkdir(parents=True)
    return contextlib.nullcontext(str(Path(options.keep).resolve()))


def _environment(folder: Path) -> dict[str, str]:
    """Of what doctor starts."""
    fixed = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder), "TOKENIZERS_PARALLELISM": "false"}
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    fixed |= dict.fromkeys(("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"), str(folder / "cache"))
    fixed |= {"ASCEND_WORK_PATH": str(folder), "ASCEND_PROCESS_LOG_PATH": str(folder)}
    return {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ, **fixed, "PYTHONPATH": path}


def _say(what: str) -> None:
    print(f"doctor: {what}", file=sys.stderr, flush=True)


def page(results: Sequence[Result], names: Collection[str], verdict: str) -> str:
    """One HTML page: the table, and the same as JSON; without addresses, folders and names (of machines and users)."""
    clean = []
    for r in results:
        figure, where = without_private(r.told, names), without_private(r.where, names)
        fix = r.fix if r.verdict == FAIL else ""
        clean.append(dataclasses.replace(r, figure=figure, where=where, ranks=(), fix=fix))
    data = {"versions": versions(), "device": get_device().kind, "time": int(time.time())}
    data["results"] = [dataclasses.asdict(r) for r in clean]
    text = "\n".join([", ".join(f"{k} {v}" for k, v in data["versions"].items()), "", table(clean), "", verdict])
    return (
        f'<!doctype html><meta charset="utf-8"><title>doctor</title><pre>{html.escape(text)}</pre>'
        f'<script type="application/json" id="doctor">{embed(data)}</script>\n'
    )
