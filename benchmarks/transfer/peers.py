"""The arms to compare with: TransferQueue, whole batches as Ray objects, and plain memory copies as the limit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import work

STORE_BYTES = 4 << 30  # of Ray's object store

Exchange = Callable[[Any], list[Any]]


class RayBatches:
    """Each batch is one object (`ray.put` of a dictionary of packed arrays); an actor hands out the references."""

    def __init__(self, rank: int, world: int, exchange: Exchange) -> None:
        self._ray, self._exchange = join_ray(rank, exchange), exchange
        if rank == 0:
            self._directory = self._ray.remote(num_cpus=0)(Directory).options(name="directory").remote()
            self._ray.get(self._directory.clear.remote())
        exchange(None)
        if rank:
            self._directory = self._ray.get_actor("directory")
        self._buffers, self._moved = work.Buffers(), 0
        self._sizes: dict[Any, int] = {}

    def begin(self, epoch: int, samples: int) -> None:
        """Nothing to open."""

    def pack(self, begin: int, packed: work.Packed) -> work.Packed:
        """Arrays are what Ray moves best."""
        return packed

    def put(self, begin: int, rows: work.Packed) -> None:
        """One object."""
        reference = self._ray.put(rows)
        self._ray.get(self._directory.add.remote([reference]))
        self._moved += work.nbytes(rows) + sum(o.nbytes for _, o in rows.values())

    def get(self, state: str, batch: int) -> tuple[int, work.Packed] | None:
        """The next object of a state, as views of Ray's memory."""
        entry = self._ray.get(self._directory.next.remote(state))
        if entry is None:
            return None
        number, (reference,) = entry
        return number, self._ray.get(reference)

    def own(self, entry: tuple[int, work.Packed]) -> tuple[int, work.Packed]:
        """A copy in this process's own memory."""
        got = {c: (self._buffers.fill(c, v), o) for c, (v, o) in entry[1].items()}
        self._moved += work.nbytes(got) + sum(o.nbytes for _, o in got.values())
        return entry[0], got

    def write_back(self, number: int, state: str, values: torch.Tensor, offsets: torch.Tensor) -> None:
        """One object for the column of a batch."""
        reference = self._ray.put({work.STATES[state]: (values.numpy(), offsets.numpy())})
        self._ray.get(self._directory.add_back.remote(state, number, [reference]))
        self._moved += values.nbytes + offsets.nbytes

    def get_one(self) -> work.Packed:
        """One row: an object of its own, or there would be no such read."""
        entry = self.get("probe", 1)
        assert entry is not None
        return self.own(entry)[1]

    def done_one(self) -> None:
        """Nothing to acknowledge."""

    def begin_probe(self, rows: list[work.Packed]) -> None:
        """Make one object per row."""
        self._ray.get(self._directory.add_small.remote([self._ray.put(r) for r in rows]))

    def end(self, epoch: int) -> None:
        """Drop all references."""
        self._exchange(None)
        self._ray.get(self._directory.clear.remote())
        self._exchange(None)

    def moved(self) -> int:
        """Bytes of objects written and copied out, without Ray's own messages."""
        return self._moved

    def close(self) -> None:
        """Leave the cluster; its first member takes it down."""
        self._exchange(None)
        self._ray.shutdown()


