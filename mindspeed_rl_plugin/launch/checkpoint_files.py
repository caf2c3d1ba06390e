"""A Megatron checkpoint directory as files: tracker, iteration folders, the RL state, the digest.

DIR/latest_checkpointed_iteration.txt     "500", or "release"
DIR/iter_0000500/...                      Megatron's own files, and ours: rl_state.pt, rl_dock-*.pt with the rows
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import secrets
from collections.abc import Sequence
from typing import Any

import torch

TRACKER = "latest_checkpointed_iteration.txt"
STATE_FILE = "rl_state.pt"
DOCK_FILE = "rl_dock"
STATE_FORMAT = 2  # 1 had the dock inside
CRITIC = "critic"  # folder of PPO's critic inside an iteration folder
# Never read when weights are loaded; ours is written after the fact. A user may delete all of these.
_NOT_WEIGHTS = (STATE_FILE, DOCK_FILE, "distrib_optim", "layer_wise_optimizer")
_CHUNK = 16 << 20  # bytes


def read_tracker(directory: str | None) -> int | str | None:
    """Iteration that the tracker file points to, "release", or None when there is no checkpoint.

    Raises ValueError for a tracker file that holds anything else.
    """
    if directory is None:
        return None
    path = os.path.join(directory, TRACKER)
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        text = file.read().strip()
    if text == "release":
        return text
    if not text.isdigit():
        raise ValueError(f"{path} holds {text!r}; expected an iteration number or 'release'")
    return int(text)


def iteration_dir(directory: str, iteration: int | str) -> str:
    """Folder of one checkpoint: `iter_0000500`, or `release`."""
    name = iteration if isinstance(iteration, str) else f"iter_{iteration:07d}"
    return os.path.join(directory, name)


def split_iteration_dir(path: str) -> tuple[str, int | str]:
    """Inverse of `iteration_dir`: the checkpoint directory, and the iteration or "release"."""
    directory, name = os.path.split(path)
    return directory, name if name == "release" else int(name.removeprefix("iter_"))


def has_state(directory: str, iteration: int | str) -> bool:
    """Whether that checkpoint holds RL state."""
    return os.path.isfile(os.path.join(iteration_dir(directory, iteration), STATE_FILE))


def write_state(directory: str, iteration: int, state: dict[str, Any]) -> None:
    """Write the RL state of one checkpoint: all of it or nothing, on disk when this returns.

    A dock in the loop's state goes to a file of its own, of which the state keeps the name and an `outline`. That file
    has a new name each time and comes first, so the state that is there always finds its own.
    """
    folder = iteration_dir(directory, iteration)
    os.makedirs(folder, exist_ok=True)
    loop, rows = state.get("loop", {}), None
    if loop.get("dock"):
        rows = f"{DOCK_FILE}-{secrets.token_hex(8)}.pt"
        _write(folder, rows, loop["dock"])
        state = {**state, "loop": {**loop, "dock": outline(loop["dock"])}, "dock_file": rows}
    _write(folder, STATE_FILE, {"format": STATE_FORMAT, **state})
    for name in os.listdir(folder):
        if name.startswith(DOCK_FILE) and name != rows:  # of a state that was just replaced, or never came to be
            os.remove(os.path.join(folder, name))


def _write(folder: str, name: str, content: dict[str, Any]) -> None:
    path = os.path.join(folder, name)
    with open(path + ".partial", "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".partial", path)
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)  # the rename itself
    finally:
        os.close(handle)


def read_state_bytes(directory: str, iteration: int | str) -> bytes:
    """The RL state of one checkpoint as bytes, to be broadcast and given to `parse_state`: without the dock's rows,
    which one rank alone needs. Raises ValueError as `parse_state` does."""
    folder = iteration_dir(directory, iteration)
    with open(os.path.join(folder, STATE_FILE), "rb") as file:
        blob = file.read()
    state = parse_state(blob, folder)
    if state["format"] > 1 or "dock" not in state.get("loop", {}):
        return blob
    state["loop"]["dock"] = outline(state["loop"]["dock"])
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def parse_state(blob: bytes, where: str) -> dict[str, Any]:
    """The RL state of `read_state_bytes`. Loads tensors and plain values only, no arbitrary objects.

    Raises ValueError for a format that this version does not know.
    """
    state = _load(io.BytesIO(blob), os.path.join(where, STATE_FILE))
    if state.get("format") not in (1, STATE_FORMAT):
        raise ValueError(
            f"{STATE_FILE} in {where} has format {state.get('format')}; this version reads 1 and {STATE_FORMAT}: "
            "resume with the plugin version that wrote it"
        )
    return state


def read_rows(directory: str, iteration: int | str, state: dict[str, Any]) -> dict[str, Any] | None:
    """The dock of the RL state `state` with its rows; None where there is none.

    Raises ValueError for a file that is missing or damaged.
    """
    folder = iteration_dir(directory, iteration)
    if "dock_file" in state:
        path = os.path.join(folder, state["dock_file"])
        if not os.path.isfile(path):
            raise ValueError(
                f"{path} is not there: it holds the rows of the rollout with which {STATE_FILE} beside it goes on; put "
                "it back, or resume from another checkpoint"
            )
        return _load(path, path)
    path = os.path.join(folder, STATE_FILE)  # format 1 holds all
    return _load(path, path).get("loop", {}).get("dock")


def _load(source: Any, path: str) -> dict[str, Any]:
    try:
        return torch.load(source, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def outline(dock: dict[str, Any]) -> dict[str, Any]:
    """What every rank must know of a dock's snapshot, without its rows: for each epoch its number and sizes, and which
    columns it holds."""
    epochs = [
        {
            **{k: epoch[k] for k in ("number", "groups", "members")},
            "held": [name for name, column in epoch["columns"].items() if len(column["slots"])],
        }
        for epoch in dock["epochs"]
    ]
    return {**dock, "epochs": epochs}


def weight_files(folder: str) -> dict[str, int]:
    """Size in bytes of each file that a weights-only load may read, by path relative to `folder`, sorted.

    The state of the distributed optimizer lies in files of its own and is left out, as it may be deleted.
    """
    sizes = {}
    for root, inner, names in os.walk(folder):
        if root == folder and CRITIC in inner:
            inner.remove(CRITIC)
        for name in names:
            if not name.startswith(_NOT_WEIGHTS):
                path = os.path.join(root, name)
                sizes[os.path.relpath(path, folder)] = os.path.getsize(path)
    return dict(sorted(sizes.items()))


def assign_files(listings: Sequence[dict[str, int]]) -> list[list[str]]:
    """Which rank hashes which file, from what each rank can see: the largest first, to the least loaded rank.

    Nodes without shared storage see only their own ranks' files; so a file goes to a rank that lists it.
    """
    sizes = {path: size for listing in listings for path, size in listing.items()}
    load = [0] * len(listings)
    mine: list[list[str]] = [[] for _ in listings]
    for path in sorted(sizes, key=lambda p: (-sizes[p], p)):
        rank = min((r for r, listing in enumerate(listings) if path in listing), key=lambda r: (load[r], r))
        load[rank] += sizes[path]
        mine[rank].append(path)
    return mine


def hash_files(folder: str, paths: Sequence[str]) -> dict[str, str]:
    """SHA-256 of each file's whole content, streamed."""
    return {path: _hash_file(os.path.join(folder, path)) for path in paths}


def _hash_file(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
