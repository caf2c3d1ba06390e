"""What the report is made from: own times of stages, thinning, remarks, samples, errors. No browser."""

import json
import re

import pytest

from mindspeed_rl_plugin.monitor.dump import dump_rollout
from mindspeed_rl_plugin.monitor.run_files import dump_files, read_metrics
from mindspeed_rl_plugin.monitor.run_summary import summarize
from mindspeed_rl_plugin.tools.report.report import embed, main
from mindspeed_rl_plugin.tools.report.report_data import collect, duration, headline, held_out, remarks, verdict
from mindspeed_rl_plugin.tools.report.report_samples import _turns, sample_data
from mindspeed_rl_plugin.tools.report.report_stages import BETWEEN, apart_data, own_seconds, stage_data, timeline_data


def event(iteration, rank, stage, start, end, peak=None):
    return {"iteration": iteration, "stage": stage, "rank": rank, "start": start, "end": end, "peak_bytes": peak}


@pytest.mark.parametrize(
    ("spans", "want"),
    [
        ([], {}),
        ([(0, 2, "a"), (2, 3, "b")], {"a": 2, "b": 1}),
        ([(0, 2, "a"), (3, 4, "b")], {"a": 2, BETWEEN: 1, "b": 1}),
        ([(0, 10, "a"), (2, 5, "b")], {"a": 7, "b": 3}),  # nested
        ([(0, 4, "a"), (3, 6, "b")], {"a": 3, "b": 3}),  # overlapping
        ([(0, 1, "a"), (1, 2, "b"), (2, 4, "a")], {"a": 3, "b": 1}),  # twice
        ([(0, 9, "a"), (1, 8, "b"), (2, 3, "c")], {"a": 2, "b": 6, "c": 1}),
    ],
)
def test_own_seconds_count_every_instant_once(spans, want):
    assert own_seconds(spans) == want


def test_stage_data_is_mean_time_and_largest_peak_over_ranks():
    events = [
        event(1, 0, "generate", 0.0, 4.0, 100),
        event(1, 0, "update", 4.0, 5.0, 70),
        event(1, 1, "generate", 0.0, 2.0, 300),
        event(1, 1, "update", 4.0, 5.0, None),
        event(2, 0, "generate", 6.0, 7.0, 50),
        event(2, 1, "generate", 6.0, 7.0, 60),
    ]
    got = stage_data(events)
    assert got["names"] == ["generate", "update", BETWEEN] and got["iterations"] == [1, 2]
    assert got["seconds"] == {"generate": [3.0, 1.0], "update": [1.0, 0.0], BETWEEN: [1.0, 0.0]}
    assert got["peak"] == {"generate": [300, 60], "update": [70, None]}
    row = got["table"][0]
    assert (row["seconds"], row["share"], row["slowest_rank"], row["peak"]) == (4.0, 4 / 6, 0, 300)
    assert row["slowest_over_mean"] == 5 / 4
    assert got["table"][2]["peak"] is None


def test_the_timeline_thins_ranks_first_and_old_iterations_then_and_says_so():
    events = [event(i, r, "update", i, i + 1) for i in range(10) for r in range(64)]
    names = ["update"]
    whole = timeline_data(events, names)
    assert (len(whole["events"]), len(whole["ranks"]), whole["iterations_left_out"]) == (640, 64, 0)
    thin = timeline_data(events, names, limit=100)
    assert (thin["ranks"][0], thin["ranks"][-1], len(thin["ranks"]), thin["ranks_total"]) == (0, 63, 16, 64)
    assert thin["iterations"] == [4, 5, 6, 7, 8, 9] and thin["iterations_left_out"] == 4
    assert len(thin["events"]) == 96 and thin["events"][0][3] == 0.0
    apart = [{"process": "a:1", "stage": "pull", "start": at, "end": at + 0.5} for at in (1.0, 6.0)]
    assert apart_data(apart, thin["origin"])["apart"] == [[0, 0, 2.0, 0.5]], "beside iteration 6, which begins at 2"


def test_what_engines_apart_did_is_on_the_clock_of_the_ranks():
    apart = [
        {"process": "b:1", "stage": "pull", "start": 101.0, "end": 101.5},
        {"process": "a:1", "stage": "generate", "start": 102.0, "end": 104.0},
        {"process": "weights", "stage": "version 7", "start": 103.0, "end": 103.0},
    ]
    data = apart_data(apart, 100.0)
    assert data["processes"] == ["b:1", "a:1"] and data["kinds"] == ["generate", "pull"]
    assert data["apart"] == [[0, 1, 1.0, 0.5], [1, 0, 2.0, 2.0]] and data["marks"] == [[7, 3.0]]
    assert apart_data([], 0.0) == {"processes": [], "labels": [], "kinds": [], "apart": [], "marks": []}


def test_lanes_are_labelled_as_the_log_calls_generators_and_by_number_the_engines_that_joined():
    names = ["joined engine, process 7 on b", "generator rank 10", "client, process 5 on a", "generator rank 9"]
    apart = [{"process": name, "stage": "pull", "start": 1.0, "end": 2.0} for name in names]
    data = apart_data(apart, 0.0)
    assert data["processes"] == [names[3], names[1], names[0], names[2]]
    assert data["labels"] == ["generator rank 9", "generator rank 10", "joined engine 1", "joined engine 2"]


