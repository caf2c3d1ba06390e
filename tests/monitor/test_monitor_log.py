"""Console lines, metrics.jsonl, writers, resume."""

import io
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mindspeed_rl_plugin import environment
from mindspeed_rl_plugin.monitor.console import (
    LINE_LEGEND,
    ProgressBar,
    eval_line,
    iteration_line,
    short_float,
    write_line,
)
from mindspeed_rl_plugin.monitor.monitor import Monitor
from mindspeed_rl_plugin.monitor.run_files import JsonLines, read_jsonl, read_metrics, read_run
from mindspeed_rl_plugin.monitor.run_summary import summarize
from mindspeed_rl_plugin.tools.report.report_data import metric_series

FULL = {"reward/mean": 0.532, "reward/std": 0.41, "groups/solved": 0.25, "groups/informative": 0.5}
FULL |= {"response/length_mean": 14.2, "response/truncated": 0.0, "kl/ref": 1.2e-4, "ratio/mean": 1.0}
FULL |= {"clip_fraction": 0.0, "entropy": 0.41, "logp_diff/mean": 3e-6, "logp_diff/max": 1.04e-5}
FULL |= {"tokens_per_second": 812.4, "seconds/generate": 2.11, "seconds/reward": 0.12, "seconds/logp_old": 0.8}
FULL |= {"seconds/advantage": 0.001, "seconds/update": 1.3, "seconds/iteration": 4.5}


class Writer:
    """Stands for TensorBoard's writer, and by `log` for the wandb module."""

    def __init__(self):
        self.seen = []

    def add_scalar(self, tag, value, step):
        self.seen.append((tag, value, step))

    def log(self, values, step):
        self.seen.append((values, step))

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("rl/eval/*", "rl/eval/iteration")


def monitor_in(path, **kwargs):
    kwargs.setdefault("stream", io.StringIO())
    return Monitor(path, kwargs.pop("rank", 0), kwargs.pop("world_size", 1), is_terminal=False, **kwargs)


CRITIC = {"critic/loss": 0.25, "critic/explained_variance": 0.4}
APART = {"lag/mean": 0.85, "lag/max": 1.0, "lag/token_mean": 0.5, "segments/mean": 1.25, "engines/length_mean": 15.06}
APART |= {"idle/trainers_starved": 0.12, "idle/engines_back_pressure": 0.34, "idle/engines_version": 0.05}
APART |= {"rollout/kl": 3.4e-4, "weights/pull_seconds": 0.61, "weights/pause_seconds": 0.043, "seconds/publish": 0.2}
SAMPLED = {"sampling/groups_drawn": 48.0, "sampling/informative": 17 / 48}
SAMPLED |= {"sampling/brought": 3.0, "sampling/carried": 5.0, "sampling/filled": 1.0}
START = "reward  0.532 ±0.410 | solved 0.25 differ 0.50"
MIDDLE = "len   14.2 trunc 0.00 | kl  1.2e-4 ratio 1.000 clip 0.00 | ent 0.410 | Δlogp 3e-6/1e-5"
END = "   812 tok/s | gen 2.1s rew 0.1s lp 0.8s upd 1.3s"


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        (FULL, f"{START} | {MIDDLE} | {END}"),
        (FULL | SAMPLED, f"{START} | sampled 48 for 16 | {MIDDLE} | {END}"),
        (
            FULL | APART,
            f"{START} | {MIDDLE} mismatch 3.4e-4 | lag 0.85/0.50 seg 1.25 sampled len 15.1 | idle train 12% "
            f"back-pressure 34% version 5% | pull 0.61s pause 0.04s | {END} publish 0.2s",
        ),
        (FULL | {"rollout/kl": 1e-9}, f"{START} | {MIDDLE} | {END}"),  # where all is fresh Δlogp says it
        ({"lag/mean": 0.5, "lag/token_mean": 0.25, "segments/mean": 1.5}, "lag 0.50/0.25 seg 1.50"),
        ({"reward/mean": math.nan}, "reward    nan"),
        ({"reward/errors": 3, "groups/dropped": 1 / 512}, "grader errors 3 dropped 0.2% of the responses"),
        ({"reward/errors": 0, "groups/dropped": 1.0}, "dropped 100.0% of the responses"),
        (CRITIC, "critic 0.25 explains 0.40 alone"),
        (CRITIC | {"loss": 1.0}, "critic 0.25 explains 0.40"),
        ({"loss": 0.6931, "dpo/margin": 0.125, "dpo/accuracy": 0.75}, "loss 0.6931 margin  0.125 right 0.75"),
    ],
)
def test_the_line_of_an_iteration(metrics, line):
    assert iteration_line(12, metrics, 200) == f"rl  12/200 | {line}"


