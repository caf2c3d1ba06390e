"""The only code that knows how Megatron scales what a loss function returns.

We want the gradient of `sum_t w_t * l_t` over the whole global batch, where a micro-batch contributes
its own part of that sum. What Megatron does to that part (core 0.12.1, 0.16.1, 0.19; pipeline_parallel/
schedules.py and distributed/distributed_data_parallel.py):

* two results `(loss, metrics)`: loss x CP / number of micro-batches; the gradients are then averaged
  over DP x CP. So the part goes in multiplied by number of micro-batches x DP. The rule is the same
  in all these versions.
* three results `(loss, tokens, metrics)` under --calculate-per-token-loss: loss as it is; the gradients are
  summed over DP x CP and divided by the summed tokens. So the part goes in multiplied by the global
  number of trained tokens. Without the flag the versions differ, and three results are not used.
  Core 0.12.1 sums the tokens over DP and later ones over DP x CP: equal as long as CP is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LossScaling:
    """How this job scales losses.

    micro_batches: of one optimizer step on one rank; dp_size: data parallel ranks, context parallel ones
    not counted; per_token: Megatron's `calculate_per_token_loss`; total_tokens: trained tokens of the
    global batch.
    """

    micro_batches: int
    dp_size: int
    per_token: bool
    total_tokens: int

    def result(self, loss: Tensor, trained: Tensor, metrics: Mapping[str, Tensor]) -> tuple:
        """What the loss function returns to Megatron.

        loss: scalar, this micro-batch's part of the global sum; trained: scalar, its trained tokens;
        metrics: one-element tensors.
        """
        if self.per_token:
            return loss * max(self.total_tokens, 1), trained.int(), dict(metrics)
        return loss * (self.micro_batches * self.dp_size), dict(metrics)
