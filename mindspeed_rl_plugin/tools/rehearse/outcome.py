"""The report of a rehearsal: what was changed and why, what ran or failed, and what this machine cannot test."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_rl_plugin.checkpoints.checkpoint_files import TRACKER
from mindspeed_rl_plugin.checks.taken_over import TAKEN_OVER
from mindspeed_rl_plugin.tools.rehearse.absent_modules import STANDIN
from mindspeed_rl_plugin.tools.rehearse.capture import CapturedLaunch, Done
from mindspeed_rl_plugin.tools.rehearse.command_line import Flags
from mindspeed_rl_plugin.tools.rehearse.entry_script import Entry
from mindspeed_rl_plugin.tools.rehearse.shrink import NOT_HERE
from mindspeed_rl_plugin.tools.text_table import aligned

REFUSAL = "[rl] RL cannot run"  # first words of a refusal of the plugin (launch.endings)
_LOG_LINE = re.compile(r"iteration\s+\d+/\s*\d+ \|")
_RL_ITERATION = re.compile(r"rl \d+/\d+ \|")
_EVALUATION = re.compile(r"rl \d+/\d+ eval \|")
_VARIABLES = re.compile(r"(HCCL|ASCEND|NPU|ACL|CPU_AFFINITY|TASK_QUEUE|MULTI_STREAM|COMBINED|PYTORCH_NPU|ATB|LCCL)")
_ERROR = re.compile(r"[\w.]*(Error|Exception)(:|$)|.*: error: ")
_TORCHRUN_REPORT = re.compile(r"torch.distributed.elastic.multiprocessing")  # torchrun's report of failed ranks
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_FRAME = re.compile(r'\s*File "([^<"][^"]*)", line (\d+)')
_PROJECTS = {"mindspeed_llm": "MindSpeed-LLM", "mindspeed": "MindSpeed", "megatron": "Megatron"}  # by package


@dataclass
class Facts:
    """A rehearsal's result, for programs to read."""

    # which of these worked: iteration, evaluation, dump, save, resume, conversion
    shown: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)  # flags that were not tested, see `removed` below
    modules: list[str] = field(default_factory=list)  # Python modules with a stand-in
    seconds: dict[str, float] = field(default_factory=dict)  # of each process
    failed: list[str] = field(default_factory=list)  # lines with the reason of an early end


def shown(name: str, lines: Iterable[str], flags: Flags) -> list[str]:
    """What the process `name` (`training` or `resume`) has done, by its lines and files."""
    rounds, held_out = ([line for line in lines if kind.match(line)] for kind in (_RL_ITERATION, _EVALUATION))
    if name == "resume":
        return ["resume"] if any(line.startswith("rl 2/") for line in rounds) else []
    files = {flag: Path(flags.get(flag) or "/nowhere") for flag in ("--rl-dump-dir", "--save")}
    what = {"iteration": rounds, "evaluation": held_out, "dump": any(files["--rl-dump-dir"].glob("**/*.parquet"))}
    return [each for each, seen in (what | {"save": (files["--save"] / TRACKER).exists()}).items() if seen]


def removed(flags: Flags) -> list[str]:
    """Flags of the script that are not tested: removed flags (except those of trackers, those that RL removes
    itself, and those that generated files replace), and parallel sizes that became 1."""
    ours = {flag for row in TAKEN_OVER.values() for flag in row.split()} if "--rl-algorithm" in flags else set()
    lost = [c for c in flags.changes if c.old is not None and not c.why.startswith(("here: ", "nothing is reported"))]
    return [c.flag for c in lost if c.new is None and c.flag not in ours or c.new == "1" and "-parallel-" in c.flag]


def changes(title: str, flags: Flags, scratch: Path) -> str:
    """A table: flag, value in the script, value here, reason. SCRATCH stands for the rehearsal's folder in paths."""

    def shown(value: str | None, absent: str) -> str:
        return _cut((absent if value is None else value or "given").replace(str(scratch), "SCRATCH"), 44)

    cells = [(_cut(c.flag, 44), shown(c.old, "-"), shown(c.new, "removed"), c.why) for c in flags.changes]
    lines = [f"  {line}" for line in aligned(cells, 4)] if cells else []
    return "\n".join([f"{title} (flag, in the script, here, why):" if cells else f"{title}: none", *lines])


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[3 - width :]


