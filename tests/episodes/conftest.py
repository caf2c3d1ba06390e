"""Pools of tools and environments that leave nothing behind."""

import uuid
from collections.abc import Callable, Iterator

import pytest
from commands import until
from pool_parts import FILE, alive, schemas

from mindspeed_rl_plugin.episodes.environment_pool import EnvironmentPool


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, request) -> Iterator[Callable[..., EnvironmentPool]]:
    """Starts pools, and closes them; then nothing is left of what they started, in whatever session."""
    monkeypatch.setattr(EnvironmentPool, "_describe", schemas)
    mark, pools = uuid.uuid4().hex, []
    limit = 0.5 if request.path.stem == "test_pool_faults" else 20.0  # there many calls do not end by themselves
    monkeypatch.setenv("STARTED_BY", mark)

    def begin(environment: str | None = "Count", functions=(), **options) -> EnvironmentPool:
        paths = [f"{FILE}:{name}" for name in functions]
        given = {"workers": 1, "timeout": limit, "wait_timeout": 60.0} | options
        pools.append(EnvironmentPool(paths, environment and f"{FILE}:{environment}", **given))
        return pools[-1]

    yield begin
    for pool in pools:
        pool.close()
    until(lambda: not alive(mark))
