"""The metrics of a job in the trackers that Megatron itself was set to use, read back from what they stored."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

BLOCK = 32 << 10


@pytest.mark.slow
def test_weights_and_biases_gets_every_number(job, tmp_path, monkeypatch):
    """Megatron's own --wandb-project, offline: no account is needed. wandb is not in the lock file."""
    pytest.importorskip("wandb", reason="pip install wandb to run it")
    monkeypatch.setenv("WANDB_MODE", "offline")
    where = ("--wandb-project", "rl", "--wandb-exp-name", "grpo", "--wandb-save-dir", str(tmp_path))
    result = job("--train-iters", "2", *where).run()
    seen = {}
    for row in history(next(tmp_path.rglob("*.wandb"))):
        seen.setdefault(row["_step"], {}).update(row)
    for line in result.metrics:
        numbers = {f"rl/{k}": v for k, v in line.items() if isinstance(v, float) and k != "time"}
        assert len(numbers) > 20
        assert {k: seen[line["iteration"]].get(k) for k in numbers} == pytest.approx(numbers)


def history(file: Path) -> list[dict]:
    """Rows that wandb logged to its offline file."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for data in records(file.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("history"):
            items = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            rows.append({**items, "_step": record.history.step.num})
    return rows


def records(data: bytes) -> list[bytes]:
    """Payloads of a log in LevelDB's format: blocks of 32 KiB, each piece behind its checksum, length and kind."""
    values, at = [], 7  # wandb's own header comes first
    while at + 7 <= len(data):
        if (left := -at % BLOCK) and left < 7:  # a header is never split
            at += left
        size, kind = struct.unpack_from("<HB", data, at + 4)
        piece = data[at + 7 : at + 7 + size]
        if kind in (1, 2):  # whole, or the first piece
            values.append(piece)
        elif kind in (3, 4):
            values[-1] += piece
        at += 7 + size
    return values
