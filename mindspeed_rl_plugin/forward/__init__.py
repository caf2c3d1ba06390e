"""What the log-prob pass and the update share: batching, collation, the log-prob head, Megatron's schedule.

The only room that shifts or slices sequences: it takes columns aligned with the tokens and gives them
back so; losses see per-token vectors only. `schedule` and `output_layer` alone import Megatron here.
"""

from mindspeed_rl_plugin.forward.batching import Step, plan_batches
from mindspeed_rl_plugin.forward.collate import MicroBatch, collate, to_rows
from mindspeed_rl_plugin.forward.head import token_logps
from mindspeed_rl_plugin.forward.settings import ForwardSettings

__all__ = ["ForwardSettings", "MicroBatch", "Step", "collate", "plan_batches", "to_rows", "token_logps"]
