"""Log-probs route tokens to experts as the update does, bit for bit, for many experts per token, and count none."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe import router

from mindspeed_rl_plugin.forward import pipeline


@pytest.mark.parametrize(
    "options", [{}, dict(use_pre_softmax=True), dict(score_function="sigmoid", expert_bias=torch.arange(128.0) / 128)]
)
def test_weights_of_experts_are_those_of_training(options):
    make = torch.Generator().manual_seed(1)
    logits = torch.randn(500, 128, generator=make)
    original = router.topk_routing_with_score_function
    expected, places = original(logits, 8, **options)
    with torch.no_grad(), pipeline._routed_as_in_training():
        weights, chosen = router.topk_routing_with_score_function(logits, 8, **options)
        assert not torch.is_grad_enabled() and not weights.requires_grad
    assert torch.equal(weights, expected) and torch.equal(chosen, places)
    assert router.topk_routing_with_score_function is original
    with torch.no_grad():
        other, chosen = original(logits, 8, **options)
    assert torch.equal(chosen, places) and (other - expected).abs().max() < 1e-6  # rounding only, but not always equal


class Overlapped(torch.nn.Module):
    """A layer that takes gradients of its own accord, as MindSpeed's do, and a router that counts where they are."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("local_tokens_per_expert", torch.tensor([3.0, 5.0]))
        self.config = SimpleNamespace(timers=None, param_sync_func=None)

    def forward(self):
        with torch.enable_grad():
            self.local_tokens_per_expert += torch.is_grad_enabled()


def test_only_an_update_counts_tokens_of_experts(monkeypatch):
    """By these counts it moves the bias of the router."""
    layer, passes = Overlapped(), []

    def forward(model, **rest):
        passes.extend(chunk() for chunk in model)
        assert layer.local_tokens_per_expert.tolist() == [4, 6]
        return []

    monkeypatch.setattr(pipeline.schedules, "get_forward_backward_func", lambda: forward)
    monkeypatch.setattr(pipeline, "ends_here", lambda model: True)
    settings = SimpleNamespace(seq_length=1, micro_batch_size=1)
    assert pipeline.run_forward_only([layer], [], settings, collect=lambda *_: None) == [] and passes == [None]
    assert layer.local_tokens_per_expert.tolist() == [3, 5]
