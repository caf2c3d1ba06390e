"""The parts that the log-prob pass and the update share: batching, collation, the log-prob head, Megatron's schedule.

The only folder that shifts or slices sequences: columns go in and come out aligned with the tokens, and losses see
per-token vectors only. Only `pipeline`, `output_layer`, `call` and `context_parallel` import Megatron here.
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
