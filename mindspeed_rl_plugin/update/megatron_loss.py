"""The only code that depends on how Megatron scales the result of a loss function.

We want the gradient of `sum_t w_t * l_t` over the whole global batch, where a micro-batch contributes
its own part of that sum. What Megatron does to that part (core 0.12.1, 0.16.1, 0.19; pipeline_parallel/
schedules.py and distributed/distributed_data_parallel.py):

* two results `(loss, metrics)`: loss x CP / number of micro-batches; the gradients are then averaged
  over DP x CP. So the part goes in multiplied by number of micro-batches x DP. The rule is the same
  in all these versions.
* three results `(loss, tokens, metrics)` under --calculate-per-token-loss: loss as it is; the gradients are
  summed over DP x CP and divided by the summed tokens. So the part goes in multiplied by the global
  number of trained tokens. Without the flag the versions differ, and three results are not used.
  Core 0.12.1 sums the tokens over DP and later ones over DP x CP, where each is counted CP times; the
  part is multiplied by as much.

Every context parallel rank returns the whole part, and its gradients are those of its own positions
(`forward.context_parallel`), so their sum over CP is the gradient of the part.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.core import distributed, parallel_state
from torch import Tensor


@dataclass(frozen=True)
class LossScaling:
    """How this job scales losses."""

    micro_batches: int  # of one optimizer step on one rank
    dp_size: int  # data parallel ranks, without context parallel ones
    per_token: bool  # Megatron's `calculate_per_token_loss`
    total_tokens: int  # trained tokens of the global batch
    counted: int = 1  # how often Megatron counts each of them

    def result(self, loss: Tensor, trained: Tensor, metrics: Mapping[str, Tensor]) -> tuple:
        """What the loss function returns to Megatron.

        loss: scalar, this micro-batch's part of the global sum; trained: scalar, its trained tokens;
        metrics: one-element tensors.
        """
        if self.per_token:
            return loss * (max(self.total_tokens, 1) * self.counted), trained.int(), dict(metrics)
        return loss * (self.micro_batches * self.dp_size), dict(metrics)


def scaling_of_job(micro_batches: int, *, per_token: bool, total_tokens: int) -> LossScaling:
    """The scaling under Megatron's process groups; arguments as the fields."""
    # Megatron counts over context parallel ranks since it is handed its process groups.
    over_context = "pg_collection" in inspect.signature(distributed.finalize_model_grads).parameters
    return LossScaling(
        micro_batches=micro_batches,
        dp_size=parallel_state.get_data_parallel_world_size(),
        per_token=per_token,
        total_tokens=total_tokens,
        counted=parallel_state.get_context_parallel_world_size() if over_context else 1,
    )
