"""Every advice of a refusal is tried: with what its message says to give, remove or change, the start is not refused.

Advice is read from the message, by the forms in which ours is written; `BY_HAND` has the others. It may lead to the
next question (`--rl-schedule async`: which generators?), whose advice is then taken. A resume's: tests/loop.
"""

import ast
import re
from pathlib import Path

import pytest
from flag_table import verdict
from refusals import REFUSED, problems_of

from mindspeed_rl_plugin.config import flag_names

PACKAGE = Path(__file__).parents[2] / "mindspeed_rl_plugin"
FLAG = r"--[a-z][a-z0-9-]*[a-z0-9+]"
VERBS = "give|remove|drop|leave|change|raise|lower|shorten|sample|set|make|start"
# Advice, from its beginning -> changes, where words stand for values.
BY_HAND = {
    "leave them out": {"--rope-scaling-mscale": 1.0},
    "give --rl-environment,": {"--rl-environment": "a.py:A"},
    "give a command, or path": {"--rl-agent": "a.py:f"},
    "give bounds with": {"--rl-correction-low": 0.5},
    "lower it .for an engine that joins": {"--rl-kv-cache-gb": 1},
    "start a multiple of": {"--world-size": 32, "--num-layers": 4},
    "make it a multiple": {"--global-batch-size": 48},
    "give numbers from 0": {"--noop-layers": "1"},
    "give the number of optimizer steps": {"--train-iters": 10},
    "give --global-batch-size instead": {"--step-batch-size-schedule": None},
    "leave out that flag and": {"--n-shared-experts": None},
    "give jsonl": {"--rl-prompt-data": __file__},
    "give a hugging face tokenizer": {"--rl-tokenizer": str(Path(__file__).parent)},
    "give --rl-generators N without": {"--rl-async-order": None},
    "give --rl-generators N": {"--rl-generators": 0},
    "give --rl-stop-token-ids": {"--rl-stop-token-ids": 5, "--rl-stop": None},
    "give --rl-max-tokens-per-microbatch too": {"--rl-max-tokens-per-microbatch": 64},
    "give (numbers above 0|one for all)": {"--rl-reward-timeout": 5},
    "give fewer heads and no|give --kv-channels 32, or fewer": {
        "--num-attention-heads": 4,
        "--num-query-groups": 4,
        "--kv-channels": 32,
    },
}
# What one process cannot try: other files, other programs.
ELSEWHERE = "give the directory of a Megatron checkpoint|give --rl-engine-url|start with -m|make mindspeed_rl_plugin"
NAMES = set(flag_names())
DERIVED = {
    "--num-layers-per-virtual-pipeline-stage": "virtual_pipeline_model_parallel_size",
    "--no-rope-fusion": "no_apply_rope_fusion",
}
# Families that are not built are not listed: no argument makes one of them another.
ROWS = [changes for rule, rows in REFUSED.items() if "unbuilt" not in rule for changes in rows]


def alternatives(line):
    """What a message says before its advice, and the alternatives of this, as text that begins with a verb."""
    found = re.search(rf"(?:[;:?] |, or )(?:{VERBS}) .*$", line, flags=re.I)
    text = re.sub("^[;:?] ", "", found[0]) if found else ""
    parts = [p.strip(" ,") for p in re.split(rf",? or (?=(?:{VERBS}|-)\b|--)", text) if p]
    return line[: -len(text)], [p if p[0] != "-" else f"{parts[0].split()[0]} {p}" for p in parts]


