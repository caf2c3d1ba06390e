"""Where training starts: the decision table over --save, --load and --pretrained-checkpoint."""

import types

import pytest

from mindspeed_rl_plugin.checkpoints import checkpoint_files as files
from mindspeed_rl_plugin.checkpoints.start_decision import decide, describe, load_arguments, weights_arguments
from mindspeed_rl_plugin.loop.start import Start

pytestmark = pytest.mark.quick


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """`disk.make("dir", 500, rl=True)` leaves a checkpoint directory; `disk.args(...)` is a script's namespace."""
    monkeypatch.chdir(tmp_path)

    def make(name, *iterations, rl=False, tracker=None):
        for iteration in iterations:
            if rl:
                files.write_state(name, iteration, {})
            else:
                (tmp_path / files.iteration_dir(name, iteration)).mkdir(parents=True)
        (tmp_path / name / files.TRACKER).write_text(str(iterations[-1] if tracker is None else tracker))

    def args(**values):
        base = {"save": "out", "load": None, "pretrained_checkpoint": None, "ckpt_step": None}
        base |= {"finetune": False, "no_load_optim": False, "no_load_rng": False}
        return types.SimpleNamespace(**(base | values))

    return types.SimpleNamespace(make=make, args=args, path=tmp_path)


WEIGHTS_ONLY = {"pretrained_checkpoint": None, "finetune": True, "no_load_optim": True, "no_load_rng": True}


def test_fresh(disk):
    args = disk.args()
    start = decide(args)
    assert start == Start("fresh", None, 0, None, None)
    assert describe(start, args) == "training starts from random weights: no --load was given"
    assert load_arguments(start, args) == {"load": None, "pretrained_checkpoint": None}


@pytest.mark.parametrize(
    ("flags", "expected", "step"),
    [
        ({"load": "a"}, "a/iter_0000500", 500),
        ({"pretrained_checkpoint": "a"}, "a/iter_0000500", 500),
        ({"load": "a", "pretrained_checkpoint": "b"}, "a/iter_0000500", 500),
        ({"load": "empty", "pretrained_checkpoint": "b"}, "b/release", None),
        ({"load": "a", "ckpt_step": 100}, "a/iter_0000100", 100),
        ({"load": "b", "ckpt_step": 100}, "b/release", None),
    ],
)
def test_weights_of_load_or_pretrained_checkpoint(disk, flags, expected, step):
    disk.make("a", 100, 500)
    disk.make("b", "release")
    args = disk.args(**flags)
    start, folder = decide(args), disk.path / expected
    assert start == Start("pretrained", str(folder.parent), 0, str(folder), None)
    assert load_arguments(start, args) == {"load": str(folder.parent), "ckpt_step": step, **WEIGHTS_ONLY}
    assert f"{expected}, at iteration 0" in describe(start, args)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"load": "base"},
        {"load": "nowhere"},
        {"load": "base", "no_load_optim": True, "no_load_rng": True, "finetune": True, "ckpt_step": 500},
        {"pretrained_checkpoint": "base"},
        {"load": "out"},
    ],
)
def test_rl_state_in_save_is_resumed_whole_whatever_the_script_says(disk, flags):
    disk.make("base", 500)
    disk.make("out", 4, 8, rl=True)
    args = disk.args(**flags)
    start = decide(args)
    assert start == Start("resume", str(disk.path / "out"), 8, None, None)
    loaded = {"load": str(disk.path / "out"), "pretrained_checkpoint": None, "ckpt_step": None}
    assert load_arguments(start, args) == loaded | dict.fromkeys(("finetune", "no_load_optim", "no_load_rng"), False)
    line = describe(start, args)
    assert "resumes from" in line and "at iteration 8, optimizer and RL state included" in line
    for name in flags:
        mentioned = f"--{name.replace('_', '-')}" in line
        assert mentioned == (flags[name] != "out"), line
    args.train_iters = 8
    assert "all 8 iterations are done, raise --train-iters" in describe(start, args)


def test_the_tracker_decides_not_the_newest_folder(disk):
    """A crash in a save leaves a folder that the tracker does not point to."""
    disk.make("base", 500)
    files.write_state("out", 4, {})
    assert decide(disk.args(load="base")).kind == "pretrained"
    disk.make("out", 4, 8, rl=True, tracker=4)
    assert decide(disk.args()).iteration == 4


@pytest.mark.parametrize("iteration", [500, "release"])
def test_a_pretraining_checkpoint_in_save_is_not_overwritten(disk, iteration):
    disk.make("out", iteration)
    for flags in ({}, {"load": "out"}):
        with pytest.raises(ValueError, match="no RL state: .*--save"):
            decide(disk.args(**flags))


@pytest.mark.parametrize("flags", [{"load": "nowhere"}, {"pretrained_checkpoint": "nowhere"}])
def test_a_load_without_checkpoint_is_refused(disk, flags):
    with pytest.raises(ValueError, match=r"nowhere holds no checkpoint"):
        decide(disk.args(**flags))
    (disk.path / "nowhere").mkdir()
    (disk.path / "nowhere" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="nowhere .* Hugging Face .* import`"):
        decide(disk.args(**flags))


def test_reference_after_its_run_went_on(disk):
    """The pretraining run may save later iterations; the reference stays reachable by its own number."""
    disk.make("base", 500, 900)
    assert weights_arguments(str(disk.path / "base/iter_0000500"))["ckpt_step"] == 500
    disk.make("base", "release")
    with pytest.raises(ValueError, match="'release', .*iter_0000500; .* 500"):
        weights_arguments(str(disk.path / "base/iter_0000500"))
