"""The digest of the reference's checkpoint: SHA-256 over its files of weights, read by all ranks in the background."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from mindspeed_rl_plugin.checkpoints.checkpoint_files import CRITIC, STATE_FILE
from mindspeed_rl_plugin.ranks import combine_hashes, gather_all, rank_of_job

# Prefixes of file names. The digest omits these files: they have no weights that Megatron loads, and may be deleted.
_NOT_WEIGHTS = (STATE_FILE, "rl_dock", "distrib_optim", "layer_wise_optimizer")
_CHUNK = 16 << 20  # bytes


class CheckpointDigest:
    """SHA-256 over every file that a weights-only load of `folder` may read, read in the background.

    Each rank reads a part of the files, in a thread, since a large checkpoint takes minutes. The constructor and
    `result` are collective. Raises ValueError on every rank if no rank sees a file in `folder`.
    """

    def __init__(self, folder: str) -> None:
        listings = gather_all(weight_files(folder))
        if not any(listings):
            raise ValueError(f"{folder} holds no checkpoint files")
        self._folder = folder
        self._mine = assign_files(listings)[rank_of_job()]
        self._result: dict[str, str] | str = "was not read"
        self._thread = threading.Thread(target=self._read, name="rl-reference-digest", daemon=True)
        self._thread.start()

    def result(self, deadline: float) -> str:
        """Wait at most `deadline` seconds for the digest. Raises ValueError on every rank if a file of any rank cannot
        be read, or is not read in time."""
        self._thread.join(deadline)
        who = f"rank {rank_of_job()}"
        late = f"{who} has not read its files of {self._folder} within {deadline:g} s (--rl-wait-timeout)"
        parts = gather_all(late if self._thread.is_alive() else self._result)
        problems = [part for part in parts if isinstance(part, str)]
        if problems:
            raise ValueError(problems[0])
        return combine_hashes({path: digest for part in parts for path, digest in part.items()})

    def _read(self) -> None:
        try:
            self._result = {path: hash_file(os.path.join(self._folder, path)) for path in self._mine}
        except OSError as error:
            self._result = f"{self._folder}: {error}"


def weight_files(folder: str) -> dict[str, int]:
    """Size in bytes of each file that a weights-only load may read, by path relative to `folder`, sorted."""
    files = (path for path in Path(folder).rglob("*") if path.is_file() and not path.name.startswith(_NOT_WEIGHTS))
    sizes = {path.relative_to(folder): path.stat().st_size for path in files}
    return dict(sorted((str(path), size) for path, size in sizes.items() if path.parts[0] != CRITIC))


def assign_files(listings: Sequence[dict[str, int]]) -> list[list[str]]:
    """For each rank the paths that it hashes. Files are assigned from the largest to the smallest, each to the rank
    with the fewest bytes so far among those that see the file: without shared storage a node sees only the files of its
    own ranks. listings: for each rank, the size of each file that it sees."""
    sizes = {path: size for listing in listings for path, size in listing.items()}
    load = [0] * len(listings)
    mine: list[list[str]] = [[] for _ in listings]
    for path in sorted(sizes, key=lambda p: (-sizes[p], p)):
        rank = min((r for r, listing in enumerate(listings) if path in listing), key=lambda r: (load[r], r))
        load[rank] += sizes[path]
        mine[rank].append(path)
    return mine


def hash_file(path: str) -> str:
    """SHA-256 of a file, read in chunks."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
