"""Agreements between ranks at start, on two real ranks; the digest of the reference."""

import json
import os
from pathlib import Path

import pytest

from mindspeed_rl_plugin.checkpoints import reference_digest
from mindspeed_rl_plugin.checkpoints.checkpoint_files import CRITIC, STATE_FILE
from mindspeed_rl_plugin.checkpoints.reference_digest import CheckpointDigest, assign_files


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
    assert first["each"] == second["each"] == [0, 1]
    assert first["second says no"] == second["second says no"] == "rank 1 says no"
    assert "No such file or directory" in first["missing"] and first["missing"] == second["missing"]
    assert second["late"].startswith("rank 1 waited 0.5 s (--rl-wait-timeout) for rank 0: ")


def test_digests_are_the_same_on_both_and_so_are_their_errors(seen):
    folder, first, second = seen
    assert first["digest"] == second["digest"] == CheckpointDigest(str(folder)).result(10)
    assert first["unreadable"] == second["unreadable"] and "No such file" in first["unreadable"]
    assert first["weights"] == second["weights"] == first["same weights"]
    assert len({first[name] for name in ("weights", "swapped", "renamed")}) == 3, "it covers values, names and ranks"


def test_a_folder_without_files_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint files"):
        CheckpointDigest(str(tmp_path))


def digest(folder):
    return CheckpointDigest(str(folder)).result(10)


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "iter_0000010"
    for number in range(5):
        (folder / f"mp_rank_{number:02d}").mkdir(parents=True)
        (folder / f"mp_rank_{number:02d}" / "model_optim_rng.pt").write_bytes(bytes([number]) * (10 * number + 1))
    return folder


def test_the_digest_covers_every_byte_name_and_file_of_the_weights(checkpoint, monkeypatch):
    before = digest(checkpoint)
    with monkeypatch.context() as patch:
        patch.setattr(reference_digest, "_CHUNK", 7)
        assert digest(checkpoint) == before
    (checkpoint / STATE_FILE).write_bytes(b"later")
    (checkpoint / "rl_dock-0.pt").write_bytes(b"later")
    (checkpoint / "mp_rank_00" / "distrib_optim.pt").write_bytes(b"optimizer")
    (checkpoint / CRITIC).mkdir()
    (checkpoint / CRITIC / "model.pt").write_bytes(b"critic")
    assert digest(checkpoint) == before, "what weights do not need"
    path = checkpoint / "mp_rank_03" / "model_optim_rng.pt"
    content = path.read_bytes()
    path.write_bytes(bytes([*content[:17], content[17] ^ 1, *content[18:]]))
    assert digest(checkpoint) != before
    path.write_bytes(content)
    assert digest(checkpoint) == before
    path = path.rename(path.with_name("renamed.pt"))
    renamed = digest(checkpoint)
    path.unlink()
    assert len({before, renamed, digest(checkpoint)}) == 3


def test_files_are_shared_evenly_and_only_with_ranks_that_see_them():
    sizes = {f"{n}": 100 for n in range(8)} | {"large": 800}
    shares = assign_files([sizes, sizes])
    assert sorted(sum(sizes[p] for p in share) for share in shares) == [800, 800]
    here, there = {"a": 5, "both": 1}, {"b": 5, "both": 1}
    shares = assign_files([here, there])
    assert "a" in shares[0] and "b" in shares[1]
    assert sorted(shares[0] + shares[1]) == ["a", "b", "both"]
