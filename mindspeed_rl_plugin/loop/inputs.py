"""What the loop is given: everything that was read and checked before the model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from mindspeed_rl_plugin.algorithms import Algorithm
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.episodes.protocol import Elsewhere, Environments
from mindspeed_rl_plugin.forward import ForwardSettings
from mindspeed_rl_plugin.loop.arithmetic import Arithmetic
from mindspeed_rl_plugin.prompts import PairStream, PromptStream
from mindspeed_rl_plugin.reward import RewardPool
from mindspeed_rl_plugin.reward.builtin import check_answers
from mindspeed_rl_plugin.reward.calling import EPISODE
from mindspeed_rl_plugin.reward.specs import parse_specs
from mindspeed_rl_plugin.rows import Prompt
from mindspeed_rl_plugin.stages.generate import Episodes
from mindspeed_rl_plugin.stages.stage import StageSpec


@dataclass(frozen=True)
class Inputs:
    """forward: how batches become the model's inputs; vocab: tokens that the model may produce (the rest of Megatron's
    rows is padding); flags: RL flags that were given, with their values; data: prompts or pairs to train on; held_out:
    those of the evaluation; engine_config: config.json of the engine's model; end_tokens: ids that end a response;
    own_stages: a user's, declaration and instance; environments: that answer the model in episodes, here or
    elsewhere. What an algorithm does not need is left at its default.
    """

    args: argparse.Namespace
    config: RLConfig
    algorithm: Algorithm
    sizes: Arithmetic
    tokenizer: Any
    tokenizer_path: str | None
    vocab: int
    flags: Mapping[str, Any]
    forward: ForwardSettings
    data: PromptStream | PairStream
    held_out: tuple[Prompt, ...] | PairStream | None = None
    engine_config: Mapping[str, Any] | None = None
    end_tokens: tuple[int, ...] = ()
    graders: RewardPool | None = None
    own_stages: tuple[tuple[StageSpec, Any], ...] = ()
    environments: Environments | Elsewhere | None = None

    @property
    def episodes(self) -> Episodes | None:
        """What is declared of episodes, where responses are such."""
        return self.environments and Episodes(len(self.environments.tools), self.config.episodes.max_turns)

    def decode(self, tokens: Sequence[int]) -> str:
        """Response tokens as graders and readers see them."""
        ended = len(tokens) > 0 and tokens[-1] in self.end_tokens  # not each of them is marked special
        return self.tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=True)

    def check_fields(self, rows: Mapping[str, Set[str]]) -> None:
        """Raise ValueError where graders or environments cannot do with the fields of some row. rows: place in the data
        -> fields of its record."""
        episodes = EPISODE if self.environments is not None else ()
        self.graders.check_fields({where: {*fields, *episodes} for where, fields in rows.items()})
        if self.environments is not None:
            self.environments.check_fields(rows)

    def check_answers(self, answers: Mapping[str, str]) -> None:
        """Raises ValueError where a built-in grader cannot read a ground truth. answers: place in the data -> it."""
        regex = self.config.reward.reward_regex
        check_answers(parse_specs(self.config.graders, regex), regex, answers)

    @property
    def response_seed(self) -> int:
        """Base of the seeds of all responses."""
        seed = self.config.rollout.rollout_seed
        return self.args.seed if seed is None else seed
