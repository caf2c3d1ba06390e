"""The order of a start, with a hand-written Megatron: what is loaded with which arguments, and what the loop hears."""

import argparse
import os
import shutil
import threading
import types

import pytest
import torch

from mindspeed_rl_plugin.checkpoints import checkpoint_files as files
from mindspeed_rl_plugin.checkpoints import reference_digest
from mindspeed_rl_plugin.checkpoints.reference_digest import CheckpointDigest
from mindspeed_rl_plugin.checks import flag_checks
from mindspeed_rl_plugin.config import RLConfig, add_flags
from mindspeed_rl_plugin.launch import launch


class Loop:
    def __init__(self, events):
        self.events = events

    def before_model(self, args):
        self.events.append("before_model")

    def check_state(self, state, iteration):
        self.events.append(("check", iteration))

    def on_reference_loaded(self, model):
        self.events.append(("reference", model[0].weight[0, 0].item()))

    def on_critic_built(self, critic):
        self.events.append(critic)

    def load_state_dict(self, state):
        self.events.append(("state", state))

    def on_checkpoint_loaded(self, model, optimizer, start):
        self.events.append(("actor", model[0].weight[0, 0].item(), optimizer, start.kind))
        self.start = start

    def state_dict(self):
        return {"cursor": 17, "rows": torch.arange(3)}


class Optimizer(str):
    load_state_dict = None


OPTIMIZER = Optimizer("optimizer")


class Megatron:
    """Builds one linear layer and loads a number into it, like `setup_model_and_optimizer` and `load_checkpoint`."""

    def __init__(self, args, events, initial=0.5):
        self.args, self.events, self.initial = args, events, initial

    def setup_model_and_optimizer(self, model_type, model_provider_func=None):
        self.events.append("build")
        model = [torch.nn.Linear(2, 2)]
        with torch.no_grad():
            for p in model[0].parameters():
                p.fill_(self.initial)
        self.args.iteration = 0
        if self.args.load is not None:
            self.args.iteration, _ = launch.load_checkpoint(
                self.args, self.load_checkpoint, (model, OPTIMIZER, "scheduler"), {}
            )
        return model, OPTIMIZER, types.SimpleNamespace(step=lambda increment: self.events.append(("step", increment)))

    def load_checkpoint(self, model, optimizer, scheduler):
        a = self.args
        iteration = a.ckpt_step or files.read_tracker(a.load)
        self.events.append(("load", iteration, optimizer, a.finetune, a.no_load_optim, a.no_load_rng))
        with open(f"{files.iteration_dir(a.load, iteration)}/weight") as file, torch.no_grad():
            model[0].weight.fill_(float(file.read()))
        a.consumed_train_samples = 0 if a.finetune else iteration * a.global_batch_size
        return 0 if a.finetune else iteration, 0

    def save(self, iteration, value):
        write = lambda *_: write_checkpoint(self.args.save, iteration, value)  # noqa: E731
        launch.save_checkpoint(self.args, write, (iteration,), {})


def write_checkpoint(directory, iteration, value):
    folder = files.iteration_dir(str(directory), iteration)
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/weight", "w") as file:
        file.write(str(value))
    with open(f"{directory}/{files.TRACKER}", "w") as file:
        file.write(str(iteration))


