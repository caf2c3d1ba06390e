"""What the flags make of the engine's options."""

from types import SimpleNamespace

import pytest
import torch

from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.engine.response_kind import ONE_TURN
from mindspeed_rl_plugin.loop import engine_options as engine


@pytest.mark.parametrize(
    "given, where, share",
    [
        (None, "host", None),  # measured when the engine is built
        (None, "accelerator", 0.6),  # reward models come later, beside the engine
        (0.3, "accelerator", 0.3),
        (0.3, "host", 0.3),
    ],
)
def test_the_share_of_the_device(monkeypatch, given, where, share):
    monkeypatch.setattr(engine, "needs_tokenizer", lambda stop: False)
    config = RLConfig()
    rollout = SimpleNamespace(**{**vars(config.rollout), "device_memory_utilization": given})
    reward = SimpleNamespace(reward_model_device=where)
    inputs = SimpleNamespace(
        config=SimpleNamespace(
            rollout=rollout, data=config.data, reward=reward, monitor=config.monitor, forward=config.forward
        ),
        engine_config={},
        end_tokens=(),
        tokenizer_path=None,
        responses=ONE_TURN,
    )
    assert engine.options(inputs, torch.bfloat16).memory_utilization == share
