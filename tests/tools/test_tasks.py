"""`tasks` refuses what has no tasks. What it writes is tested with verifiers itself (episodes/test_verifiers.py)."""

import importlib.util

import pytest

from mindspeed_rl_plugin.tools.tasks import main


@pytest.mark.parametrize(
    "words, why",
    [
        (["openenv:http://x"], "'openenv:http://x' is no environment of verifiers; give verifiers:ID"),
        (["verifiers:x", "--limit", "0"], "--limit 0: give 1 or more"),
        (["verifiers:x", "--python", "/nowhere/python"], "/nowhere/python: there is no such program here"),
        (["verifiers:x"], "has no verifiers (No module named 'verifiers'); install it there"),
    ],
)
def test_what_has_no_tasks_is_refused_and_leaves_no_file(words, why, tmp_path, capsys):
    if len(words) == 1 and words[0] == "verifiers:x" and importlib.util.find_spec("verifiers"):
        pytest.skip("verifiers is installed here")
    assert main([*words, "--out", str(tmp_path / "tasks.jsonl")]) == 1
    assert why in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_a_file_that_cannot_be_written_is_refused(tmp_path, capsys):
    assert main(["verifiers:x", "--out", str(tmp_path / "no" / "tasks.jsonl")]) == 1
    assert "--out" in (said := capsys.readouterr().err) and "No such file or directory" in said
