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
STATE_FORMAT, _DOCK_FILE_FORMAT = 1, 2  # we write 1; some older versions wrote 2, with the dock's rows in another file
CRITIC = "critic"  # folder of PPO's critic inside an iteration folder
CRITIC_MARK = "rl_value_head"  # empty file in an iteration folder: the output layer of this checkpoint is a value head


def read_tracker(directory: str | None) -> int | str | None:
    """Iteration that the tracker file names, "release", or None when there is no checkpoint.

    If the tracker file is empty (Megatron was killed while it wrote the file), returns the newest complete checkpoint
    and prints a line, or raises ValueError if none is complete. Raises ValueError for a file with other text.
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
        return _newest_complete(directory)
    if not text.isdigit():
        raise ValueError(f"{path} holds {text!r}; expected an iteration number or 'release'")
    return int(text)


def mend_tracker(directory: str) -> None:
    """Write the result of `read_tracker` into an empty tracker file, since Megatron reads the file too. Only the job
    whose `--save` is this directory may call it."""
    if is_empty(directory):
        write_text(os.path.join(directory, TRACKER), str(read_tracker(directory)))


def is_empty(directory: str) -> bool:
    """Whether there is an empty tracker file."""
    path = os.path.join(directory, TRACKER)
    return os.path.isfile(path) and not os.path.getsize(path)


@functools.cache
def _newest_complete(directory: str) -> int:
    """The newest complete checkpoint. Megatron opens the tracker file after all ranks have written their files, so a
    rank's file can be truncated only if its machine failed before the data was on disk."""
    folders = sorted(path for path in Path(directory).glob("iter_*") if path.name.removeprefix("iter_").isdigit())
    newest = next((path for path in reversed(folders) if _is_complete(path)), None)
    if newest is None:
        raise ValueError(
            f"{directory}/{TRACKER} is empty, and no checkpoint in this directory is complete; remove the file to "
            "start without a checkpoint"
        )
    iteration = split_iteration_dir(str(newest))[1]
    say(f"{directory}/{TRACKER} is empty, probably since a job was killed at the end of a save; this run uses "
        f"iteration {iteration}, the newest complete checkpoint")  # fmt: skip
    return iteration


def _is_complete(folder: Path) -> bool:
    from mindspeed_rl_plugin.checkpoints.dist_files import DistFiles  # imports torch

    if DistFiles.are_in(folder):
        return DistFiles(folder).are_whole()
    files = [*folder.glob("mp_rank_*/*.pt")]
    return bool(files) and all(map(zipfile.is_zipfile, files))  # a zip file has its index at its end


def iteration_dir(directory: str, iteration: int | str) -> str:
    """Folder of one checkpoint: `iter_0000500`, or `release`."""
    name = iteration if isinstance(iteration, str) else f"iter_{iteration:07d}"
    return os.path.join(directory, name)


def split_iteration_dir(path: str) -> tuple[str, int | str]:
    """Inverse of `iteration_dir`: the checkpoint directory, and the iteration or "release"."""
    directory, name = os.path.split(path)
    return directory, name if name == "release" else int(name.removeprefix("iter_"))


def critic_source(directory: str) -> str:
    """Iteration folder of `--rl-critic-load`. Raises ValueError if there is none."""
    directory = os.path.abspath(directory)
    tracked = read_tracker(directory)
    if tracked is None:
        raise ValueError(
            f"--rl-critic-load {directory} holds no checkpoint ({TRACKER} is missing); give the directory of a Megatron"
            f" checkpoint (that of a saved critic is SAVE/iter_0000500/{CRITIC}), or leave the flag out"
        )
    folder = iteration_dir(directory, tracked)
    if not os.path.isdir(folder):
        raise ValueError(f"--rl-critic-load {directory}: {TRACKER} names {tracked}, but there is no {folder}")
    return folder


def has_state(directory: str, iteration: int | str) -> bool:
    return os.path.isfile(os.path.join(iteration_dir(directory, iteration), STATE_FILE))


def write_state(directory: str, iteration: int, state: dict[str, Any]) -> None:
    """Write the RL state of one checkpoint atomically; it is on disk when this returns."""
    import torch  # not at the top, since the import takes seconds

    folder = iteration_dir(directory, iteration)
    os.makedirs(folder, exist_ok=True)
    content = {"format": STATE_FORMAT, **state}
    atomic_write(os.path.join(folder, STATE_FILE), lambda path: torch.save(content, path))
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)  # makes the rename durable
    finally:
        os.close(handle)


def read_state(directory: str, iteration: int | str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Returns the RL state of one checkpoint with an `outline` of its dock, for all ranks; and the dock with its rows
    (None: no dock), for one rank. Loads only tensors and plain values, no arbitrary objects.

    Raises ValueError for an unknown format, and for a missing or damaged file.
    """
    folder = iteration_dir(directory, iteration)
    state = _load(os.path.join(folder, STATE_FILE))
    if state.get("format") not in (STATE_FORMAT, _DOCK_FILE_FORMAT):
        raise ValueError(
            f"{STATE_FILE} in {folder} has format {state.get('format')}; this version reads {STATE_FORMAT} and "
            f"{_DOCK_FILE_FORMAT}: resume with the plugin version that wrote it"
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
    """A dock's snapshot without rows: of each epoch its number, its sizes, and the names of columns that have rows."""
    epochs = [
        {
            **{k: epoch[k] for k in ("number", "groups", "members")},
            "held": [name for name, column in epoch["columns"].items() if len(column["slots"])],
        }
        for epoch in dock["epochs"]
    ]
    return {**dock, "epochs": epochs}
