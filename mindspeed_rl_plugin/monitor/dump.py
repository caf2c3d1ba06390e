"""Dumps: every rollout as one Parquet file, written atomically, and read back into rows.

One row a sample. Per-token lists cover the response only (P..L of the dock's columns), since entries
on prompt tokens are masked; the prompt's token ids have a column of their own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl_plugin.monitor.run_files import atomic_write, dump_file, dump_files
from mindspeed_rl_plugin.rows import FINISH, Column, Ragged, Rows, SampleId, unpack_json

TOKEN_COLUMNS = ("loss_mask", "logp_rollout", "logp_old", "logp_ref", "advantages")
REQUIRED = ("tokens", "loss_mask", "reward")


def dump_rollout(
    dump_dir: str | os.PathLike[str],
    rows: Rows,
    decode: Callable[[Sequence[int]], str],
    *,
    iteration: int | None = None,
    graders: Sequence[str] = (),
    own: Sequence[str] = (),
) -> Path:
    """Write the rows of one rollout to `rollout-{epoch:06d}.parquet`, by their latest epoch, and return its path.

    Columns used: tokens, loss_mask, reward (needed); prompt, meta, reward_parts, advantages, finish,
    version, logp_rollout, logp_old, logp_ref (where they are there). decode: token ids to text.
    iteration: the training iteration that the rollout feeds first; graders: names of the columns of reward_parts
    `[B, n]`; own: further columns, of a user's stages. Raises ValueError for missing columns, no rows, or a number of
    graders that does not fit.
    """
    import pyarrow.parquet as pq

    epoch = _check(rows, graders)
    table = _table(rows, decode, iteration, graders)
    for name in own:
        table = table.append_column(name, _plain(rows[name]))
    path = dump_file(dump_dir, epoch)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, lambda p: pq.write_table(table, p, compression="zstd"))
    return path


def read_rollout(path: str | os.PathLike[str]) -> Rows:
    """The rows of a dump as the dock had them; per-token columns are 0 on prompt tokens."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    ids = tuple(map(SampleId, *(columns[k].to_pylist() for k in SampleId._fields)))
    prompt, response = _ragged(columns["prompt_tokens"], torch.int32), _ragged(columns["response_tokens"], torch.int32)
    lengths = prompt.lengths.tolist()
    whole = [torch.cat(pair) for pair in zip(prompt.rows(), response.rows(), strict=True)]
    out: dict[str, Ragged | Tensor] = {"prompt": prompt, "tokens": Ragged.from_rows(whole, torch.int32)}
    for name in TOKEN_COLUMNS:
        if name in columns:
            tail = _ragged(columns[name], torch.uint8 if name == "loss_mask" else torch.float32)
            padded = [torch.cat([r.new_zeros(p), r]) for p, r in zip(lengths, tail.rows(), strict=True)]
            out[name] = Ragged.from_rows(padded, tail.values.dtype)
    out["reward"] = torch.tensor(columns["reward"].to_pylist(), dtype=torch.float32)
    if "reward_parts" in columns:
        out["reward_parts"] = torch.tensor(columns["reward_parts"].to_pylist(), dtype=torch.float32)
    if "finish" in columns:
        out["finish"] = torch.tensor([FINISH.index(f) for f in columns["finish"].to_pylist()], dtype=torch.int8)
    if "version" in columns:
        out["version"] = torch.tensor(columns["version"].to_pylist(), dtype=torch.int64)
    return Rows(ids, out)


def discard_dumps_after(dump_dir: str | os.PathLike[str], epoch: int) -> int:
    """Remove the dumps of rollouts later than `epoch`, which a resumed run makes again; returns how many there were."""
    late = [path for e, path in dump_files(dump_dir).items() if e > epoch]
    for path in late:
        path.unlink()
    return len(late)


def _check(rows: Rows, graders: Sequence[str]) -> int:
    missing = [name for name in REQUIRED if name not in rows.columns]
    epochs = sorted({i.epoch for i in rows.ids})
    if missing or not epochs:
        raise ValueError(f"dump_rollout needs the columns {REQUIRED} and rows; missing {missing}, epochs {epochs}")
    parts = rows.columns.get("reward_parts")
    if graders and parts is not None and parts.shape[1] != len(graders):
        raise ValueError(f"dump_rollout: {len(graders)} grader names for {parts.shape[1]} reward parts")
    return epochs[-1]


