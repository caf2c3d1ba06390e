"""The flags in an argparse parser, generated from the fields of the config groups."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from types import UnionType
from typing import Any

from mindspeed_rl_plugin.config.flag import flag_name, limits_text
from mindspeed_rl_plugin.config.rl_config import group_types


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add every flag to Megatron's parser, one titled argument group a config group. Idempotent.

    Raises ValueError when the parser already owns a flag of that name with another meaning.
    """
    taken = {s: a for a in parser._actions for s in a.option_strings}
    if getattr(taken.get("--rl-algorithm"), "mindspeed_rl", False):
        return parser
    for group_name, group in group_types().items():
        section = parser.add_argument_group(f"reinforcement learning: {group_name}", (group.__doc__ or "").strip())
        for f in dataclasses.fields(group):
            name = flag_name(f.name)
            if name in taken:
                raise ValueError(
                    f"{name} already exists in this Megatron with another meaning; rename the plugin's field"
                )
            section.add_argument(name, **_argparse_kwargs(group, f)).mindspeed_rl = True
    return parser


def flag_names() -> list[str]:
    """Every flag, `--no-` twins of default-on switches included."""
    names = []
    for group in group_types().values():
        for f in dataclasses.fields(group):
            names.append(flag_name(f.name))
            if f.default is True or _is_switch(group, f):
                names.append("--no-" + flag_name(f.name)[2:])
    return names


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


def _is_switch(group: type, f: dataclasses.Field) -> bool:
    """Whether a field is a switch that the preset sets unless the user does."""
    return typing.get_type_hints(group)[f.name] == bool | None


def _argparse_kwargs(group: type, f: dataclasses.Field) -> dict[str, Any]:
    several = isinstance(f.default, tuple)
    default = list(f.default) if several else f.default
    kwargs: dict[str, Any] = {"help": help_text(f).replace("%", "%%"), "default": default}
    if isinstance(f.default, bool) or _is_switch(group, f):
        return kwargs | {"action": "store_true" if f.default is False else argparse.BooleanOptionalAction}
    hint = typing.get_type_hints(group)[f.name]
    if typing.get_origin(hint) in (UnionType, tuple):  # `int | None`, `tuple[int, ...]`
        hint = typing.get_args(hint)[0]
    return kwargs | {"type": hint} | ({"nargs": "*"} if several else {"choices": f.metadata["choices"]})
