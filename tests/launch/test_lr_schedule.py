"""The schedule check against Megatron's own scheduler: it refuses exactly what Megatron would refuse later."""

import functools
import json
import types
from pathlib import Path

import pytest
from commands import ended

from mindspeed_rl_plugin.launch import lr_schedule as schedule

record = functools.partial(schedule.record, critic=False)
BASE = dict(train_iters=100, lr_decay_iters=None, lr_warmup_iters=10, lr_warmup_fraction=None, global_batch_size=4)
BASE |= dict(lr=1e-3, min_lr=1e-5, lr_decay_style="cosine", weight_decay_incr_style="constant")
BASE |= dict(start_weight_decay=0.01, end_weight_decay=0.01)
BASE |= dict(override_opt_param_scheduler=False, use_checkpoint_opt_param_scheduler=False)

CHANGES = [
    {},
    {"train_iters": 120},
    {"train_iters": 120, "lr_decay_iters": 100},
    {"lr_decay_iters": 100},
    {"lr_decay_iters": 99},
    {"lr_warmup_iters": 11},
    {"lr_warmup_iters": 0, "lr_warmup_fraction": 0.1},
    {"lr_warmup_fraction": 0.2},
    {"global_batch_size": 8},
    {"global_batch_size": 8, "train_iters": 50, "lr_warmup_iters": 5},
    {"lr": 2e-3},
    {"min_lr": 0.0},
    {"lr_decay_style": "linear"},
    {"start_weight_decay": 0.02, "end_weight_decay": 0.02},
    {"weight_decay_incr_style": "linear"},
    {"train_iters": 120, "override_opt_param_scheduler": True},
    {"train_iters": 120, "use_checkpoint_opt_param_scheduler": True},
]


CONSTANT = {**BASE, "lr_decay_style": "constant"}
LONGER = {**CONSTANT, "train_iters": 120}

# resumed with -> whether a constant schedule is the same at every step
FROM_CONSTANT = [
    ({}, True),
    ({"train_iters": 120}, True),
    ({"min_lr": 0.0, "lr_decay_iters": 7}, True),
    ({"lr": 2e-3, "train_iters": 120}, False),
    ({"lr_warmup_iters": 11}, False),
    ({"lr_decay_style": "cosine"}, False),
    ({"start_weight_decay": 0.02, "end_weight_decay": 0.02}, False),
    ({"train_iters": 120, "end_weight_decay": 0.02, "weight_decay_incr_style": "linear"}, False),
]


@pytest.mark.parametrize(("change", "same"), FROM_CONSTANT, ids=str)
def test_a_constant_schedule_may_go_on_for_longer(change, same):
    recorded = record(types.SimpleNamespace(**CONSTANT))
    assert (problem(recorded, types.SimpleNamespace(**{**CONSTANT, **change})) is None) == same


@pytest.fixture(scope="module")
def megatrons(warm_python):
    """For each change: the state that Megatron saves before it, and whether it refuses the resume with it; then the
    same for a longer constant schedule, without and with what settles it."""
    pairs = [[BASE, {**BASE, **change}] for change in CHANGES]
    more = schedule.settled(record(types.SimpleNamespace(**CONSTANT)), types.SimpleNamespace(**LONGER))
    pairs += [[CONSTANT, LONGER], [CONSTANT, {**LONGER, **more}]]
    worker = Path(__file__).with_name("lr_schedule_worker.py")
    return json.loads(ended(warm_python, worker, input=json.dumps(pairs)).stdout.splitlines()[-1])


@pytest.mark.parametrize("number", range(len(CHANGES)), ids=lambda n: str(CHANGES[n]))
def test_agrees_with_megatron(number, megatrons):
    saved, refused = megatrons[number]
    recorded = record(types.SimpleNamespace(**BASE))
    assert schedule.compared(recorded).items() <= saved.items()
    assert saved.keys() - schedule.compared(recorded) == {"num_steps"}, "all of it is compared"
    assert refused == (problem(recorded, types.SimpleNamespace(**{**BASE, **CHANGES[number]})) is not None)


def test_megatron_takes_a_longer_constant_schedule_once_it_is_settled(megatrons):
    assert [refused for _, refused in megatrons[len(CHANGES) :]] == [True, False]
    assert problem(None, types.SimpleNamespace(**BASE)) is None, "a state without a record is left to Megatron"


def test_a_changed_batch_is_said_where_the_schedule_counts_by_it():
    recorded = record(types.SimpleNamespace(**BASE))
    message = schedule.remark(recorded, types.SimpleNamespace(**{**BASE, "global_batch_size": 16}), 6)
    assert "was 4, now 16" in message and "6 iterations" in message and "as 1.5 of 16 seq" in message
    assert schedule.remark(recorded, types.SimpleNamespace(**BASE), 6) is None
    flat = types.SimpleNamespace(**{**CONSTANT, "global_batch_size": 16, "lr_warmup_iters": 0})
    assert schedule.remark(recorded, flat, 6) is None and schedule.remark(None, flat, 6) is None


