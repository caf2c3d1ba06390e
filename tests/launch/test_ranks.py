"""Agreements between ranks at start, on two real ranks."""

import json
import os
from pathlib import Path

import pytest

from mindspeed_rl_plugin.launch.reference_digest import CheckpointDigest


@pytest.fixture(scope="module")
def seen(tmp_path_factory, torchrun):
    """(folder that was hashed, what rank 0 saw, what rank 1 saw)."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "checkpoint").mkdir()
    for number in range(5):
        (folder / "checkpoint" / f"file{number}").write_bytes(os.urandom(1000 * number))
    torchrun(Path(__file__).with_name("ranks_worker.py"), folder / "checkpoint", folder / "out")
    return folder / "checkpoint", *(json.loads((folder / f"out.{rank}").read_text()) for rank in range(2))


def test_everybody_hears_rank_0_and_its_errors(seen):
    _, first, second = seen
    assert first["value"] == second["value"] == {"from": 0}
    assert (first["first"], second["first"]) == (True, False)
    assert first["error"] == second["error"] == "rank 0 says no"
    assert "No such file or directory" in first["missing"] and first["missing"] == second["missing"]


def test_digests_are_the_same_on_both_and_so_are_their_errors(seen):
    folder, first, second = seen
    assert first["digest"] == second["digest"] == CheckpointDigest(str(folder)).result(10)
    assert first["unreadable"] == second["unreadable"] and "No such file" in first["unreadable"]
    assert first["weights"] == second["weights"] == first["same weights"]
    assert len({first[name] for name in ("weights", "swapped", "renamed")}) == 3, "it covers values, names and ranks"


def test_a_folder_without_files_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint files"):
        CheckpointDigest(str(tmp_path))
