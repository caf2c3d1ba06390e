"""`plan --dock` explains its letters, and whose table it prints."""

from mindspeed_rl_plugin import plan


def test_every_letter_and_the_paper_are_named(capsys):
    assert plan.main(["--dock"]) == 0
    out = capsys.readouterr().out
    assert "MindSpeed RL (arXiv 2507.19017)" in out
    legend = out[out.index("Per rollout:") :]
    assert all(f" {letter} " in legend for letter in ("G", "N", "PL", "SL", "n", "M"))
