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


def test_everybody_hears_rank_0(seen):
    _, first, second = seen
    assert first["value"] == second["value"] == {"from": 0}
    assert (first["first"], second["first"]) == (True, False)


def test_an_error_of_rank_0_is_raised_everywhere(seen):
    _, first, second = seen
    assert first["error"] == second["error"] == "rank 0 says no"
    assert "No such file or directory" in first["missing"] and first["missing"] == second["missing"]


def test_the_digest_is_the_same_on_both_and_alone(seen):
    folder, first, second = seen
    assert first["digest"] == second["digest"] == CheckpointDigest(str(folder)).result(10)


def test_a_file_that_one_rank_cannot_read_is_an_error_on_both(seen):
    _, first, second = seen
    assert first["unreadable"] == second["unreadable"] and "No such file" in first["unreadable"]


def test_the_digest_of_weights_covers_values_names_and_ranks(seen):
    _, first, second = seen
    assert first["weights"] == second["weights"] == first["same weights"]
    assert len({first[name] for name in ("weights", "swapped", "renamed")}) == 3


def test_a_folder_without_files_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint files"):
        CheckpointDigest(str(tmp_path))
