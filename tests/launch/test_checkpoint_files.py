"""Checkpoints as files: tracker, RL state written whole or not at all, and the digest of the weights."""

import os

import pytest
import torch

from mindspeed_rl_plugin.launch import checkpoint_files as files
from mindspeed_rl_plugin.ranks import combine_hashes


def test_tracker(tmp_path):
    assert files.read_tracker(None) is None
    assert files.read_tracker(str(tmp_path)) is None
    for text, value in (("500\n", 500), ("0", 0), ("release", "release")):
        (tmp_path / files.TRACKER).write_text(text)
        assert files.read_tracker(str(tmp_path)) == value
    (tmp_path / files.TRACKER).write_text("5o0")
    with pytest.raises(ValueError, match="holds '5o0'; expected an iteration number or 'release'"):
        files.read_tracker(str(tmp_path))


@pytest.mark.parametrize("iteration", [7, 1234567, 12345678, "release"])
def test_iteration_folder_and_back(iteration):
    path = files.iteration_dir("/a/b", iteration)
    assert files.split_iteration_dir(path) == ("/a/b", iteration)


def test_state_round_trip(tmp_path):
    state = {"loop": {"rows": torch.arange(5), "cursor": {"epoch": 1}}, "reference": {"path": None, "digest": "x"}}
    files.write_state(str(tmp_path), 3, state)
    assert files.has_state(str(tmp_path), 3)
    assert not files.has_state(str(tmp_path), 4)
    assert os.listdir(tmp_path / "iter_0000003") == [files.STATE_FILE]
    back = files.parse_state(files.read_state_bytes(str(tmp_path), 3), "there")
    assert torch.equal(back["loop"]["rows"], torch.arange(5))
    assert back["reference"] == state["reference"]


def test_a_crash_while_writing_leaves_no_state(tmp_path, monkeypatch):
    def dies(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(OSError, match="no space"):
        files.write_state(str(tmp_path), 3, {})
    assert not files.has_state(str(tmp_path), 3)


def a_dock(value):
    slots = {"slots": torch.tensor([0, 1]), "values": torch.full((2, 1000), value)}
    none = {"slots": torch.tensor([], dtype=torch.int64), "values": torch.empty(0)}
    sizes = {"number": 4, "groups": 1, "members": 2}
    return {"format": 1, "last_epoch": 4, "columns": {}, "epochs": [{**sizes, "columns": {"a": slots, "b": none}}]}


OUTLINE = {"number": 4, "groups": 1, "members": 2, "held": ["a"]}


def test_the_rows_of_a_dock_are_in_a_file_of_their_own(tmp_path):
    """One rank reads them; all others only sizes."""
    state = {"loop": {"cursor": 1, "dock": a_dock(7.0)}}
    files.write_state(str(tmp_path), 3, state)
    blob = files.read_state_bytes(str(tmp_path), 3)
    found = files.parse_state(blob, "there")
    assert found["loop"]["cursor"] == 1 and found["loop"]["dock"]["epochs"] == [OUTLINE] and len(blob) < 4000
    rows = files.read_rows(str(tmp_path), 3, found)
    assert torch.equal(rows["epochs"][0]["columns"]["a"]["values"], torch.full((2, 1000), 7.0))
    assert state["loop"]["dock"]["epochs"][0].keys() == a_dock(0.0)["epochs"][0].keys(), "what was given stays"
    os.remove(tmp_path / "iter_0000003" / found["dock_file"])
    with pytest.raises(ValueError, match=r"rl_dock-\w+.pt is not there: it holds the rows of the rollout"):
        files.read_rows(str(tmp_path), 3, found)


def test_a_crash_between_the_two_files_leaves_the_former_pair(tmp_path, monkeypatch):
    files.write_state(str(tmp_path), 3, {"loop": {"dock": a_dock(1.0)}})
    replace = os.replace

    def dies(old, new):
        if new.endswith(files.STATE_FILE):
            raise OSError("killed")
        replace(old, new)

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(OSError, match="killed"):
        files.write_state(str(tmp_path), 3, {"loop": {"dock": a_dock(2.0)}})
    monkeypatch.undo()

    def held():
        found = files.parse_state(files.read_state_bytes(str(tmp_path), 3), "there")
        return files.read_rows(str(tmp_path), 3, found)["epochs"][0]["columns"]["a"]["values"][0, 0].item()

    assert held() == 1.0
    files.write_state(str(tmp_path), 3, {"loop": {"dock": a_dock(3.0)}})
    assert held() == 3.0 and len([n for n in os.listdir(tmp_path / "iter_0000003") if n.endswith(".pt")]) == 2


def test_a_state_of_the_former_format_has_its_dock_inside(tmp_path):
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    torch.save({"format": 1, "loop": {"cursor": 1, "dock": a_dock(7.0)}}, folder / files.STATE_FILE)
    blob = files.read_state_bytes(str(tmp_path), 3)
    found = files.parse_state(blob, "there")
    assert found["loop"] == {"cursor": 1, "dock": {**a_dock(0.0), "epochs": [OUTLINE]}} and len(blob) < 4000
    assert files.read_rows(str(tmp_path), 3, found)["epochs"][0]["columns"]["a"]["values"].sum() == 14000


def test_a_damaged_state_is_named(tmp_path):
    files.write_state(str(tmp_path), 3, {"loop": {"dock": a_dock(1.0)}})
    path = tmp_path / "iter_0000003" / files.STATE_FILE
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(ValueError, match=f"{files.STATE_FILE} cannot be read"):
        files.read_state_bytes(str(tmp_path), 3)


def test_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "STATE_FORMAT", 99)
    files.write_state(str(tmp_path), 3, {})
    monkeypatch.undo()
    with pytest.raises(ValueError, match="has format 99; this version reads 1 and 2"):
        files.parse_state(files.read_state_bytes(str(tmp_path), 3), "there")