def tail(done: Done, count: int = 25) -> str:
    """The lines with the reason of a failure: the deadline, a refusal, a missing module, the end of a traceback, else
    the last lines of the ranks."""
    if done.code is None:
        return f"{done.name}: ended at its deadline after {done.seconds:.0f} s; last line: {(done.lines or [''])[-1]}"
    lines = [re.sub(r"^\[rank.*?\]: ", "", line) for line in done.lines]
    lines = [line for line in lines if not line.strip().startswith("[--")]  # argparse's usage
    refused = list(itertools.dropwhile(lambda line: not line.startswith(REFUSAL), lines))
    if refused:  # the plugin's own message is enough
        return "\n".join([refused[0], *itertools.takewhile(lambda line: line.startswith("  - "), refused[1:])])
    lines = list(itertools.takewhile(lambda line: not _TORCHRUN_REPORT.search(line), lines)) or lines
    error = next((i for i, line in enumerate(lines) if _ERROR.match(line)), len(lines))
    if missing := _MISSING.match(lines[error]) if error < len(lines) else None:
        return _missing_module(missing[1], lines[:error])
    return "\n".join(lines[: error + 12][-count:])


def reason(done: Done) -> str:
    """The line of `tail` that says most: that of the error, else the last one."""
    lines = tail(done).splitlines()
    return next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1] if lines else "it printed nothing")


def _missing_module(module: str, traceback: list[str]) -> str:
    """One line: the module, the code that imports it, and the fix."""
    frames = [match.groups() for line in traceback if (match := _FRAME.match(line))]
    file, number = frames[-1] if frames else ("its log does not say where", "?")
    owner = next((name for part, name in _PROJECTS.items() if part in Path(file).parts), "the script")
    return (
        f"the Python module {module} is not installed, and {owner} needs it ({file}, line {number}): "
        "install it here, or put a folder that holds it on PYTHONPATH"
    )


def iterations(done: Done, rl: bool) -> list[str]:
    """Megatron's lines of iterations, and the plugin's own lines, also of evaluations; empty if the process failed or
    logged no iteration (rl: of RL; else of pretraining)."""
    lines = [line for line in done.lines if line.startswith("[rl]") and "RL is attached" not in line]
    rounds = [line for line in done.lines if _RL_ITERATION.match(line)]
    logged = [re.sub(r"\s+", " ", line[line.index("iteration") :]) for line in done.lines if _LOG_LINE.search(line)]
    held_out = [line for line in done.lines if _EVALUATION.match(line)]
    return [*lines, *held_out, *rounds, *logged] if done.ok and (rounds if rl else logged) else []


def absent_modules(lines: Iterable[str]) -> set[str]:
    """Python modules that got a stand-in, by the lines of a process."""
    return {line.removeprefix(STANDIN).split()[0] for line in lines if line.startswith(STANDIN)}


def not_exercised(
    launch: CapturedLaunch, entry: Entry, flags: Flags, ranks: int, absent: Collection[str] = ()
) -> list[str]:
    """What may still fail on the real machine, since it was not tested here. absent: missing Python modules."""
    kernels = [c.flag for c in flags.changes if c.why.startswith(NOT_HERE) and c.old is not None]
    variables = sorted(name for name in launch.exported if _VARIABLES.match(name))
    operators = "fused operators ran as plain torch operators on a CPU" if entry.mindspeed else "none was called"
    rl = "--rl-algorithm" in flags
    lines = [
        (True, "memory, speed and numerics at the real sizes (the table above has what was made smaller)"),
        (True, f"HCCL, and {launch.world} ranks on {launch.nnodes} node(s): {ranks} ranks used gloo"),
        (True, f"NPU kernels: {operators}"),
        (kernels, f"switched off, since they need an accelerator: {' '.join(kernels)}"),
        (rl, "vLLM-Ascend (vLLM generated on the CPU), and an engine's memory, its sleep and its wake-up"),
        (rl, "prompts, answers and graders on real data: generated sums were used"),
        (True, "the script's data, tokenizer and checkpoints, their formats and sizes: generated ones were used"),
        (launch.skipped, "commands of the script that were not run:"),
        *((True, f"    {_cut(command, 160)}") for command in launch.skipped),
        (not launch.confined, "this kernel has no Landlock: what the script ran could write anywhere"),
        (launch.missing, f"files and folders that the script names, but that are not here: {' '.join(launch.missing)}"),
        (variables, f"environment variables without effect here: {' '.join(variables)}"),
        (absent, f"Python modules that are not installed, and not called: {' '.join(sorted(absent))}"),
        (launch.started > 1, f"the script starts {launch.started} trainings; only the first was rehearsed"),
    ]
    return [line for applies, line in lines if applies]
