"""SharedDock on real gloo ranks, and what happens when one does not come."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("shared_dock_worker.py")


def run(case: str, world: int, seconds: float = 60) -> list[tuple[int, str]]:
    """(exit code, output) of each rank."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(world), OMP_NUM_THREADS="1")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), case],
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    end = time.monotonic() + seconds
    try:
        return [(p.wait(max(1, end - time.monotonic())), p.stdout.read()) for p in ranks]
    finally:
        for p in ranks:
            p.kill()


@pytest.mark.parametrize("world", [2, 4])
def test_the_loop_over_gloo_gives_what_one_process_gives(world: int) -> None:
    for code, output in run("loop", world):
        assert code == 0 and "loop ok" in output, output


def test_errors_of_the_leader_are_raised_on_every_rank() -> None:
    for code, output in run("errors", 2):
        assert code == 0 and "errors ok" in output, output


def test_a_rank_that_does_not_come_is_named_within_the_deadline() -> None:
    (leader, said), (present, heard), (_, _) = run("absent", 3)
    assert leader == 0 and present == 0, said + heard
    assert "rank 2 of 3 to make the same call" in said and "dock call 2, lease 'generate'" in said, said
    assert "dock call 2, lease 'generate'" in heard, heard


def test_a_rank_that_dies_is_noticed_at_once() -> None:
    (leader, said), _ = run("dead", 2)
    assert leader == 0 and "rank 1 of 2" in said and "died" in said, said
