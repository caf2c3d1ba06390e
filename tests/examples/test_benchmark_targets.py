"""Benchmarks say of each target of their issue whether it was reached."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "training"))
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_an_iteration_is_compared_with_trls(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("end_to_end", monkeypatch)
    seen = {
        ("short", "tokens_per_second"): (1000.0, 1000.0),  # not ahead
        ("long-tailed", "tokens_per_second"): (900.0, 450.0),
        ("vocabulary", "peak_memory"): (600.0, 1000.0),
    }
    rows = [
        {"arm": arm, "case": case, "metric": metric, "value": value, "unit": ""}
        for (case, metric), values in seen.items()
        for arm, value in zip(("ours", "trl"), values, strict=True)
    ]
    assert {(r["case"], r["metric"]): (r["value"], r["reached"]) for r in bench.targets(rows)} == {
        ("short", "tokens_per_second"): (1.0, False),
        ("long-tailed", "tokens_per_second"): (2.0, True),
        ("vocabulary", "peak_memory"): (0.6, False),
    }
    assert bench.targets(rows[:1]) == [], "of one arm alone nothing is said"


def test_schedules_are_compared_with_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("schedules", monkeypatch)
    seconds = {
        ("sync", "slow-32"): 8.4,
        ("streamed", "slow-32"): 8.1,
        ("sync", "short"): 3.0,
        ("streamed", "short"): 3.0,
    }
    rows = [
        {"arm": arm, "case": case, "metric": metric, "value": value, "range": [value, value + 1]}
        for (arm, case), value in seconds.items()
        for metric in bench.METRICS
    ]
    compared = {r["case"]: (round(r["value"], 2), r["reached"]) for r in bench.ratios(rows)}
    assert compared == {"slow-32": (1.04, False), "short": (1.0, True)} and bench.ratios(rows[:4]) == []
    idle = [
        {"arm": "streamed", "case": "slow-32", "metric": metric, "value": value, "range": [value, value]}
        for metric, value in zip(bench.IDLE, (0.25, 0.5, 0.125), strict=True)
    ]
    table = bench.table(rows + idle)
    assert "| slow-32 | streamed | 8.10 | 8.10 | 8.10 | 8.10 | 8.10 | 0.25 | 0.50 | 0.12 | 8.10 to 9.10 |" in table
    assert "| short | sync | 3.00 | 3.00 | 3.00 | 3.00 | 3.00 |  |  |  | 3.00 to 4.00 |" in table
    assert bench.end_to_end.unit(bench.IDLE[0]) == "share" and bench.end_to_end.unit("update") == "s"


def test_each_response_of_vllm_has_its_imposed_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "training"))
    import trl_vllm

    def generate(prompts, sampling_params, use_tqdm):
        assert not use_tqdm, "what else TRL gives arrives"
        responses = [[9] * params.max_tokens for params in sampling_params]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)]) for tokens in responses]

    class Params(SimpleNamespace):
        def clone(self):
            return Params(**vars(self))

    seen: list[int] = []
    call = trl_vllm.imposed(generate, lambda prompts: [3 + prompt[0] for prompt in prompts], seen)
    given = Params(max_tokens=512)
    outputs = call([{"prompt_token_ids": [i, 7]} for i in (0, 4)], given, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [3, 7]
    assert seen == [2 + 2 + 3 + 7]
    assert given.max_tokens == 512, "TRL's own is left as it was"


def test_log_probs_are_compared_with_the_logits_and_with_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("logprob", monkeypatch)
    case = "4096/152064/1024"
    assert case in bench.CASES
    named = (("chunked/plain", "peak_bytes", 0.19), ("chunked/megatron", "seconds", 1.4), ("plain", "peak_bytes", 5e9))
    rows = [{"case": case, "arm": arm, "metric": metric, "value": value} for arm, metric, value in named]
    assert [(r["arm"], r["reached"]) for r in bench.targets(rows)] == [
        ("chunked/plain", True),
        ("chunked/megatron", False),
    ]


def test_the_model_is_fitted_to_what_is_measured_and_predicts_the_rest(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """In fewer rollouts and steps of the search than the benchmark's, which need seconds."""
    bench = load("scale_model", monkeypatch)
    monkeypatch.setattr(bench, "ROLLOUTS", 4)
    monkeypatch.setattr(bench, "HALVINGS", 3)
    streamed = ("short", "streamed")
    measured = {row: bench.IN_README[row] for row in (*bench.FITTED, streamed)}
    rows = {(row["case"], row["arm"]): row for row in bench.beside_measured(measured)}
    assert [row["fitted"] for row in rows.values()] == [True] * 4 + [False]
    assert all(abs(rows[name, "sync"]["error"]) < 1e-6 for name in ("short", "long-tailed")), "the fit is exact there"
    gain = rows["short", "sync"]["model"] / rows[streamed]["model"]
    assert rows[streamed]["gain"] == gain and abs(gain - 1) < 0.2
    assert "1 of 1 gains to which nothing was fitted are within 10%" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="lacks .*'long-tailed', 'async'"):
        bench.beside_measured({row: measured[row] for row in bench.FITTED[:3]})


