"""Dumps: every rollout as one Parquet file, written atomically, and read back into rows.

One row per sample. Lists per token are the dock's columns without the prompt's part. The prompt's token ids are a
separate column. With several turns, the response includes observations, and the turns have columns, too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl_plugin.monitor.run_files import atomic_write, dump_file, dump_files
from mindspeed_rl_plugin.rows import FINISH, Column, Ragged, Rows, SampleId, unpack_json

REPLAYED = ("graded", "valid", "length", "weights_digest")  # columns that only `replay` reads
DUMP_FIELDS = (
    *SampleId._fields, "iteration", "prompt", "response", "answer", "reward", "reward_parts", "advantage",
    "response_length", "finish", "version", "segments", "prompt_tokens", "response_tokens", *REPLAYED,
)  # fmt: skip
TOKEN_COLUMNS = ("loss_mask", "logp_rollout", "logp_old", "logp_ref", "advantages")


def dump_rollout(
    dump_dir: str | os.PathLike[str],
    rows: Rows,
    decode: Callable[[Sequence[int]], str],
    *,
    iteration: int,
    graders: Sequence[str] = (),
    own: Sequence[str] = (),
) -> Path:
    """Write the rows of one rollout to `rollout-{iteration - 1:06d}.parquet`, and return its path.

    decode: token ids to text; iteration: the first iteration that trains on the rollout; graders: names of the
    columns of reward_parts `[B, n]`; own: further columns, of a user's stages and of responses of several turns.
    """
    import pyarrow.parquet as pq

    table = _table(rows, decode, iteration, graders)
    for name in own:
        if name in rows.columns and name not in table.column_names:
            table = table.append_column(name, _plain(rows[name]))
    path = dump_file(dump_dir, iteration - 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, lambda p: pq.write_table(table, p, compression="zstd"))
    return path


def read_rollout(path: str | os.PathLike[str], own: Iterable[str] = ()) -> Rows:
    """The rows of a dump: prompt, tokens, columns per token (0 in the prompt), segments, turns, paths, routes, rewards,
    finish, version, `REPLAYED`, which older dumps lack, and columns of `own` that have as many numbers in each row."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    ids = tuple(map(SampleId, *(columns[k].to_pylist() for k in SampleId._fields)))
    prompt, response = _ragged(columns["prompt_tokens"]), _ragged(columns["response_tokens"])
    whole = [torch.cat(pair) for pair in zip(prompt.rows(), response.rows(), strict=True)]
    out: dict[str, Column] = {"prompt": prompt, "tokens": Ragged.from_rows(whole)}
    for name in set(TOKEN_COLUMNS) & columns.keys():
        pairs = zip(prompt.lengths.tolist(), _ragged(columns[name]).rows(), strict=True)
        out[name] = Ragged.from_rows([torch.cat([row.new_zeros(length), row]) for length, row in pairs])
    for name, which in (("segments", [1, 0]), ("turns", [1, 1])):  # older dumps lack segments
        if name in columns:
            held = map(torch.tensor, columns[name].to_pylist())
            out[name] = Ragged.from_rows([torch.tensor(r) for r in _shifted(held, prompt.lengths, which)])
    if "turns" in columns:
        rewards = [torch.tensor(row, dtype=torch.float32) for row in columns["turn_reward"].to_pylist()]
        out |= {"prompt_length": prompt.lengths, "turn_reward": Ragged.from_rows(rewards)}
    if "paths" in columns:
        out["paths"] = Ragged.from_rows([torch.tensor(row) for row in columns["paths"].to_pylist()])
    if "routes" in columns:
        layers, topk, dtype = json.loads(table.schema.metadata[b"routes"])
        held = [torch.frombuffer(bytearray(row), dtype=getattr(torch, dtype)) for row in columns["routes"].to_pylist()]
        out["routes"] = Ragged.from_rows([row.reshape(-1, layers, topk) for row in held])
    out["reward_parts"] = torch.tensor(columns["reward_parts"].to_pylist(), dtype=torch.float32)
    out["finish"] = torch.tensor([FINISH.index(f) for f in columns["finish"].to_pylist()], dtype=torch.int8)
    numbers = [name for name in ("reward", "version", "response_length", *REPLAYED) if name in columns]
    out |= {name: torch.tensor(columns[name].to_numpy()) for name in numbers}
    if absent := {*own} - out.keys() - columns.keys():
        raise ValueError(f"{path} has no column {', '.join(sorted(absent))}, which this job reads: put it back")
    return Rows(ids, out | {name: torch.tensor(columns[name].to_pylist()) for name in {*own} - out.keys()})


def lacking(columns: Iterable[str]) -> set[str]:
    """Columns that a dump with these columns lacks, and that every `replay` reads."""
    read = {*DUMP_FIELDS} - {"prompt", "response", "answer", "advantage"}
    return {*read, *(("environment_failed",) if "turns" in columns else ())}.difference(columns)


def discard_dumps_after(dump_dir: str | os.PathLike[str], done: int) -> int:
    """Remove the dumps of rollouts that a run, resumed after `done` iterations, makes again. Returns their number."""
    late = [path for before, path in dump_files(dump_dir).items() if before >= done]
    for path in late:
        path.unlink()
    return len(late)


