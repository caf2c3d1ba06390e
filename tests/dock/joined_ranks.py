"""Ranks of a torchrun job: the first puts prompts into the dock, and waits for what consumers outside write."""

import sys
from pathlib import Path

import torch.distributed as dist
from dock_help import COLUMNS, STATES, ids, prompts
from dock_ranks import result

from mindspeed_rl_plugin.dock import make_docks

dist.init_process_group("gloo")
(dock,) = make_docks(COLUMNS, STATES, [None], group=dist.group.WORLD, deadline=60)
address = dock.exchange.invite(sys.argv[1])
dock.open(0, 3, 1)
if dist.get_rank() == 0:
    dock.put(prompts(3))
    Path(sys.argv[2]).write_text(address)
    dock.commit(dock.lease("logp", ids=ids(3, 1), deadline=60), result("logp", ids(3, 1)))
dist.barrier()
dock.close()
