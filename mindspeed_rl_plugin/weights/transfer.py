"""Carries out a plan in the mode `stream`: local copies, then buckets of messages. What arrives is written into
the engine's parameters bucket by bucket.

Works with gloo, nccl and hccl, since it only uses batched point-to-point messages: in each bucket, a rank sends at most
one message to each other rank. Two buckets are in flight, so that one is packed while the other is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle, groupby
from operator import itemgetter

import torch
from torch import Tensor

from mindspeed_rl_plugin.layout.transfer_plan import Copy, Move, TransferPlan
from mindspeed_rl_plugin.weights.p2p import MessageBatch, P2PChannel, TensorMessage


@torch.no_grad()
def stream(
    plan: TransferPlan,
    source: Mapping[str, Tensor],
    destination: Mapping[str, Tensor],
    *,
    channel: P2PChannel,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Carry out this rank's part of the plan. Collective over all ranks that the plan names.

    source, destination: stored parameters of this rank by name; each may be empty.
    dtype: of the messages; its itemsize is that of the plan. Values are converted to it before they are sent (those of
    wide tensors stay float32, see `_pack`), and to the parameter's dtype on arrival.
    Temporary memory: four buffers, each of at most half of `bucket_bytes`. Raises what `MessageBatch.wait` raises.
    """
    rank = channel.rank
    copy_pieces((copy for copy in plan.copies if copy.rank == rank), source, destination)
    buckets = plan.buckets_of(rank)
    buffers = cycle([_Buffers(buckets[i::2], channel, source, destination, dtype, device) for i in (0, 1)])
    in_turn(buckets, lambda moves: next(buffers).start(moves))


def copy_pieces(copies: Iterable[Copy], source: Mapping[str, Tensor], destination: Mapping[str, Tensor]) -> None:
    """Copy pieces from this rank's trainer parameters into its engine parameters."""
    for _, piece in copies:
        piece.inside(destination, piece.destination).copy_(piece.inside(source, piece.source))


def in_turn(buckets: Iterable[list[Move]], start: Callable[[list[Move]], Callable[[], None]]) -> None:
    """Start every bucket, and finish it after the next one has started. start: starts a bucket; returns the function
    that finishes it."""
    finish = None
    for moves in buckets:
        before, finish = finish, start(moves)
        if before is not None:
            before()
    if finish is not None:
        finish()


class _Buffers:
    """One send and one receive buffer, for every second bucket of a rank."""

    def __init__(
        self,
        buckets: Sequence[list[Move]],
        channel: P2PChannel,
        source: Mapping[str, Tensor],
        destination: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.channel, self.rank, self.source, self.destination = channel, channel.rank, source, destination
        loads = [[sum(m.piece.nbytes for m in moves if m[end] == self.rank) for moves in buckets] for end in (1, 2)]
        self.outbox, self.inbox = (
            torch.empty(max(load, default=0) // dtype.itemsize, dtype=dtype, device=device) for load in loads
        )
        self.batch: MessageBatch | None = None
        self.arrivals: list[tuple[Tensor, Tensor]] = []

    def start(self, moves: Sequence[Move]) -> Callable[[], None]:
        """Pack what this rank sends in the bucket and post all its messages. Returns `finish`."""
        number, out, into = moves[0].bucket, [], []
        for m in moves:
            if m.source == self.rank:
                out.append((m.destination, m.piece.nbytes, m.piece.inside(self.source, m.piece.source)))
            else:
                into.append((m.source, m.piece.nbytes, m.piece.inside(self.destination, m.piece.destination)))
        departures, sends = _slots(self.outbox, out, number)
        self.arrivals, receives = _slots(self.inbox, into, number)
        for inside, slot in departures:
            _pack(inside, slot)
        self.batch = self.channel.post(f"bucket {number}", sends, receives)
        return self.finish

    def finish(self) -> None:
        """Wait for the bucket and write what arrived into the engine's parameters."""
        self.batch.wait()
        for inside, slot in self.arrivals:
            _unpack(slot, inside)
        self.batch, self.arrivals = None, []


def _slots(
    buffer: Tensor, pieces: Sequence[tuple[int, int, Tensor]], tag: int
) -> tuple[list[tuple[Tensor, Tensor]], list[TensorMessage]]:
    """Each view with its slot in the buffer, and one message per peer. pieces: (peer, bytes, view of a parameter)."""
    slots, messages, at = [], [], 0
    for peer, theirs in groupby(sorted(pieces, key=itemgetter(0)), key=itemgetter(0)):
        begin = at
        for _, nbytes, inside in theirs:
            slots.append((inside, buffer[at : at + nbytes // buffer.itemsize]))
            at += nbytes // buffer.itemsize
        messages.append((buffer[begin:at], peer, tag))
    return slots, messages


def _pack(values: Tensor, slot: Tensor) -> None:
    """Write values into a flat slot of a message. A wide tensor is sent as the bits of its float32 values."""
    if slot.numel() == values.numel():
        slot.view(values.shape).copy_(values)
    else:
        slot.copy_(values.float().flatten().view(slot.dtype))


def _unpack(slot: Tensor, values: Tensor) -> None:
    """The inverse of `_pack`. The slot of a wide tensor is cloned, since float32 values need an aligned address."""
    if slot.numel() == values.numel():
        values.copy_(slot.view(values.shape))
    else:
        values.copy_(slot.clone().view(torch.float32).view(values.shape))
