"""Megatron's own RL arguments: refused beside ours, and the table is the whole of the parsers' group."""

import argparse
import os
import types
from pathlib import Path

from mindspeed_rl_plugin.config import flag_names
from mindspeed_rl_plugin.launch.upstream_rl import ARGUMENTS, UPSTREAM_RL


def messages(**attributes):
    args = types.SimpleNamespace(**attributes)
    return [message for row in UPSTREAM_RL if (message := row.message(args)) is not None]


def test_a_value_of_their_own_is_refused_with_our_name_for_it():
    (message,) = messages(grpo_group_size=16)
    assert message.startswith("--grpo-group-size 16: an argument of Megatron's own RL")
    assert message.endswith("give --rl-samples-per-prompt instead")
    assert messages(rl_default_temperature=0.7)[0].endswith("give --rl-temperature instead")
    assert messages(rl_use_sequence_packing=True)[0].endswith("; remove it")
    assert messages(grpo_kl_beta=0.0)[0].startswith("--grpo-kl-beta 0.0: ")


def test_defaults_and_a_megatron_without_them_pass():
    assert messages(**{name: default for name, (default, _) in ARGUMENTS.items()}) == []
    assert messages() == []


def test_what_is_named_instead_is_ours():
    named = {word for _, ours in ARGUMENTS.values() for word in ours.split() if word.startswith("--")}
    assert named <= set(flag_names())


def parsers():
    """The installed Megatron's arguments.py, and those of the checkouts in MEGATRON_LM_PATH."""
    import importlib.util

    installed = Path(importlib.util.find_spec("megatron.core").origin).parents[1] / "training" / "arguments.py"
    checkouts = filter(None, os.environ.get("MEGATRON_LM_PATH", "").split(":"))
    return [installed, *(Path(c) / "megatron" / "training" / "arguments.py" for c in checkouts)]


def group_of(source):
    """Attribute -> default of `_add_rl_args` in this file, executed alone; nothing where it has none."""
    head, found, tail = source.read_text().partition("def _add_rl_args(parser):")
    if not found:
        return {}
    body = tail.partition("\ndef ")[0]
    space = {"argparse": argparse}
    exec(found + body, space)
    parser = space["_add_rl_args"](argparse.ArgumentParser())
    return {a.dest: a.default for a in parser._actions if a.dest not in ("help", "perform_rl_step")}


def test_the_table_holds_every_argument_with_its_default():
    groups = [group_of(source) for source in parsers()]
    assert any(groups), "no Megatron here has the group"
    for group in groups:
        assert {name: ARGUMENTS.get(name, ("missing",))[0] for name in group} == group
