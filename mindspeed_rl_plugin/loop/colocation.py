"""Lets trainer and engine use the same devices in turns: copies weights to the engine, and moves training state to the
host and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from mindspeed_rl_plugin.critic.critic import Critic
from mindspeed_rl_plugin.dock.peers import Peers
from mindspeed_rl_plugin.engine.rollout_engine import Engine
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine
from mindspeed_rl_plugin.environment import launch_env
from mindspeed_rl_plugin.layout.layout import EngineParallel, ModelShape, Parallel
from mindspeed_rl_plugin.loop import engine_options
from mindspeed_rl_plugin.loop.inputs import Inputs
from mindspeed_rl_plugin.weights.offload import TrainState, gathered
from mindspeed_rl_plugin.weights.resharder import Resharder, Transfer


class Colocation:
    """model: this rank's chunks; state: the policy's training state; offloaded: categories of training state that leave
    the device during generation; stage: measures the time of a stage."""

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
    def of(
        cls,
        inputs: Inputs,
        model: Sequence[torch.nn.Module],
        optimizer: Any,
        critic: Critic | None,
        *,
        rank: int,
        peers: Peers,
        stage: Callable[[str], AbstractContextManager[None]],
    ) -> Colocation:
        """Build it on this rank, by the flags. peers: ranks of the engine of `rank`. Collective over all ranks; the
        engine takes seconds to start."""
        args, config = inputs.args, inputs.config
        dtype = engine_options.dtype_of(args, config.rollout.engine_dtype)
        resharder = Resharder(
            ModelShape.from_megatron_args(args, inputs.vocab),
            Parallel.from_megatron_args(args),
            EngineParallel(config.rollout.generate_tp, config.rollout.generate_ep),
            rank=rank,
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
        # The engine measures the free memory when it starts, so the training state is offloaded first.
        trained = (state,) if critic is None else (state, critic)
        for one in trained:
            one.offload(config.reshard.offloaded)
        engine = VllmEngine(engine_options.options(inputs, dtype))
        engine = inputs.responses.over(engine, inputs.tokenizer, peers)
        engine.sleep()
        for one in trained:
            one.onload()
        return cls(model, state, critic, engine, resharder, config.reshard.offloaded, stage)

    @contextmanager
    def awake(self, version: int) -> Iterator[Transfer]:
        """Within the context the engine is awake, with the model's weights of `version`. Yields this rank's `Transfer`.

        Afterwards the optimizer state returns in the background; `onload` waits for it.
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
        """Begin to offload the state of policy and critic that --rl-swap names, except weights, unless begun already:
        drop gradients, copy optimizer state to the host. Until `finish_offload` a checkpoint may read the latter."""
        for state in self._states:
            state.start_offload(self.offloaded - {"params"})

    def onload(self) -> None:
        """Wait until all training state of the policy is on the device; `awake` restores that of the critic."""
        self.state.onload()

    def refuse_save(self) -> None:
        """Raise if a checkpoint would lack state that is on the host, or would contain NaN or infinity."""
        if self.state.off_device:
            raise RuntimeError(
                f"a checkpoint now would lack {', '.join(sorted(self.state.off_device))}, which are on the host for "
                "generation; save between iterations"
            )
        self.resharder.refuse_broken(self.model)

    def close(self) -> None:
        """End the engine. To end, it must wake, so the memory of the training state is freed first."""
        for state in self._states:
            state.discard()
        self.engine.shutdown()

    @property
    def _states(self) -> list[TrainState]:
        """States of the policy and, if any, of the critic."""
        return [self.state, *(() if self.critic is None else (self.critic.state,))]

    def _to_engine(self, version: int) -> Transfer:
        with gathered(self.model):
            # First offload the state that the transfer does not read: only then trainer and engine both fit.
            self.start_offload()
            if self.critic is not None:
                self.critic.offload(self.offloaded & {"params"})
            self.state.finish_offload()
            self.engine.wake(("weights",))
            # The copy to the host and the transfer only read weights, so they may run at the same time.
            self.state.start_offload(self.offloaded & {"params"})
            with self.stage("transfer"):
                transfer = self.resharder.to_engine(self.model, self.engine.parameters(), version)
            self.engine.update_weights(version, transfer.digest)
            self.state.finish_offload()
        self.engine.wake(("kv_cache",))
        return transfer
