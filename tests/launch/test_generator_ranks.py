"""The last ranks of a job become generators, before Megatron counts its ranks."""

import argparse
import os
import queue
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from mindspeed_rl_plugin.config import RLConfig, add_flags
from mindspeed_rl_plugin.dock import machines
from mindspeed_rl_plugin.environment import begin_start, environment_apart, is_part, launch_env, launcher_store
from mindspeed_rl_plugin.generators import launcher_ranks
from mindspeed_rl_plugin.generators.launcher_ranks import RankSplit, agree, begin, part
from mindspeed_rl_plugin.launch.generator_ranks import split_of

FLAGS = "--rl-algorithm grpo --rl-schedule async --rl-generators"
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch):
    """Sets what torchrun sets for a rank; what the split changes is undone."""

    def become(number: int, world: int, local: int | None = None) -> None:
        local = local or world
        for name, value in zip(VARIABLES, (number, world, number % local, local), strict=True):
            monkeypatch.setenv(name, str(value))
        for name in ("ROLE_RANK", "ROLE_WORLD_SIZE", "MINDSPEED_RL_PART"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)

    return become


def config(line: str) -> RLConfig:
    return RLConfig.from_args(add_flags(argparse.ArgumentParser()).parse_args(line.split()))


@pytest.mark.parametrize(
    "line",
    [
        "--rl-algorithm grpo",
        "--rl-algorithm grpo --rl-schedule streamed --rl-generators 1",
        f"{FLAGS} 0",
        f"{FLAGS} ray:2,tp=2",
    ],
)
def test_without_generators_all_ranks_train(rank, line: str) -> None:
    rank(0, 4)
    assert split_of(config(line)) is None


def test_the_command_line_says_how_ranks_are_split(rank) -> None:
    rank(5, 16, 8)
    line = f"{FLAGS}=8 --rl-generate-tp 4 --rl-wait-timeout 60"
    assert split_of(config(line)) == RankSplit(world=16, local=8, generators=8, engine=4, deadline=60.0)


@pytest.mark.parametrize(
    ("number", "engine", "env"),
    [
        (0, None, {"rank": 0, "world_size": 5, "local_rank": 0, "local_world_size": 5}),
        (4, None, {"rank": 4, "world_size": 5, "local_rank": 4, "local_world_size": 5}),
        (5, 0, {"rank": 0, "world_size": 1, "local_rank": 5, "local_world_size": 1}),
        (7, 2, {"rank": 0, "world_size": 1, "local_rank": 7, "local_world_size": 1}),
    ],
)
def test_one_machine(rank, number: int, engine: int | None, env: dict) -> None:
    """The local rank, by which a device is taken, stays."""
    rank(number, 8)
    assert part(RankSplit(8, 8, 3, 1, 60.0)) == engine
    assert launch_env() == env and is_part()
    assert (os.environ["ROLE_RANK"], os.environ["ROLE_WORLD_SIZE"]) == (str(env["rank"]), str(env["world_size"]))


def test_engines_of_several_ranks_on_machines_of_their_own(rank, capsys) -> None:
    rank(0, 16, 8)
    assert part(RankSplit(16, 8, 8, 4, 60.0)) is None
    assert launch_env() == {"rank": 0, "world_size": 8, "local_rank": 0, "local_world_size": 8}
    said = capsys.readouterr().out
    assert "ranks 0 to 7 (WORLD_SIZE 8: 16 less --rl-generators 8; machines 1, ranks a machine 8)" in said
    assert "generators: ranks 8 to 15 (engines 2, ranks an engine 4)" in said
    page = Path(__file__).parents[2] / "docs" / "schedules.md"
    assert f"[rl] {RankSplit(8, 8, 4, 1, 60.0).text()}\n" in page.read_text()
    assert "trainers: rank 0 (WORLD_SIZE 1: 2 less " in RankSplit(2, 2, 1, 1, 60.0).text()
    assert "generators: rank 1 (engines 1, " in RankSplit(2, 2, 1, 1, 60.0).text()
    rank(13, 16, 8)
    assert part(RankSplit(16, 8, 8, 4, 60.0)) == 1
    assert launch_env() == {"rank": 1, "world_size": 4, "local_rank": 5, "local_world_size": 4}


