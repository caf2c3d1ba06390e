"""Trainer and engine on the same devices, in turns: weights to the engine, training state to the host, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from mindspeed_rl_plugin.critic.critic import Critic
from mindspeed_rl_plugin.engine.rollout_engine import Engine
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine
from mindspeed_rl_plugin.environment import launch_env
from mindspeed_rl_plugin.layout.layout import EngineParallel, ModelShape, Parallel
from mindspeed_rl_plugin.loop import engine_options
from mindspeed_rl_plugin.loop.rank_parts import RankParts
from mindspeed_rl_plugin.weights.offload import TrainState, gathered
from mindspeed_rl_plugin.weights.resharder import Resharder, Transfer


class Colocation:
    """model: this rank's chunks; state: what of the training leaves the device during generation, of the categories
    `offloaded`; stage: times a stage."""

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        state: TrainState,
        critic: Critic | None,
        engine: Engine,
        resharder: Resharder,
        offloaded: Sequence[str],
        stage: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.model, self.state, self.critic = model, state, critic
        self.engine, self.resharder, self.stage = engine, resharder, stage
        self.offloaded = frozenset(offloaded)

    @classmethod
    def of(cls, at: RankParts, model: Sequence[torch.nn.Module], optimizer: Any, critic: Critic | None) -> Colocation:
        """On this rank, by the flags. Collective over all ranks; the engine takes seconds to start."""
        inputs = at.inputs
        args, config = inputs.args, inputs.config
        dtype = engine_options.dtype_of(args, config.rollout.engine_dtype)
        resharder = Resharder(
            ModelShape.from_megatron_args(args, inputs.vocab),
            Parallel.from_megatron_args(args),
            EngineParallel(config.rollout.generate_tp, config.rollout.generate_ep),
            rank=at.job.topology.rank,
            engine_dtype=dtype,
            mode=config.reshard.reshard,
            bucket_bytes=config.reshard.reshard_bucket_mb << 20,
            node_size=launch_env()["local_world_size"],
            verify=config.reshard.verify_weights,
            deadline=config.monitor.wait_timeout,
        )
        engine_options.check_engine_rotary(inputs, model)
        budget = inputs.host_memory_budget()
        state = TrainState(model, optimizer, budget=budget, verify=config.reshard.verify_weights)
        if critic is not None:
            critic.state.budget, critic.state.verify = budget, config.reshard.verify_weights
        # The engine measures the free memory when it starts: the training state must not be in its way.
        trained = (state,) if critic is None else (state, critic)
        for one in trained:
            one.offload(config.reshard.offloaded)
        engine = VllmEngine(engine_options.options(inputs, dtype))
        engine = inputs.responses.over(engine, inputs.tokenizer, at.docks.engines.peers)
        engine.sleep()
        for one in trained:
            one.onload()
        return cls(model, state, critic, engine, resharder, config.reshard.offloaded, at.job.monitor.stage)

    @contextmanager
    def awake(self, version: int) -> Iterator[Transfer]:
        """The engine with the model's weights, of `version`. Yields what this rank transferred.

        The optimizer's way back passes beside what follows; `onload` waits for it.
        """
        with self.stage("reshard"):
            transfer = self._to_engine(version)
        yield transfer
        with self.stage("swap_back"):
            self.engine.sleep()
            self.state.onload(self.offloaded & {"params"})
            self.resharder.check_return(self.model)
            if self.critic is not None:
                self.critic.onload()
        self.state.start_onload(self.offloaded & {"optimizer"})

    def start_offload(self) -> None:
        """Begin to copy to the host what the transfer of weights does not read: gradients and optimizer state, those
        of the critic too. What has begun to leave is passed over. It may still be read, for a checkpoint."""
        for state in self._states:
            state.start_offload(self.offloaded - {"params"})

    def onload(self) -> None:
        """All of the training state is on the device."""
        self.state.onload()

    def refuse_save(self) -> None:
        """Raise where a checkpoint would lack what is on the host, or hold NaN or infinity."""
        if self.state.off_device:
            raise RuntimeError(
                f"a checkpoint now would lack {', '.join(sorted(self.state.off_device))}, which are on the host for "
                "generation; save between iterations"
            )
        self.resharder.refuse_broken(self.model)

    def close(self) -> None:
        """End the engine. It wakes for that, in the memory that the training state gives up for good."""
        for state in self._states:
            state.discard()
        self.engine.shutdown()

    @property
    def _states(self) -> list[TrainState]:
        """Of the policy, and of the critic where there is one."""
        return [self.state, *(() if self.critic is None else (self.critic.state,))]

    def _to_engine(self, version: int) -> Transfer:
        with gathered(self.model):
            # First what the transfer does not need, so that both sides' weights fit beside each other.
            self.start_offload()
            if self.critic is not None:
                self.critic.offload(self.offloaded & {"params"})
            self.state.finish_offload()
            self.engine.wake(("weights",))
            # The copy to the host reads what the transfer reads, so that both may run.
            self.state.start_offload(self.offloaded & {"params"})
            with self.stage("transfer"):
                transfer = self.resharder.to_engine(self.model, self.engine.parameters(), version)
            self.engine.update_weights(version, transfer.digest)
            self.state.finish_offload()
        self.engine.wake(("kv_cache",))
        return transfer