def test_lines_of_two_iterations_are_aligned_and_explained():
    other = FULL | {"reward/mean": -1.5, "kl/ref": 0.25, "tokens_per_second": 12345.0, "response/length_mean": 8.0}
    bars = [[m.start() for m in re.finditer(r"\|", iteration_line(k, m, 200))] for k, m in ((9, FULL), (100, other))]
    assert bars[0] == bars[1] and iteration_line(1, {}) == "rl 1"
    line = iteration_line(1, FULL | {"seconds/reshard": 1.0})
    assert all(f"{word}:" in LINE_LEGEND and f" {word} " in line for word in ("differ", "ent", "Δlogp", "resh", "lp"))
    assert eval_line(10, {"eval/accuracy": 0.52341, "eval/pass@8": 0.75, "eval/prompts": 250}, 200) == (
        "rl  10/200 eval | accuracy 0.5234 | pass@8 0.75 | prompts 250"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (3e-6, "3e-6"), (1.2e-4, "1.2e-4"), (0.25, "0.25"), (12.0, "12"), (1234.0, "1.2e3"), (math.inf, "inf")],
)
def test_short_floats(value, text):
    assert short_float(value) == text


def test_a_stream_without_unicode_gets_ascii():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    write_line("±1 Δlogp é", stream)
    assert raw.getvalue() == b"+-1 dlogp ?\n"


def test_log_writes_a_line_of_json_and_both_writers(tmp_path):
    """A text is in the file only: writers and curves are of numbers."""
    board, wandb, out = Writer(), Writer(), io.StringIO()
    monitor = monitor_in(tmp_path, tensorboard_writer=board, wandb=wandb, stream=out, total_iterations=9)
    first = {"loss": torch.tensor([0.5]), "lr": np.float32(0.25), "version": 4, "weights/digest": "0123"}
    monitor.log(1, first | {"kl/ref": math.nan})
    monitor.log_eval(1, {"accuracy": 0.5})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    rows = [json.loads(line) for line in text.splitlines()]
    assert [r.pop("time") > 0 for r in rows] == [True, True]
    numbers = {"loss": 0.5, "lr": 0.25, "version": 4}
    assert rows == [
        {"kind": "train", "iteration": 1, **numbers, "weights/digest": "0123", "kl/ref": None},
        {"kind": "eval", "iteration": 1, "eval/accuracy": 0.5},
    ]
    seen = [(t.removeprefix("rl/"), v) for t, v, _ in board.seen if t != "rl/kl/ref"]
    assert seen == [*numbers.items(), ("eval/accuracy", 0.5)]
    assert wandb.seen[1] == ({"rl/eval/accuracy": 0.5, "rl/eval/iteration": 1}, 1)
    assert "rl/weights/digest" not in wandb.seen[0][0]
    assert out.getvalue().splitlines() == [LINE_LEGEND, "rl 1/9 | kl     nan", "rl 1/9 eval | accuracy 0.5"]
    assert metric_series(read_metrics(tmp_path))["series"].keys() == {*numbers, "kl/ref", "eval/accuracy"}


def test_other_ranks_only_feed_the_writers_they_have(tmp_path):
    board, out = Writer(), io.StringIO()
    monitor = monitor_in(tmp_path, rank=1, world_size=2, tensorboard_writer=board, stream=out)
    monitor.log(1, {"loss": 1.0})
    assert board.seen == [("rl/loss", 1.0, 1)] and out.getvalue() == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dock-rank1.jsonl", "events-rank1.jsonl"]


