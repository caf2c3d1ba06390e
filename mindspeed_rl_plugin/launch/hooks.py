"""The hooks of the patch table: called instead of Megatron's functions, with the original as first argument.

Without `--rl-algorithm` they call the originals, add the `--rl-*` flags, and report such flags if unknown or unused.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import sys
from collections.abc import Callable
from typing import Any

from mindspeed_rl_plugin.checks import taken_over
from mindspeed_rl_plugin.checks.early import refuse_misspelt
from mindspeed_rl_plugin.config import RLConfig, add_flags, given_flags, rl_enabled
from mindspeed_rl_plugin.environment import say
from mindspeed_rl_plugin.launch import endings


def add_megatron_arguments(original: Callable, parser: Any) -> Any:
    """Add the `--rl-*` flags to Megatron's parser."""
    _refuse_yaml(sys.argv[1:])
    taken_over.from_command_line()
    return refuse_misspelt(_repair_help(add_flags(original(parser))))


def validate_args(original: Callable, args: Any, *rest: Any, **named: Any) -> Any:
    """Check the arguments under RL right after Megatron's own validation, before anything is built.

    The model's family and the division of the batch are checked before that validation: its messages would name flags
    that the user did not give.
    """
    if not rl_enabled(args):
        _warn_of_unused(args)
        return original(args, *rest, **named)
    from mindspeed_rl_plugin.checks.flag_checks import check_args, check_unvalidated
    from mindspeed_rl_plugin.ranks import wait_at_most

    endings.watch(args)
    with endings.refusing():
        check_unvalidated(args)
    result = original(args, *rest, **named)
    with endings.refusing():
        check_args(args)
    wait_at_most(args.rl_wait_timeout)
    return result


def under_rl(name: str) -> Callable:
    """A hook that, with RL, calls the function of this name in `launch.launch` (imported only then) with Megatron's
    arguments, the original, and the call's arguments; without RL it only calls the original."""

    def hook(original: Callable, *positional: Any, **named: Any) -> Any:
        from megatron.training import get_args

        args = get_args()
        if not rl_enabled(args):
            return original(*positional, **named)
        ours = getattr(importlib.import_module("mindspeed_rl_plugin.launch.launch"), name)
        return ours(args, original, positional, named)

    hook.__name__ = name
    return hook


def _warn_of_unused(args: Any) -> None:
    """Print warnings now, before hundreds of Megatron's lines, and again at the end of the run."""
    if flags := given_flags(RLConfig.from_args(args)):
        why = "no reinforcement learning: --rl-algorithm is missing, and without it these have no effect:"
        what = f"{why} {' '.join(flags)}"
        say(
            f"WARNING: this run is ordinary pretraining, {what}. Give --rl-algorithm NAME (`python -m "
            "mindspeed_rl_plugin algorithms` lists them), or remove these flags to pretrain"
        )
        atexit.register(say, f"WARNING: this run was ordinary pretraining, {what}")


def _repair_help(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Make `--help` work: core 0.19.0 to 0.19.2 have a bare % in the help of --moe-paged-stash-buffer-size-factor-cuda.

    Texts that argparse can format are not changed. Remove when these versions are no longer supported.
    """
    for action in parser._actions:
        if action.help and action.help is not argparse.SUPPRESS:
            try:
                action.help % vars(action)
            except (ValueError, TypeError):
                action.help = action.help.replace("%", "%%")
            except KeyError:
                continue  # a name that only argparse knows, such as %(prog)s
    return parser


def _refuse_yaml(argv: list[str]) -> None:
    """Refuse Megatron's `--yaml-cfg`: it replaces all parsed arguments, so RL flags would be lost without a message."""
    rl = [a for a in argv if a.startswith("--rl-algorithm")]
    if rl and any(a.split("=")[0] == "--yaml-cfg" for a in argv):
        raise ValueError("--yaml-cfg drops every other argument, the --rl-* flags too; give the arguments as flags")