ARGS = dict(save="out", save_interval=1, pretrained_checkpoint=None, ckpt_step=None, train_iters=8)
ARGS |= dict(finetune=False, no_load_optim=False, no_load_rng=False, params_dtype=torch.float32, global_batch_size=4)
ARGS |= dict(consumed_train_samples=0)
ARGS |= dict(lr=1e-3, min_lr=0.0, lr_decay_iters=None, lr_warmup_iters=0, lr_decay_style="linear")
ARGS |= dict(start_weight_decay=0.1, end_weight_decay=0.1, weight_decay_incr_style="constant")
ARGS |= dict(micro_batch_size=1, data_parallel_size=1, world_size=1)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """`job(load=..., kl=...)` runs one start; returns what happened."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flag_checks, "check_model", lambda model: None)
    monkeypatch.setattr(launch, "read_inputs", lambda args: types.SimpleNamespace(vocab=1, config=RLConfig()))
    monkeypatch.setattr(launch.memory_fit, "check", lambda args, vocab, lora: None)
    monkeypatch.setattr(launch.patching, "assert_in_force", lambda: None)

    def run(*, load=None, kl=0.001, initial=0.5, more=(), **values):
        monkeypatch.setattr(launch, "_launch", None)
        flags = ["--rl-algorithm", "grpo", "--rl-samples-per-prompt", "2", "--rl-kl-loss-coef", str(kl), *more]
        rl = add_flags(argparse.ArgumentParser()).parse_args(flags)
        args = argparse.Namespace(**{**ARGS, "load": load, **values}, **vars(rl))
        before = dict(vars(args))
        events = []
        loop, megatron = Loop(events), Megatron(args, events, initial)
        monkeypatch.setattr(launch.run, "current", lambda: loop)
        named = {"model_provider_func": len}
        launch.setup_model_and_optimizer(args, megatron.setup_model_and_optimizer, ("gpt",), named)
        progress = {"iteration": args.iteration, "consumed_train_samples": args.consumed_train_samples}
        assert vars(args) == before | progress, "arguments are put back"
        return types.SimpleNamespace(events=events, start=loop.start, megatron=megatron, args=args)

    return run


def unreadable(path):
    raise FileNotFoundError(2, "No such file", path)


def test_fresh_and_without_kl(job, capsys):
    """From a checkpoint, and resumed: test_start_processes.py."""
    done = job()
    assert done.events == ["before_model", "build", ("reference", 0.5), ("actor", 0.5, "optimizer", "fresh")]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[rl] grpo: advantage group-norm, loss clip -0.2/+0.2, ")
    assert lines[1] == "[rl] batch arithmetic"
    assert done.start.reference_path is None and len(done.start.reference_digest) == 64
    write_checkpoint("base", 500, 1.5)
    assert not [e for e in job(load="base", kl=0).events if e[0] == "reference"], "none is kept where nothing reads it"


def test_a_checkpoint_of_adapters_needs_no_place_for_the_model(monkeypatch):
    monkeypatch.setattr(flag_checks, "check_model", lambda model: None)
    monkeypatch.setattr(launch, "small_disk", lambda args, parameters: seen.append(parameters))
    seen, model, at = [], torch.nn.Linear(100, 2, bias=False), types.SimpleNamespace(iteration=0)
    launch._check_loaded([model], at, at)
    model.rl_lora = torch.nn.Linear(3, 2, bias=False)
    launch._check_loaded([model], at, at)
    assert seen == [200, 6]


@pytest.mark.parametrize("flags", [("no_save_optim",), ("no_save_rng",), ("no_save_optim", "no_save_rng")])
def test_a_resume_does_not_look_for_what_was_not_saved(job, capsys, flags):
    """Also where the flags are gone by then; Megatron leaves the schedule out with the optimizer, so it is moved on."""
    first = job(kl=0, **dict.fromkeys(flags, True))
    started = capsys.readouterr().out
    first.megatron.save(4, 2.5)
    second = job(kl=0)
    resumed = next(line for line in capsys.readouterr().out.splitlines() if "resumes from" in line)
    optimizer, generators = "no_save_optim" in flags, "no_save_rng" in flags
    assert [e for e in second.events if e[0] == "load"] == [("load", 4, "optimizer", False, optimizer, generators)]
    assert [e for e in second.events if e[0] == "step"] == [("step", 16)] * optimizer
    assert second.args.iteration == 4 and ("optimizer and RL state included" in resumed) != optimizer
    for flag, given in (("--no-save-optim", optimizer), ("--no-save-rng", generators)):
        assert (f"note: {flag}:" in started) == (flag in resumed) == given
    assert second.megatron.save(8, 3.5) is None and [e[-2:] for e in job(kl=0).events if e[0] == "load"] == [
        (False, False)
    ]


@pytest.mark.parametrize(
    ("algorithm", "advice"),
    [
        (("grpo",), ", or resume with --rl-kl-loss-coef 0"),
        (("rloo", "--rl-kl-loss-coef", "0"), ", or resume with --rl-kl-reward-coef 0"),
        (("rloo",), ", or resume with --rl-kl-loss-coef 0 --rl-kl-reward-coef 0"),
        (("dpo", "--rl-kl-loss-coef", "0"), ""),
    ],
)
def test_the_advice_is_what_helps_this_algorithm(job, monkeypatch, capsys, algorithm, advice):
    """A reference that changed, is gone, was never digested, or has random weights: what reads it can be left out."""
    named = {"more": ("--rl-algorithm", *algorithm), "micro_batch_size": 2}
    job(**named).megatron.save(4, 2.5)
    with pytest.raises(ValueError, match="other weights") as other:
        job(initial=0.25, **named)
    shutil.rmtree("out")
    write_checkpoint("base", 500, 1.5)
    job(load="base", **named).megatron.save(4, 2.5)
    write_checkpoint("base", 500, 1.6)
    with pytest.raises(ValueError, match="has changed") as changed:
        job(**named)
    shutil.rmtree("base")
    with pytest.raises(ValueError, match="no checkpoint files") as gone:
        job(**named)
    shutil.rmtree("out")
    write_checkpoint("base", 500, 1.5)
    with monkeypatch.context() as patch:
        patch.setattr(reference_digest, "hash_file", unreadable)
        job(load="base", **named).megatron.save(4, 2.5)
    said = capsys.readouterr().out
    with pytest.raises(ValueError, match="could not be read .* digest") as unknown:
        job(**named)
    if "--rl-kl" in advice:
        kl = [word for pair in advice.split("resume with ")[1:] for word in pair.split()]
        shutil.rmtree("base")
        done = job(**{**named, "more": (*named["more"], *kl)})
        assert done.start.reference_path.endswith("base/iter_0000500"), "it is not touched"
        assert [e[1] for e in done.events if e[0] == "load"] == [4]
    assert str(other.value).endswith(f"resume with the same --seed and parallel sizes{advice}")
    assert str(changed.value).endswith(f"; restore the reference{advice}")
    assert str(gone.value).endswith(f": restore it{advice}")
    assert str(unknown.value).endswith(f"; start a new run{advice}")
    assert f"reference: start a new run from this checkpoint{advice}\n" in said


def test_a_random_reference_is_rebuilt_and_without_kl_not_needed(job):
    job(initial=0.5).megatron.save(4, 2.5)
    done = job(initial=0.5)
    assert ("reference", 0.5) in done.events and done.events[-1] == ("actor", 2.5, "optimizer", "resume")
    assert job(initial=0.25, kl=0).events[-1] == ("actor", 2.5, "optimizer", "resume")


def test_megatron_loading_something_else_is_noticed(job, monkeypatch):
    write_checkpoint("base", 500, 1.5)
    job(load="base").megatron.save(4, 2.5)
    monkeypatch.setattr(Megatron, "load_checkpoint", lambda self, *rest: (3, 0))
    with pytest.raises(ValueError, match="iteration 3 from .*out, expected 4"):
        job(kl=0)


def test_arguments_are_put_back_after_an_error(job):
    args = types.SimpleNamespace(load="a")
    with pytest.raises(KeyError), launch.overridden(args, {"load": "b", "absent_in_this_version": 1}):
        assert args.load == "b"
        raise KeyError
    assert vars(args) == {"load": "a"}


def test_state_is_on_disk_before_the_tracker_and_rank_0_writes_it(job, monkeypatch):
    write_checkpoint("base", 500, 1.5)
    done = job(load="base")
    with monkeypatch.context() as patch:
        patch.setattr(launch.ranks, "is_rank_0", lambda: False)
        launch.save_checkpoint(done.args, lambda *_: None, (4,), {})
    assert not files.has_state("out", 4)
    there = []
    saved = lambda iteration: there.append(files.has_state("out", iteration))  # noqa: E731
    launch.save_checkpoint(done.args, saved, (4,), {})
    launch.save_checkpoint(done.args, saved, (), {"iteration": 8})
    assert there == [True, True] and files.read_tracker("out") is None


def test_only_rank_0_gets_the_rows(job, monkeypatch):
    """The others wait for what it reads, and hear of the dock's sizes."""
    slots = {"slots": torch.tensor([0]), "values": torch.ones(1, 9)}
    epoch = {"number": 4, "groups": 1, "members": 1, "columns": {"a": slots}}
    monkeypatch.setattr(Loop, "state_dict", lambda self: {"dock": {"last_epoch": 4, "epochs": [epoch]}})
    job().megatron.save(4, 2.5)
    (state,) = [e[1] for e in job().events if e[0] == "state"]
    assert torch.equal(state["rows"]["epochs"][0]["columns"]["a"]["values"], torch.ones(1, 9))

    read = files.read_state
    with monkeypatch.context() as patch:  # as on another rank, which hears the state and reads nothing itself
        patch.setattr(files, "read_state", lambda *where: (read(*where)[0], None))
        (state,) = [e[1] for e in job().events if e[0] == "state"]
    outline = {"number": 4, "groups": 1, "members": 1, "held": ["a"]}
    assert "rows" not in state and state["dock"]["epochs"] == [outline]