def tries(part, head):
    """Changes of arguments that an alternative may stand for; one of them must help."""
    named, before = re.findall(FLAG, part), re.findall(FLAG, head)
    for pattern, change in BY_HAND.items():
        if re.match(pattern, part, flags=re.I):
            return [change]
    if re.match("remove one", part):
        return [{flag: None} for flag in before]
    if re.match("remove|drop|leave|give no ", part):
        return [dict.fromkeys(named or before[:1])]
    if re.match("change|raise|lower|shorten|sample|set|give (fewer|more|at |an |a multiple|half|[0-9])", part):
        numbers = {int(n) for n in re.findall(r"\d+", f"{head} {part} 1 2 4")}
        numbers |= {n * 2 for n in numbers} | {n // 2 for n in numbers}
        without = [{flag: None} for flag in named if part.startswith("change --")]  # of a switch
        return without + [{flag: number} for flag in (named or before) for number in sorted(numbers - {0})]
    pairs = re.findall(rf"({FLAG})((?: (?!and\b|instead|alone|too\b|to\b|of\b|with|in\b|N\b)[\w.:]+)*)", part)
    if pairs:
        return [{flag: value.strip() for flag, value in pairs}]
    return [{before[0]: value} for value in re.split(", | or ", re.sub("^give (one of )?", "", part))]


def applied(changes, change):
    """The changes with these besides. Upstream's flags must be known to a parser of theirs, ours to ours."""
    out = dict(changes)
    for flag, value in change.items():
        name = DERIVED.get(flag) or flag[2:].replace("-", "_")
        if flag in NAMES:
            out[flag] = None if value is None else str(value)
            continue
        assert verdict([flag], flag[2:].replace("-", "_"), None) or name == "world_size", f"no parser knows {flag}"
        if name.startswith("no_"):
            name, value = name[3:], value is None
        out.pop(name, None)
        if value is not None:
            out[name] = int(value) if str(value).isdigit() else True if value == "" else value
    return out


def helps(build, changes, change, line, depth):
    """Whether a refusal is gone with these changes, and what is refused instead goes with its own advice."""
    then = applied(changes, change)
    try:
        before, after = problems_of(build, changes), problems_of(build, then)
    except SystemExit:  # of the parser
        return False
    new = [other for other in after if other not in before]
    return line not in after and (not new or depth > 0 and all(tried(build, then, other, depth - 1) for other in new))


def tried(build, changes, line, depth):
    head, parts = alternatives(line)
    return any(tried_part(build, changes, line, part, head, depth) for part in parts)


def tried_part(build, changes, line, part, head, depth=2):
    """A word alone, as in "give host", is a value of the flag that the message begins with, and must be fine there."""
    depth = depth if re.search(rf"{FLAG}|\d|^(?!give)", part, flags=re.I) else 0
    return any(helps(build, changes, change, line, depth) for change in tries(part, head))


@pytest.mark.parametrize("changes", ROWS, ids=lambda value: str(value)[:60])
def test_what_a_refusal_advises_is_accepted(build, changes):
    for line in problems_of(build, changes):
        head, parts = alternatives(line)
        for part in parts:
            if not re.match(ELSEWHERE, part, flags=re.I):
                assert tried_part(build, changes, line, part, head), (line, part)


# Modules of checks, and what of their messages no row brings: the beginning of the advice or message -> why.
CHECKS = """
    checks/flag_checks.py checks/upstream_checks.py checks/schedule_checks.py checks/episode_checks.py
    engine/engine_sizes.py engine/hf_moe.py engine/hf_rope.py layout/parallel.py layout/shape.py
    forward/settings.py loop/arithmetic.py reward/specs.py algorithms/presets.py
"""
UNTRIED = {
    "a critic has the policy's own": "of another checkpoint: tests/checkpoints/test_critic_files.py",
    "have different vocabularies": "a note",
    "vocabulary's size is unknown": "of `plan`, which has no tokenizer",
    "sequence length ": "of a run whose arguments were never checked",
    "a row of ": "the same",
    "give it": "the family is found by the score",
    "in this vLLM engines cannot": "of a vLLM that is not here",
}


def messages(module):
    """Every text of a module that names a flag and ends with advice, as a pattern."""
    tree = ast.parse((PACKAGE / module).read_text())
    inner = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values}
    for node in ast.walk(tree):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        if id(node) not in inner and all(isinstance(p, ast.FormattedValue | ast.Constant) for p in parts):
            text = "".join(p.value if isinstance(p, ast.Constant) and isinstance(p.value, str) else "\0" for p in parts)
            if "--" in text and alternatives(text)[1]:
                yield text


def test_every_message_of_the_checks_is_tried(build):
    lines = "\n".join(line for changes in ROWS for line in problems_of(build, changes))
    lacking = [
        m
        for module in CHECKS.split()
        for m in messages(module)
        if not re.search(".*".join(map(re.escape, m.split("\0"))), lines)
    ]
    assert [m for m in lacking if not any(known in m for known in UNTRIED)] == []
