"""Two ranks of test_ranks.py: agreements and digests over gloo; each rank writes what it saw as JSON."""

import datetime
import json
import os
import sys

import torch
import torch.distributed as dist

from mindspeed_rl_plugin import ranks
from mindspeed_rl_plugin.launch import checkpoint_files as files
from mindspeed_rl_plugin.launch.reference_digest import CheckpointDigest

folder, out = sys.argv[1:]
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
rank = dist.get_rank()


def fails():
    raise ValueError("rank 0 says no")


def error(function):
    try:
        ranks.on_rank_0(function)
    except ValueError as problem:
        return str(problem)


def unreadable():
    """The error of a digest when one file, of one rank's share, cannot be read."""
    whole = files.hash_files

    def hash_files(at, paths):
        return whole(at, ["gone" if path == "file4" else path for path in paths])

    files.hash_files = hash_files
    try:
        CheckpointDigest(folder).result(60)
    except ValueError as problem:
        return str(problem)
    finally:
        files.hash_files = whole


values = {
    "value": ranks.on_rank_0(lambda: {"from": rank}),
    "error": error(fails),
    "missing": error(lambda: open(os.path.join(folder, "nowhere")).close()),
    "first": ranks.is_rank_0(),
    "digest": CheckpointDigest(folder).result(60),
    "unreadable": unreadable(),
    "weights": ranks.weights_digest([("w", torch.full((3,), float(rank), dtype=torch.bfloat16))]),
    "same weights": ranks.weights_digest([("w", torch.full((3,), float(rank), dtype=torch.bfloat16))]),
    "swapped": ranks.weights_digest([("w", torch.full((3,), float(1 - rank), dtype=torch.bfloat16))]),
    "renamed": ranks.weights_digest([("v", torch.full((3,), float(rank), dtype=torch.bfloat16))]),
}
with open(f"{out}.{rank}", "w") as file:
    json.dump(values, file)
dist.destroy_process_group()
