"""Requests to a leader and its answers over a gloo group, each wait with a deadline."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl_plugin.dock.wire import decode, encode
from mindspeed_rl_plugin.types import Rows

FRAME = 4096  # bytes of the first message: the length of all, then as much of it as fits
LENGTH = 8
MARGIN = 10.0  # seconds the others wait longer than the leader, so that its error, which knows more, comes first
TAG = 7301

Message = tuple[dict[str, Any], Rows | None]


class Link:
    """Point-to-point messages between group rank 0 and the others. deadline: seconds to wait for a rank to come."""

    def __init__(self, group: dist.ProcessGroup, deadline: float) -> None:
        if dist.get_backend(group) != "gloo":
            raise ValueError(f"the dock needs a gloo group, got {dist.get_backend(group)}; make one with new_group")
        self.group, self.deadline = group, deadline
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.calls = 0

    def ask(self, call: str, note: dict[str, Any], rows: Rows | None, patience: float) -> Message:
        """On another rank: send a request, return the answer. patience: seconds the leader may wait inside."""
        self.calls += 1
        wait = self.deadline + MARGIN
        self._send(0, encode(note, rows), wait, f"{self._where(call)}: the leader (rank 0) to take the request")
        return decode(self._receive(0, wait + patience, f"{self._where(call)}: the answer of the leader (rank 0)"))

    def gather(self, call: str, note: dict[str, Any], rows: Rows | None) -> list[Message]:
        """On the leader: the request of every rank, its own first."""
        self.calls += 1
        end = time.monotonic() + self.deadline
        requests: list[Message] = [(note, rows)]
        for rank in range(1, self.size):
            what = f"{self._where(call)}: rank {rank} of {self.size} to make the same call"
            requests.append(decode(self._receive(rank, max(end - time.monotonic(), 0.01), what)))
        return requests

    def answer(self, call: str, answers: list[Message]) -> Message:
        """On the leader: send every rank its answer, return its own."""
        encoded: dict[tuple[int, int], Tensor] = {}
        for rank in range(1, self.size):
            note, rows = answers[rank]
            key = (id(note), id(rows))
            if key not in encoded:
                encoded[key] = encode(note, rows)
            self._send(rank, encoded[key], self.deadline, f"{self._where(call)}: rank {rank} to take its answer")
        return answers[0]

    def _where(self, call: str) -> str:
        return f"dock call {self.calls}, {call}"

    def _send(self, rank: int, data: Tensor, seconds: float, what: str) -> None:
        frame = torch.zeros(FRAME, dtype=torch.uint8)
        frame[:LENGTH].view(torch.int64)[0] = data.numel()
        first = min(FRAME - LENGTH, data.numel())
        frame[LENGTH : LENGTH + first] = data[:first]
        end = time.monotonic() + seconds
        self._wait(lambda: dist.isend(frame, self._global(rank), group=self.group, tag=TAG), end, what)
        if first < data.numel():
            self._wait(lambda: dist.isend(data[first:], self._global(rank), group=self.group, tag=TAG), end, what)

    def _receive(self, rank: int, seconds: float, what: str) -> Tensor:
        frame = torch.empty(FRAME, dtype=torch.uint8)
        end = time.monotonic() + seconds
        self._wait(lambda: dist.irecv(frame, self._global(rank), group=self.group, tag=TAG), end, what)
        data = torch.empty(int(frame[:LENGTH].view(torch.int64)[0]), dtype=torch.uint8)
        first = min(FRAME - LENGTH, data.numel())
        data[:first] = frame[LENGTH : LENGTH + first]
        if first < data.numel():
            self._wait(lambda: dist.irecv(data[first:], self._global(rank), group=self.group, tag=TAG), end, what)
        return data

    def _wait(self, start: Any, end: float, what: str) -> None:
        """Wait for one message until `end`. gloo reports a late and a dead rank alike as RuntimeError."""
        begin = time.monotonic()
        left = max(end - begin, 0.001)
        try:
            start().wait(timedelta(seconds=left))
        except RuntimeError as error:
            spent = time.monotonic() - begin
            if spent >= left * 0.95:
                raise TimeoutError(f"rank {self.rank} waited {spent:.1f} s in vain for {what}") from error
            raise ConnectionError(
                f"rank {self.rank} lost its connection while it waited for {what}: a rank died or gave up; "
                f"the first error among the ranks tells which ({str(error).splitlines()[-1][:200]})"
            ) from error

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)
