"""What the log-prob pass and the update share: batching, collation, the log-prob head, calls of Megatron's schedule.

Only this folder shifts or slices sequences. Its inputs and outputs are columns that are aligned with the tokens. Losses
get vectors of trained tokens. Here only `pipeline`, `output_layer`, `call`, `layer_hooks`, `tree_kernels` and
`context_parallel` import Megatron.
"""

from mindspeed_rl_plugin.forward.batching import Step, TokenBudget, plan_batches, plan_tokens
from mindspeed_rl_plugin.forward.collate import MicroBatch, collate, to_rows
from mindspeed_rl_plugin.forward.head import token_logps
from mindspeed_rl_plugin.forward.settings import ForwardSettings

__all__ = [
    "ForwardSettings",
    "MicroBatch",
    "Step",
    "TokenBudget",
    "collate",
    "plan_batches",
    "plan_tokens",
    "to_rows",
    "token_logps",
]
