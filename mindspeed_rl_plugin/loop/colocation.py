"""Trainer and engine on the same devices, in turns: weights to the engine, training state to the host, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from mindspeed_rl_plugin.critic.critic import Critic
from mindspeed_rl_plugin.engine.protocol import Engine
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
        early = self.offloaded - {"params"}
        self.state.ensure_offloading(early)
        if self.critic is not None:
            self.critic.state.ensure_offloading(early)

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
        self.state.discard()
        if self.critic is not None:
            self.critic.state.discard()
        self.engine.shutdown()

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
