"""What both projects train on in shared_prompts.py: rows that begin alike, the sizes of the model, and counts."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

Clocks = tuple[float, float]  # of the wall and of the process [s]
DRIFT = 1e-4  # most difference of log-probs between arms, fp32 [nats]


@dataclass(frozen=True)
class Sizes:
    """Of the model."""

    hidden: int = 256
    layers: int = 4
    heads: int = 8
    groups: int = 4
    ffn: int = 1024
    vocabulary: int = 1024


SIZES = Sizes()


@dataclass(frozen=True)
class Case:
    """Rows of one prompt. members: rows; prompt, response: tokens; pair: a preference pair; forks: how often rows
    divide in two behind the prompt, each time after as many tokens as all parts of a response have."""

    members: int
    prompt: int
    response: int
    pair: bool = False
    forks: int = 0

    def rows(self) -> list[list[int]]:
        """`[member][token]`."""
        draw, length = random.Random(self.members + self.prompt), self.response // (self.forks + 1)

        def more(count: int) -> list[int]:
            return [draw.randrange(SIZES.vocabulary - 1) for _ in range(count)]

        heads = [more(self.prompt)]
        for _ in range(self.forks):
            turns = [more(length) for _ in heads]
            heads = [head + turn for head, turn in zip(heads, turns, strict=True) for _ in range(2)]
        last = self.response - self.forks * length
        return [heads[member % len(heads)] + more(last) for member in range(self.members)]


CASES = {
    f"{n}/{p}/{r}": Case(n, p, r)
    for n, p, r in ((8, 64, 64), (8, 256, 64), (8, 512, 64), (8, 1024, 256), (16, 1024, 64), (16, 64, 256))
}
CASES |= {"episodes 8/256/256": Case(8, 256, 256, forks=2), "pair 2/256/256": Case(2, 256, 256, pair=True)}


def predicted(rows: Sequence[Sequence[int]], prompt: int) -> float:
    """By how much fewer floating point operations a tree needs than its rows: matrix products of layers and head, and
    pairs of a query and a key. All passes have the same share."""
    size, nodes = SIZES, {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
    scored = sum(len(row) - prompt for row in rows)

    def operations(depths: Sequence[int]) -> float:
        projections = 2 * size.hidden**2 * (2 + 2 * size.groups / size.heads) + 6 * size.hidden * size.ffn
        layers = size.layers * (projections * len(depths) + 4 * size.hidden * sum(depths))
        return layers + 2 * size.hidden * size.vocabulary * scored

    apart = operations([depth + 1 for row in rows for depth in range(len(row))])
    return apart / operations([len(node) for node in nodes])


def seconds(start: Clocks, middle: Clocks, end: Clocks) -> dict[str, float]:
    """Of the log-prob pass, which ends at `middle`, and of the update behind it."""
    result = {}
    for name, before, after in (("logp", start, middle), ("update", middle, end), ("step", start, end)):
        result |= {f"{name}_seconds": after[0] - before[0], f"{name}_cpu_seconds": after[1] - before[1]}
    return result


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def resident() -> int:
    """Bytes of this process in memory now."""
    return _status("VmRSS")


def peak_resident() -> int:
    """Most bytes of this process in memory since `clear_peak`."""
    return _status("VmHWM")


def clear_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))
