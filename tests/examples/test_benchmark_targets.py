"""The benchmarks of log-probs and of whole iterations say of each target of their issue whether it was reached."""

import importlib.util
import sys
from pathlib import Path

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
