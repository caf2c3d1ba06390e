"""Benchmarks of the dock: dock_scaling.py runs, its limiter limits; transfer_dock.py says of each target of its issue
whether it was reached."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "transfer")]

import dock_scaling  # noqa: E402
import transfer_dock  # noqa: E402

sys.path[:2] = []


def test_targets_are_medians_of_ratios_of_the_same_repeat() -> None:
    """A load in the second repeat slowed both arms: 21, 20, 19, but 2000 / 100 of the medians by chance alone."""
    seen = {
        ("dock-shm", "short/64", "get_mb_s"): [2100.0, 400.0, 2000.0],
        ("transferqueue", "short/64", "get_mb_s"): [100.0, 20.0, 2000 / 19],
        ("dock-shm", "short/64", "small_get_p50_ms"): [0.4, 0.9, 0.45],
        ("dock-tcp", "short/64", "bytes_ratio"): [1.03, 1.03, 1.01],
        ("memcpy", "short/64", "bytes_ratio"): [9.0],
    }
    rows = [(r["arm"], r["metric"], r["value"], r["target"], r["reached"]) for r in transfer_dock.targets(seen)]
    assert sorted(rows) == [
        ("dock-shm", "get_mb_s over transferqueue", pytest.approx(20), ">= 20", True),
        ("dock-shm", "small_get_p50_ms", 0.45, "<= 0.5", True),
        ("dock-tcp", "bytes_ratio", 1.03, "<= 1.02", False),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bucket", "auto"])
def test_it_runs_and_the_wire_shows_what_an_arm_moves(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "dock_scaling.py"), "--nodes", "1,2"]
    command += ["--repeats", "1", "--limiter", kind, "--json", str(tmp_path / "out.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0 and done.stdout.startswith("EMULATION"), done.stdout + done.stderr
    value = {(r["arm"], r["case"], r["metric"]): r["value"] for r in json.loads((tmp_path / "out.json").read_text())}
    assert value["local-packed", "S=2", "remote_mb"] == 0 < value["hash-padded", "S=2", "remote_mb"]
    wire = [value[arm, "S=2", "wire"] for arm in dock_scaling.ARMS]
    assert wire[0] > wire[1] > 10 * wire[2], wire
    # The link's counter holds what the dock says it moved, and little more: messages and headers.
    central = value["central-padded", "S=2", "remote_mb"] * 8 / 50
    assert 0.4 * central < wire[0] < 1.1 * central
    assert value["central-padded", "S=2", "seconds"] >= 0.8 * wire[0], "nothing is faster than its wire"
