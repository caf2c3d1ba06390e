"""The runner: `torchrun ... -m mindspeed_rl_plugin SCRIPT ARGS`, and the sub-commands.

Runs an unmodified Megatron entry script as `__main__`, with the plugin attached.
"""

from __future__ import annotations

import importlib
import os
import runpy
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# name -> (module of this package with main(argv) -> exit code, help). The module is imported if its command is given.
SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "algorithms": ("tools.algorithms", "presets of --rl-algorithm, their parts and sources"),
    "doctor": ("tools.doctor.doctor", "which part of a machine's stack is at fault; --job: of a job that hangs"),
    "export": ("tools.convert.to_hf", "a Megatron checkpoint as a Hugging Face model"),
    "flags": ("tools.flags", "the flags of the plugin: all, or those that contain a WORD"),
    "generate": ("generators.join", "one more engine for a running job of --rl-schedule async"),
    "import": ("tools.convert.to_megatron", "a Hugging Face model as a Megatron checkpoint"),
    "patch": ("tools.patch", "check, apply or revert the one-line patch of a checkout"),
    "plan": ("tools.plan.plan", "a reshard's memory and time; --dock: a rollout's bytes; --schedule: iteration times"),
    "rehearse": ("tools.rehearse.rehearse", "run an Ascend launch script here, shrunk, for one iteration"),
    "replay": ("tools.replay.repeat", "run an iteration of a job again, from its checkpoint and dump, and compare"),
    "report": ("tools.report.report", "one HTML file of a run: curves, timeline, memory, samples"),
    "tasks": ("tools.tasks", "the tasks of a `verifiers` environment as a data file"),
}


def usage() -> str:
    """The text of `--help`."""
    lines = [
        "usage: torchrun ... -m mindspeed_rl_plugin SCRIPT.py [ARGS of the script, and --rl-* flags]",
        "       python -m mindspeed_rl_plugin COMMAND [ARGS]",
        "",
        "Runs a Megatron-LM or MindSpeed entry script with reinforcement learning attached. Without --rl-algorithm",
        "the script runs exactly as without the plugin. `flags` lists the --rl-* flags.",
        "",
        "commands (each has --help):",
    ]
    return "\n".join(lines + [f"  {name:<10} {text}" for name, (_, text) in SUBCOMMANDS.items()])


def main(argv: list[str]) -> int:
    """Run a sub-command or a script; returns the exit status. A SystemExit that the script raises is not caught."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] in SUBCOMMANDS:
        with _quiet_on_a_closed_pipe():
            return importlib.import_module(f"mindspeed_rl_plugin.{SUBCOMMANDS[argv[0]][0]}").main(argv[1:]) or 0
    script = argv[0]
    if not os.path.isfile(script):
        known = ", ".join(SUBCOMMANDS)
        print(f"mindspeed_rl_plugin: {script!r} is neither a file nor a command ({known})", file=sys.stderr)
        return 2
    run_script(script, argv[1:])
    return 0


@contextmanager
def _quiet_on_a_closed_pipe() -> Iterator[None]:
    """If the reader of standard output has ended (`| head`), exit with status 141, as after SIGPIPE. BrokenPipeError of
    any other pipe is raised."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # in `finally`, because --help raises SystemExit
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout, 0)
        if not output.poll(0):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # drops what is still buffered
        sys.exit(141)


def run_script(script: str, arguments: list[str]) -> None:
    """Run `script` as `__main__` with the plugin attached, as `python script arguments` would.

    Exits with a message if Megatron cannot be imported.
    """
    sys.argv = [script, *arguments]
    from mindspeed_rl_plugin.checks import early

    early.check_flags()  # needed if the adaptor is imported already: its import below then does nothing
    import mindspeed_rl_plugin.adaptor  # noqa: F401
    from mindspeed_rl_plugin.launch.generator_ranks import leave_if_generator

    leave_if_generator()  # for the same reason
    here = os.path.dirname(os.path.abspath(script))
    if getattr(sys.flags, "safe_path", False):  # option -P of Python 3.11: the working directory is not in sys.path
        sys.path.insert(0, here)
    else:
        sys.path[0] = here  # instead of the working directory, which -m puts there
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if root not in sys.path:
        sys.path.append(root)  # so that spawned processes find a plugin that is not installed
    try:
        runpy.run_path(script, run_name="__main__")
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core", "megatron.training"):
            raise
        sys.exit(
            f"mindspeed_rl_plugin: {script} imports {error.name}, which is not found: put your Megatron-LM checkout on "
            "PYTHONPATH (megatron-core from PyPI has megatron.training from 0.17 on); without accelerator, run setup.sh"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
