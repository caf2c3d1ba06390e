"""Megatron's own RL arguments: the table has the whole of the parsers' group, and names flags of ours instead."""

import argparse
import os
import types
from pathlib import Path

from mindspeed_rl_plugin.config import flag_names
from mindspeed_rl_plugin.config.upstream import OWN_RL, RUN, refusals


def test_defaults_pass_together_and_what_is_named_instead_is_ours():
    assert refusals(types.SimpleNamespace(**{row.name: row.fine[0] for row in OWN_RL}), RUN) == []
    fixes = {row.name: row.why.rpartition("; ")[2] for row in OWN_RL}
    assert fixes["grpo_group_size"] == "give --rl-samples-per-prompt instead"
    assert fixes["rl_use_sequence_packing"] == "remove it"
    assert {word for fix in fixes.values() for word in fix.split() if word.startswith("--")} <= set(flag_names())


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
    table = {row.name: row.fine[0] for row in OWN_RL}
    groups = [group_of(source) for source in parsers()]
    assert any(groups), "no Megatron here has the group"
    for group in groups:
        assert {name: table.get(name, "missing") for name in group} == group
