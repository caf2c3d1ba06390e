"""The only code that depends on how Megatron scales the result of a loss function.

We want the gradient of `sum_t w_t * l_t` over the global batch. A micro-batch computes its part of this sum. What
Megatron does with the part (core 0.12.1, 0.16.1, 0.19; pipeline_parallel/schedules.py and
distributed/distributed_data_parallel.py):

* The loss function returns `(loss, metrics)`: Megatron takes loss x CP / number of micro-batches, and averages the
  gradients over DP x CP. So we multiply the part by the number of micro-batches x DP, for all these versions.
* The loss function returns `(loss, tokens, metrics)`, with --calculate-per-token-loss: Megatron takes the loss as it
  is, sums the gradients over DP x CP, and divides them by the sum of the tokens. So we multiply the part by the number
  of trained tokens in the global batch. Core 0.12.1 sums the tokens over DP. Later versions sum them over DP x CP, and
  so count each token CP times; then we also multiply the part by CP. Without the flag, these versions treat three
  results of a loss function in different ways; so ours returns two.

Every context parallel rank returns the complete part, but computes only the gradients of its own positions
(`forward.context_parallel`). So the sum of these gradients over CP is the gradient of the part.
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
    counted: int = 1  # how often Megatron counts each trained token

    def result(self, loss: Tensor, trained: Tensor, metrics: Mapping[str, Tensor]) -> tuple:
        """What the loss function returns to Megatron.

        loss: scalar, this micro-batch's part of the global sum; trained: scalar, number of its trained tokens;
        metrics: one-element tensors.
        """
        if self.per_token:
            return loss * (max(self.total_tokens, 1) * self.counted), trained.int(), dict(metrics)
        return loss * (self.micro_batches * self.dp_size), dict(metrics)


def scaling_of_job(micro_batches: int, *, per_token: bool, total_tokens: int) -> LossScaling:
    """The scaling under Megatron's process groups; arguments as the fields."""
    # Versions of Megatron with this argument count tokens over context parallel ranks too.
    over_context = "pg_collection" in inspect.signature(distributed.finalize_model_grads).parameters
    return LossScaling(
        micro_batches=micro_batches,
        dp_size=parallel_state.get_data_parallel_world_size(),
        per_token=per_token,
        total_tokens=total_tokens,
        counted=parallel_state.get_context_parallel_world_size() if over_context else 1,
    )
