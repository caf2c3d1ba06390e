"""Messages between ranks, sent in batches with a deadline; bytes of point-to-point messages are counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TensorMessage = tuple[Tensor, int, int]  # contiguous tensor, peer, tag


class P2PChannel:
    """Sends and receives messages of one rank, and counts their bytes.

    sent, received: bytes of the messages of all calls of `post`; group: of the ranks; deadline: seconds that `wait`
    waits for each message.
    """

    def __init__(self, rank: int, *, group: dist.ProcessGroup | None = None, deadline: float = 600.0) -> None:
        self.rank, self.group, self.deadline = rank, group, deadline
        self.sent = self.received = 0

    def post(self, what: str, sends: Sequence[TensorMessage], receives: Sequence[TensorMessage]) -> MessageBatch:
        """Start the messages together; `what` names them in errors. nccl and hccl ignore tags; there two ranks
        must list the messages between them in the same order."""
        for tensor, _, _ in sends:
            # Tells `host.collectives.isend` that no copy is needed: the batch keeps the tensor until `wait` returns.
            tensor.outlives_send = True
        ops = [dist.P2POp(dist.isend, t, peer, self.group, tag=tag) for t, peer, tag in sends]
        ops += [dist.P2POp(dist.irecv, t, peer, self.group, tag=tag) for t, peer, tag in receives]
        self.sent += sum(t.nbytes for t, _, _ in sends)
        self.received += sum(t.nbytes for t, _, _ in receives)
        start = partial(dist.batch_isend_irecv, ops) if ops else list
        return MessageBatch(self, what, {op.peer for op in ops}, start, [op.tensor for op in ops])

    def share(self, what: str, mine: Sequence[int], length: int, device: torch.device) -> list[list[int]]:
        """The rows of all ranks, in rank order. mine: row of this rank, 64-bit integers; length: number of integers to
        which rows are padded with 0. Bytes are not counted. Collective. Raises what `MessageBatch.wait` raises."""
        row = torch.zeros(length, dtype=torch.int64, device=device)
        row[: len(mine)] = torch.tensor(list(mine), dtype=torch.int64)
        ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        rows = [torch.empty_like(row) for _ in ranks]
        start = partial(dist.all_gather, rows, row, group=self.group, async_op=True)
        MessageBatch(self, what, {*ranks} - {self.rank}, lambda: [start()], [row, *rows]).wait()
        return [r.tolist() for r in rows]


class MessageBatch:
    """Messages in flight. tensors: their data, kept until `wait` returns."""

    def __init__(
        self,
        channel: P2PChannel,
        what: str,
        peers: set[int],
        start: Callable[[], list[dist.Work]],
        tensors: list[Tensor],
    ) -> None:
        self._channel, self._what, self._peers, self._tensors = channel, what, sorted(peers), tensors
        self._works = self._guard(start)

    def wait(self) -> None:
        """Wait until all messages have arrived. Raises TimeoutError after the deadline, ConnectionError if a peer is
        lost; these errors name the batch and its peers."""
        here = all(tensor.is_cpu for tensor in self._tensors)
        for work in self._works:
            if self._guard(partial(_arrive if here else _arrive_on_device, work, self._channel.deadline)) is False:
                raise TimeoutError(self._late())
        self._works, self._tensors = [], []

    def _guard(self, call: Callable[[], Any]) -> Any:
        begin = time.monotonic()
        try:
            return call()
        except RuntimeError as error:
            # gloo raises the same type if a peer has closed its connection and if a peer is late.
            if time.monotonic() - begin >= self._channel.deadline * 0.99:
                raise TimeoutError(self._late()) from error
            raise ConnectionError(
                f"rank {self._channel.rank} lost one of ranks {self._peers} in {self._what}: "
                f"{str(error).splitlines()[0][:200]}; resume from the last checkpoint"
            ) from error

    def _late(self) -> str:
        return (
            f"rank {self._channel.rank} waited {self._channel.deadline:.0f} s for {self._what} "
            f"from or to ranks {self._peers}"
        )


def _arrive(work: dist.Work, seconds: float) -> bool:
    return work.wait(timedelta(seconds=seconds))


def _arrive_on_device(work: dist.Work, seconds: float) -> bool:
    """Whether the work ends within the time. Polls, since `wait` of nccl and hccl has no time limit: it only makes the
    current stream wait (ProcessGroupNCCL.cpp, ProcessGroupHCCL.cpp, `synchronizeInternal` without blocking wait). A
    pause is at most a sixteenth of what was waited, so that a measured time is not much longer than the true one."""
    begin = time.monotonic()
    while not work.is_completed():
        if (waited := time.monotonic() - begin) > seconds:
            return False
        time.sleep(min(max(waited / 16, 2e-5), 2e-3))
    work.wait()
    return True