def _table(rows: Rows, decode: Callable[[Sequence[int]], str], iteration: int, graders: Sequence[str]) -> Any:
    import pyarrow as pa

    columns, prompt = rows.columns, _prompt(rows)
    response = _behind(prompt, rows["tokens"])
    meta = unpack_json(rows["meta"])
    prompts = [m["text"] if "text" in m else decode(p.tolist()) for m, p in zip(meta, prompt.rows(), strict=True)]
    data = {name: pa.array([getattr(i, name) for i in rows.ids]) for name in SampleId._fields}
    data |= {
        "iteration": pa.array([iteration] * len(rows)),
        "prompt": pa.array(map(_utf8, prompts)),
        "response": pa.array([_utf8(decode(r.tolist())) for r in response.rows()]),
        "answer": pa.array([_utf8(str(m.get("answer", ""))) for m in meta]),
        "reward": pa.array(rows["reward"].numpy()),
        "reward_parts": pa.array(rows["reward_parts"].tolist(), pa.list_(pa.float32())),
        "advantage": pa.array(_trained_mean(rows["advantages"], rows["loss_mask"]), pa.float32()),
        "response_length": pa.array(columns.get("response_length", response.lengths).numpy()),
        "finish": pa.array([FINISH[f] for f in rows["finish"].tolist()]),
        "version": pa.array(rows["version"].numpy()),
        "segments": pa.array(_shifted(rows["segments"].rows(), -prompt.lengths, [1, 0])),
        "prompt_tokens": _list(prompt),
        "response_tokens": _list(response),
        **{name: pa.array(rows[name].numpy()) for name in REPLAYED},
    }
    data |= {name: _list(_behind(prompt, columns[name])) for name in TOKEN_COLUMNS if name in columns}
    if "turns" in columns:
        data |= _of_turns(rows, prompt)
    metadata = {"graders": json.dumps(list(graders))}
    if (routes := columns.get("routes")) is not None:  # bytes of `[L, layers, K]`
        data["routes"] = pa.array([row.contiguous().numpy().tobytes() for row in routes.rows()])
        metadata["routes"] = json.dumps([*routes.values.shape[1:], str(routes.values.dtype).removeprefix("torch.")])
    return pa.table(data).replace_schema_metadata(metadata)


def _prompt(rows: Rows) -> Ragged:
    """The prompts; with several turns the tokens before the first turn, which may include an environment's messages."""
    if "prompt_length" not in rows.columns:
        return rows["prompt"]
    pairs = zip(rows["tokens"].rows(), rows["prompt_length"].tolist(), strict=True)
    return Ragged.from_rows([row[:length] for row, length in pairs])


def _of_turns(rows: Rows, prompt: Ragged) -> dict[str, Any]:
    """Columns for the turns. turns: [first, end) of each turn, as positions in the response."""
    import pyarrow as pa

    turns = _shifted(rows["turns"].rows(), -prompt.lengths, [1, 1])
    texts = [_utf8(json.dumps(messages, ensure_ascii=False)) for messages in unpack_json(rows["conversation"])]
    paths = {"paths": pa.array(row.tolist() for row in rows["paths"].rows())} if "paths" in rows.columns else {}
    return {"turns": pa.array(turns), "conversation": pa.array(texts), **paths}


def _shifted(rows: Iterable[Tensor], by: Tensor, which: Sequence[int]) -> list[list[list[int]]]:
    """Rows `[S, 2]` with their token positions shifted. by: `[B]` tokens; which: 1 where a number is a position."""
    return [(row + places).tolist() for row, places in zip(rows, torch.outer(by, torch.tensor(which)), strict=True)]


def _behind(prompt: Ragged, column: Ragged) -> Ragged:
    """The part of every row after the prompt."""
    pairs = zip(column.rows(), prompt.lengths.tolist(), strict=True)
    return Ragged.from_rows([row[length:] for row, length in pairs])


def _trained_mean(column: Ragged, mask: Ragged) -> list[float]:
    """Mean over each row's trained tokens; 0 without any."""
    pairs = zip(column.rows(), mask.rows(), strict=True)
    return [float(c[m.bool()].double().mean()) if bool(m.any()) else 0.0 for c, m in pairs]


def _list(column: Ragged) -> Any:
    import pyarrow as pa

    return pa.ListArray.from_arrays(pa.array(column.offsets.numpy(), pa.int32()), pa.array(column.values.numpy()))


def _plain(column: Column) -> Any:
    """A column as plain values: one value or list for each sample."""
    import pyarrow as pa

    return pa.array([row.tolist() for row in (column.rows() if isinstance(column, Ragged) else column)])


def _ragged(array: Any) -> Ragged:
    offsets = torch.tensor(array.offsets.to_pylist(), dtype=torch.int64)
    return Ragged(torch.tensor(array.flatten().to_numpy()), offsets - offsets[0])


def _utf8(text: str) -> str:
    """Valid UTF-8: half a surrogate pair, which Arrow would refuse, becomes "?"."""
    return text.encode("utf-8", "replace").decode("utf-8")