class Directory:
    """References by the order in which they came, and how far each state is."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._batches: list[Any] = []
        self._small: list[Any] = []
        self._back: dict[tuple[str, int], Any] = {}
        self._at: dict[str, int] = {}

    def add(self, reference: list[Any]) -> None:
        """A batch."""
        self._batches.append(reference)

    def add_small(self, references: list[Any]) -> None:
        """Rows for the probe."""
        self._small += [[r] for r in references]

    def add_back(self, state: str, number: int, reference: list[Any]) -> None:
        """A column that a state wrote."""
        self._back[state, number] = reference

    def next(self, state: str) -> tuple[int, list[Any]] | None:
        """What a state has not had yet."""
        at = self._at.get(state, 0)
        items = self._small if state == "probe" else self._batches
        if at == len(items):
            return None
        self._at[state] = at + 1
        return at, items[at]


class TransferQueue:
    """PyPI transferqueue over its SimpleStorage: nested columns, and one client a process, as its guide does.

    settings: others than `BEST`, which `transferqueue_settings.py` found.
    """

    BEST = {
        "units": 2,
        "polling": True,
        "layout": "jagged",
        # Ids for all rows of the epoch at once, not one by one as they come; one torch thread as in the other arms.
        "environment": {"TQ_PRE_ALLOC_SAMPLE_NUM": str(work.SAMPLES), "TQ_NUM_THREADS": "1"},
    }

    def __init__(self, rank: int, world: int, exchange: Exchange, settings: Mapping[str, Any] | None = None) -> None:
        chosen = {**self.BEST, **(settings or {})}
        os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
        os.environ.update(chosen["environment"])
        self._layout = getattr(torch, chosen["layout"])
        self._ray, self._exchange, self._rank = join_ray(rank, exchange), exchange, rank
        import transfer_queue
        from omegaconf import OmegaConf
        from tensordict import TensorDict

        self._queue, self._dict = transfer_queue, TensorDict
        if rank == 0:
            form = {
                "controller": {"polling_mode": chosen["polling"]},
                "backend": {"SimpleStorage": {"num_data_storage_units": chosen["units"]}},
            }
            transfer_queue.init(OmegaConf.create(form))
        exchange(None)
        if rank:
            transfer_queue.init()
        self._client = transfer_queue.get_client()
        self._lo = loopback()

    def begin(self, epoch: int, samples: int) -> None:
        """A partition for each epoch."""
        self._partition = f"epoch-{epoch}"

    def pack(self, begin: int, packed: work.Packed) -> Any:
        """A TensorDict of nested columns."""
        columns = {c: self._nested(torch.from_numpy(packed[c][0]), packed[c][1]) for c in work.RAGGED}
        columns.update({c: torch.from_numpy(packed[c][0])[:, None] for c in work.DENSE})
        return self._dict(columns, batch_size=len(packed["row"][0]))

    def put(self, begin: int, rows: Any) -> None:
        """Insert a batch."""
        self._client.put(rows, partition_id=self._partition)

    def get(self, state: str, batch: int, columns: tuple[str, ...] = tuple(work.COLUMNS)) -> Any:
        """The next rows of a state, contiguous and this process's own as they come."""
        meta = self._client.get_meta(list(columns), batch, self._partition, task_name=state)
        if meta is None or meta.size == 0:
            return None
        return meta, self._client.get_data(meta)

    def own(self, entry: Any) -> tuple[Any, work.Packed]:
        """Columns of the TensorDict as they lie."""
        return entry[0], {c: self._packed(entry[1][c]) for c in entry[1].keys()}  # noqa: SIM118

    def write_back(self, meta: Any, state: str, values: torch.Tensor, offsets: torch.Tensor) -> None:
        """Put the column by the batch's metadata."""
        column = self._nested(values, offsets.numpy())
        self._client.put(self._dict({work.STATES[state]: column}, batch_size=meta.size), metadata=meta)

    def get_one(self) -> work.Packed:
        """One row."""
        return self.own(self.get("probe", 1, work.PROBE))[1]

    def done_one(self) -> None:
        """Nothing to acknowledge."""

    def end(self, epoch: int) -> None:
        """Clear the partition."""
        self._exchange(None)
        if self._rank == 0:
            self._client.clear_partition(self._partition)
        self._exchange(None)

    def moved(self) -> int:
        """Bytes over the loopback device, where all its traffic goes; counted by one rank for all."""
        return loopback() if self._rank == 0 else 0

    def close(self) -> None:
        """Leave the queue and the cluster."""
        self._exchange(None)
        if self._rank == 0:
            self._queue.close()
        self._ray.shutdown()

    def _nested(self, values: torch.Tensor, offsets: np.ndarray) -> torch.Tensor:
        if self._layout is torch.jagged:
            return torch.nested.nested_tensor_from_jagged(values, torch.from_numpy(offsets))
        return torch.nested.as_nested_tensor(list(values.split(np.diff(offsets).tolist())), layout=self._layout)

    @staticmethod
    def _packed(column: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        if column.is_nested and column.layout is torch.jagged:
            return column.values().numpy(), column.offsets().numpy()
        if column.is_nested:
            rows = column.unbind()
            return torch.cat(rows).numpy(), np.cumsum([0, *map(len, rows)])
        return column.contiguous().reshape(-1).numpy(), np.arange(len(column) + 1)


class Memcpy:
    """No dock at all: each rank copies its own rows into warm memory, and out of it into other warm memory."""

    def __init__(self, rank: int, world: int, exchange: Exchange) -> None:
        self._arenas: dict[Any, work.Buffers] = {}
        self._buffers, self._moved = work.Buffers(), 0

    def begin(self, epoch: int, samples: int) -> None:
        """Forget where the states are; the memory stays."""
        self._batches: list[work.Packed] = []
        self._at: dict[str, int] = {}

    def pack(self, begin: int, packed: work.Packed) -> work.Packed:
        """As they are."""
        return packed

    def put(self, begin: int, rows: work.Packed) -> None:
        """One copy."""
        self._batches.append(self._copied(("put", begin), rows))

    def get(self, state: str, batch: int) -> Any:
        """The next batch."""
        at = self._at.get(state, 0)
        if at == len(self._batches):
            return None
        self._at[state] = at + 1
        return (state, at), self._batches[at]

    def own(self, entry: Any) -> tuple[Any, work.Packed]:
        """One copy."""
        self._moved += work.nbytes(entry[1])
        return entry[0], {c: (self._buffers.fill(c, v), o) for c, (v, o) in entry[1].items()}

    def write_back(self, handle: Any, state: str, values: torch.Tensor, offsets: torch.Tensor) -> None:
        """One copy."""
        self._copied(handle, {work.STATES[state]: (values.numpy(), offsets.numpy())})

    def get_one(self) -> work.Packed:
        """One row."""
        at = self._at["probe"] = self._at.get("probe", -1) + 1
        batch = self._batches[at % len(self._batches)]
        low, high = batch["loss_mask"][1][:2]
        mask = batch["loss_mask"][0][low:high]
        return {"row": (batch["row"][0][:1].copy(), np.arange(2)), "loss_mask": (mask.copy(), np.array([0, high]))}

    def done_one(self) -> None:
        """Nothing to acknowledge."""

    def end(self, epoch: int) -> None:
        """Nothing to clear."""

    def moved(self) -> int:
        """Bytes copied."""
        return self._moved

    def close(self) -> None:
        """Nothing to leave."""

    def _copied(self, key: Any, rows: work.Packed) -> work.Packed:
        self._moved += work.nbytes(rows)
        arena = self._arenas.setdefault(key, work.Buffers())
        return {c: (arena.fill(c, v), o) for c, (v, o) in rows.items()}


def join_ray(rank: int, exchange: Exchange) -> Any:
    """The first rank starts a cluster of its own, the others join; returns the module."""
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    import ray

    common = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "benchmark"}
    if rank == 0:
        context = ray.init(
            address="local",
            num_cpus=16,
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            **common,
        )
        exchange(context.address_info["address"])
    else:
        ray.init(address=exchange(None)[0], **common)
    return ray


def loopback() -> int:
    """Bytes received over the loopback device of this machine so far."""
    with open("/proc/net/dev", encoding="ascii") as file:
        line = next(x for x in file if x.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


ARMS = {"transferqueue": TransferQueue, "ray": RayBatches, "memcpy": Memcpy}
