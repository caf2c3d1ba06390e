"""What an engine is told of episodes: files by their absolute paths, and the tokens that end a turn."""

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mindspeed_rl_plugin import ranks
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.config.algorithm_flags import AlgorithmConfig
from mindspeed_rl_plugin.config.episode_flags import EpisodeConfig
from mindspeed_rl_plugin.dock.peers import Peers
from mindspeed_rl_plugin.episodes import episode_kind
from mindspeed_rl_plugin.episodes.environment_pool import EnvironmentPool
from mindspeed_rl_plugin.episodes.environments import EpisodeError
from mindspeed_rl_plugin.episodes.episode_kind import EpisodeKind, with_environments
from mindspeed_rl_plugin.episodes.setup import EpisodeSetup
from mindspeed_rl_plugin.loop.run import Run


def setup_of(chat: bool = True, **flags) -> EpisodeSetup:
    config = RLConfig(algorithm=AlgorithmConfig("grpo"), episodes=EpisodeConfig(**flags))
    data = dataclasses.replace(config.data, apply_chat_template=chat)
    return EpisodeSetup.of(dataclasses.replace(config, data=data), "tokenizer")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("my/a.py:A", "{here}/my/a.py:A"),
        ("verifiers:gsm8k", "verifiers:gsm8k"),
        ("verifiers:my/e.toml", "verifiers:{here}/my/e.toml"),
        ("openenv:http://h:8000", "openenv:http://h:8000"),
        ("my/a.py", "my/a.py"),
    ],
)
def test_files_are_known_by_their_absolute_paths(given: str, kept: str) -> None:
    setup = setup_of(environment=given, tools=("t.py:f",))
    assert setup.flags.environment == kept.format(here=Path.cwd()) and setup.flags.tool_parser == "auto"
    assert setup.flags.tools == (f"{Path.cwd()}/t.py:f",)
    assert msgspec.convert(json.loads(json.dumps(dataclasses.asdict(setup))), EpisodeSetup) == setup


@pytest.mark.parametrize(("packed", "refused"), [("pack_sequences", False), ("share_prompts", False), (None, True)])
def test_agents_may_fork_where_rows_are_packed(packed: str | None, refused: bool) -> None:
    config = RLConfig(algorithm=AlgorithmConfig("grpo"), episodes=EpisodeConfig(agent="true"))
    forward = dataclasses.replace(config.forward, **({packed: True} if packed else {}))
    setup = EpisodeSetup.of(dataclasses.replace(config, forward=forward), "tokenizer")
    assert ("--rl-pack-sequences" in setup.forks.refused) == refused


@pytest.mark.parametrize(("given", "kept"), [("my/bin/python", "{here}/my/bin/python"), ("python3", "python3")])
def test_so_is_an_interpreter(given: str, kept: str) -> None:
    setup = setup_of(environment="verifiers:x", environment_python=given)
    assert setup.flags.environment_python == kept.format(here=Path.cwd())


def test_a_file_without_a_name_in_it_is_refused_as_it_was_given() -> None:
    setup = setup_of(tools=("my/a.py",))
    with pytest.raises(EpisodeError, match=r"--rl-tools 'my/a.py'"):
        EnvironmentPool(setup.flags.tools, None, workers=1, timeout=1, wait_timeout=9)


