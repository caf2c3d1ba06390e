"""Run a Megatron entry script in host mode, as the runner does, and record what every train_step returns.

usage: recorded_pretrain.py RECORD SCRIPT ARGS.  Log lines will not do: core 0.13 and later average the
first two iterations into the second line.
"""

import json
import os
import runpy
import sys

import torch

from mindspeed_rl_plugin import host
from mindspeed_rl_plugin.host.on_import import after_import

record, script = sys.argv[1:3]
sys.argv = sys.argv[2:]
sys.path[0] = os.path.dirname(os.path.abspath(script))


def watch(training):
    """Wrap `megatron.training.training.train_step` so that the last rank writes loss and gradient norm."""
    original = training.train_step

    def train_step(*args, **kwargs):
        result = original(*args, **kwargs)
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            norm = next(r for r in result[4:] if isinstance(r, float | torch.Tensor))
            with open(record, "a") as handle:
                handle.write(json.dumps([float(result[0]["lm loss"]), float(norm)]) + "\n")
        return result

    training.train_step = train_step


assert host.activate_if_needed()
if "MINDSPEED" in os.environ:
    import mindspeed.megatron_adaptor  # noqa: F401
after_import("megatron.training.training", watch)
runpy.run_path(script, run_name="__main__")
