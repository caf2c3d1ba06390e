"""Two ranks of test_ranks.py: agreements and digests over gloo; each rank writes what it saw as JSON."""

import datetime
import json
import os
import sys
import time

import torch
import torch.distributed as dist

from mindspeed_rl_plugin import ranks
from mindspeed_rl_plugin.checkpoints import reference_digest
from mindspeed_rl_plugin.checkpoints.reference_digest import CheckpointDigest

folder, out = sys.argv[1:]
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
rank = dist.get_rank()


def error(function):
    try:
        function()
    except ValueError as problem:
        return str(problem)


def fails():
    raise ValueError(f"rank {rank} says no")


def unreadable():
    """A digest when one file, of one rank's share, cannot be read."""
    whole = reference_digest.hash_file
    reference_digest.hash_file = lambda path: whole(path.replace("file4", "gone"))
    try:
        CheckpointDigest(folder).result(60)
    finally:
        reference_digest.hash_file = whole


def weights(name, value):
    return ranks.weights_digest([(name, torch.full((3,), float(value), dtype=torch.bfloat16))])


values = {
    "value": ranks.on_rank_0(lambda: {"from": rank}),
    "error": error(lambda: ranks.on_rank_0(fails)),
    "missing": error(lambda: ranks.on_rank_0(lambda: open(os.path.join(folder, "nowhere")).close())),
    "each": ranks.on_all_ranks(lambda: rank),
    "second says no": error(lambda: ranks.on_all_ranks(fails if rank == 1 else dict)),
    "first": ranks.is_rank_0(),
    "digest": CheckpointDigest(folder).result(60),
    "unreadable": error(unreadable),
    "weights": weights("w", rank),
    "same weights": weights("w", rank),
    "swapped": weights("w", 1 - rank),
    "renamed": weights("v", rank),
}
ranks.wait_at_most(0.5)
try:
    ranks.on_rank_0(lambda: time.sleep(1.5))
except (TimeoutError, RuntimeError) as late:  # the second: to rank 0, whom nobody waits for any more
    values["late"] = str(late)
with open(f"{out}.{rank}", "w") as file:
    json.dump(values, file)
dist.destroy_process_group()
