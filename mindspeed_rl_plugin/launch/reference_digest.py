"""The digest of the reference's checkpoint: SHA-256 over its files, read by all ranks in the background."""

from __future__ import annotations

import threading

from mindspeed_rl_plugin.launch import checkpoint_files as files
from mindspeed_rl_plugin.ranks import combine_hashes, gather_all, rank_of_job


class CheckpointDigest:
    """SHA-256 over every file that a weights-only load of `folder` may read, read in the background.

    The ranks share the reading, each in a thread of its own, for a large checkpoint takes minutes. Building it and
    `result` are collective. Raises ValueError on every rank when no rank sees a file there.
    """

    def __init__(self, folder: str) -> None:
        listings = gather_all(files.weight_files(folder))
        if not any(listings):
            raise ValueError(f"{folder} holds no checkpoint files")
        self._folder = folder
        self._mine = files.assign_files(listings)[rank_of_job()]
        self._found: dict[str, str] | str = "was not read"
        self._thread = threading.Thread(target=self._read, name="rl-reference-digest", daemon=True)
        self._thread.start()

    def result(self, deadline: float) -> str:
        """The digest, waited for; `deadline`: seconds. Raises ValueError on every rank for a file that went missing."""
        self._thread.join(deadline)
        who = f"rank {rank_of_job()}"
        late = f"{who} has not read its share of {self._folder} within {deadline:g} s (--rl-wait-timeout)"
        parts = gather_all(late if self._thread.is_alive() else self._found)
        problems = [part for part in parts if isinstance(part, str)]
        if problems:
            raise ValueError(problems[0])
        return combine_hashes({path: digest for part in parts for path, digest in part.items()})

    def _read(self) -> None:
        try:
            self._found = files.hash_files(self._folder, self._mine)
        except OSError as error:
            self._found = f"{self._folder}: {error}"