def test_resume_drops_later_lines_and_no_iteration_comes_twice(tmp_path):
    first = monitor_in(tmp_path)
    first.log_eval(0, {"accuracy": 0.1})
    for k in range(1, 6):
        first.log(k, {"loss": k})
    first.log_eval(2, {"accuracy": 0.2})
    first.close()
    resumed = monitor_in(tmp_path, resume_iteration=2)
    resumed.log_eval(2, {"accuracy": 0.25})  # made again at the resumed iteration
    for k in (3, 4):
        resumed.log(k, {"loss": 10 * k})
    keys = [(r["kind"], r["iteration"]) for r in read_jsonl(tmp_path / "metrics.jsonl")]
    assert sorted(keys) == sorted(set(keys)), "an iteration came twice"
    rows = read_metrics(tmp_path)
    assert [(r["iteration"], r.get("loss"), r.get("eval/accuracy")) for r in rows] == [
        (0, None, 0.1), (1, 1, None), (2, 2, 0.25), (3, 30, None), (4, 40, None),
    ]  # fmt: skip
    assert read_run(tmp_path)["resume_iteration"] == 2


def test_a_new_run_in_an_old_directory_sets_the_old_lines_aside(tmp_path):
    for loss in (1, 2):
        monitor = monitor_in(tmp_path)
        with monitor.stage("update"):
            monitor.log(loss, {"loss": loss})
        if loss == 1:  # the new run is not evaluated: its report shows no responses of the old one
            monitor.log_held_out(1, [])
        monitor.close()
    assert not (tmp_path / "heldout.jsonl").exists() and (tmp_path / "heldout.jsonl.old").exists()
    assert [r["loss"] for r in read_metrics(tmp_path)] == [2]
    assert [r["loss"] for r in read_jsonl(tmp_path / "metrics.jsonl.old")] == [1]
    assert [len(read_jsonl(tmp_path / f"events-rank0.jsonl{x}")) for x in ("", ".old")] == [1, 1]


def test_lines_written_before_a_kill_are_whole(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from mindspeed_rl_plugin.monitor.run_files import JsonLines\n"
        "lines = JsonLines(sys.argv[1], 0)\n"
        "for k in range(50): lines.append({'iteration': k})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "x.jsonl"
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60, check=False)
    assert done.returncode == -9
    assert [r["iteration"] for r in read_jsonl(path)] == list(range(50))


