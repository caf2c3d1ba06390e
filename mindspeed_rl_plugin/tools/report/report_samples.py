"""Samples of the report: complete groups of evenly spaced rollouts (part of a group, if --samples is below its size).
Long texts are cut. The response of an episode is a list of turns."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.monitor.run_files import dump_files

COLUMNS = (
    "epoch", "group", "member", "prompt", "response", "answer", "reward", "reward_parts",
    "advantage", "response_length", "finish", "version", "logp_rollout", "logp_old", "loss_mask",
    "turn_reward", "conversation",
)  # fmt: skip
MESSAGE_SIZE = 64  # characters that a message adds to its text in the page


def find_dumps(
    run_dir: str | os.PathLike[str], run: dict[str, Any], dump_dir: str | os.PathLike[str] | None
) -> tuple[dict[int, Path], list[Path]]:
    """Number of iterations before a dump -> its file, and the folder of the dumps. Without dumps, the folders that were
    searched: `dump_dir` or, if it is None, the folder in run.json, dump/ in the run directory, and the run directory.
    Raises ValueError if `dump_dir` does not exist."""
    if dump_dir is not None and not Path(dump_dir).is_dir():
        raise ValueError(f"--dump-dir {dump_dir} is not a directory; give the --rl-dump-dir of the run")
    recorded = [Path(run["dump_dir"])] if run.get("dump_dir") else []
    places = [Path(dump_dir)] if dump_dir is not None else [*recorded, Path(run_dir) / "dump", Path(run_dir)]
    for place in places:
        if dumps := dump_files(place):
            return dumps, [place]
    return {}, list(dict.fromkeys(places))


def sample_data(dumps: dict[int, Path], *, limit: int, text_limit: int = 20_000) -> dict[str, Any]:
    """Rows for the samples table, at most `limit`, and the number of all rows.

    prompts: distinct prompt texts; rows: [epoch, group, member, index of the prompt, response, answer, reward, parts,
    advantage, length, finish, version, largest |engine - trainer| log-prob]. The response is a text or, for an
    episode, the list of `_turns`; it is cut at `text_limit` characters. Raises ValueError for a file that is no dump.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    prompts: dict[str, int] = {}
    rows: list[list[Any]] = []
    graders: list[str] = []
    try:
        total = sum(pq.read_metadata(p).num_rows for p in dumps.values())
        plan = _plan(dumps, limit)
        for done, take in plan.items():
            file = pq.ParquetFile(dumps[done])
            graders = json.loads((file.schema_arrow.metadata or {}).get(b"graders", b"[]"))
            table = file.read([c for c in COLUMNS if c in file.schema_arrow.names]).slice(0, take)
            rows += [_row(record, prompts, text_limit) for record in table.to_pylist()]
    except (pa.ArrowException, KeyError) as error:
        folder = next(iter(dumps.values())).parent
        raise ValueError(f"a dump in {folder} cannot be read ({error}); remove it, or pass --dump-dir") from error
    return {
        "prompts": list(prompts),
        "rows": rows,
        "graders": graders,
        "total": total,
        "rollouts": len(dumps),
        "rollouts_shown": len(plan),
    }


