"""The flags in Megatron's real parser: grouped, colliding with nobody's, and checked end to end."""

import ast
import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from checkouts import checkouts
from commands import ended
from flag_table import verdict

from mindspeed_rl_plugin.config import RLConfig, flag_names
from mindspeed_rl_plugin.config.flag import spelt

HERE = Path(__file__).parent

# Whether RL is asked for, more words, part or parts of the error (None for a good start). Other refusals: refusals.py.
CASES = [
    (False, [], None),
    (True, [], None),
    (True, ["--rl-dock", "whatever"], None),
    (True, ["--hidden-dropout", "0.1"], "ValueError: RL cannot run with these arguments:\n  - --hidden-dropout 0.1: "),
    (True, ["--rl-temperature", "0"], "  - --rl-temperature is 0.0"),
    (True, ["--no-save-optim", "--no-save-rng"], None),
    (True, ["--yaml-cfg", "x.yaml"], "ValueError: --yaml-cfg"),
    (True, ["--rl-advantage", "best"], "  - argument --rl-advantage: invalid choice: 'best'"),
    (True, ["--rl-rollout-promts", "4"], "--rl-rollout-promts is unknown; did you mean --rl-rollout-prompts? `python"),
    (False, ["--rl-xyzzy=1", "--rl-zzzz"], "lists all flags\n  - --rl-zzzz is unknown; `python -m"),
    (
        True,
        ["--micro-batch-size", "3", "--rl-prompt-data", "nowhere", "--rl-top-p", "2", "--hidden-dropout", "0.1"],
        ("  - --global-batch-size 4 ", "  - --rl-prompt-data nowhere", "  - --rl-top-p is 2.0", "  - --hidden-dropout"),
    ),
]


@pytest.fixture(scope="module")
def parsed(tmp_path_factory, start_flags):
    """What the real parser of the installed Megatron says, through the runner, in one process."""
    folder = tmp_path_factory.mktemp("parse")
    (folder / "tokenizer").mkdir()
    (folder / "prompts.jsonl").write_text("{}\n")
    lists = json.dumps([start_flags(rl) + ["--save", "out", "--save-interval", "2"] + words for rl, words, _ in CASES])
    runner = (sys.executable, "-m", "mindspeed_rl_plugin")
    done = ended(*runner, HERE / "parse_driver.py", lists, cwd=folder, more={"COLUMNS": "120"})
    return json.loads(done.stdout.rpartition("RESULT ")[2])


def test_help_shows_the_groups(parsed):
    for group in ("data", "rollout", "reward", "algorithm", "reshard", "dock", "monitor"):
        assert f"reinforcement learning: {group}:" in parsed["help"]
    for flag in flag_names():
        assert flag in parsed["help"], flag
    text = " ".join(parsed["help"].split())
    assert "responses sampled for each prompt (the group size) [responses]; at least 1 (default: 8)" in text


def test_every_flag_of_the_installed_megatron_has_a_verdict(parsed):
    """Other versions, MindSpeed and MindSpeed-LLM: test_verdicts.py."""
    assert len(parsed["actions"]) > 500 and [row for row in parsed["actions"] if verdict(*row) is None] == []


def test_no_help_has_a_seam():
    groups = [getattr(RLConfig(), group.name) for group in dataclasses.fields(RLConfig)]
    helps = {f.name: f.metadata["help"] for group in groups for f in dataclasses.fields(group)}
    assert len(helps) > 80 and not [name for name, text in helps.items() if text != " ".join(text.split())]


def test_flags_are_ours_alone_in_the_installed_parser(parsed):
    assert sorted(parsed["flags"]) == sorted(flag_names())
    assert not set(parsed["dests"]) & set(parsed["other_dests"]), "argparse itself refuses the same flag twice"
    assert len(parsed["other_dests"]) > 500, "that was Megatron's parser"


@pytest.mark.parametrize(("number", "expected"), [(n, e) for n, (*_, e) in enumerate(CASES)])
def test_validation_end_to_end(parsed, number, expected):
    error = parsed["errors"][number]
    if expected is None:
        assert error is None
    else:
        assert error and all(e in error for e in ([expected] if isinstance(expected, str) else expected)), error


def dests():
    return {f"rl_{f.name}" for group in vars(RLConfig()).values() for f in dataclasses.fields(group)}


def scan(root):
    """The `--rl-*` flags and `rl_*` names in a tree's Python files, tests aside."""
    flags, names = set(), set()
    for folder, inner, files in os.walk(root):
        inner[:] = [d for d in inner if d not in ("tests", ".git")]
        for file in files:
            if not file.endswith(".py"):
                continue
            try:
                tree = ast.parse(Path(folder, file).read_text(encoding="utf-8"))
            except SyntaxError:  # templates
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    if node.value.startswith(("--rl-", "--no-rl-")) and " " not in node.value:
                        flags.add(node.value)
                    if node.value.startswith("rl_") and node.value.isidentifier():
                        names.add(node.value)
                elif isinstance(node, ast.Attribute) and node.attr.startswith("rl_"):
                    names.add(node.attr)
                elif isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "").startswith("rl_"):
                    names.add(node.target.id)
    return flags, names


VARIABLES = ("MEGATRON_LM_PATH", "MINDSPEED_PATH", "MINDSPEED_LLM_PATH")
INSTALLED = Path(importlib.util.find_spec("megatron.core").origin).parents[1]
UPSTREAM = [pytest.param(p, marks=pytest.mark.upstream) for variable in VARIABLES for p in checkouts(variable)]


@pytest.mark.parametrize("tree", [INSTALLED, *UPSTREAM], ids=str)
def test_no_flag_or_attribute_exists_upstream(tree):
    """Also not as a bare attribute: newer Megatron reads `args.rl_*` names without its own RL being on."""
    flags, names = scan(tree)
    assert not set(flag_names()) & (flags | {spelt(name) for name in names})
    assert not dests() & names
    assert "0.19" not in str(tree) or "--rl-use-sequence-packing" in flags, "a collision would be seen"
