"""Megatron's trainer offers what the Protocol of a trainer says, under the same names, with the same parameters."""

from __future__ import annotations

import inspect

import pytest

from mindspeed_rl_plugin.loop.megatron_trainer import MegatronTrainer
from mindspeed_rl_plugin.stages.trainer import Trainer

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
