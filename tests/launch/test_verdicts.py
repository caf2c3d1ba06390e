"""The table of verdicts against the real parsers: every flag has one, and no verdict names a flag that nobody has.

The checkouts come from MEGATRON_LM_PATH, MINDSPEED_PATH and MINDSPEED_LLM_PATH, each with colons between several; the
first MindSpeed goes with the first MindSpeed-LLM. The installed Megatron's parser is walked by test_flags.py.
"""

import json
import os
import re
import sys
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import flag_table
import pytest
from checkouts import checkouts, cores
from commands import ended
from flag_table import verdict

from mindspeed_rl_plugin.checks import taken_over
from mindspeed_rl_plugin.checks.refused_flags import UPSTREAM

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ADAPTORS = ("mindspeed.megatron_adaptor", "mindspeed_llm.tasks.megatron_adaptor_v2")
ROWS = map(json.loads, (ROOT / "docs" / "launch-scripts.jsonl").read_text().splitlines())
TRAINED = {Path(row["script"]).name: row for row in ROWS if row["end"] == "trained"}


@pytest.mark.parametrize(("where", "flags"), flag_table.SUPPORTED.items())
def test_what_is_supported_is_used_where_the_table_says(where, flags):
    """In a test or a script of ours, comments aside; or in a script of upstream's, which the rehearsal left as it is
    (that it has the flags is tested with the checkouts, by tests/tools/test_launch_scripts.py)."""
    if "/" not in where:
        assert not set(flags.split()) & set(TRAINED[where]["removed"])
        return
    text = re.sub(r"^ *#.*", "", (ROOT / where).read_text(), flags=re.M)
    names = {flag: flag.removeprefix("--").replace("-", "_") for flag in flags.split()}
    assert [flag for flag, name in names.items() if not re.search(rf'{flag}(?![\w-])|"{name}"|\b{name}=', text)] == []


def test_no_flag_has_two_verdicts_of_one_table():
    taken = " ".join(taken_over.TAKEN_OVER.values()).split()
    supported = " ".join(flag_table.SUPPORTED.values()).split()
    for flags in (taken, supported, taken_over.UNTESTED.split(), " ".join(flag_table.NEUTRAL.values()).split()):
        assert [flag for flag, times in Counter(flags).items() if times > 1] == []
    assert not set(taken) & set(supported)


def test_a_flag_is_said_to_be_untested_where_the_table_has_no_other_verdict():
    """The patterns of `UNTESTED` alone decide, in the package."""
    kinds = {flag: kind for flag, (kind, _) in flag_table.rows().items() if "*" not in flag and kind != "taken over"}
    said = taken_over.untested(dict.fromkeys(kinds, ()))
    assert said == [flag for flag, kind in kinds.items() if kind == "untested"] and len(said) > 20


def platforms():
    """Name -> folders and adaptor of every platform that the checkouts make."""
    old = cores().get("0.12")
    for megatron in checkouts():
        yield [megatron]
    for mindspeed, llm in zip(checkouts("MINDSPEED_PATH"), checkouts("MINDSPEED_LLM_PATH"), strict=True):
        yield [mindspeed, old, ADAPTORS[0]]
        yield [llm, mindspeed, old, ADAPTORS[1]]


def walk(folders):
    """Rows of the parser of a platform, without ours."""
    path = [str(ROOT), *(str(f) for f in folders if f not in ADAPTORS), os.environ.get("PYTHONPATH", "")]
    adaptor = (f for f in folders if f in ADAPTORS)
    more = {"PYTHONPATH": os.pathsep.join(path)}
    done = ended(sys.executable, HERE / "parser_walk.py", *adaptor, timeout=580, more=more)
    rows = json.loads(done.stdout.rpartition("RESULT ")[2])
    return [row for row in rows if not (row[2] or "").startswith("reinforcement learning")]


@pytest.mark.upstream
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_every_flag_has_a_verdict_and_every_verdict_a_flag():
    rows = {" ".join(map(str, folders)): walk(folders) for folders in platforms()}
    assert len(rows) >= 7, "fewer checkouts than versions that the table is about"
    for platform, flags in rows.items():
        assert len(flags) > 400 and [row for row in flags if verdict(*row) is None] == [], platform
    flags = {flag for platform in rows.values() for names, *_ in platform for flag in names}
    attributes = {attribute for platform in rows.values() for _, attribute, _ in platform}
    groups = {group for platform in rows.values() for *_, group in platform}
    named = (row for row in flag_table.rows() if not any(fnmatchcase(flag, row) for flag in flags))
    assert list(named) == []
    attributes |= {"gtp_weight_remat_size"}  # made of --tensor-parallel-num-weight-shards while that is validated
    assert [row.name for row in UPSTREAM if row.name not in attributes] == []
    assert [group for titles in flag_table.NEUTRAL_GROUPS.values() for group in titles if group not in groups] == []
