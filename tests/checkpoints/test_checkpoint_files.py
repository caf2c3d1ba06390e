"""Checkpoints as files: tracker, and RL state written whole or not at all."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import checkpoint

from mindspeed_rl_plugin.checkpoints import checkpoint_files as files
from mindspeed_rl_plugin.checkpoints import start_decision


def test_tracker(tmp_path):
    assert files.read_tracker(None) is None
    assert files.read_tracker(str(tmp_path)) is None
    for text, value in (("500\n", 500), ("0", 0), ("release", "release")):
        (tmp_path / files.TRACKER).write_text(text)
        assert files.read_tracker(str(tmp_path)) == value
    (tmp_path / files.TRACKER).write_text("5o0")
    with pytest.raises(ValueError, match="'5o0'; .* 'release'"):
        files.read_tracker(str(tmp_path))


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_the_newest_checkpoint_that_is_whole_is_taken_where_a_kill_left_the_tracker_empty(tmp_path, capsys, form):
    """Cut short: with the machine, for Megatron opens the tracker when all ranks have written."""
    for iteration in (9, 10, 11):
        folder = Path(files.iteration_dir(str(tmp_path), iteration))
        if form == "torch_dist":
            checkpoint.save({"w": torch.zeros(100)}, checkpoint_id=folder, no_dist=True)
            last = folder / "__0_0.distcp"
        else:
            for rank in ("mp_rank_00", last := "mp_rank_01"):
                (folder / rank).mkdir(parents=True)
                torch.save({"w": torch.zeros(100)}, folder / rank / "model_optim_rng.pt")
            last = folder / last / "model_optim_rng.pt"
        if iteration == 11:
            last.write_bytes(last.read_bytes()[:-40])
    (tmp_path / files.TRACKER).touch()
    assert files.read_tracker(str(tmp_path)) == files.read_tracker(str(tmp_path)) == 10
    assert capsys.readouterr().out.count("at the end of a save; this run uses iteration 10, the newest") == 1
    args = SimpleNamespace(load=str(tmp_path), save=str(tmp_path / "new"), pretrained_checkpoint=None, ckpt_step=None)
    path = start_decision.decide(args).reference_path
    with pytest.raises(ValueError, match=f"{files.TRACKER} is empty, so Megatron cannot load .*; put 10 back into it"):
        start_decision.weights_arguments(path)
    files.mend_tracker(str(tmp_path))
    assert (tmp_path / files.TRACKER).read_text() == "10"
    assert start_decision.weights_arguments(path)["ckpt_step"] == 10


def test_an_empty_tracker_without_a_whole_checkpoint_is_refused(tmp_path):
    (tmp_path / files.TRACKER).touch()
    (tmp_path / "iter_0000003").mkdir()
    with pytest.raises(ValueError, match="is empty, and no checkpoint in this directory is complete; remove"):
        files.read_tracker(str(tmp_path))
    files.mend_tracker(str(tmp_path / "nothing"))


@pytest.mark.parametrize("iteration", [7, 1234567, 12345678, "release"])
def test_iteration_folder_and_back(iteration):
    path = files.iteration_dir("/a/b", iteration)
    assert files.split_iteration_dir(path) == ("/a/b", iteration)


def a_dock(value):
    slots = {"slots": torch.tensor([0, 1]), "values": torch.full((2, 1000), value)}
    none = {"slots": torch.tensor([], dtype=torch.int64), "values": torch.empty(0)}
    sizes = {"number": 4, "groups": 1, "members": 2}
    return {"format": 1, "last_epoch": 4, "columns": {}, "epochs": [{**sizes, "columns": {"a": slots, "b": none}}]}


def test_a_state_is_read_with_an_outline_of_its_dock_and_the_rows_apart(tmp_path):
    """One rank needs the rows; all others only sizes."""
    reference = {"path": None, "digest": "x"}
    files.write_state(str(tmp_path), 3, {"loop": {"cursor": 1, "dock": a_dock(7.0)}, "reference": reference})
    assert files.has_state(str(tmp_path), 3) and not files.has_state(str(tmp_path), 4)
    assert os.listdir(tmp_path / "iter_0000003") == [files.STATE_FILE]
    state, dock = files.read_state(str(tmp_path), 3)
    outline = {"number": 4, "groups": 1, "members": 2, "held": ["a"]}
    assert state["loop"] == {"cursor": 1, "dock": {**a_dock(0.0), "epochs": [outline]}}
    assert state["reference"] == reference
    assert torch.equal(dock["epochs"][0]["columns"]["a"]["values"], torch.full((2, 1000), 7.0))
    files.write_state(str(tmp_path), 3, {"loop": {"rows": torch.arange(5)}})
    state, dock = files.read_state(str(tmp_path), 3)
    assert torch.equal(state["loop"]["rows"], torch.arange(5)) and dock is None


def test_a_crash_while_writing_leaves_the_former_state_or_none(tmp_path, monkeypatch):
    def dies(*args):
        raise OSError("no space left on device")

    for former in (False, True):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
            patch.setattr(os, "replace", dies)
            files.write_state(str(tmp_path), 3, {"loop": 2})
        assert os.listdir(tmp_path / "iter_0000003") == [files.STATE_FILE] * former
        if not former:
            files.write_state(str(tmp_path), 3, {"reference": 1})
    assert files.read_state(str(tmp_path), 3)[0]["reference"] == 1


def test_a_state_with_its_rows_in_a_file_beside_it_is_read(tmp_path):
    """As versions before wrote them (whole checkpoints of these: loop/test_old_checkpoint.py)."""
    files.write_state(str(tmp_path), 3, {"format": 2, "loop": {"dock": "outline"}, "dock_file": "rl_dock-0.pt"})
    torch.save(a_dock(7.0), tmp_path / "iter_0000003" / "rl_dock-0.pt")
    state, dock = files.read_state(str(tmp_path), 3)
    assert state["loop"] == {"dock": "outline"} and dock["epochs"][0]["columns"]["a"]["values"].sum() == 14000
    os.remove(tmp_path / "iter_0000003" / "rl_dock-0.pt")
    with pytest.raises(ValueError, match="rl_dock-0.pt cannot be read.*put it back"):
        files.read_state(str(tmp_path), 3)


def test_what_cannot_be_read_is_named(tmp_path):
    files.write_state(str(tmp_path), 3, {"format": 99})
    with pytest.raises(ValueError, match="format 99; .* 1 and 2"):
        files.read_state(str(tmp_path), 3)
    files.write_state(str(tmp_path), 3, {"evil": os.system})
    with pytest.raises(ValueError, match="Weights only load failed"):
        files.read_state(str(tmp_path), 3)
    path = tmp_path / "iter_0000003" / files.STATE_FILE
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(ValueError, match=f"{files.STATE_FILE} cannot be read"):
        files.read_state(str(tmp_path), 3)
