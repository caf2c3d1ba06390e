"""The `ResponseKind` of episodes (tools and environments answer the model's turns), and the start of environments."""

from __future__ import annotations

import atexit
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor

from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.config.episode_flags import EXTERNAL
from mindspeed_rl_plugin.dock.peers import Peers
from mindspeed_rl_plugin.engine.response_kind import ONE_TURN, Checks, ResponseKind
from mindspeed_rl_plugin.engine.rollout_engine import Engine, task_of
from mindspeed_rl_plugin.environment import say
from mindspeed_rl_plugin.episodes.chat import AgentFormats
from mindspeed_rl_plugin.episodes.environments import CheckFields, Environments, begin_once, row_of, tool_names
from mindspeed_rl_plugin.episodes.episode_rows import (
    DUMPED,
    EPISODE_COUNTS,
    FORK_COUNTS,
    MEASURED,
    EpisodeMeter,
    check_paths,
    check_rest,
    check_turns,
    episode_columns,
    episode_row,
    sampled_tokens,
)
from mindspeed_rl_plugin.episodes.parsers import make_parser
from mindspeed_rl_plugin.episodes.setup import EpisodeSetup
from mindspeed_rl_plugin.prompts.tokenizer import load_tokenizer
from mindspeed_rl_plugin.ranks import on_all_ranks, rank_of_job
from mindspeed_rl_plugin.reward.items import opening
from mindspeed_rl_plugin.rows import Completion, Prompt, Rows, SampleId, longest_responses


class EpisodeKind(ResponseKind):
    """setup: settings, the same for all engines; tools, check_fields: of the environments, known on every rank;
    environments: those of this rank, or None; apart: whether engines and their environments run in other processes;
    formats: for the tools of agents, with which their trial is checked."""

    reads, dumped = ("meta",), DUMPED
    limited = ("length", "prompt_length")
    graded = ("conversation", "environment")
    ends = ("stop", "length", "turns", "time")

    def __init__(
        self,
        setup: EpisodeSetup,
        tools: Sequence[Mapping[str, Any]],
        check_fields: CheckFields,
        environments: Environments | None = None,
        apart: bool = False,
        formats: AgentFormats | None = None,
    ) -> None:
        self._formats = formats
        self.setup, self.tools, self.check_fields = setup, tools, check_fields
        self.environments, self._apart = environments, apart
        self.tokenizer, self.stops = setup.tokenizer, setup.flags.requests
        self.columns = episode_columns(len(tools), setup.flags.max_turns, self.stops)
        if self.stops:
            self.limited = (*self.limited, "paths")
        self.measured = tuple(column.name for column in self.columns if column.name in MEASURED)
        self.drops_failed = setup.flags.environment_on_error == "drop"

    def over(self, engine: Engine, tokenizer: Any, peers: Peers) -> Engine:
        return self.setup.over(engine, tokenizer, self.environments, peers)

    def described(self) -> Mapping[str, Any]:
        return dataclasses.asdict(self.setup)

    def try_once(self, meta: Mapping[str, Any], base: int, where: str) -> None:
        """See `ResponseKind`. Then closes the environments if no engine uses them."""
        none = self.environments is None or self.setup.flags.agent == EXTERNAL  # nobody may have come to take it
        on_all_ranks(lambda: None if none else self._begin_one(meta, base, where))
        if self._apart:
            self.close()

    def grade_fields(self, prompt: Prompt) -> Mapping[str, Any]:
        return {"conversation": _answered(prompt, 1), "environment": 0.0}

    def completed(self, completion: Completion, prompt: Prompt) -> Completion:
        """See `ResponseKind`. The response becomes an episode of one turn."""
        length = len(completion.tokens)
        columns = episode_row(
            prompt.tokens,
            prompt.tokens,
            [(0, length)],
            [0.0],
            _answered(prompt, length),
            counts=dict.fromkeys(EPISODE_COUNTS + FORK_COUNTS, 0),
            tools=[(0, 0)] * len(self.tools),
            failed=False,
            paths=[(0, len(prompt.tokens))] if self.stops else None,
        )
        return dataclasses.replace(completion, columns={**completion.columns, **columns})

    def prompt_lengths(self, rows: Rows) -> tuple[Tensor, Tensor]:
        return rows["prompt_length"], ~rows["environment_began"].bool()

    def response_lengths(self, rows: Rows) -> Tensor:
        return longest_responses(rows)

    def sampled(self, rows: Rows) -> Tensor:
        return sampled_tokens(rows)

    def check_turns(self, rows: Rows) -> Checks:
        yield from check_turns(rows)
        yield from check_paths(rows)

    def check_rest(self, rows: Rows) -> Checks:
        return check_rest(rows)

    def meter(self) -> Callable[[Rows], Mapping[str, float]]:
        return EpisodeMeter(tool_names(self.tools))

    def close(self) -> None:
        if self.environments is not None:
            self.environments.close()

    def _begin_one(self, meta: Mapping[str, Any], base: int, where: str) -> None:
        seed = task_of(base, SampleId(0, 0, 0), meta).seed
        if why := begin_once(self.environments, row_of(meta), seed, self._formats):
            flags = self.setup.flags
            who = f"--rl-agent {flags.agent}" if flags.agent else f"--rl-environment {flags.environment}"
            text = f"{who} {why}\n  when it was tried on {where}"
            if self.setup.flags.environment_on_error == "stop":
                raise ValueError(text)
            say(f"warning: {text}")