def _table(rows: Rows, decode: Callable[[Sequence[int]], str], iteration: int | None, graders: Sequence[str]) -> Any:
    import pyarrow as pa

    columns = rows.columns
    prompt_lengths = _prompt_lengths(rows)
    tokens = columns["tokens"]
    prompt, response = _cut(tokens, prompt_lengths)
    data: dict[str, Any] = {}
    for name in SampleId._fields:
        data[name] = pa.array([getattr(i, name) for i in rows.ids], pa.int64())
    if iteration is not None:
        data["iteration"] = pa.array([iteration] * len(rows), pa.int64())
    meta = unpack_json(columns["meta"]) if "meta" in columns else [{}] * len(rows)
    texts = [m["text"] if "text" in m else decode(p.tolist()) for m, p in zip(meta, prompt.rows(), strict=True)]
    data["prompt"] = pa.array([_utf8(t) for t in texts], pa.string())
    data["response"] = pa.array([_utf8(decode(r.tolist())) for r in response.rows()], pa.string())
    data["answer"] = pa.array([_utf8(str(m.get("answer", ""))) for m in meta], pa.string())
    data["reward"] = pa.array(columns["reward"].float().numpy(), pa.float32())
    if "reward_parts" in columns:
        data["reward_parts"] = pa.array(columns["reward_parts"].float().tolist(), pa.list_(pa.float32()))
    if "advantages" in columns:
        data["advantage"] = pa.array(_trained_mean(columns["advantages"], columns["loss_mask"]), pa.float32())
    data["response_length"] = pa.array(response.lengths.numpy(), pa.int64())
    if "finish" in columns:
        data["finish"] = pa.array([FINISH[f] for f in columns["finish"].tolist()], pa.string())
    if "version" in columns:
        data["version"] = pa.array(columns["version"].numpy(), pa.int64())
    data["prompt_tokens"], data["response_tokens"] = _list(prompt, pa.int32()), _list(response, pa.int32())
    for name in TOKEN_COLUMNS:
        if name in columns:
            dtype = pa.uint8() if name == "loss_mask" else pa.float32()
            data[name] = _list(_cut(columns[name], prompt_lengths)[1], dtype)
    return pa.table(data).replace_schema_metadata({"graders": json.dumps(list(graders))})


def _prompt_lengths(rows: Rows) -> Tensor:
    """`[B]` prompt tokens: of the column prompt where it is there, else up to the first trained token."""
    if "prompt" in rows.columns:
        return rows.columns["prompt"].lengths
    first = [int(m.nonzero()[0]) if bool(m.any()) else m.shape[0] for m in rows.columns["loss_mask"].rows()]
    return torch.tensor(first, dtype=torch.int64)


def _cut(column: Ragged, prompt_lengths: Tensor) -> tuple[Ragged, Ragged]:
    """The prompt part and the response part of every row."""
    position = torch.arange(column.values.shape[0]) - column.offsets[:-1].repeat_interleave(column.lengths)
    in_prompt = position < prompt_lengths.repeat_interleave(column.lengths)
    zero = torch.zeros(1, dtype=torch.int64)
    head = torch.cat([zero, prompt_lengths.cumsum(0)])
    tail = torch.cat([zero, (column.lengths - prompt_lengths).cumsum(0)])
    return Ragged(column.values[in_prompt], head), Ragged(column.values[~in_prompt], tail)


def _trained_mean(column: Ragged, mask: Ragged) -> list[float]:
    """Mean over each row's trained tokens; 0 where it has none."""
    pairs = zip(column.rows(), mask.rows(), strict=True)
    return [float(c[m.bool()].double().mean()) if bool(m.any()) else 0.0 for c, m in pairs]


def _list(column: Ragged, dtype: Any) -> Any:
    import pyarrow as pa

    offsets = pa.array(column.offsets.numpy(), pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(column.values.numpy(), dtype))


def _plain(column: Column) -> Any:
    """A column as it is: one value or list a sample."""
    import pyarrow as pa

    return pa.array([row.tolist() for row in (column.rows() if isinstance(column, Ragged) else column)])


def _ragged(array: Any, dtype: torch.dtype) -> Ragged:
    offsets = torch.tensor(array.offsets.to_pylist(), dtype=torch.int64)
    values = torch.tensor(array.flatten().to_pylist(), dtype=dtype)
    return Ragged(values, offsets - offsets[0])


def _utf8(text: str) -> str:
    """Half a surrogate pair, which a model may well produce, is no UTF-8: it becomes "?"."""
    return text.encode("utf-8", "replace").decode("utf-8")
