"""`flags`: all flags in groups, those with a word, and the page that is generated from them."""

import re
from pathlib import Path

import pytest
from flag_table import verdict

from mindspeed_rl_plugin.config import flag_names
from mindspeed_rl_plugin.tools import flags

pytestmark = pytest.mark.quick

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"


def test_the_page_is_what_the_command_prints(capsys):
    assert flags.main(["--markdown"]) == 0
    assert capsys.readouterr().out == PAGE.read_text(), "python -m mindspeed_rl_plugin flags --markdown > docs/flags.md"


def test_every_flag_is_listed_in_at_most_100_columns(capsys):
    assert flags.main([]) == 0
    text = capsys.readouterr().out
    listed = {word.rstrip(",") for line in text.splitlines() if line.startswith("  --") for word in line.split()}
    assert {name for name in flag_names() if not name.startswith("--no-")} <= listed
    assert max(map(len, text.splitlines())) <= flags.WIDTH


def test_a_word_narrows_the_list(capsys):
    assert flags.main(["Temperature"]) == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
    assert "--rl-temperature" in shown and len(shown) == 4
    assert flags.main(["xyzzy"]) == 1


def test_words_of_other_programs_say_what_to_use(capsys):
    """Each names flags that exist, ours or of Megatron's, whose table of verdicts knows all of them."""
    for word, text in (
        ("wandb", "--wandb-project"),
        ("tensorboard_dir", "--tensorboard-dir"),
        ("LoRA", "--rl-lora-rank"),
    ):
        assert flags.main([word]) == 0
        assert text in capsys.readouterr().out
    named = {name for text in flags.FLAGS_ELSEWHERE.values() for name in re.findall(r"--[a-z][a-z0-9-]+", text)}
    ours = {name for name in named if name.startswith("--rl-")}
    torchrun = {"--nproc-per-node", "--nnodes"}
    assert ours <= set(flag_names()) and all(verdict([name], "", None) for name in named - ours - torchrun)
