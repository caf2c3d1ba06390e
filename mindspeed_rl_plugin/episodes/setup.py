"""The settings of episodes for an engine, and what is built from them."""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.config.episode_flags import EXTERNAL, FUNCTION, OPENENV, VERIFIERS, EpisodeConfig
from mindspeed_rl_plugin.dock.machines import own_address
from mindspeed_rl_plugin.dock.peers import Peers
from mindspeed_rl_plugin.engine.rollout_engine import Engine
from mindspeed_rl_plugin.environment import name_to_users
from mindspeed_rl_plugin.episodes.agent_lead import AgentLead, ForkLimits
from mindspeed_rl_plugin.episodes.agents import AGENTS_PROGRAM, EXTERNAL_PROGRAM, AgentEnvironments
from mindspeed_rl_plugin.episodes.chat import AgentFormats, RawFormat, make_format
from mindspeed_rl_plugin.episodes.environment_pool import EnvironmentPool
from mindspeed_rl_plugin.episodes.environments import Environments, EpisodeError
from mindspeed_rl_plugin.episodes.episode_engine import EpisodeEngine
from mindspeed_rl_plugin.episodes.lead import EpisodeLimits, Lead
from mindspeed_rl_plugin.episodes.parsers import is_own, make_parser
from mindspeed_rl_plugin.episodes.verifiers_bridge import MAX_ROLLOUTS, check_rows, verifiers_program
from mindspeed_rl_plugin.gateway.agent_messages import AgentSetup, JobSampling
from mindspeed_rl_plugin.reward.specs import ENVIRONMENT, locate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EpisodeSetup:
    """The settings of episodes that an engine gets."""

    flags: EpisodeConfig  # with absolute paths of the user's files
    observation: str  # "chat" or "raw"
    tokenizer: str  # its directory
    prompt: int  # longest prompt [tokens]
    response: int  # longest response [tokens]
    wait: float  # seconds that other ranks wait for this rank
    run: str = ""  # directory of the run; a user's code finds it in MINDSPEED_RL_RUN
    sampling: tuple[float, float, int] = (1.0, 1.0, 0)  # temperature, top-p and top-k of training
    no_stops: str = ""  # the flag with which agents can give no stop texts
    rewarded: bool = False  # whether the reward of environments is graded
    trust_remote_code: bool = False  # whether code of the tokenizer may run
    forks: ForkLimits = ForkLimits()

    @classmethod
    def of(cls, config: RLConfig, tokenizer: str, multiple: int = 1) -> EpisodeSetup | None:
        """From a job's flags; None if responses are not episodes. tokenizer: its directory; multiple: of which lengths
        of micro-batches are multiples."""
        if not (flags := config.episodes).on:
            return None
        flags = dataclasses.replace(
            flags,
            tools=tuple(map(_absolute, flags.tools)),
            environment=flags.environment and _absolute(flags.environment),
            tool_parser=_absolute(flags.tool_parser),
            agent=flags.agent and _agent(flags.agent),
            environment_python=flags.environment_python and _program(flags.environment_python),
        )
        observation = flags.observation or ("chat" if config.data.apply_chat_template else "raw")
        lengths = config.data.max_prompt_length, config.rollout.max_response_length
        trust = {"trust_remote_code": config.data.trust_remote_code}
        rollout, rewarded = config.rollout, ENVIRONMENT in {text.partition("=")[0] for text in config.graders}
        more = {"sampling": (rollout.temperature, rollout.top_p, rollout.top_k), "rewarded": rewarded, **trust}
        more["no_stops"] = config.schedule.going_on
        if flags.requests:
            more["forks"] = _forks(config, multiple)
        return cls(flags, observation, str(Path(tokenizer).resolve()), *lengths, config.monitor.wait_timeout, **more)

    def environments(self) -> Environments:
        """Start the environments. Raises ValueError if they cannot be loaded; with verifiers, `poll` raises it."""
        flags = self.flags
        name_to_users("RUN", self.run)
        if flags.requests:
            return self._agents()
        return EnvironmentPool(
            flags.tools,
            flags.environment,
            flags.tool_parser if is_own(flags.tool_parser) else None,
            workers=flags.environment_workers,
            timeout=flags.environment_timeout,
            wait_timeout=self.wait,
        )

    def _agents(self) -> AgentEnvironments:
        flags, place, program, workers = self.flags, None, AGENTS_PROGRAM, self.flags.environment_workers
        if flags.foreign:
            agent, loads, together = flags.environment.removeprefix(VERIFIERS), flags.environment, MAX_ROLLOUTS
            program = verifiers_program(flags.environment_python)
        else:
            agent, loads = flags.agent, f"--rl-agent {flags.agent}"
            together = -(-flags.agent_processes // workers)
        if flags.agent == EXTERNAL:
            program, workers, together = EXTERNAL_PROGRAM, 1, None
        if not flags.foreign and FUNCTION.fullmatch(agent):
            try:
                place, together = locate(agent, "--rl-agent", "function"), None
            except ValueError as error:
                raise EpisodeError(str(error)) from None
        setup = AgentSetup(
            agent,
            place,
            (own_address() or "127.0.0.1") if flags.agent_host == "0.0.0.0" else flags.agent_host,
            JobSampling(*self.sampling, flags.agent_sampling, self.no_stops),
            flags.agent_variables,
            flags.agent_memory,
            self.rewarded,
            self.run,
        )
        limits = flags.environment_timeout, self.wait, None if flags.environment_lockstep else together
        made = AgentEnvironments(program, setup, loads, workers, *limits)
        if flags.foreign:
            made.check_fields = check_rows
        return made

    def format(self, tokenizer: PreTrainedTokenizerBase, environments: Environments) -> RawFormat:
        """The format that encodes messages. Raises ValueError for a tokenizer or a template that does not fit."""
        return make_format(tokenizer, self.observation, environments.tools)

    def formats(self, tokenizer: PreTrainedTokenizerBase) -> AgentFormats:
        """The formats for the tools of agents."""
        return AgentFormats(tokenizer, functools.cache(lambda: make_parser(self.flags.tool_parser, tokenizer)))

    def over(
        self, engine: Engine, tokenizer: PreTrainedTokenizerBase, environments: Environments | None, peers: Peers
    ) -> EpisodeEngine:
        """Episodes on top of an engine. environments: kept on the first rank until the engine shuts down,
        closed here on other ranks; peers: the ranks of the engine."""
        flags, lead, longest = self.flags, None, self.flags.longest_turn(self.response)
        limits = EpisodeLimits(
            turns=flags.max_turns,
            observation=flags.longest_observation(self.response),
            prompt=self.prompt,
            turn=longest,
            lockstep=flags.environment_lockstep,
            on_error=flags.environment_on_error,
        )
        if engine.leader:
            form = self.format(tokenizer, environments)
            if flags.requests:
                lead = AgentLead(limits, form, self.formats(tokenizer), environments, self.forks)
            else:
                parse = make_parser(flags.tool_parser, tokenizer) if environments.tools else lambda text: ()
                lead = Lead(limits, form, parse, environments)
        elif environments is not None:
            environments.close()
        begins = bool(flags.environment or flags.agent)
        return EpisodeEngine(engine, longest, begins, lead, peers, flags.requests, flags.agent_branches == "last")


def _forks(config: RLConfig, multiple: int) -> ForkLimits:
    forward, refused = config.forward, ""
    if resolve(config.algorithm).needs_critic:
        refused = "--rl-advantage gae needs one conversation: continue it, or start the job with another estimator"
    elif not forward.packed_by:
        refused = "a row of a micro-batch is one conversation: start the job with --rl-pack-sequences "
        refused += "and --rl-max-tokens-per-microbatch"
    most = forward.max_tokens_per_microbatch
    return ForkLimits(refused, most and most // multiple * multiple, forward.share_prompts)


def _agent(agent: str) -> str:
    """--rl-agent with absolute paths: of a function's file, or of a command's program and arguments that are files.
    Links are kept, see `_program`."""
    if FUNCTION.fullmatch(agent) or agent == EXTERNAL:
        return _absolute(agent)
    return shlex.join(os.path.abspath(word) if os.path.isfile(word) else word for word in shlex.split(agent))


def _program(path: str) -> str:
    """Path of an interpreter; a name on PATH is kept. Links are not resolved, because by them Python finds a virtual
    environment."""
    return os.path.abspath(path) if os.sep in path else path


def _absolute(spec: str) -> str:
    """The value of a flag with the absolute path of a user's file; other values are kept."""
    if spec.startswith(OPENENV):
        return spec
    if spec.startswith(VERIFIERS):
        name = spec.removeprefix(VERIFIERS)
        return f"{VERIFIERS}{Path(name).resolve()}" if name.endswith(".toml") else spec
    file, colon, name = spec.rpartition(":")
    return f"{Path(file).resolve()}:{name}" if colon else spec
