"""Megatron's trainer offers what the Protocol of a trainer says, under the same names, with the same parameters."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

from mindspeed_rl_plugin.loop.megatron_trainer import MegatronTrainer
from mindspeed_rl_plugin.stages.stage import StageSpec
from mindspeed_rl_plugin.stages.trainer import Trainer
from mindspeed_rl_plugin.stages.update import CriticUpdate, PairUpdate, TrainStep

MEMBERS = sorted(name for name in vars(Trainer) if not name.startswith("_"))


def test_the_protocol_is_what_the_page_says() -> None:
    assert MEMBERS == ["forward", "publish", "refuse_broken", "step", "weights"]


@pytest.mark.parametrize("name", MEMBERS)
def test_megatron_conforms(name: str) -> None:
    asked, offered = vars(Trainer)[name], vars(MegatronTrainer)[name]
    assert isinstance(asked, property) == isinstance(offered, property)
    if not isinstance(asked, property):
        shapes = [
            [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()] for f in (asked, offered)
        ]
        assert shapes[0] == shapes[1]


class Step:
    """Of a policy, a critic or pairs."""

    def prepare(self, *_, **__) -> None: ...

    def run(self, function, args, kwargs) -> tuple:
        return function(*args, **kwargs)

    def metrics(self) -> dict:
        return {}


@pytest.mark.parametrize("whose", ["policy", "critic", "pairs"])
def test_the_learning_rate_is_that_of_the_step_and_not_of_the_next(whose: str) -> None:
    rates = {name: SimpleNamespace(param_groups=[{"lr": lr}]) for name, lr in (("lr", 1.0), ("critic/lr", 2.0))}

    def train_step(model, optimizer, scheduler, config) -> tuple:
        optimizer.param_groups[0]["lr"] += 10.0
        return (None,) * 6

    call = TrainStep(train_step, (None, None, None, rates["lr"], None, None), {})
    policy = MegatronTrainer([], None, Step(), None)
    if whose == "critic":
        critic = SimpleNamespace(model=None, optimizer=rates["critic/lr"], scheduler=None, config=None)
        given = StageSpec("update", ("tokens",), (), unit="step", resource="trainer"), None, 9.0, policy, True
        update = CriticUpdate(*given, critic=critic, value_step=Step(), warmup=0, global_batch=1)
    else:
        update = PairUpdate(None, 9.0, Step())
    if whose == "policy":
        _, metrics = policy.step([], call, measured=(), version=0)
    else:
        _, metrics = update.optimize([], call, done=0, version=0)
    assert metrics == {"lr": 1.0} | ({"critic/lr": 2.0} if whose == "critic" else {})
