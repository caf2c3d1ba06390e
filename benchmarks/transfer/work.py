"""The rows that every arm moves: ragged samples of variable length, made once, and the checksum of every cell.

Lengths are sampled like those of a rollout: prompts of 64 to 512 tokens, responses lognormal around 650 up to 2048;
the long case has all of them times eight.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SAMPLES = 4096
MEMBERS = 8  # responses of one prompt
FACTORS = {"short": 1, "long": 8}
RAGGED = {
    "tokens": np.int32,
    "loss_mask": np.uint8,
    "logp_rollout": np.float32,
    "logp_old": np.float32,
    "logp_ref": np.float32,
}
DENSE = {"row": np.int64, "reward": np.float32}
COLUMNS = {**RAGGED, **DENSE}
STATES = {f"state_{i}": f"written_{i}" for i in range(4)}  # worker state -> float32 token column that it writes
PROBE = ("row", "loss_mask")  # what a read of one row fetches

Packed = dict[str, tuple[np.ndarray, np.ndarray]]  # column -> values of some rows, and `[rows + 1]` offsets


@dataclass(frozen=True)
class Work:
    """Rows of one case. values: column -> `[T]` or `[samples]`; offsets: `[samples + 1]`; checks: column ->
    `[samples]` CRC-32 of each cell."""

    values: dict[str, np.ndarray]
    offsets: np.ndarray
    checks: dict[str, np.ndarray]

    @property
    def samples(self) -> int:
        """Rows."""
        return len(self.offsets) - 1

    def part(self, begin: int, end: int) -> Packed:
        """Rows begin..end."""
        low, high = self.offsets[begin], self.offsets[end]
        out = {c: (self.values[c][low:high], self.offsets[begin : end + 1] - low) for c in RAGGED}
        out.update({c: (self.values[c][begin:end], np.arange(end - begin + 1)) for c in DENSE})
        return out

    def wrong(self, got: Packed) -> list[str]:
        """What differs from what was put: columns of which some cell has another checksum."""
        rows = got["row"][0]
        return [c for c, (v, o) in got.items() if not np.array_equal(checksums(v, o), self.checks[c][rows])]


def checksums(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """`[rows]` CRC-32 of each row."""
    data, at = memoryview(np.ascontiguousarray(values).view(np.uint8)), (offsets * values.itemsize).tolist()
    return np.array([zlib.crc32(data[a:b]) for a, b in zip(at, at[1:], strict=False)], np.uint32)


def nbytes(packed: Packed) -> int:
    """Bytes of the values."""
    return sum(v.nbytes for v, _ in packed.values())


def make(directory: Path, samples: int, factor: int) -> int:
    """Write the rows of a case into a directory; returns their bytes."""
    rng = np.random.default_rng(7)
    prompts = rng.integers(64, 513, samples) * factor
    responses = np.clip(rng.lognormal(np.log(650), 0.75, samples), 16, 2048).astype(np.int64) * factor
    offsets = np.concatenate([[0], np.cumsum(prompts + responses)])
    values = {
        "tokens": rng.integers(0, 150_000, offsets[-1], np.int32),
        "loss_mask": rng.integers(0, 2, offsets[-1], np.uint8),
        "row": np.arange(samples),
        "reward": rng.random(samples, np.float32),
        **{c: rng.random(offsets[-1], np.float32) for c in ("logp_rollout", "logp_old", "logp_ref")},
    }
    directory.mkdir(parents=True)
    np.save(directory / "offsets.npy", offsets)
    for name, column in values.items():
        at = offsets if name in RAGGED else np.arange(samples + 1)
        np.save(directory / f"{name}.npy", column)
        np.save(directory / f"{name}.check.npy", checksums(column, at))
    return sum(v.nbytes for v in values.values())


def load(directory: Path) -> Work:
    """The rows of a case, mapped from its directory."""
    return Work(
        {c: np.load(directory / f"{c}.npy", mmap_mode="c") for c in COLUMNS},
        np.load(directory / "offsets.npy"),
        {c: np.load(directory / f"{c}.check.npy") for c in COLUMNS},
    )


class Buffers:
    """Memory that a reader keeps for the columns it reads, so that no arm pays for fresh pages at every read."""

    def __init__(self) -> None:
        self._kept: dict[str, np.ndarray] = {}

    def fill(self, name: str, values: np.ndarray) -> np.ndarray:
        """A copy of `values` in this memory; valid until the next read of that column."""
        out = self.take(name, values.nbytes).view(values.dtype)
        out[:] = values
        return out

    def take(self, name: str, nbytes: int) -> np.ndarray:
        """`[nbytes]` uint8 of this memory; valid until the next read of that column."""
        kept = self._kept.get(name)
        if kept is None or kept.nbytes < nbytes:
            kept = self._kept[name] = np.empty(nbytes + nbytes // 4, np.uint8)
        return kept[:nbytes]
