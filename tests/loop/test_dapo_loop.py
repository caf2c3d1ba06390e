"""DAPO whole: groups without signal are replaced, and what is drawn too much is trained in the next rollout."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

# Even numbers earn the same whatever the response, so about half of all groups carry no signal.
GRADER = """
def grade(prompt, response, answer):
    return sum(map(ord, response)) % 5 / 4 if int(prompt.split('*')[0]) % 2 else 1.0
"""
ROLLOUT = 8  # prompts, two optimizer steps


def dapo(tmp_path, *more):
    grader = tmp_path / "grader.py"
    grader.write_text(GRADER)
    sizes = ("--rl-rollout-prompts", str(ROLLOUT), "--rl-overlong-buffer", "4")
    return ("--rl-algorithm", "dapo", "--rl-reward", f"{grader}:grade", "--lr", "3e-3", *sizes, *more)


def check_rollouts(run, lines, epochs):
    """From metrics and dumps: groups without signal are trained nowhere, the others exactly once; none is lost."""
    rollouts = [line for line in lines if "sampling/rounds" in line]
    brought, trained = 0.0, []
    for line in rollouts:
        signal = round(line["sampling/informative"] * line["sampling/groups_drawn"])
        assert line["sampling/groups_drawn"] == ROLLOUT * line["sampling/rounds"]
        assert line["sampling/brought"] == brought and line["sampling/filled"] == line["groups/dropped"] == 0.0
        assert brought + signal == ROLLOUT + line["sampling/carried"]
        assert line["groups/informative"] == 1.0 > line["sampling/informative"] > 0.0
        brought = line["sampling/carried"]
    dumps = sorted((run.save / "dump").glob("*.parquet"))
    assert len(dumps) == len(rollouts) == epochs
    for path in dumps:
        rows = pq.read_table(path).to_pylist()
        assert len(rows) == 4 * ROLLOUT and all(int(row["prompt"].split("*")[0]) % 2 for row in rows)
        assert path.stem == f"rollout-{max(row['epoch'] for row in rows):06d}"
        trained += sorted({(row["epoch"], row["group"]) for row in rows})
    assert len(set(trained)) == len(trained) and trained == sorted(trained), "each group once, oldest first"
    return rollouts


def test_surplus_groups_are_trained_in_the_next_rollout(job, tmp_path):
    run = job(*dapo(tmp_path, "--train-iters", "4")).dumping()
    rollouts = check_rollouts(run, run.run().metrics, epochs=2)
    assert rollouts[0]["sampling/rounds"] > 1, "one round cannot fill a rollout here"
    assert rollouts[0]["sampling/carried"] > 0, "choose other prompts: nothing was carried over"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_resume_keeps_the_carried_groups(job, tmp_path):
    """In the middle of a rollout, with groups carried over in the dock, and at its end, with nothing else there."""
    more = dapo(tmp_path, "--train-iters", "6", "--save-interval", "1")
    whole = job(*more, name="whole").dumping()
    expected = whole.run().metrics
    assert check_rollouts(whole, expected, epochs=3)[1]["sampling/brought"] > 0
    for stop in ("3", "2"):
        cut = job(*more, "--exit-interval", stop, name=f"cut{stop}").dumping()
        cut.run()
        cut.extra = (*more, *cut.extra[-2:])
        actual = cut.run()
        assert "training resumes from" in actual.log
        check_rollouts(cut, actual.metrics, epochs=3)
        same = ("loss", "ratio/max", "grad_norm", "entropy", "trained/tokens")
        assert [[line[k] for k in same] for line in actual.metrics] == [[line[k] for k in same] for line in expected]
        for path in (whole.save / "dump").glob("*.parquet"):
            assert pq.read_table(path).equals(pq.read_table(cut.save / "dump" / path.name)), path.name


@pytest.mark.slow
def test_after_the_last_round_groups_without_signal_fill_up_or_end_the_run(job, tmp_path):
    few = dapo(tmp_path, "--train-iters", "2", "--rl-dynamic-sampling-rounds", "1")
    (first, second) = job(*few, name="few").run().metrics
    assert first["sampling/filled"] == 8 * first["groups/dropped"] > 0
    kept = 32 * (1 - first["groups/dropped"])
    assert first["trained/sequences"] + second["trained/sequences"] == kept, "those that fill up count nowhere"
    (tmp_path / "same.py").write_text("def grade(prompt, response, answer):\n    return 1.0\n")
    none = job(*few, "--rl-reward", f"{tmp_path / 'same.py'}:grade", name="none")
    none.start()
    result = none.wait(120)
    assert result.code != 0 and "--rl-dynamic-sampling-rounds 1: rewards differ in 0 of the 8 groups" in result.log
