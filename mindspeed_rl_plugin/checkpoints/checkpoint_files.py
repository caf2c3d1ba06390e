"""A Megatron checkpoint directory as files: tracker, iteration folders, the RL state.

DIR/latest_checkpointed_iteration.txt     "500", or "release"
DIR/iter_0000500/...                      Megatron's own files, and ours: rl_state.pt
"""

from __future__ import annotations

import functools
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.environment import say
from mindspeed_rl_plugin.monitor.run_files import atomic_write, write_text

TRACKER = "latest_checkpointed_iteration.txt"
STATE_FILE = "rl_state.pt"
STATE_FORMAT, _APART = 1, 2  # the second had the rows of its dock in a file beside it
CRITIC = "critic"  # folder of PPO's critic inside an iteration folder
CRITIC_MARK = "rl_value_head"  # empty file in a critic's iteration folder: its output layer is a value head


def read_tracker(directory: str | None) -> int | str | None:
    """Iteration that the tracker file points to, "release", or None when there is no checkpoint.

    Where a kill while Megatron wrote it left it empty, that is the newest checkpoint that is whole, and a line says so.
    Raises ValueError where there is none, and for a tracker file that holds anything else.
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
    if not text:
        return _newest_whole(directory)
    if not text.isdigit():
        raise ValueError(f"{path} holds {text!r}; expected an iteration number or 'release'")
    return int(text)


def mend_tracker(directory: str) -> None:
    """Write what `read_tracker` finds into a tracker file that is empty, for Megatron reads it too. For the job that
    owns the directory."""
    if is_empty(directory):
        write_text(os.path.join(directory, TRACKER), str(read_tracker(directory)))


def is_empty(directory: str) -> bool:
    """Whether there is a tracker file with nothing in it."""
    path = os.path.join(directory, TRACKER)
    return os.path.isfile(path) and not os.path.getsize(path)


@functools.cache
def _newest_whole(directory: str) -> int:
    """Megatron opens the tracker file when every rank has written its part: a file that is cut short was lost with the
    machine."""
    folders = sorted(path for path in Path(directory).glob("iter_*") if path.name.removeprefix("iter_").isdigit())
    whole = next((path for path in reversed(folders) if _is_whole(path)), None)
    if whole is None:
        raise ValueError(
            f"{directory}/{TRACKER} is empty, and no checkpoint beside it is whole; remove it to start without one"
        )
    iteration = split_iteration_dir(str(whole))[1]
    say(f"{directory}/{TRACKER} is empty, as a kill at the end of a save leaves it: {iteration}, the newest checkpoint "
        "that is whole, is taken")  # fmt: skip
    return iteration


def _is_whole(folder: Path) -> bool:
    from mindspeed_rl_plugin.checkpoints.dist_files import DistFiles  # torch again

    if DistFiles.are_in(folder):
        return DistFiles(folder).are_whole()
    files = [*folder.glob("mp_rank_*/*.pt")]
    return bool(files) and all(map(zipfile.is_zipfile, files))  # the index of such a file is its end


def iteration_dir(directory: str, iteration: int | str) -> str:
    """Folder of one checkpoint: `iter_0000500`, or `release`."""
    name = iteration if isinstance(iteration, str) else f"iter_{iteration:07d}"
    return os.path.join(directory, name)


def split_iteration_dir(path: str) -> tuple[str, int | str]:
    """Inverse of `iteration_dir`: the checkpoint directory, and the iteration or "release"."""
    directory, name = os.path.split(path)
    return directory, name if name == "release" else int(name.removeprefix("iter_"))


def critic_source(directory: str) -> str:
    """Iteration folder that `--rl-critic-load` means. Raises ValueError where there is none."""
    directory = os.path.abspath(directory)
    tracked = read_tracker(directory)
    if tracked is None:
        raise ValueError(
            f"--rl-critic-load {directory} holds no checkpoint ({TRACKER} is missing); give the directory of a "
            f"Megatron checkpoint, of a critic SAVE/iter_0000500/{CRITIC}, or leave the flag out"
        )
    folder = iteration_dir(directory, tracked)
    if not os.path.isdir(folder):
        raise ValueError(f"--rl-critic-load {directory}: {TRACKER} names {tracked}, but there is no {folder}")
    return folder


def has_state(directory: str, iteration: int | str) -> bool:
    return os.path.isfile(os.path.join(iteration_dir(directory, iteration), STATE_FILE))


def write_state(directory: str, iteration: int, state: dict[str, Any]) -> None:
    """Write the RL state of one checkpoint: all of it or nothing, on disk when this returns."""
    import torch  # this file is read before torch is (early.py)

    folder = iteration_dir(directory, iteration)
    os.makedirs(folder, exist_ok=True)
    content = {"format": STATE_FORMAT, **state}
    atomic_write(os.path.join(folder, STATE_FILE), lambda path: torch.save(content, path))
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)  # the rename itself
    finally:
        os.close(handle)


def read_state(directory: str, iteration: int | str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The RL state of one checkpoint with an `outline` of its dock, for all ranks, and the dock with its rows, which
    one rank alone needs (None where there is none). Loads tensors and plain values only, no arbitrary objects.

    Raises ValueError for a format that this version does not know, and for a file that is missing or damaged.
    """
    folder = iteration_dir(directory, iteration)
    state = _load(os.path.join(folder, STATE_FILE))
    if state.get("format") not in (STATE_FORMAT, _APART):
        raise ValueError(
            f"{STATE_FILE} in {folder} has format {state.get('format')}; this version reads {STATE_FORMAT} and "
            f"{_APART}: resume with the plugin version that wrote it"
        )
    dock = state.get("loop", {}).get("dock")
    if "dock_file" in state:
        return state, _load(os.path.join(folder, state["dock_file"]))
    if dock:
        state["loop"]["dock"] = outline(dock)
    return state, dock


def _load(path: str) -> dict[str, Any]:
    import torch

    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError, FileNotFoundError) as error:
        raise ValueError(f"{path} cannot be read: {error}; put it back, or resume from another checkpoint") from error


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
