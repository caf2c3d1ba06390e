"""The benchmark of the dock says of each target of its issue whether it was reached."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    added = str(BENCHMARKS / "transfer")
    spec = importlib.util.spec_from_file_location("transfer_dock", BENCHMARKS / "transfer_dock.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(added)
    for name in ("work", "peers", "docks"):
        sys.modules.pop(name, None)


def test_targets_are_medians_of_ratios_of_the_same_repeat(bench) -> None:
    seen = {
        ("dock-shm", "short/64", "get_mb_s"): [2100.0, 400.0, 2000.0],
        # A load in the second repeat that slowed both: 21, 20, 19, but 2000 / 100 = 20 of the medians by chance alone.
        ("transferqueue", "short/64", "get_mb_s"): [100.0, 20.0, 2000 / 19],
        ("dock-shm", "long/512", "put_mb_s"): [500.0, 900.0, 700.0],
        ("ray", "long/512", "put_mb_s"): [1000.0, 1000.0, 1000.0],
        ("dock-shm", "short/64", "small_get_p50_ms"): [0.4, 0.9, 0.45],
        ("dock-tcp", "short/64", "bytes_ratio"): [1.03, 1.03, 1.01],
        ("memcpy", "short/64", "bytes_ratio"): [9.0],
    }
    results = {(r["arm"], r["case"], r["metric"]): (r["value"], r["target"], r["reached"]) for r in bench.targets(seen)}
    assert results == {
        ("dock-shm", "short/64", "get_mb_s over transferqueue"): (pytest.approx(20), ">= 20", True),
        ("dock-shm", "long/512", "put_mb_s over ray"): (pytest.approx(0.7), ">= 1", False),
        ("dock-shm", "short/64", "small_get_p50_ms"): (0.45, "<= 0.5", True),
        ("dock-tcp", "short/64", "bytes_ratio"): (1.03, "<= 1.02", False),
    }
    text = bench.target_table(bench.targets(seen))
    assert text.count("| yes |") == 2 and text.count("| NO |") == 2


def test_a_tree_is_compared_with_the_one_before_it(bench) -> None:
    """By the median of the repeats' own ratios: 1.1, 0.5 and 0.8 here."""
    seen = {
        ("dock-shm", "short/64", "get_mb_s"): [110.0, 50.0, 8.0],
        ("dock-shm before", "short/64", "get_mb_s"): [100.0, 100.0, 10.0],
        ("dock-shm", "short/64", "alone_small_get_p50_ms"): [0.2, 0.3, 0.3],
        ("dock-shm before", "short/64", "alone_small_get_p50_ms"): [0.2] * 3,
        ("dock-shm", "short/64", "cpu_s_per_gb"): [1.0],
        ("dock-shm before", "short/64", "cpu_s_per_gb"): [1.0],
        ("dock-tcp", "short/64", "get_mb_s"): [1.0],
    }
    results = {r["metric"]: (r["value"], r["target"], r["reached"]) for r in bench.compared(seen)}
    assert results == {
        "get_mb_s after over before": (pytest.approx(0.8), ">= 0.9", False),
        "alone_small_get_p50_ms after over before": (pytest.approx(1.5), "<= 1.15", False),
    }