class Optimizer:
    """Loads as core 0.19 does: it finds a saved group by its rates, and takes all of it but the parameters."""

    def __init__(self, lr, betas):
        kinds = [(0.0, lr), (1.0, lr), (1.0, 10 * lr)]  # the last is of --decoupled-lr, from core 0.16 on
        self.param_groups = [
            {"wd_mult": wd, "max_lr": peak, "min_lr": 0.0, "betas": betas, "step": int(lr), "params": n}
            for n, (wd, peak) in enumerate(kinds)
        ]

    def load_state_dict(self, state):
        saved = {(g["wd_mult"], g["max_lr"]): g for g in state.get("optimizer", state)["param_groups"]}
        groups = self.param_groups
        self.param_groups = [{**saved[g["wd_mult"], g["max_lr"]], "params": g["params"]} for g in groups]


@pytest.mark.parametrize("nested", [True, False], ids=["mixed precision", "fp32"])
@pytest.mark.parametrize(("flag", "lr"), [("override", 2.0), ("use_checkpoint", 1.0)])
def test_a_checkpoint_of_other_rates_is_loaded_with_the_flags_or_with_its_own(flag, lr, nested):
    first, second = Optimizer(2.0, (0.9, 0.5)), Optimizer(2.0, (0.9, 0.5))
    saved = {"param_groups": Optimizer(1.0, (0.8, 0.8)).param_groups}
    saved["param_groups"].insert(0, saved["param_groups"].pop(1))
    scheduler = types.SimpleNamespace(steps=[], **{f"{flag}_opt_param_scheduler": True})
    scheduler.step = scheduler.steps.append
    with schedule.loading(types.SimpleNamespace(chained_optimizers=[first, second]), scheduler):
        first.load_state_dict({"optimizer": saved} if nested else saved)
    assert [g["max_lr"] for g in first.param_groups] == [lr, lr, 10 * lr]
    assert {g["betas"] for g in first.param_groups} == {(0.9, 0.5) if lr == 2 else (0.8, 0.8)}
    assert [g["params"] for g in first.param_groups] == [0, 1, 2] and {g["step"] for g in first.param_groups} == {1}
    assert scheduler.steps == [0] and [g["max_lr"] for g in second.param_groups] == [2.0, 2.0, 20.0]
    assert "load_state_dict" not in vars(first) | vars(second), "as it was"
    with pytest.raises(AssertionError), schedule.loading(None, None):  # of weights alone
        raise AssertionError


def test_what_stands_in_the_optimizer_alone_is_compared_too():
    given = dict(adam_beta2=0.95, decoupled_lr=None, **BASE)
    recorded = record(types.SimpleNamespace(**given))
    assert "--adam-beta2 was 0.95, now 0.99." in problem(
        recorded, types.SimpleNamespace(**given | {"adam_beta2": 0.99})
    )
    assert "--decoupled-lr was None" in problem(recorded, types.SimpleNamespace(**given | {"decoupled_lr": 1e-4}))
    older = {name: value for name, value in recorded.items() if name in BASE}
    assert problem(older, types.SimpleNamespace(**given)) is None, "a checkpoint of a former version"


def test_a_schedule_that_is_kept_is_recorded_and_one_that_was_not_saved_is_not_kept():
    recorded = record(types.SimpleNamespace(**BASE))
    kept = types.SimpleNamespace(**BASE | {"lr": 2e-3, "use_checkpoint_opt_param_scheduler": True})
    assert record(kept, recorded) == recorded != record(kept)
    message = problem(recorded, kept, {"no_load_optim": True})
    assert "--lr was 0.001, now 0.002. Give --override-opt_param-scheduler" in message and "could keep" in message
    other = types.SimpleNamespace(**BASE | {"lr": 2e-3, "override_opt_param_scheduler": True})
    assert problem(recorded, other, {"no_load_optim": True}) is None


def test_a_critics_rate_is_compared_in_a_run_with_a_critic():
    recorded = record(types.SimpleNamespace(**BASE, rl_critic_lr=1e-5), critic=True)
    other = types.SimpleNamespace(**BASE, rl_critic_lr=2e-5)
    assert "--rl-critic-lr was 1e-05, now 2e-05" in problem(recorded, other, critic=True)
    assert problem(recorded, other) is None, "whose critic is gone"


def problem(recorded, args, absent=(), critic=False):
    try:
        schedule.check(recorded, args, "out/iter_0000004", absent, critic=critic)
    except ValueError as error:
        return str(error)
