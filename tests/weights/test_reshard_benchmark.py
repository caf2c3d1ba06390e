"""benchmarks/reshard.py runs, and moves the bytes that its analysis says."""

import json
import sys
from pathlib import Path

import pytest
from commands import ended

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "reshard.py"


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