def test_a_cut_last_line_is_dropped_but_a_broken_one_inside_is_an_error(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"iteration": 1}\n{"iteration": 2')
    assert read_jsonl(path) == [{"iteration": 1}]
    lines = JsonLines(path, 2)
    lines.append({"iteration": 3})
    assert read_jsonl(path) == [{"iteration": 1}, {"iteration": 3}]
    path.write_text('{"iteration": 1}\n{"iteration": 2\n{"iteration": 3}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_jsonl(path)


def test_the_progress_bar_is_drawn_on_a_terminal_only(tmp_path, capfd):
    with monitor_in(tmp_path).progress(10) as bar:
        bar.update(3)
    assert capfd.readouterr().err == ""
    with ProgressBar(10, "generate", shown=True) as bar:
        bar.update(3)
        time.sleep(0.2)  # tqdm writes ten times per second at most
        bar.update(10 - bar.n)
    assert "10/10" in capfd.readouterr().err


def test_summary_of_a_run(run_builder, tmp_path):
    run_builder(tmp_path / "run", iterations=20, dumps=False)
    rows = read_metrics(tmp_path / "run")
    got = summarize(tmp_path / "run")
    accuracy = [r["eval/accuracy"] for r in rows if "eval/accuracy" in r]
    speeds = sorted(r["tokens_per_second"] for r in rows[1:])
    assert len(accuracy) == 3 and got["accuracy_before"] == accuracy[0] and got["accuracy_after"] == accuracy[-1]
    assert got["iterations"] == 20
    assert got["tokens_per_second"] == pytest.approx((speeds[9] + speeds[10]) / 2)
    assert got["logprob_diff_max"] == max(r["logp_diff/max"] for r in rows[1:])
    assert got["seconds"] == pytest.approx(sum(r["seconds/iteration"] for r in rows[1:]) + 3 * 0.8)


def test_summary_says_none_for_what_was_never_measured(tmp_path):
    monitor = monitor_in(tmp_path)
    monitor.log_eval(0, {"accuracy": 0.5, "reward_mean": 0.25})
    assert summarize(tmp_path) == {
        "accuracy_before": 0.5, "accuracy_after": None, "reward_before": 0.25, "reward_after": None, "iterations": 0,
        "tokens_per_second": None, "logprob_diff_max": None, "seconds": None,
    }  # fmt: skip


def test_the_runs_own_lines_are_in_a_file_from_the_first_one_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(environment, "_log", [])
    monkeypatch.setattr(environment, "_before_log", [])
    environment.say("starting")
    for resumed, iteration in ((0, 1), (1, 2)):
        monitor = Monitor(tmp_path, 0, 1, total_iterations=2, resume_iteration=resumed)
        monitor.log(iteration, FULL)
        environment.say(f"saved {iteration}")
        monitor.close()
    printed = capsys.readouterr().out
    assert (tmp_path / "log.txt").read_text() == printed and printed.startswith("[rl] starting\n")
    assert printed.count("rl 1/2 |") == printed.count("rl 2/2 |") == 1
    Monitor(tmp_path, 0, 1).close()
    assert not (tmp_path / "log.txt").exists() and (tmp_path / "log.txt.old").read_text() == printed


QUICKSTART = (0.0, 0.0016, 0.0089, 0.0545, 0.0075, 0.0805, 0.1047, math.nan, 0.0643)
IDLE, FINE = {"groups/informative": 0.0}, {"groups/informative": 0.1}


@pytest.mark.parametrize(
    ("compares", "metrics", "at", "text"),
    [
        (True, [FINE] * 5 + [IDLE] * 7 + [FINE] + [IDLE] * 20, [14], "in 8 of the last 10 rollouts"),
        (True, [IDLE, IDLE, FINE] * 10, [], ""),
        (False, [IDLE] * 20, [], ""),  # groups of equal rewards teach what does not compare them
        (True, [{"kl/ref": kl} for kl in (0.0, 1.7, 1.8, 9.0)], [2], "moved by 1.7 nats"),
        (True, [{"kl/ref": kl} for kl in (3.0, 3.4, 3.8)], [], ""),  # resumed: what it was before is not known
        (True, [{"kl/old": kl} for kl in (0.1, 0.9)], [2], "moved by 0.9 nats"),
        (True, [{"kl/ref": kl} for kl in QUICKSTART], [], ""),
    ],
)
def test_a_run_that_learns_nothing_or_too_fast_is_warned_once(tmp_path, capsys, compares, metrics, at, text):
    monitor, warned = monitor_in(tmp_path, compares=compares), {}
    for number, more in enumerate(metrics, 1):
        monitor.log(number, FULL | more)
        warned |= {number: said} if (said := capsys.readouterr().out) else {}
    assert list(warned) == at
    assert all(re.search(text + ".*#it-runs-but-does-not-learn", said) for said in warned.values())
    page = Path(__file__).parents[2] / "docs" / "when-something-goes-wrong.md"
    assert "\n## It runs, but does not learn\n" in page.read_text()


def test_a_run_knows_where_it_was_resumed_and_trims_what_came_after(tmp_path):
    for resumed, evaluated in ((0, 4), (2, 2), (6, 8), (4, 4)):
        monitor = Monitor(tmp_path, 0, 1, resume_iteration=resumed)
        monitor.log_held_out(evaluated, [[0, "p" * 9000, "r", "a", 1.0]])
        monitor.close()
    assert [start["iteration"] for start in read_run(tmp_path)["starts"]] == [0, 2, 4]
    kept = read_jsonl(tmp_path / "heldout.jsonl")
    assert [line["iteration"] for line in kept] == [2, 4] and len(kept[0]["rows"][0][1]) == 4000