def test_saving_before_the_start_is_refused(monkeypatch):
    monkeypatch.setattr(launch, "_launch", None)
    with pytest.raises(ValueError, match="before training has started"):
        launch.save_checkpoint(None, len, (1,), {})


def test_training_does_not_wait_for_the_digest(job, monkeypatch):
    """Hashing may take minutes: it ends before the first checkpoint that records it, not before the first step."""
    write_checkpoint("base", 500, 1.5)
    gate, hash_file = threading.Event(), reference_digest.hash_file
    monkeypatch.setattr(reference_digest, "hash_file", lambda path: gate.wait(20) and hash_file(path))
    done = job(load="base")
    assert done.events[-1] == ("actor", 1.5, "optimizer", "pretrained") and not gate.is_set()
    gate.set()
    done.megatron.save(4, 2.5)
    state, _ = files.read_state("out", 4)
    expected = CheckpointDigest("base/iter_0000500").result(10)
    assert state["reference"]["digest"] == expected and len(expected) == 64


def test_another_schedule_is_refused_before_the_model_is_built_but_where_a_flag_says_which(job, monkeypatch):
    """Every change that Megatron refuses: test_lr_schedule.py."""
    job().megatron.save(4, 2.5)
    assert job(lr_warmup_fraction=0.0).start.kind == "resume", "the same schedule in other words"
    for flag in ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"):
        assert job(train_iters=12, **{flag: True}).start.kind == "resume"
    monkeypatch.setattr(Megatron, "setup_model_and_optimizer", lambda *a, **k: pytest.fail("the model is being built"))
    for changes, message in (
        ({"train_iters": 12}, "iter_0000004 was .*: --train-iters was 8, now 12; --lr-decay-iters was 8, now 12. Give"),
        ({"lr": 2e-3}, "--lr was 0.001, now 0.002. Give --override-opt_param-scheduler to go on with the new values"),
        ({"global_batch_size": 8}, "--global-batch-size was 4, now 8.*--use-checkpoint-opt_param-scheduler to keep"),
    ):
        with pytest.raises(ValueError, match=message):
            job(**changes)