def test_samples_are_whole_groups_of_evenly_spread_rollouts(rows_builder, tmp_path):
    for epoch in range(10):
        rows = rows_builder(epoch, 0.5, groups=6, members=4)
        dump_rollout(tmp_path, rows, lambda t: "".join(map(chr, t)), iteration=epoch + 1)
    got = sample_data(dump_files(tmp_path), limit=40)
    assert (got["total"], got["rollouts"], got["rollouts_shown"], len(got["rows"])) == (240, 10, 10, 40)
    for epoch in range(10):
        assert [(r[1], r[2]) for r in got["rows"] if r[0] == epoch] == [(0, m) for m in range(4)]
    few = sample_data(dump_files(tmp_path), limit=9)
    assert sorted({r[0] for r in few["rows"]}) == [0, 9] and len(few["rows"]) == 8
    everything = sample_data(dump_files(tmp_path), limit=1000)
    assert len(everything["rows"]) == 240
    assert sample_data(dump_files(tmp_path), limit=0)["rows"] == []
    cut = sample_data(dump_files(tmp_path), limit=4, text_limit=10)["rows"][0][4]
    assert cut.startswith("Let me add\n[cut here, ")


def test_an_episode_is_shown_turn_by_turn(episode_dump):
    """The prompt with what the environment said first; tokens, trained ones and rewards of turns; the environment's
    seconds, of its beginning and of its last word too."""
    got = sample_data(dump_files(episode_dump), limit=9)
    assert got["prompts"] == ["system: Use the tool.\n\nuser: What is 0+0? Begin.", "What is 0+0? Begin."]
    (reset, first, tool, more, last, end), (alone,) = (row[4] for row in got["rows"])
    rest = got["rows"][0][9] - 12
    assert reset == ["start", "", None, None, None, 0.25, 0]
    assert first == ["assistant", "<call>", 8, 8, 0.0, None, 0], "the reward is the trained one"
    assert (tool[0], tool[2:]) == ("add", [None, None, None, 0.125, 0]) and "<b>" in tool[1]
    assert more == ["user", "go on", None, None, None, None, 0]
    assert last == ["assistant", "Answer: 0", rest, rest, 0.0, None, 0]
    assert end == ["user", "right", None, None, None, 1.5, 0]
    assert alone == ["assistant", "Answer: 1", got["rows"][1][9], 0, 0.25, 0.75, 0], "sampled, not trained"


def test_an_episode_that_forks_is_shown_as_a_tree():
    """Each message once, below the path where it stands first; equal draws are two."""

    def said(path, *messages):
        return [{"role": role, "content": text, "path": path, **dict(more)} for role, text, *more in messages]

    def turn(first):
        return "turn", [first, first + 2]

    messages = said(0, ("user", "q"), ("assistant", "a", turn(0)), ("user", "b"), ("assistant", "c", turn(2)))
    messages += said(1, ("user", "q"), ("assistant", "a"), ("user", "d"), ("assistant", "e", turn(4)))
    messages += said(2, ("user", "q"), ("assistant", "a"), ("user", "d"), ("assistant", "e", turn(6)))
    messages += said(3, ("system", "s"), ("user", "q"), ("assistant", "f", turn(8)))
    record = {"turn_reward": [0.0, 1.0, 2.0, 3.0, 4.0], "loss_mask": [1] * 9 + [0]}
    shown = _turns(record, messages[:1], messages[1:], 999)
    assert [(who, text, trained, reward, depth) for who, text, _, trained, reward, _, depth in shown] == [
        ("assistant", "a", 2, 0.0, 0),
        ("user", "b", None, None, 0),
        ("assistant", "c", 2, 1.0, 0),
        ("branch", "path 1: as path 0 for 2 messages, then", None, None, 1),
        ("user", "d", None, None, 1),
        ("assistant", "e", 2, 2.0, 1),
        ("branch", "path 2: as path 1 for 3 messages, then", None, None, 2),
        ("assistant", "e", 2, 3.0, 2),
        ("branch", "path 3: begins anew", None, None, 0),
        ("system", "s", None, None, 0),
        ("user", "q", None, None, 0),
        ("assistant", "f", 1, 4.0, 0),
    ]


def test_a_long_episode_is_cut_as_a_whole(episode_dump):
    _, first, tool, note = sample_data(dump_files(episode_dump), limit=1, text_limit=90)["rows"][0][4]
    assert first[1] == "<call>" and tool[1].startswith("</script><script>doc\n[cut here, ")
    assert note[:2] == ["", "[cut here, 5 messages in all]"]


