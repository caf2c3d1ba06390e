"""The inputs of the loop: all that was read and checked before the model is built."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_rl_plugin.algorithms import Algorithm
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.dock import ColumnSpec
from mindspeed_rl_plugin.engine.response_kind import ONE_TURN, ResponseKind
from mindspeed_rl_plugin.environment import launch_env
from mindspeed_rl_plugin.forward import ForwardSettings
from mindspeed_rl_plugin.layout.parallel import expert_layers
from mindspeed_rl_plugin.loop.arithmetic import Arithmetic, reads_old_logps
from mindspeed_rl_plugin.loop.docks import DockSize
from mindspeed_rl_plugin.prompts import PairStream, PromptStream
from mindspeed_rl_plugin.reward import RewardPool
from mindspeed_rl_plugin.reward.builtin import check_answers
from mindspeed_rl_plugin.reward.specs import parse_specs
from mindspeed_rl_plugin.rows import Prompt, Sampling, route_dtype
from mindspeed_rl_plugin.stages.stage import StageSpec
from mindspeed_rl_plugin.stages.table import stage_table
from mindspeed_rl_plugin.weights.host_memory import HostMemoryBudget


@dataclass(frozen=True)
class Inputs:
    """Fields that an algorithm does not need have their defaults."""

    args: argparse.Namespace
    config: RLConfig
    algorithm: Algorithm
    sizes: Arithmetic
    tokenizer: Any
    tokenizer_path: str | None
    vocab: int  # tokens that the model may produce; further rows of Megatron's embedding are padding
    flags: Mapping[str, Any]  # RL flags on the command line, with their values
    forward: ForwardSettings  # how batches become the model's inputs
    data: PromptStream | PairStream  # prompts or pairs to train on
    held_out: tuple[Prompt, ...] | PairStream | None = None  # prompts or pairs of the evaluation
    engine_config: Mapping[str, Any] | None = None  # config.json of the engine's model
    end_tokens: tuple[int, ...] = ()  # ids that end a response
    graders: RewardPool | None = None
    own_stages: tuple[tuple[StageSpec, Any], ...] = ()  # declaration and instance of each stage of the user
    responses: ResponseKind = ONE_TURN  # kind of the responses

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of response tokens, for graders and readers."""
        ended = len(tokens) > 0 and tokens[-1] in self.end_tokens  # not every end token is marked as special
        return self.tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=True)

    def check_fields(self, rows: Mapping[str, Set[str]]) -> None:
        """Raise ValueError if graders or environments need a field that a record lacks. rows: place of a record in the
        data -> its fields."""
        self.graders.check_fields({where: {*fields, *self.responses.graded} for where, fields in rows.items()})
        self.responses.check_fields(rows)

    def check_answers(self, answers: Mapping[str, str]) -> None:
        """Raise ValueError if a built-in grader cannot read a ground truth. answers: place of a record in the data ->
        its ground truth."""
        regex = self.config.reward.reward_regex
        check_answers(parse_specs(self.config.graders, regex), regex, answers)

    @property
    def sampling(self) -> Sampling:
        """How responses are sampled."""
        rollout = self.config.rollout
        return Sampling(
            max_tokens=rollout.max_response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=rollout.stop,
            stop_token_ids=rollout.stop_token_ids,
            ignore_eos=rollout.ignore_eos,
        )

    def settled(self) -> Inputs:
        """The same inputs; `algorithm.old_logps` is true if a rollout has several steps, or if `reads_old_logps` is."""
        old_logps = self.sizes.steps > 1 or reads_old_logps(self.config, self.algorithm)
        return replace(self, algorithm=replace(self.algorithm, old_logps=old_logps))

    def table(self) -> list[StageSpec]:
        """The stages of the run."""
        graders, own = self.graders, [spec for spec, _ in self.own_stages]
        rewards = {"graders": len(graders.names), "by_group": graders.by_group} if graders else {"graders": 0}
        dump, routes = self.config.monitor.dump_dir is not None, routes_of(self.args, self.config)
        return stage_table(self.algorithm, **rewards, dump=dump, own=own, kind=self.responses, routes=routes)

    @property
    def dynamic_rounds(self) -> int:
        """Rounds that dynamic sampling may take for a rollout; 0 without dynamic sampling."""
        return self.config.algorithm.dynamic_sampling_rounds if self.algorithm.dynamic_sampling else 0

    def dock_size(self) -> DockSize:
        """The check that the dock is large enough for these flags."""
        config, ahead = self.config, (0, 0)
        if config.schedule.apart:
            held_out = len(self.held_out or ()) * (config.monitor.eval_pass_k + 1)
            ahead = (config.schedule.max_staleness + 1, -(-held_out // self.sizes.members))
        elif config.schedule.partial:
            ahead = (-(-config.schedule.in_the_making(self.sizes.prompts) // self.sizes.prompts) - 1, 0)
        return DockSize(config, self.table(), self.sizes, self.dynamic_rounds, ahead)

    def host_memory_budget(self) -> HostMemoryBudget:
        """The budget of this machine's host memory, for weights and state that its ranks keep there. Collective."""
        return HostMemoryBudget.of_machine(launch_env()["local_world_size"], self.config.monitor.wait_timeout)

    @property
    def response_seed(self) -> int:
        """Base of the seeds of all responses."""
        seed = self.config.rollout.rollout_seed
        return self.args.seed if seed is None else seed


def routes_of(args: argparse.Namespace, config: RLConfig) -> tuple[str, ColumnSpec] | None:
    """The stage that chooses experts for later passes, and their column (`engine.routes`); None if routers choose."""
    if config.forward.router_replay is None:
        return None
    each = len(expert_layers(args)), args.moe_router_topk
    column = ColumnSpec("routes", route_dtype(args.num_experts), "token", ragged=True, trailing=each)
    return {"rollout": "generate", "old": "logp_old"}[config.forward.router_replay], column
