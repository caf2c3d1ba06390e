"""What a rehearsal says at its end: what was changed and why, what ran, and what this machine cannot show."""

from __future__ import annotations

import re
from pathlib import Path

from mindspeed_rl_plugin.tools.rehearse.capture import Launch
from mindspeed_rl_plugin.tools.rehearse.command_line import Change, Flags
from mindspeed_rl_plugin.tools.rehearse.entry_script import Entry
from mindspeed_rl_plugin.tools.rehearse.passes import Done
from mindspeed_rl_plugin.tools.rehearse.unavailable import NOT_HERE
from mindspeed_rl_plugin.tools.text_table import aligned

_ITERATION = re.compile(r"iteration\s+\d+/\s*\d+ \|")
_RL_ITERATION = re.compile(r"rl \d+/\d+ \|")
_VARIABLES = re.compile(r"(HCCL|ASCEND|NPU|ACL|CPU_AFFINITY|TASK_QUEUE|MULTI_STREAM|COMBINED|PYTORCH_NPU|ATB|LCCL)")


def changes(title: str, rows: list[Change], scratch: Path) -> str:
    """A table: flag, value in the script, value here, why. Paths in the rehearsal's folder begin with SCRATCH."""

    def shown(value: str | None, absent: str) -> str:
        return _cut((absent if value is None else value or "given").replace(str(scratch), "SCRATCH"), 44)

    cells = [(_cut(c.flag, 44), shown(c.old, "-"), shown(c.new, "removed"), c.why) for c in rows]
    lines = [f"  {line}" for line in aligned(cells, 4)] if cells else []
    return "\n".join([f"{title} (flag, in the script, here, why):" if cells else f"{title}: none", *lines])


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[3 - width :]


def trained(done: Done, rl: bool) -> bool:
    """Whether an iteration was really logged, of RL or of pretraining."""
    return done.ok and any((_RL_ITERATION.match if rl else _ITERATION.search)(line) for line in done.lines)


def iteration_lines(done: Done) -> list[str]:
    """Megatron's lines of its iterations, and the plugin's own lines."""
    lines = []
    for line in done.lines:
        if _ITERATION.search(line):
            lines.append(re.sub(r"\s+", " ", line[line.index("iteration") :]))
        elif line.startswith("[rl]") and "patches in force" not in line or _RL_ITERATION.match(line):
            lines.append(line)
    return lines


def not_exercised(launch: Launch, entry: Entry, flags: Flags, ranks: int) -> list[str]:
    """What may still go wrong on the real machine, because nothing of it was tried here."""
    kernels = [c.flag for c in flags.changes if c.why.startswith(NOT_HERE) and c.old is not None]
    variables = sorted(name for name in launch.exported if _VARIABLES.match(name))
    lines = [
        "memory, speed and numerics at the real sizes (everything in the table above was made smaller)",
        f"HCCL, and {launch.world} ranks on {launch.nnodes} node(s): {ranks} ranks talked over gloo on one machine",
        "NPU kernels: " + ("fused operators ran as plain torch operators on a CPU" if entry.mindspeed else "none"),
    ]
    if kernels:
        lines.append(f"switched off, since no host has them: {' '.join(kernels)}")
    if "--rl-algorithm" in flags:
        lines.append("vLLM-Ascend: vLLM generated on the CPU; sleeping and waking an engine, its memory")
        lines.append("prompts, answers and graders on real data: generated sums were used")
    lines.append("the script's data, tokenizer and checkpoints, their formats and sizes: generated ones were used")
    if launch.skipped:
        lines.append("commands of the script that were not run:")
        lines += [f"    {_cut(command, 160)}" for command in launch.skipped]
    if not launch.confined:
        lines.append("this kernel has no Landlock: what else the script called was free to write (rehearse --help)")
    if launch.missing:
        lines.append(f"files and folders that the script names and that are not here: {' '.join(launch.missing)}")
    if variables:
        lines.append(f"environment variables without effect here: {' '.join(variables)}")
    if launch.started > 1:
        lines.append(f"the script starts {launch.started} trainings; only the first was rehearsed")
    return lines
