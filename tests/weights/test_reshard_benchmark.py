"""benchmarks/reshard.py: its targets judge what its rows say, its models have the size asked for, and it runs."""

import json
import sys
from pathlib import Path

import pytest
from commands import ended, imported

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "reshard.py"
benchmark = imported(SCRIPT)


def measured(moved, least=100.0, seconds=0.5, peak=1.0):
    case = "a case"
    rows = [("stream", "received_bytes_all_ranks", moved), ("stream", "peak_bytes", peak)]
    rows += [("allgather", "peak_bytes", 2.0)]
    rows += [("analytic", "least_bytes_all_ranks", least), ("stream/allgather", "seconds", seconds)]
    return [{"arm": a, "case": case, "metric": m, "value": v, "unit": ""} for a, m, v in rows]


@pytest.mark.parametrize(
    "rows, reached",
    [
        (measured(105.0), ["yes", "yes", "yes"]),
        (measured(106.0, seconds=1.01, peak=2.1), ["no", "no", "no"]),
        (measured(0.0, least=0.0), ["yes", "yes", "yes"]),
        (measured(1.0, least=0.0), ["no", "yes", "yes"]),
    ],
)
def test_targets_are_judged_by_the_rows(rows, reached):
    assert [row["value"] for row in benchmark.targets(rows) if row["metric"].endswith("reached")] == reached


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_models_are_as_large_as_asked_for(family):

    from mindspeed_rl_plugin.layout.layout import ModelShape
    from mindspeed_rl_plugin.tools.plan.estimate import weights_by_layer

    for size in (0.5, 1.0, 2.0):
        config = benchmark.model_config(family, size)
        assert 1 <= weights_by_layer(ModelShape.from_hf_config(config, 32000), 2).sum() / (size * 1e9) < 1.25


@pytest.mark.slow
def test_it_runs(tmp_path):
    out = tmp_path / "rows.json"
    flags = ("--model-gb", "0.25", "--repeats", "1", "--no-plan", "--cases", "dense tp2 -> tp1")
    ended(sys.executable, SCRIPT, "--json", out, *flags)
    rows = json.loads(out.read_text())
    assert all(set(row) == {"arm", "case", "metric", "value", "unit"} for row in rows)
    assert {"naive", "allgather", "stream", "analytic", "target"} <= {row["arm"] for row in rows}
    value = {(row["arm"], row["metric"]): row["value"] for row in rows}
    assert value["stream", "received_bytes_all_ranks"] == value["analytic", "least_bytes_all_ranks"] > 0
    assert value["allgather", "received_bytes_all_ranks"] == value["analytic", "allgather_bytes_all_ranks"]
