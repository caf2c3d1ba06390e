"""Megatron's trainer offers what the Protocol of a trainer says, under the same names, with the same parameters."""

import inspect
from types import SimpleNamespace

import pytest
from stage_context import context_of

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.loop.megatron_trainer import MegatronTrainer
from mindspeed_rl_plugin.stages import update
from mindspeed_rl_plugin.stages.trainer import Trainer

MEMBERS = sorted(name for name in vars(Trainer) if not name.startswith("_"))


@pytest.mark.parametrize("name", MEMBERS)
def test_megatron_conforms(name: str) -> None:
    asked, offered = vars(Trainer)[name], vars(MegatronTrainer)[name]
    assert isinstance(asked, property) == isinstance(offered, property)
    if not isinstance(asked, property):
        shapes = [
            [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()] for f in (asked, offered)
        ]
        assert shapes[0] == shapes[1]


@pytest.mark.parametrize("whose", ["policy", "critic"])
def test_the_learning_rate_is_that_of_the_step_and_not_of_the_next(whose: str) -> None:
    one, two = (SimpleNamespace(param_groups=[{"lr": lr}]) for lr in (1.0, 2.0))

    def train_step(model, optimizer, *_) -> tuple:
        optimizer.param_groups[0]["lr"] += 10.0
        return (None,) * 6

    run = lambda function, args, kwargs: function(*args, **kwargs)  # noqa: E731
    step = SimpleNamespace(prepare=lambda *_, **__: None, run=run, metrics=dict)
    critic = SimpleNamespace(model=None, optimizer=two, scheduler=None, config=None)
    context = context_of(trainer=MegatronTrainer([], None, step), critic=critic)
    spec = update.spec(resolve(AlgorithmConfig(algorithm="ppo" if whose == "critic" else "dpo")))
    stage = update.CriticUpdate(spec, context, step) if whose == "critic" else update.Update(spec, context)
    call = update.TrainStep(train_step, (None, None, None, one, None, None), {})
    _, metrics = stage.optimize([], call, done=0, version=0)
    assert metrics == {"lr": 1.0} | ({"critic/lr": 2.0} if whose == "critic" else {})
