"""The objects from which the stages of a rank are built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_rl_plugin.algorithms import Algorithm
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.dock import Dock
from mindspeed_rl_plugin.engine.response_kind import ResponseKind
from mindspeed_rl_plugin.engine.rollout_engine import Engine
from mindspeed_rl_plugin.forward import ForwardSettings
from mindspeed_rl_plugin.monitor.monitor import Monitor
from mindspeed_rl_plugin.prompts import PairStream, PromptStream
from mindspeed_rl_plugin.ranks import Collectives
from mindspeed_rl_plugin.reward import RewardPool
from mindspeed_rl_plugin.rows import Sampling
from mindspeed_rl_plugin.stages.trainer import Trainer

if TYPE_CHECKING:  # these import Megatron, which the stage table must not need
    from mindspeed_rl_plugin.critic.critic import Critic
    from mindspeed_rl_plugin.weights.host_memory import HostWeights


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """All objects that stages may need. Those that the algorithm does not need are None."""

    config: RLConfig  # RL flags
    algorithm: Algorithm  # its `old_logps` is set by `Inputs.settled`
    forward: ForwardSettings  # how batches become the model's inputs
    data: PromptStream | PairStream  # prompts or pairs to train on
    members: int  # rows of a group
    global_batch: int  # rows of an optimizer step
    sampling: Sampling  # how responses are sampled
    seed: int  # base of the seeds of responses
    longest: int  # most tokens of a response
    decode: Callable[[Sequence[int]], str]  # response tokens -> the text that graders see
    graders: RewardPool | None  # the pool of this rank
    responses: ResponseKind  # kind of the responses
    dock_of: Callable[[str], Dock]  # resource of a stage -> view of the dock (`loop.docks.Docks.of`)
    ranks: Collectives  # of the job
    monitor: Monitor  # of this rank
    leader: bool  # whether this is the first rank of the job
    writer: bool  # whether it writes for all ranks of its data parallel index
    last_stage: bool  # whether this rank holds the end of the model
    model: Any  # this rank's chunks of it
    trainer: Trainer  # of the policy
    engine: Engine | None = None  # None if other processes generate
    critic: Critic | None = None  # None if the advantages need no critic
    reference: HostWeights | None = None  # weights of the reference; None for pairs
    pair_references: Any = None  # `[pairs, 2]` log-probs of all pairs under the reference