class Some:
    """Environments that were started."""

    tools, begins = (), True
    check_fields = dict

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class Ranks:
    """One rank of several, and what the others say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, others: dict[int, Any], problem: str = "") -> None:
        self.made: list[Some] = []

        def environments(setup: EpisodeSetup) -> Some:
            if problem:
                raise EpisodeError(problem)
            self.made.append(Some())
            return self.made[-1]

        monkeypatch.setattr(EpisodeSetup, "environments", environments)
        monkeypatch.setattr(EpisodeSetup, "format", lambda *_: None)
        monkeypatch.setattr(episode_kind, "rank_of_job", lambda: rank)
        said = lambda value: [others.get(r, (None, None)) if r != rank else value for r in range(4)]  # noqa: E731
        monkeypatch.setattr(ranks, "gather_all", said)

    def start(self, schedule: str = "sync", chat: bool = False) -> Any:
        config = RLConfig(algorithm=AlgorithmConfig("grpo"), episodes=EpisodeConfig(environment="a.py:A"))
        config = dataclasses.replace(
            config,
            rollout=dataclasses.replace(config.rollout, generate_tp=2),
            data=dataclasses.replace(config.data, apply_chat_template=chat),
            schedule=dataclasses.replace(config.schedule, schedule=schedule),
        )
        return episode_kind.response_kind(config, "tokenizer", None, "/s/rl")


FIRST = (((), dict), None)


@pytest.mark.parametrize(
    ("rank", "schedule", "starts"), [(0, "sync", 1), (1, "sync", 0), (2, "sync", 1), (0, "async", 1), (2, "async", 0)]
)
def test_only_the_first_rank_of_an_engine_starts_environments(monkeypatch, rank, schedule, starts) -> None:
    ranks = Ranks(monkeypatch, rank, {0: FIRST, 2: FIRST})
    kind = ranks.start(schedule)
    assert kind.environments == (ranks.made[0] if starts else None) and len(ranks.made) == starts
    assert kind.tools == () and kind.setup.run == "/s/rl"


@pytest.mark.parametrize(("chat", "tools", "said"), [(False, True, 1), (True, True, 0), (False, False, 0)])
def test_that_nothing_tells_the_model_of_its_tools_is_said(monkeypatch, capsys, chat, tools, said) -> None:
    monkeypatch.setattr(Some, "tools", [{"type": "function", "function": {"name": "buy"}}] if tools else [])
    monkeypatch.setattr(episode_kind, "make_parser", lambda *_: None)
    Ranks(monkeypatch, 0, {2: ((Some.tools, dict), None)}).start(chat=chat)
    assert capsys.readouterr().out.count("raw: nothing tells the model of its tools (buy); describe them") == said


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_one_rank_cannot_start_every_rank_refuses(monkeypatch, rank: int) -> None:
    ranks = Ranks(monkeypatch, rank, {0: (None, "no module"), 2: FIRST}, "no module" if rank == 0 else "")
    with pytest.raises(ValueError, match="no module"):
        ranks.start()
    assert [some.closed for some in ranks.made] == [1] * (rank == 2)


@pytest.mark.parametrize(("rank", "here"), [(0, True), (1, False)])
def test_what_one_rank_cannot_begin_every_rank_refuses(monkeypatch, rank: int, here: bool) -> None:
    Ranks(monkeypatch, rank, {0: (None, "reset raised")})
    tried = lambda *_: (_ for _ in ()).throw(EpisodeError("reset raised"))  # noqa: E731
    monkeypatch.setattr(EpisodeKind, "_begin_one", tried)
    with pytest.raises(ValueError, match="reset raised"):
        EpisodeKind(setup_of(environment="a.py:A"), (), dict, Some() if here else None).try_once({}, 0, "")


def test_a_run_that_stops_by_an_error_closes_its_environments(monkeypatch) -> None:
    """Without a wait for other ranks: the engine is left alone."""
    monkeypatch.setattr("sys.last_value", ValueError(), raising=False)
    run, some, left_alone = Run(), Some(), lambda: None
    kind = EpisodeKind(setup_of(environment="a.py:A"), (), dict, some)
    run.inputs = SimpleNamespace(graders=None, responses=kind)
    job = SimpleNamespace(monitor=SimpleNamespace(close=left_alone))
    run.loop = SimpleNamespace(schedule=SimpleNamespace(stop=left_alone), job=job)
    run.close()
    assert some.closed == 1


def test_another_engine_closes_its_environments_when_its_process_ends(monkeypatch) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr(episode_kind.atexit, "register", at_exit.append)
    Ranks(monkeypatch, 0, {})
    monkeypatch.setattr(EpisodeSetup, "over", lambda self, *_: self)
    monkeypatch.setattr(episode_kind, "load_tokenizer", lambda *_: None)
    described = json.loads(json.dumps(EpisodeKind(setup_of(environment="a.py:A"), (), dict).described()))
    over = lambda leader: with_environments(SimpleNamespace(leader=leader), described, "t", "/runs/a", Peers)  # noqa: E731
    made = over(leader=True)
    (close,) = at_exit
    close()
    assert close.__self__.closed == 1 and made.run == "/runs/a" and made.tokenizer == "t"
    over(leader=False)
    assert len(at_exit) == 1
    assert with_environments("engine", None, None, "", Peers) == "engine"


def test_processes_are_told_the_run(monkeypatch) -> None:
    monkeypatch.setenv("MINDSPEED_RL_RUN", "")
    setup = dataclasses.replace(setup_of(tools=("/nowhere.py:f",)), run="/runs/a")
    with pytest.raises(EpisodeError, match="no file"):
        setup.environments()
    assert os.environ["MINDSPEED_RL_RUN"] == "/runs/a"
