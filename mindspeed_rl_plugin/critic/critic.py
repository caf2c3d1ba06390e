"""The critic of a run: Megatron's chunks, optimizer and schedule, and what the loop does with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl_plugin.critic.value_head import NAME, ValueHead
from mindspeed_rl_plugin.forward import ForwardSettings, MicroBatch, collate, to_rows
from mindspeed_rl_plugin.forward.context_parallel import of_all_ranks
from mindspeed_rl_plugin.forward.pipeline import run_forward_only
from mindspeed_rl_plugin.rows import Ragged, Rows
from mindspeed_rl_plugin.weights.offload import TrainState, gathered
from mindspeed_rl_plugin.weights.storages import unwrap


class Critic:
    """PPO's value model on this rank."""

    def __init__(self, model: Sequence[torch.nn.Module], optimizer: Any, scheduler: Any, config: Any) -> None:
        self.model = list(model)  # this rank's chunks, wrapped as those of the policy
        self.optimizer, self.scheduler = optimizer, scheduler  # Megatron's; the policy has others
        self.config = config  # of the model, prepared for training
        self.state = TrainState(self.model, optimizer)  # what --rl-swap names is offloaded during generation

    @torch.no_grad()
    def copy_backbone(self, policy: Sequence[torch.nn.Module]) -> None:
        """Copy the policy's parameters except its output layer; the value head is not changed. Raises ValueError if a
        parameter of the critic, other than the head, is missing in the policy or has another shape there."""
        for mine, theirs in zip(self.model, policy, strict=True):
            source = dict(unwrap(theirs).named_parameters())
            for name, parameter in unwrap(mine).named_parameters():
                if name.startswith(f"{NAME}."):
                    continue
                if name not in source or source[name].shape != parameter.shape:
                    raise ValueError(f"the policy has no parameter {name} {tuple(parameter.shape)} for the critic")
                parameter.copy_(source[name])
        self.optimizer.reload_model_params()

    def reset_head(self) -> None:
        """Initialise the value head again."""
        for chunk in self.model:
            head = getattr(unwrap(chunk), NAME, None)
            if isinstance(head, ValueHead):
                head.reset_parameters()
        self.optimizer.reload_model_params()

    def values(self, micro_batches: Sequence[Rows], settings: ForwardSettings) -> list[Ragged] | None:
        """The value before each trained token, computed from the tokens before it. Micro-batches, result and ranks are
        as in `compute_logps`."""
        batches = [collate(rows, settings, index=i) for i, rows in enumerate(micro_batches)]

        def collect(output: Tensor, batch: MicroBatch) -> Ragged:
            values = torch.where(batch.mask, of_all_ranks(output[..., 0].float(), batch), 0.0)
            return to_rows(values.cpu(), batch)

        with gathered(self.model):
            return run_forward_only(self.model, batches, settings, collect)

    def offload(self, what: Iterable[str]) -> None:
        """See `TrainState.offload`: free the device memory of categories; offloads that have begun are finished too."""
        with gathered(self.model):
            self.state.offload(what)

    def onload(self) -> None:
        """Restore what was offloaded."""
        self.state.onload()
