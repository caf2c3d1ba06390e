"""The first second of a rank: what is said and refused before torch, and what is left to Megatron's parser."""

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import check_golden

from mindspeed_rl_plugin.checks import early
from mindspeed_rl_plugin.checks.refused_flags import OWN_RL

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "pretrain_gpt.py"


@pytest.fixture(autouse=True)
def first_time(monkeypatch, tmp_path):
    """As in a rank that has checked nothing; files of prompts: a.jsonl, empty.jsonl, broken.json."""
    monkeypatch.setattr(early, "_args", None)
    monkeypatch.chdir(tmp_path)
    row = json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n"
    Path("a.jsonl").write_text(row)
    Path("late.jsonl").write_text(row + '{"prompt": "1+1=", "answer": null}\n')
    Path("made.jsonl").write_text("{}")  # of a former start
    Path("pairs.jsonl").write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n')
    Path("empty.jsonl").write_text("")
    Path("broken.json").write_text("[{")
    Path("own.py").write_text("import flags_of_it, os\nos.chdir('elsewhere')\n")
    Path("flags_of_it.py").write_text('parser.add_argument("--rl-rewards")\n')
    Path("makes.py").write_text("open('made.jsonl', 'w')\n")
    Path("sets.py").write_text("pretrain(args_defaults={'rl_answer_key': 'chosen'})\n")
    usual = gc.get_threshold()
    yield
    gc.set_threshold(*usual)


def checked(monkeypatch, words, script=str(SCRIPT)):
    monkeypatch.setattr(sys, "argv", [script, *words.split()])
    early.check_flags()
    early.check_rows()


GOOD = "--rl-algorithm grpo --rl-prompt-data a.jsonl --rl-reward exact --seq-length 4096"
# More words, each with a message of its own in refusals.txt.
REFUSED = [
    "--rl-rewrad exact",
    "--rl-algo ppo",
    "--rl-samples-per-prompt abc",
    "--rl-temperature 0",
    "--rl-prompt-data b.jsonl",
    "--rl-eval-data b.jsonl",
    "--rl-prompt-data empty.jsonl",
    "--rl-eval-data broken.json",
    "--rl-answer-key solution",
    "--rl-prompt-data late.jsonl",
    "--rl-reward guess",
    "--rl-reward own.py:score.x",
    "--rl-reward-timeout 5 5",
    "--seq-length 40",
]
# A name in another word or as a variable is no file that the script makes; the path that it makes is left out alone.
OF_SCRIPTS = {
    "--rl-prompt-data b.jsonl sets/test": "--rl-prompt-data b.jsonl: no such",
    "--rl-prompt-data b.jsonl sets/data/": "--rl-prompt-data b.jsonl: no such",
    "--rl-prompt-data late.jsonl --rl-eval-data made.jsonl": "late.jsonl line 2",
    "--rl-prompt-data made.jsonl --rl-reward guess": "'guess'",
}


@pytest.mark.parametrize("words", OF_SCRIPTS)
def test_what_a_script_makes_is_left_to_it_and_no_more(words, monkeypatch, capsys):
    Path("makes.py").write_text(Path("makes.py").read_text() + "def train_valid_test_datasets(data): ...\n")
    with pytest.raises(SystemExit):
        checked(monkeypatch, f"{GOOD} {words}", "makes.py")
    assert OF_SCRIPTS[words] in capsys.readouterr().err


def test_small_files_are_checked_behind_a_large_one(monkeypatch):
    monkeypatch.setattr(early, "CHECKED_BYTES", Path("late.jsonl").stat().st_size)
    Path("large.jsonl").write_text(Path("late.jsonl").read_text() + "\n")
    checked(monkeypatch, f"{GOOD} --rl-prompt-data large.jsonl")
    monkeypatch.setattr(early, "_args", None)
    with pytest.raises(SystemExit):
        checked(monkeypatch, f"{GOOD} --rl-prompt-data large.jsonl late.jsonl")


def test_what_needs_no_megatron_is_refused(monkeypatch, capsys):
    lines = []
    for words in REFUSED:
        monkeypatch.setattr(early, "_args", None)
        with pytest.raises(SystemExit) as ended:
            checked(monkeypatch, f"{GOOD} {words}")
        said = capsys.readouterr()
        head, line = said.err.splitlines()
        assert ended.value.code == 2 and said.out.startswith("[rl] starting: ")
        assert head == "[rl] RL cannot run with these arguments:"
        lines.append(line.removeprefix("  - "))
    check_golden("test_early", lines)