def test_the_critic_is_built_after_the_policy_and_saved_before_it(job, monkeypatch):
    """A policy that the warm-up has not trained yet is saved and loaded without the optimizer that never stepped."""
    from mindspeed_rl_plugin.launch import build_critic as critic

    heard = []

    def build(setup, positional, named, args, start, policy, absent):
        heard.append((start.kind, policy[0].weight[0, 0].item(), positional, named))
        return ("critic",), "somewhere"

    monkeypatch.setattr(critic, "build", build)
    monkeypatch.setattr(critic, "save", lambda *_: heard.append("saved"))
    monkeypatch.setattr(Loop, "state_dict", lambda self: {"cursor": 1, launch.TRAINED: False})
    ppo = ("--rl-advantage", "gae")
    done = job(more=ppo)
    actor = ("actor", 0.5, "optimizer", "fresh")
    assert done.events == ["before_model", "build", ("reference", 0.5), ("critic",), actor]
    done.args.no_save_optim = False
    policy = lambda *_: heard.append(done.args.no_save_optim)  # noqa: E731
    launch.save_checkpoint(done.args, policy, (3,), {})
    assert heard[-2:] == ["saved", True] and done.args.no_save_optim is False
    write_checkpoint("out", 3, 2.5)
    again = job(more=ppo, kl=0)
    assert again.events[3:5] == [("load", 3, "optimizer", False, True, False), ("step", 12)]
    assert heard[-1] == ("resume", 2.5, ("gpt",), {"model_provider_func": len})
    monkeypatch.setattr(Loop, "state_dict", lambda self: {"cursor": 1, launch.TRAINED: True})
    again.args.no_save_optim = False
    launch.save_checkpoint(again.args, lambda *_: heard.append(again.args.no_save_optim), (4,), {})
    assert heard[-2:] == ["saved", False]