@pytest.mark.parametrize(
    ("split", "says"),
    [
        (RankSplit(4, 4, 4, 1, 60.0), "--rl-generators 4 leaves no rank of 4"),
        (RankSplit(4, 4, 3, 2, 60.0), "--rl-generators 3 .* 2 ranks of an engine .*; give 2$"),
        (RankSplit(8, 8, 5, 2, 60.0), "--rl-generators 5 .* 2 ranks of an engine .*; give 4 or 6$"),
        (RankSplit(8, 8, 3, 4, 60.0), "--rl-generators 3 .* 4 ranks of an engine .*; give 4$"),
        (RankSplit(4, 4, 2, 4, 60.0), "--rl-generators 2 .* 4 ranks of an engine .*; start more than 4 ranks"),
        (RankSplit(16, 8, 6, 4, 60.0), "--rl-generators 6 .* 4 ranks of an engine .*; give 8$"),
        (RankSplit(16, 8, 4, 1, 60.0), "--rl-generators 4 with 8 ranks a machine .* multiple of 8"),
    ],
)
def test_ranks_that_do_not_divide(rank, split: RankSplit, says: str) -> None:
    rank(0, split.world, split.local)
    with pytest.raises(ValueError, match=says):
        part(split)
    assert not is_part()


def test_the_ranks_of_each_start_agree_whatever_the_last_ones_left(monkeypatch, capfd) -> None:
    """One store for three starts. The ranks of the second end while rank 0 has answered nobody: their questions, and
    the answers to those of the first, are still there. Those of the first that still run end when they see others."""
    monkeypatch.setattr(launcher_ranks, "KEY_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(launcher_ranks, "WATCH_SECONDS", 0.05)
    keys, ended = dist.HashStore(), queue.Queue()

    def start(world: int, place: str) -> set[tuple[str, str]]:
        with ThreadPoolExecutor(world) as pool:
            work = [
                pool.submit(agree, keys, rank, world, "" if rank else place, lambda _, rank=rank: ended.put(rank))
                for rank in range(world)
            ]
            return {one.result(timeout=10) for one in work}

    ((first, place),) = start(3, "a 1001")
    assert place == "a 1001"
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.3)
    with monkeypatch.context() as short, pytest.raises(TimeoutError, match="rank 0 did not start within 0.1 s"):
        short.setattr(launcher_ranks, "BEGIN_SECONDS", 0.1)
        agree(keys, 2, 3, "")
    assert ended.get(timeout=5) == 0, "rank 2 has asked again"
    ((last, place),) = start(4, "a 1003")
    assert place == "a 1003" and last != first
    assert {ended.get(timeout=5) for _ in range(2)} == {1, 2}, "rank 0 is another one"
    said = capfd.readouterr().err
    assert all(f"[rl] rank {a} stops: rank {b} is gone (the launcher has st" in said for a, b in ((0, 2), (1, 0)))


@pytest.mark.parametrize(("restarts", "shared", "changes"), [("0", "True", 0), ("2", "False", 0), ("2", "True", 1)])
def test_where_ranks_may_start_again_they_have_a_store_of_each_start(
    rank, monkeypatch, restarts: str, shared: str, changes: int
) -> None:
    """What the launcher's store holds stays out of it; generators go on to use that, under the name of the start. At
    MASTER_ADDR nothing but the launcher's port may be open."""
    rank(0, 1)
    monkeypatch.setattr(machines, "own_address", lambda: "0.0.0.0")
    launcher = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    launcher.set("mindspeed_rl//dock", "of the last start")
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launcher.port), "MINDSPEED_RL_START": ""}
    given |= {"TORCHELASTIC_MAX_RESTARTS": restarts, "TORCHELASTIC_USE_AGENT_STORE": shared}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    begin()
    before = launcher_store()
    begin()  # of the import line, behind the runner's
    assert launcher_store() == before
    assert (os.environ["MASTER_PORT"] != str(launcher.port)) == changes
    assert os.environ["MASTER_ADDR"] == ("0.0.0.0" if changes else "127.0.0.1")
    host, port, name = launcher_store()
    assert (host, port, bool(name)) == ("127.0.0.1", launcher.port, changes)
    assert launcher_ranks.store().check(["dock"]) == (not changes)
    assert "MINDSPEED_RL_START" not in environment_apart()
    begin_start("next", "b", "5")
    assert launcher_store() == ("127.0.0.1", launcher.port, "next")


@pytest.mark.parametrize(
    ("own", "taken"), [("10.1.2.3", "10.1.2.3"), ("127.0.1.1", "first"), ("fe80::1%eth0", "first")]
)
def test_an_address_that_others_cannot_use_is_left_to_the_name(monkeypatch, own: str, taken: str) -> None:
    monkeypatch.setattr(machines, "own_address", lambda: own)
    monkeypatch.setenv("MASTER_ADDR", "first")
    assert machines.reachable_address() == taken
