"""The machines of one call of `doctor`, and the command line that starts its ranks on each of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Nodes:
    """The machines of this call; `doctor` runs once on each of them."""

    ranks: int  # on each machine
    count: int = 1  # number of machines
    index: int = 0  # of this machine
    address: str = "localhost"  # of the first machine
    port: int = 0  # a free port of the first machine; one machine alone needs none

    def torchrun(self, *arguments: str) -> list[str]:
        """The command line that starts this machine's ranks with these arguments."""
        first = [f"--node-rank={self.index}", f"--master-addr={self.address}", f"--master-port={self.port}"]
        where = [f"--nnodes={self.count}", *first] if self.count > 1 else ["--standalone"]
        return [sys.executable, "-m", "torch.distributed.run", *where, f"--nproc-per-node={self.ranks}", *arguments]