def _plan(dumps: dict[int, Path], limit: int) -> dict[int, int]:
    """Number of iterations before a rollout -> number of its first rows to take. The rollouts are evenly spaced, with
    the first and the last, or only the last. The rows are complete groups (part of one, if `limit` is less)."""
    import pyarrow.parquet as pq

    rollouts = list(dumps)
    if not rollouts or limit < 1:
        return {}
    names = ["epoch", "group"]  # a rollout may have groups of several epochs
    groups = pq.read_table(dumps[rollouts[-1]], columns=names)
    size = max(1, len(groups) // max(1, len(groups.group_by(names).aggregate([]))))
    count = min(len(rollouts), max(1, limit // size))
    spread = (rollouts[round(k * (len(rollouts) - 1) / (count - 1))] for k in range(count))
    chosen = list(spread) if count > 1 else rollouts[-1:]
    take = max(1, limit // len(chosen) // size) * size
    return {done: min(take, limit) for done in chosen}


def _row(record: dict[str, Any], prompts: dict[str, int], text_limit: int) -> list[Any]:
    get = record.get
    messages = json.loads(get("conversation") or "[]")
    asked = list(takewhile(lambda message: "turn" not in message, messages))
    prompt = _asked(asked) if asked else record["prompt"]
    spoken = messages[len(asked) :]
    return [
        *(record[k] for k in ("epoch", "group", "member")),
        prompts.setdefault(_clip(prompt, text_limit), len(prompts)),
        _turns(record, asked, spoken, text_limit) if messages else _clip(record["response"], text_limit),
        _clip(get("answer") or "", text_limit),
        _short(record["reward"]),
        [_short(p) for p in get("reward_parts") or []],
        _short(get("advantage")),
        get("response_length"),
        get("finish"),
        get("version"),
        _short(_largest_difference(get("logp_rollout"), get("logp_old"), get("loss_mask"))),
    ]


def _asked(messages: Sequence[Mapping[str, Any]]) -> str:
    """The prompt of an episode, with the environment's first messages, which the data file does not have."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _turns(
    record: dict[str, Any], asked: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]], text_limit: int
) -> list[list[Any]]:
    """Turns of the model and observations, together cut at `text_limit` characters.

    Each entry is [role or tool, text, sampled tokens, trained tokens, reward, seconds of the environment, branches
    above it]. The seconds of a reply are in the entry of its first message or, if the reply has no message, in the
    entry before; those before the first turn are in an entry "start". The rewards are those that are trained: 0 if the
    environment failed. An entry "branch" begins each further path of an agent's episode; the messages that an earlier
    path has, too, are shown there only.
    """
    rewards, room = iter(record["turn_reward"]), text_limit
    shown = [["start", "", None, None, None, m["seconds"], 0] for m in asked[-1:] if "seconds" in m]
    for depth, message in _tree([*asked, *messages])[len(asked) :]:
        if room <= 0:
            return [*shown, ["", f"[cut here, {len(messages)} messages in all]", *[None] * 4, depth]]
        first, end = message.get("turn", (0, 0))
        trained = [end - first, sum(record["loss_mask"][first:end]), _short(next(rewards))] if end else [None] * 3
        text = _clip(message["content"], room)
        shown.append([message.get("name") or message["role"], text, *trained, message.get("seconds"), depth])
        room -= len(text) + MESSAGE_SIZE
    return shown


def _tree(messages: Sequence[Mapping[str, Any]]) -> list[tuple[int, Mapping[str, Any]]]:
    """(branches above it, message) of all messages of paths, each where it stands first, and messages "branch"."""
    paths, depths = list[list[Mapping[str, Any]]](), list[int]()
    shown = list[tuple[int, Mapping[str, Any]]]()
    for _, path in groupby(messages, lambda message: message.get("path")):
        said = [*path]
        common = [sum(1 for _ in takewhile(_is_same, zip(said, other, strict=False))) for other in paths]
        most = max(common, default=0)
        place, depth = common.index(most) if most else 0, 0
        if paths:
            depth = depths[place] + 1 if most else 0
            where = f"as path {place} for {most} message{'s' * (most > 1)}, then" if most else "begins anew"
            shown.append((depth, {"role": "branch", "content": f"path {len(paths)}: {where}"}))
        paths.append(said)
        depths.append(depth)
        shown += [(depth, message) for message in said[most:]]
    return shown


def _is_same(pair: tuple[Mapping[str, Any], Mapping[str, Any]]) -> bool:
    """Whether a message was not sampled, but is one of another path."""
    one, other = ({k: v for k, v in m.items() if k not in ("turn", "reward", "path", "seconds")} for m in pair)
    return "turn" not in pair[0] and one == other


def _largest_difference(
    engine: Sequence[float] | None, trainer: Sequence[float] | None, mask: Sequence[int] | None
) -> float | None:
    if not engine or not trainer or not mask:
        return None
    return max((abs(e - t) for e, t, m in zip(engine, trainer, mask, strict=True) if m), default=None)


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}\n[cut here, {len(text):,} characters in all]"


def _short(value: float | None) -> float | None:
    """Six digits; None for a number that is not finite, since JSON has no such numbers."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
