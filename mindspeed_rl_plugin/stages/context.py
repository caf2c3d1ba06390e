"""What the stages of a rank are built from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_rl_plugin.algorithms import Algorithm
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.dock import Dock
from mindspeed_rl_plugin.engine.rollout_engine import Engine
from mindspeed_rl_plugin.episodes.environments import Elsewhere, Environments
from mindspeed_rl_plugin.forward import ForwardSettings
from mindspeed_rl_plugin.monitor.monitor import Monitor
from mindspeed_rl_plugin.prompts import PairStream, PromptStream
from mindspeed_rl_plugin.ranks import Collectives
from mindspeed_rl_plugin.reward import RewardPool
from mindspeed_rl_plugin.rows import Sampling
from mindspeed_rl_plugin.stages.trainer import Trainer

if TYPE_CHECKING:  # these import Megatron, which the stage table does without
    from mindspeed_rl_plugin.critic.critic import Critic
    from mindspeed_rl_plugin.weights.host_memory import HostWeights


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """What a stage's `build` takes what it needs from. What an algorithm does not need is None.

    config: RL flags.
    algorithm: with `old_logps` as the run's sizes decide it.
    forward: how batches become the model's inputs.
    data: prompts or pairs to train on.
    prompts, members: groups of a rollout, and rows of one.
    global_batch: rows of an optimizer step.
    sampling, seed: how responses are sampled, and the base of their seeds.
    decode: response tokens to the text that graders see.
    graders: the pool of this rank.
    environments: that answer the model in episodes.
    dock_of: resource of a stage -> the dock as the ranks see it that share its leases.
    ranks: of the job.
    monitor: of this rank.
    writer: whether this rank writes what its data parallel rank computed.
    last_stage: whether it holds the end of the model.
    model: its chunks.
    engine: None where other processes generate.
    trainer: of the policy; None for pairs.
    critic: None where advantages need none.
    reference: weights of the reference, for pairs None.
    pair_references: `[pairs, 2]` log-probs of all pairs under the reference.
    """

    config: RLConfig
    algorithm: Algorithm
    forward: ForwardSettings
    data: PromptStream | PairStream
    prompts: int
    members: int
    global_batch: int
    sampling: Sampling
    seed: int
    decode: Callable[[Sequence[int]], str]
    graders: RewardPool | None
    environments: Environments | Elsewhere | None
    dock_of: Callable[[str], Dock]
    ranks: Collectives
    monitor: Monitor
    writer: bool
    last_stage: bool
    model: Any
    engine: Engine | None = None
    trainer: Trainer | None = None
    critic: Critic | None = None
    reference: HostWeights | None = None
    pair_references: Any = None

    @property
    def leader(self) -> bool:
        """Whether this is the first rank of the job."""
        return self.ranks.rank == 0

    @property
    def longest(self) -> int:
        """Longest response [tokens]."""
        return self.config.rollout.max_response_length
