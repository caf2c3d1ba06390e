"""The flags in an argparse parser, generated from the fields of the config groups."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Callable
from types import UnionType
from typing import Any

from mindspeed_rl_plugin.config.flag import flag_name, limits_text
from mindspeed_rl_plugin.config.rl_config import group_types


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add every flag to Megatron's parser, one titled argument group a config group. Idempotent.

    Raises argparse.ArgumentError when the parser already owns a flag of that name.
    """
    if any(hasattr(action, "mindspeed_rl") for action in parser._actions):
        return parser
    for group_name, group in group_types().items():
        section = parser.add_argument_group(f"reinforcement learning: {group_name}", (group.__doc__ or "").strip())
        hints = typing.get_type_hints(group)  # once: it evaluates those of all fields
        for f in dataclasses.fields(group):
            section.add_argument(flag_name(f.name), **_argparse_kwargs(f, hints[f.name])).mindspeed_rl = True
    return parser


def flag_names() -> list[str]:
    """Every flag, `--no-` twins of default-on switches included."""
    return [name for a in add_flags(argparse.ArgumentParser(add_help=False))._actions for name in a.option_strings]


def help_text(f: dataclasses.Field) -> str:
    """What `--help` says of a flag: its meaning, unit, limits and default."""
    text, limits = f.metadata["help"], limits_text(f)
    if f.metadata["unit"]:
        text += f" [{f.metadata['unit']}]"
    if limits:
        text += f"; {limits}"
    if f.default not in (None, ()) and not isinstance(f.default, bool):
        text += f" (default: {' '.join(map(str, f.default)) if isinstance(f.default, tuple) else f.default})"
    return text


def _argparse_kwargs(f: dataclasses.Field, hint: Any) -> dict[str, Any]:
    several = isinstance(f.default, tuple)
    default = list(f.default) if several else f.default
    kwargs: dict[str, Any] = {"help": help_text(f).replace("%", "%%"), "default": default}
    if hint in (bool, bool | None):
        return kwargs | {"action": "store_true" if f.default is False else argparse.BooleanOptionalAction}
    if typing.get_origin(hint) in (UnionType, tuple):  # `int | None`, `tuple[int, ...]`
        hint = typing.get_args(hint)[0]
    if f.metadata["form"]:
        hint = _checked(f.metadata["form"])
    return kwargs | {"type": hint} | ({"nargs": "*"} if several else {"choices": f.metadata["choices"]})


def _checked(form: Callable[[str], Any]) -> Callable[[str], str]:
    """The text that a form can read, as it is: Megatron saves its arguments, plain values alone."""

    def checked(text: str) -> str:
        form(text)
        return text

    return checked