def response_kind(config: RLConfig, tokenizer_path: str, tokenizer: Any, run: str, multiple: int = 1) -> ResponseKind:
    """The kind of responses that the flags choose. run: directory of the run; multiple: as in `EpisodeSetup.of`.

    Environments start on the first rank of each engine. If engines run in other processes, only the first rank of the
    job starts environments, for the trial. Collective. Raises ValueError, on all ranks, if they cannot start.
    """
    if (setup := EpisodeSetup.of(config, tokenizer_path, multiple)) is None:
        return ONE_TURN
    setup, apart = dataclasses.replace(setup, run=run), config.schedule.apart
    rank, here = rank_of_job(), None

    def start() -> tuple[Any, Any] | None:
        nonlocal here
        if rank == 0 or (rank % config.rollout.generate_tp == 0 and not apart):
            here = _started(setup, tokenizer)
        return here and (here.tools, here.check_fields)

    try:
        tools, check_fields = on_all_ranks(start)[0]
    except ValueError:
        if here is not None:
            here.close()
        raise
    if tools and setup.observation == "raw":
        say(
            f"--rl-observation raw: nothing tells the model of its tools ({', '.join(tool_names(tools))}); describe "
            "them in the prompts of the data, or give --rl-apply-chat-template"
        )
    formats = setup.formats(tokenizer) if setup.flags.requests else None
    return EpisodeKind(setup, tools, check_fields, here, apart, formats)


def with_environments(
    engine: Engine, described: Mapping[str, Any] | None, tokenizer: str | None, run: str, peers: Callable[[], Peers]
) -> Engine:
    """An engine in a process that is no rank of the trainer; with episodes on top if the job has episodes. Environments
    end with this process at the latest, also after an error.

    described: see `ResponseKind`; tokenizer: its directory here; peers: returns the ranks of the engine. Collective.
    """
    if described is None:
        return engine
    setup = dataclasses.replace(msgspec.convert(described, EpisodeSetup), tokenizer=tokenizer, run=run)
    ranks, environments = peers(), setup.environments() if engine.leader else None
    if environments is not None:
        atexit.register(environments.close)
    return setup.over(engine, load_tokenizer(tokenizer, setup.trust_remote_code), environments, ranks)


def _started(setup: EpisodeSetup, tokenizer: Any) -> Environments:
    """Start environments, and check that tokenizer and template fit them. Raises ValueError."""
    environments = setup.environments()
    try:
        setup.format(tokenizer, environments)
        if environments.tools and setup.flags.max_turns == 1:
            raise ValueError(
                f"--rl-max-turns 1 with tools ({', '.join(tool_names(environments.tools))}): the model would never "
                "see a result; give 2 or more"
            )
        if environments.tools or (setup.flags.requests and setup.flags.tool_parser != "auto"):
            make_parser(setup.flags.tool_parser, tokenizer)
    except ValueError:
        environments.close()
        raise
    return environments


def _answered(prompt: Prompt, length: int) -> list[dict[str, Any]]:
    """The conversation in which the answer of the data is the model's only turn. length: of this turn [tokens]."""
    turn = {"role": "assistant", "content": prompt.answer, "turn": [0, length], "reward": 0.0}
    return [*opening(prompt.messages, prompt.text), turn]