def test_the_model_runs_the_jobs_that_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    bench = load("scale_model", monkeypatch)
    assert {arm: bench.apart(arm) for arm in bench.MODELLED[:3]} == {"sync": False, "streamed": False, "async": True}
    setups = {arm: bench.setup_of(bench.CASES["slow-4"], arm) for arm in bench.MODELLED}
    assert {arm: (s.schedule, s.order, s.inflight, s.graders) for arm, s in setups.items()} == {
        "sync": ("sync", "free", "keep", 4),
        "streamed": ("streamed", "free", "keep", 4),
        "async": ("async", "free", "keep", 4),
        "drain": ("async", "free", "drain", 4),
        "one-step-off": ("async", "strict", "keep", 4),
    }
    page = (BENCHMARKS / "README.md").read_text().partition("## scale_model.py")[2]
    told = re.findall(r"\| (\S+) \| (\S+) \| (?:fitted|predicted) \| \S+ \| (\S+) \|", page)
    assert {(case, arm): float(s) for case, arm, s in told} == {k: v["iteration"] for k, v in bench.IN_README.items()}
    rows = [
        {"case": "short", "arm": arm, "metric": metric, "value": value}
        for arm, metric, value in (("sync", "iteration", 2.0), ("sync", "update", 1.0), ("trl", "iteration", 9.0))
    ]
    (tmp_path / "measured.json").write_text(json.dumps(rows))
    assert bench.read(tmp_path / "measured.json") == {("short", "sync"): {"iteration": 2.0, "update": 1.0}}


def figures(calls: float) -> dict:
    """Of one trainer and one engine, in whose 10 s so much was the control plane."""
    iteration = {"seconds": 10.0, "waited": 4.0, "calls": {"select": calls / 2, "clear": calls / 2}}
    idle = {"back-pressure": 0.75, "version": 0.25}
    one = {"seconds": 10.0, "calls": {"next": 1.0 + calls, "done": 0.0}, "idle": idle}
    both = {"on_processor": 0.01, "cpu": 0.5, "responses": 100.0}
    return {"trainer-0": {"iterations": [iteration], **both}, "engine-0": {**one, **both}}


def test_the_share_of_the_control_plane_is_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    plane = load("control_plane", monkeypatch)
    args = SimpleNamespace(trainers=1, engines=1, rows=100, iterations=1, seconds=10.0)
    for calls, verdict in ((0.15, "reached"), (0.25, "NOT reached")):
        result = plane.summary(figures(calls), args)
        of_both = [result[who]["most"] for who in ("trainers", "engines")]
        assert of_both == pytest.approx([calls / 10] * 2)
        assert result["cpu_ms_a_row"] == 10.0 and result["lines"][-1] == f"at most 2% asked: {verdict}"


def test_processes_that_sleep_write_what_stages_write(monkeypatch: pytest.MonkeyPatch) -> None:
    plane = load("control_plane", monkeypatch)
    names = [spec.name for spec in plane.TABLE]
    assert names[:4] == ["prompts", "generate", "reward", "groups"] and {*plane.SLEPT, "select"} <= {*names[4:]}
    ids = tuple(plane.SampleId(0, 0, m) for m in range(2))
    for spec in plane.TABLE:
        rows = plane.filled(spec, plane.Rows(ids), [3, 5])
        assert list(rows.columns) == [column.name for column in spec.writes]
        ragged = [column.name for column in spec.writes if column.ragged]
        assert all(rows[name].lengths.tolist() == [3, 5] for name in ragged)
    done = plane.completion(SimpleNamespace(id=ids[1]), 3, 7)
    assert (done.id, len(done.tokens), len(done.logps), done.segments) == (ids[1], 3, 3, ((0, 7),))


def test_episodes_are_compared_with_the_faster_arm_of_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("episodes", monkeypatch)
    case = bench.Case("work", 16, 2)
    seconds = {"ours": (2.0, 1.0), "trl": (8.0, 6.0), "trl-vllm": (3.2, 2.0)}  # of an iteration, and of its rollout
    counts = {"turns": 3.5, "calls": 2.5, "tokens": 70.0}
    rows = [
        {"arm": arm, "case": name, "metric": metric, "value": value, "range": [value, value + 1]}
        for arm, (iteration, rollout) in seconds.items()
        for name in ("tool", "slow")
        for metric, value in bench.measured(case, [(iteration, rollout)] * 3, counts).items()
    ]
    apart = {"wall": 3.6, "over_busy": 1.2, "over_single_turns": 1.1}
    rows += [
        {"arm": "engine", "case": "rollout-at-once", "metric": metric, "value": value, "range": [value, value]}
        for metric, value in apart.items()
    ]
    compared = {(r["case"], r["metric"], r["arm"]): (r["value"], r.get("reached")) for r in bench.targets(rows)}
    assert compared == {
        ("tool", bench.SPEED, "ours/trl"): (4.0, None),
        ("tool", bench.SPEED, "ours/trl-vllm"): (1.6, True),
        ("slow", bench.SPEED, "ours/trl"): (4.0, None),
        ("slow", bench.SPEED, "ours/trl-vllm"): (1.6, False),
        ("rollout-at-once", "over_busy", "engine"): (1.2, False),
        ("rollout-at-once", "over_single_turns", "engine"): (1.1, True),
    }
    assert bench.targets(rows[:7]) == [], "of one arm alone nothing is said"
    text = bench.table(rows)
    assert "| tool | trl-vllm | 20 | 32 | 3.2 | 2 | 3.5 | 2.5 | 70 | 20 to 21 |" in text
    assert "| rollout-at-once | engine | 3.6 | 1.2 | 1.1 | 1.2 to 1.2 |" in text


def test_arms_that_did_other_work_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("episodes", monkeypatch)
    others = [{"turns": 3.5, "calls": 2.5, "tokens": 70.0}]
    bench.check_work({"turns": 3.4, "calls": 2.45, "tokens": 76}, others)
    for name, value, fails in (("turns", 3.0, "3 turns an episode, not 3.5"), ("tokens", 50, "50 tokens .*, not 70")):
        with pytest.raises(RuntimeError, match=fails):
            bench.check_work(others[0] | {name: value}, others)
