"""Megatron's own schedulers, for test_lr_schedule.py.

    lr_schedule_worker.py < JSON [[arguments saved with, arguments resumed with], ...]

Prints one JSON line: for each pair the state that is saved, and whether the resume is refused.
"""

import json
import sys
import types

from mindspeed_rl_plugin import host

host.activate_if_needed(announce=False)

from megatron.training import training  # noqa: E402


def scheduler(arguments):
    given = types.SimpleNamespace(
        lr_warmup_init=0.0, lr_wsd_decay_iters=None, lr_wsd_decay_style="exponential", **arguments
    )
    training.get_args = lambda: given
    return training.get_optimizer_param_scheduler(types.SimpleNamespace(param_groups=[{}]))


answers = []
for before, now in json.load(sys.stdin):
    saved = scheduler(before).state_dict()
    try:
        scheduler(now).load_state_dict(saved)
        answers.append([saved, False])
    except AssertionError:
        answers.append([saved, True])
print(json.dumps(answers))
