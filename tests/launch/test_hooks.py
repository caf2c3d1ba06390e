"""The hooks one by one: pass-through without --rl-algorithm, and what each asks of `launch` and the loop."""

import argparse
import atexit
import sys
import types

import pytest

from mindspeed_rl_plugin.checks import flag_checks
from mindspeed_rl_plugin.config import add_flags
from mindspeed_rl_plugin.launch import endings, launch
from mindspeed_rl_plugin.launch import patching as applying
from mindspeed_rl_plugin.launch.patches import PATCHES


def parsed(*words):
    return add_flags(argparse.ArgumentParser()).parse_args(words)


def hooked(name, original):
    """The original as the patch of this name leaves it."""
    (patch,) = (patch for patch in PATCHES if patch.name == name)
    return patch.wrapper(original)


@pytest.fixture
def world(monkeypatch):
    """Megatron's get_args and the loop, both by hand; `world.args` may be replaced."""
    w = types.SimpleNamespace(args=parsed("--rl-algorithm", "grpo"))
    megatron = types.ModuleType("megatron.training")
    megatron.get_args = lambda: w.args
    monkeypatch.setitem(sys.modules, "megatron.training", megatron)
    loop = types.SimpleNamespace(
        train_iterator=lambda: "dock",
        train_step=lambda original, args, kwargs: ("stepped", original(*args, **kwargs)),
    )
    monkeypatch.setattr(launch.run, "current", lambda: loop)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    return w


def test_flags_are_added_to_what_megatron_returns():
    parser = argparse.ArgumentParser()
    parser.add_argument("--other", help="10% of it")
    wrapped = hooked("add_megatron_arguments", lambda p: p)
    assert wrapped(wrapped(parser)) is parser
    assert parser.parse_args(["--rl-algorithm", "grpo"]).rl_algorithm == "grpo"
    texts = ("half, 50%% (default: %(default)s)", "of %(prog)s", argparse.SUPPRESS)
    actions = [parser.add_argument(f"--a{number}", help=text, default=3) for number, text in enumerate(texts)]
    wrapped(parser)
    assert "10% of it" in " ".join(parser.format_help().split()), "a bare % in a help text must not break --help"
    assert tuple(action.help for action in actions) == texts


def test_validation_comes_after_megatrons_but_for_the_batch(monkeypatch, world):
    seen = []
    monkeypatch.setattr(flag_checks, "check_args", lambda args: seen.append("ours"))
    monkeypatch.setattr(flag_checks, "CHECKS", ())
    monkeypatch.setattr(flag_checks, "GENERATION_CHECKS", ())
    wrapped = hooked("validate_args", lambda args, defaults=None: seen.append("megatron") or args)
    assert wrapped(world.args, {"a": 1}) is world.args and seen == ["megatron", "ours"]
    world.args.world_size, world.args.global_batch_size, world.args.micro_batch_size = 2, 60, 8
    with pytest.raises(endings.Refusal, match="\n  - --global-batch-size 60 "):
        wrapped(world.args, {})
    assert seen == ["megatron", "ours"]
    world.args.global_batch_size = 64
    monkeypatch.setattr(flag_checks, "check_args", lambda args: (_ for _ in ()).throw(ValueError("refused")))
    with pytest.raises(endings.Refusal, match="refused"):
        wrapped(world.args, {})


def test_rl_flags_without_an_algorithm_are_warned_of_at_the_start_and_at_the_end(world, capsys, monkeypatch):
    ends = []
    monkeypatch.setattr(atexit, "register", lambda *call: ends.append(call))
    wrapped = hooked("validate_args", lambda args, defaults: args)
    wrapped(parsed(), {})
    assert capsys.readouterr().out == ""
    wrapped(parsed("--rl-reward", "math", "--rl-top-p", "0.9"), {})
    warning = capsys.readouterr().out
    assert warning.startswith("[rl] WARNING: this run is ordinary pretraining")
    assert "--rl-algorithm is missing" in warning and ": --rl-top-p --rl-reward. Give" in warning
    monkeypatch.setenv("RANK", "1")
    wrapped(parsed("--rl-reward", "math"), {})
    assert capsys.readouterr().out == ""
    monkeypatch.undo()
    (end, line), _ = ends
    end(line)
    said = capsys.readouterr().out
    assert said.startswith("[rl] WARNING: this run was ordinary pretraining, ") and said.endswith(
        "--rl-top-p --rl-reward\n"
    )


def test_setup_proves_the_patches_first(world, monkeypatch):
    def lost():
        raise RuntimeError("not in force")

    monkeypatch.setattr(applying, "assert_in_force", lost)
    with pytest.raises(RuntimeError, match="not in force"):
        hooked("setup_model_and_optimizer", lambda *a, **k: pytest.fail("built"))("provider")


def test_the_iterator_is_the_docks_and_no_data_is_opened(world):
    def never(provider):
        raise AssertionError("pretraining data were opened")

    assert hooked("build_train_valid_test_data_iterators", never)(None) == ("dock", None, None)
    assert (world.args.do_train, world.args.do_valid, world.args.do_test) == (True, False, False)