@pytest.mark.parametrize(
    "words, script",
    [
        (GOOD, SCRIPT),
        (" ".join([GOOD, *(row.spelt for row in OWN_RL)]), SCRIPT),  # Megatron's own: its parser comes
        (f"{GOOD} --rl-something-else 3", SCRIPT),  # perhaps the script's: like none of ours
        (f"{GOOD} --rl-rewards 3", "own.py"),  # of a module beside it
        (f"{GOOD} --rl-eval-data there.jsonl", "own.py"),  # from another directory
        (f"{GOOD} --rl-prompt-data made.jsonl", "makes.py"),
        (f"{GOOD} --seq-length 4k", SCRIPT),  # Megatron's parser says what is wrong
        (f"{GOOD} --rl-prompt-data made.jsonl", "own.py"),  # that of another directory has its fields
        (f"{GOOD} --rl-prompt-data pairs.jsonl", "sets.py"),  # which names its fields itself
        ("--rl-algorithm dpo --rl-prompt-data pairs.jsonl --lr 1e-5", SCRIPT),
    ],
)
def test_what_may_be_right_passes(words, script, monkeypatch, capsys):
    checked(monkeypatch, words, str(script))
    assert capsys.readouterr().out.count("[rl] starting: ") == 1
    checked(monkeypatch, words, str(script))
    assert capsys.readouterr() == ("", ""), "once a process"


def test_ranks_that_generate_need_no_files(monkeypatch):
    words = f"{GOOD} --rl-prompt-data of.trainers.jsonl --rl-schedule async --rl-generators 1"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    checked(monkeypatch, words)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(early, "_args", None)
    with pytest.raises(SystemExit):
        checked(monkeypatch, words)


@pytest.mark.parametrize("words", ["", "--lr 1 --save x", "--rl-reward-timeout 3", "--rl-reward-timeoutt 3"])
def test_without_an_algorithm_nothing_is_said_or_changed(words, monkeypatch, capsys):
    before = gc.get_threshold()
    checked(monkeypatch, words)
    assert capsys.readouterr() == ("", "") and gc.get_threshold() == before


def test_a_misspelt_algorithm_is_not_pretraining(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        checked(monkeypatch, "--rl-algoritm grpo")
    assert "did you mean --rl-algorithm?" in capsys.readouterr().err


def test_the_collector_works_as_ever_once_training_begins(monkeypatch):
    usual = gc.get_threshold()
    checked(monkeypatch, GOOD)
    assert gc.get_threshold() == early.THRESHOLDS != usual
    frozen = gc.get_freeze_count()
    assert early.ready() >= 0 and gc.get_threshold() == usual and gc.get_freeze_count() > frozen
    gc.unfreeze()


@pytest.mark.parametrize("runner", [["-m", "mindspeed_rl_plugin"], ["-c", "import mindspeed_rl_plugin.adaptor"]])
def test_a_misspelt_flag_is_answered_before_torch_is_imported(runner):
    words = [str(SCRIPT)] if "-m" in runner else []
    command = [sys.executable, "-X", "importtime", *runner, *words, *GOOD.split(), "--rl-rewrad", "x"]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert done.returncode == 2 and "did you mean --rl-reward?" in done.stderr
    assert "mindspeed_rl_plugin.checks.early" in imported and not {"torch", "transformers", "megatron"} & imported


def test_a_misspelt_flag_is_answered_in_few_lines_by_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "mindspeed_rl_plugin", str(SCRIPT), *GOOD.split(), "--rl-rewrad", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode and "did you mean --rl-reward?" in done.stderr
    assert len((done.stdout + done.stderr).splitlines()) <= 80


def test_a_misspelt_flag_of_the_script_is_in_our_lines_and_in_torchruns_summary(monkeypatch, capsys, tmp_path):
    """Its own message has no mark, so whoever reads our lines only would see nothing."""
    parser = early.refuse_misspelt(argparse.ArgumentParser())
    parser.add_argument("--micro-batch-size")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for config in (None, object()):
        monkeypatch.setattr(early, "given_config", lambda config=config: config)
        with pytest.raises(SystemExit):
            parser.parse_args(["--micro-batchsize", "8"])
        said = capsys.readouterr()
        assert "unrecognized arguments: --micro-batchsize 8" in said.err
        assert ("[rl] the script's arguments are refused: " in said.out) == (config is not None)
    assert "--micro-batchsize 8; did you mean --micro-batch-size?" in said.out
    assert "did you mean --micro-batch-size?" in (tmp_path / "error.json").read_text()
