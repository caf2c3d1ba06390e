"""Ranks of a dock as real processes, and a consumer outside of the job: each obeys the test over a pipe."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection

import numpy as np
import torch
from dock_help import COLUMNS, SMALL, STATES, Gathered, prompts

from mindspeed_rl_plugin.dock import Dock, Ragged, Rows, SampleId
from mindspeed_rl_plugin.dock.factory import Member
from mindspeed_rl_plugin.dock.rpc import Process
from mindspeed_rl_plugin.processes import machine
from mindspeed_rl_plugin.service.guest_dock import GuestDock
from mindspeed_rl_plugin.service.job_service import JobService
from mindspeed_rl_plugin.weights.machine_staging import Shared
from mindspeed_rl_plugin.weights.published_memory import publish_memory, sources_of

LENGTH = 50_000  # tokens: such puts go through lent memory
VERSION_BYTES = 8 << 20


def rank_main(pipe: Connection, log: str, rank: int, nodes: list[str], heartbeat: float) -> None:
    """A rank of the job: obeys until it is asked to end."""
    speak_to(log)

    def exchange(value: object) -> list:
        pipe.send(("exchange", value))
        return pipe.recv()

    peers = Gathered(rank, len(nodes), exchange) if len(nodes) > 1 else None
    how = {"node": nodes[rank], "host": "127.0.0.1", "heartbeat": heartbeat}
    member = Member(COLUMNS, STATES, peers, limits=SMALL, **how)
    obey(pipe, Commands(member.dock(deadline=10), member))


def outside_main(pipe: Connection, log: str, address: str, secret_file: str, node: str) -> None:
    """A consumer outside of the job. node: another name for this machine, "" for its own."""
    speak_to(log)
    obey(pipe, Commands(GuestDock.join(address, secret_file, lease_seconds=60.0, node=node), None))


def speak_to(log: str) -> None:
    """Both outputs go to a file."""
    torch.set_num_threads(1)
    handle = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)


def obey(pipe: Connection, commands: Commands) -> None:
    """(name, arguments) -> ("done", value) or ("failed", text), until "end" or the pipe's end."""
    pipe.send(("done", None))
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        if name in ("end", "fail"):  # what an interpreter does that ends by itself, or by an exception
            if name == "fail":
                sys.last_value = ValueError("of the user's code")
            return atexit._run_exitfuncs()
        try:
            pipe.send(("done", getattr(commands, name, getattr(commands.dock, name, None))(*arguments)))
        except (ValueError, OSError):
            pipe.send(("failed", traceback.format_exc()))


class Commands:
    """What a test may ask of a process, beside the methods of its dock."""

    def __init__(self, dock: Dock, member: Member | None) -> None:
        self.dock, self.member, self.leases = dock, member, {}

    def invite(self, *where: str) -> str:
        return JobService(self.dock).invite(*where)

    def put(self, groups: int) -> None:
        self.dock.put(prompts(groups))

    def lease(self, state: str, most: int | None, deadline: float) -> tuple[int, list]:
        lease = self.dock.lease(state, max_rows=most, deadline=deadline)
        self.leases[lease.token] = lease
        return lease.token, list(lease.rows.ids)

    def commit(self, token: int) -> None:
        lease = self.leases[token]
        self.dock.commit(lease, result(lease.state, lease.rows.ids))

    def work(self, state: str, most: int) -> list[SampleId]:
        """Take batches until every row is done."""
        seen = []
        while lease := self.dock.lease(state, max_rows=most, deadline=20):
            if "tokens" in lease.rows.columns:
                rows = zip(lease.rows.ids, lease.rows["tokens"].rows(), strict=True)
                assert all(row.tolist()[::1000] == cell(i).tolist()[::1000] for i, row in rows)
            seen += lease.rows.ids
            self.dock.commit(lease, result(state, lease.rows.ids))
        return seen

    def read(self, rows: list[SampleId]) -> bool:
        """Whether tokens are those that belong to the ids."""
        cells = self.dock.read(rows, ["tokens"])["tokens"].rows()
        return all(row.equal(cell(SampleId(*i))) for i, row in zip(rows, cells, strict=True))

    def used(self) -> int:
        house = None if self.member is None else self.member.core.warehouse
        return 0 if house is None else house.slabs.used

    def where(self) -> set[str]:
        return {m.where for m in self.dock.traffic.take()}

    def served(self) -> dict:
        return self.dock.served

    def address(self) -> tuple:
        return tuple(self.member.server.address)

    def publish(self, version: int) -> None:
        """A version of weights whose bytes are its number."""
        store = publish_memory(self.dock, VERSION_BYTES, 2)
        store.begin(version)[:] = version
        store.commit(version, b"")

    def pull(self, rank: int, version: int, seconds: float) -> str:
        """Read a version over and over; the error that ends that."""
        source, into = sources_of(self.dock)[rank], [np.empty((1, VERSION_BYTES), np.uint8)]
        source.seek(version, seconds)
        until = time.monotonic() + seconds
        try:
            while True:
                source.read(version, [(0, 1, VERSION_BYTES, VERSION_BYTES)], into, until - time.monotonic())
                source.check(version, until - time.monotonic())
        except OSError as error:
            return "lost" if isinstance(error, ConnectionError) else type(error).__name__

    def hang(self) -> None:
        """As in a collective: SIGTERM does not help."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)


def reader_main(pipe: Connection, log: str, secret: bytes) -> None:
    """The process of a machine that reads weights for the others, and does not end."""

    def fill(version: int, seconds: float, memory: np.ndarray) -> bytes:
        pipe.send("reads")
        time.sleep(100)
        return b""

    speak_to(log)
    Shared(Process("other", -1, machine(), secret), "key", 5000, fill).get(1, 100.0)


def cell(sample: SampleId) -> torch.Tensor:
    """Tokens of a sample."""
    return torch.arange(LENGTH, dtype=torch.int32) + 1000 * sample.group + sample.member


def result(state: str, rows) -> Rows | None:
    """What a state writes for these rows."""
    rows = tuple(SampleId(*i) for i in rows)
    if state == "generate":
        return Rows(rows, {"tokens": Ragged.from_rows([cell(i) for i in rows])})
    if state == "logp":
        return Rows(rows, {"logp": Ragged.from_rows([cell(i).float() for i in rows])})
    return Rows(rows, {"reward": torch.ones(len(rows))}) if state == "reward" else None
