"""What a run refuses of a launch script's arguments, though a plan does not need it: said beside the plan."""

from __future__ import annotations

import argparse
from typing import NoReturn

from mindspeed_rl_plugin.config import RLConfig, add_flags, config_problems
from mindspeed_rl_plugin.config.upstream import RUN, UPSTREAM
from mindspeed_rl_plugin.tools.rehearse.command_line import Flags


def refusals(flags: Flags) -> tuple[str, ...]:
    """One message for each argument that is given and that a run refuses (`config.upstream`), and for each value of an
    RL flag that no run takes. Arguments that are missing are left to the run."""
    out = []
    for row in UPSTREAM:
        text = flags.get(row.spelt)
        if row.about == RUN and text is not None:
            out.append(row.message(argparse.Namespace(**{row.name: typed(text)})))
    return (*filter(None, out), *_of_rl_flags(flags))


def typed(text: str) -> bool | int | float | str:
    """A flag's value as its type: a switch is True, a number is a number."""
    if not text:
        return True
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _of_rl_flags(flags: Flags) -> tuple[str, ...]:
    parser = add_flags(_Parser(add_help=False))
    words = [word for flag, values in flags.items if flag.startswith(("--rl-", "--no-rl-")) for word in (flag, *values)]
    try:
        args, _ = parser.parse_known_args(words)
    except ValueError as error:
        return (str(error),)
    return tuple(config_problems(RLConfig.from_args(args)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)