def test_state_loads_no_arbitrary_objects(tmp_path):
    files.write_state(str(tmp_path), 3, {"evil": os.system})
    with pytest.raises(Exception, match="Weights only load failed"):
        files.parse_state(files.read_state_bytes(str(tmp_path), 3), "there")


def digest(folder, ranks=1):
    """As the ranks do it, one after the other."""
    listing = files.weight_files(str(folder))
    hashes = {}
    for mine in files.assign_files([listing] * ranks):
        hashes.update(files.hash_files(str(folder), mine))
    return combine_hashes(hashes)


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "iter_0000010"
    for number in range(5):
        (folder / f"mp_rank_{number:02d}").mkdir(parents=True)
        (folder / f"mp_rank_{number:02d}" / "model_optim_rng.pt").write_bytes(bytes([number]) * (10 * number + 1))
    return folder


def test_digest_does_not_depend_on_who_reads(checkpoint):
    assert digest(checkpoint, 1) == digest(checkpoint, 2) == digest(checkpoint, 7)


def test_digest_covers_every_byte_name_and_file(checkpoint):
    before = digest(checkpoint)
    path = checkpoint / "mp_rank_03" / "model_optim_rng.pt"
    content = bytearray(path.read_bytes())
    content[17] ^= 1
    path.write_bytes(content)
    assert digest(checkpoint) != before
    content[17] ^= 1
    path.write_bytes(content)
    assert digest(checkpoint) == before
    path.rename(checkpoint / "mp_rank_03" / "renamed.pt")
    assert digest(checkpoint) != before
    (checkpoint / "mp_rank_03" / "renamed.pt").unlink()
    assert digest(checkpoint) != before


def test_digest_ignores_what_weights_do_not_need(checkpoint):
    before = digest(checkpoint)
    (checkpoint / files.STATE_FILE).write_bytes(b"later")
    (checkpoint / f"{files.DOCK_FILE}-0.pt").write_bytes(b"later")
    (checkpoint / "mp_rank_00" / "distrib_optim.pt").write_bytes(b"optimizer")
    assert digest(checkpoint) == before


def test_large_files_are_streamed_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_CHUNK", 7)
    (tmp_path / "a").write_bytes(bytes(range(100)))
    by_chunks = digest(tmp_path)
    monkeypatch.setattr(files, "_CHUNK", 1000)
    assert digest(tmp_path) == by_chunks


def test_files_are_shared_evenly_and_only_with_ranks_that_see_them():
    sizes = {f"{n}": 100 for n in range(8)} | {"large": 800}
    shares = files.assign_files([sizes, sizes])
    assert sorted(sum(sizes[p] for p in share) for share in shares) == [800, 800]
    here, there = {"a": 5, "both": 1}, {"b": 5, "both": 1}
    shares = files.assign_files([here, there])
    assert "a" in shares[0] and "b" in shares[1]
    assert sorted(shares[0] + shares[1]) == ["a", "b", "both"]