def test_a_dump_that_is_none_is_named(tmp_path):
    (tmp_path / "rollout-000000.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="cannot be read"):
        sample_data(dump_files(tmp_path), limit=10)


@pytest.mark.parametrize(
    ("row", "run", "words"),
    [
        ({"response/truncated": 0.2}, {}, "20% of the latest responses are cut"),
        ({"groups/informative": 0.05}, {}, "Only 5% of the latest groups"),
        ({"logp_diff/mean": 0.2}, {}, "differ by 0.2 nats"),
        ({"clip_fraction": 0.5}, {}, "50% of the latest tokens are clipped"),
        ({"reward/errors": 3}, {}, "failed on 3 samples"),
        ({"loss": None}, {}, "not finite in 1 iterations, first in iteration 1"),
        ({"loss": 1.0}, {"world_size": 8}, "only 1 of 8 ranks"),
    ],
)
def test_remarks_name_what_stands_out(row, run, words):
    assert any(words in r for r in remarks([{"iteration": 1, "loss": 0.0, **row}], run, [0]))
    assert remarks([{"iteration": 1, "loss": 0.0}], {"world_size": 1}, [0]) == []
    entropy = [{"iteration": k, "entropy": 1.0 if k < 15 else 0.01} for k in range(20)]
    assert any("Entropy fell from 1 to 0.01" in r for r in remarks(entropy, {}, []))


def test_headline_of_a_run(run_builder, tmp_path):
    run = run_builder(tmp_path / "tuned" / "rl", iterations=20, dumps=False)
    data = collect(run)
    assert data["title"] == "tuned/rl"
    tiles = {t["label"]: t["value"] for t in data["tiles"]}
    accuracy = [r["eval/accuracy"] for r in read_metrics(run) if "eval/accuracy" in r]
    assert tiles["Held-out accuracy"] == f"{accuracy[0]:.1%} → {accuracy[-1]:.1%}"
    assert data["held_out"]["rows"][1] == ["2+2=", "4", [["4 (0)", 1.0], ["4 (20)", 1.0]]]
    assert tiles["Iterations"] == "20" and re.fullmatch(r"-?\d\.\d{3} → -?\d\.\d{3}", tiles["Held-out reward"])
    one = dict.fromkeys(summarize(run)) | {"accuracy_before": 0.5, "iterations": 0}
    assert headline([{"iteration": 0}], {}, one)[0]["value"] == "50.0%"


def rewards(*values):
    return [{"iteration": k, "reward/mean": v} for k, v in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("rows", "held_out", "before", "after", "says"),
    [
        # 2 x sqrt(0.25/400 + 0.24/400) = 0.070
        ([], 400, 0.5, 0.6, "Learned: accuracy on 400 held-out prompts rose by 0.1, two standard errors are 0.07."),
        ([], 400, 0.6, 0.5, "Became worse: accuracy on 400 held-out prompts fell by 0.1"),
        ([], 100, 0.5, 0.6, "No clear change: accuracy on 100 held-out prompts changed by 0.1, two standard errors"),
        (rewards(0, 0.1, 0, 0.1, 0.9, 1, 0.9, 1), None, None, None, "Learned: mean reward of 2 rollouts rose by 0.9,"),
        (rewards(*[0, 1] * 8), None, None, None, "No clear change: mean reward of 4 rollouts changed by 0, "),
        (rewards(0, 1, 0, 1, 0, 1, 0), None, 0.5, None, "Too short to judge"),
    ],
)
def test_a_run_is_judged_by_two_standard_errors(rows, held_out, before, after, says):
    assert verdict(rows, {"held_out": held_out}, {"accuracy_before": before, "accuracy_after": after}).startswith(says)


def test_no_evaluation_has_no_responses_to_held_out_prompts(tmp_path):
    assert held_out(tmp_path / "none") == {"iterations": [], "rows": []}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0123, "12 ms"), (5.25, "5.2 s"), (245, "4 min 05 s"), (7620, "2 h 07 min")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_no_text_can_leave_the_data_element():
    hostile = ["</script>", "<!--", "]]>", "&lt;", "\u2028", "\ud800"]
    text = embed(hostile)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == hostile


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    def said(folder):
        assert main([str(folder)]) == 1 and not (tmp_path / "report.html").exists()
        return capsys.readouterr().err

    assert "is not a directory" in said(tmp_path / "absent") and "--rl-run-dir of a run" in said(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    assert "has not finished an iteration" in said(tmp_path)


def test_the_report_says_where_it_looked_for_dumps(run_builder, tmp_path, capsys):
    run = run_builder(tmp_path / "run", iterations=3)
    assert main([str(run)]) == 0 and f"responses in {run / 'dump'}\n" in capsys.readouterr().out
    assert main([str(run), "--samples", "1"]) == 0
    said = re.search(r"(\d+) of the (\d+) responses .*--samples \2 ", capsys.readouterr().out)
    assert int(said[1]) < int(said[2])
    bare = run_builder(tmp_path / "bare", iterations=3, dumps=False)
    assert main([str(bare)]) == 0
    assert f"no dumps in {bare / 'dump'}, {bare}\n" in capsys.readouterr().out
    assert main([str(run), "--dump-dir", str(tmp_path / "nowhere")]) == 1
    assert "--rl-dump-dir of the run" in capsys.readouterr().err
