"""Pools of tools and environments that leave nothing behind."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mindspeed_rl_plugin.episodes.pool import EnvironmentPool
from mindspeed_rl_plugin.workers.process import Worker

sys.path.insert(0, str(Path(__file__).parent))
from pool_parts import FILE, LIMIT, schemas  # noqa: E402


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EnvironmentPool]]:
    """Starts pools, and closes them; then nothing is left of their process groups."""
    monkeypatch.setattr(EnvironmentPool, "_describe", schemas)
    groups, start, pools = set(), Worker._start, []

    def noted(worker: Worker) -> None:
        start(worker)
        groups.add(worker.pid)

    def begin(environment: str | None = "Count", functions=(), **options) -> EnvironmentPool:
        paths = [f"{FILE}:{name}" for name in functions]
        given = {"workers": 1, "timeout": LIMIT, "wait_timeout": 60.0} | options
        pools.append(EnvironmentPool(paths, environment and f"{FILE}:{environment}", **given))
        return pools[-1]

    monkeypatch.setattr(Worker, "_start", noted)
    yield begin
    for pool in pools:
        pool.close()
    end = time.monotonic() + 10
    while (left := alive(groups)) and time.monotonic() < end:
        time.sleep(0.02)
    assert groups and not left


def alive(groups: set[int]) -> set[int]:
    """Processes of these groups, or those that the kernel has yet to remove."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) in groups and state != "Z":
            found.add(int(stat.parent.name))
    return found
