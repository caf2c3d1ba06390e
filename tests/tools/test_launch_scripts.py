"""The table of upstream's launch scripts: which scripts are rehearsed, what is known of each, and one for real."""

import json
import os
import sys
from pathlib import Path

import launch_scripts as scripts
import pytest
from flag_table import SUPPORTED

from mindspeed_rl_plugin.checks.taken_over import untested
from mindspeed_rl_plugin.tools.rehearse import outcome
from mindspeed_rl_plugin.tools.rehearse.capture import capture
from mindspeed_rl_plugin.tools.rehearse.command_line import Flags


def test_what_ran_is_known_by_lines_and_files(tmp_path):
    flags = Flags.parse(["--rl-dump-dir", str(tmp_path / "dump"), "--save", str(tmp_path)])
    rounds, held_out = "rl 1/2 | reward", "rl 0/2 eval | accuracy 0"
    assert outcome.shown("training", [], flags) == []
    assert outcome.shown("training", [rounds, held_out], flags) == ["iteration", "evaluation"]
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "rollout_000000.parquet").touch()
    (tmp_path / "latest_checkpointed_iteration.txt").touch()
    assert outcome.shown("training", [rounds, held_out], flags) == scripts.ALL[:4]
    assert outcome.shown("resume", [rounds], flags) == []
    assert outcome.shown("resume", ["rl 2/2 | reward"], flags) == ["resume"]


def test_what_is_not_rehearsed_is_what_was_taken_out():
    flags = Flags({"--data-path": ("x",), "--swap-attention": (), "--pipeline-model-parallel-size": ("8",)})
    flags.apply("here: a mock data set", "--data-path --mock-data=")
    flags.apply("not on a host", "--swap-attention")
    flags.apply("smaller", "--num-layers~2 --pipeline-model-parallel-size~1")
    taken = ["--swap-attention", "--pipeline-model-parallel-size"]
    assert outcome.removed(flags) == taken
    flags = Flags({"--rl-algorithm": ("grpo",), "--moe-fb-overlap": ()})
    flags.apply("not on a host", "--moe-fb-overlap")
    assert outcome.removed(flags) == [], "RL takes it out on an NPU, too"


def test_the_table_in_the_docs_is_made_of_its_rows_and_each_ended_well():
    text, rows = scripts.TABLE.read_text(), scripts.known(scripts.TABLE)
    assert text.split(scripts.BEGIN)[1].split(scripts.END)[0].strip() == scripts.render(rows).strip()
    assert f"{scripts.RL_FLAGS}\n" in text
    assert rows and all(row.good for row in rows)
    assert not any(word in json.dumps([row.said for row in rows]) for word in ("/home/", "/root/", "/tmp/"))


@pytest.mark.upstream
@pytest.mark.timeout(900)
def test_what_upstreams_scripts_give_has_been_tried(tmp_path, monkeypatch):
    """No script that trains prints a line about an untested flag; those that the table of verdicts names have its
    flags; and every script of a checkout that the table lists has its row."""
    captured, flags, lacking = 0, {}, []
    rows = {(row.platform, row.script): row for row in scripts.known(scripts.TABLE)}
    for together, whose in scripts.checkouts():
        platform = ", ".join(each.name for each in reversed(together.values()))
        if platform not in (listed for listed, _ in rows):
            continue
        monkeypatch.chdir(together[whose])
        for script in (script for pattern in scripts.SCRIPTS[whose] for script in Path().glob(pattern)):
            captured += 1
            given = Flags.parse(capture(script, tmp_path / str(captured), 60).arguments)
            assert {*SUPPORTED.get(script.name, "").split()} <= set(given.values)
            row = rows.get((platform, str(script)))
            lacking += [] if row else [str(script)]
            if (not row or row.end == "trained") and (unshown := untested(given.values)):
                flags[str(script)] = unshown
    assert captured >= 3 and flags == {} and lacking == []


@pytest.mark.slow
@pytest.mark.upstream
@pytest.mark.timeout(900)
def test_a_script_of_upstream_is_rehearsed(tmp_path, monkeypatch):
    if absent := [name for name in scripts.CHECKOUTS if name not in os.environ]:
        pytest.skip(f"not set: {' '.join(absent)}")
    table = tmp_path / "scripts.md"
    table.write_text(f"{scripts.BEGIN}\n{scripts.END}\n")
    words = ["--only", "qwen3/pretrain_qwen3_0point6b_4K_ptd.sh", "--table", str(table), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["launch_scripts.py", *words])
    assert scripts.main() == 0, [log.read_text()[-3000:] for log in tmp_path.glob("*.log")]
    ends = [row.end for row in scripts.known(table)]
    assert ends and set(ends) == {"trained"}  # one of each pair of checkouts
