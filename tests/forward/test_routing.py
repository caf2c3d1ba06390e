"""Log-probs route tokens to experts as the update does, bit for bit, for many experts per token."""

import pytest
import torch
from megatron.core.transformer.moe import router

from mindspeed_rl_plugin.forward import schedule


@pytest.mark.parametrize(
    "options", [{}, dict(use_pre_softmax=True), dict(score_function="sigmoid", expert_bias=torch.arange(128.0) / 128)]
)
def test_weights_of_experts_are_those_of_training(options):
    make = torch.Generator().manual_seed(1)
    logits = torch.randn(500, 128, generator=make)
    original = router.topk_routing_with_score_function
    expected, places = original(logits, 8, **options)
    with torch.no_grad(), schedule._routed_as_in_training():
        weights, chosen = router.topk_routing_with_score_function(logits, 8, **options)
        assert not torch.is_grad_enabled() and not weights.requires_grad
    assert torch.equal(weights, expected) and torch.equal(chosen, places)
    assert router.topk_routing_with_score_function is original
    with torch.no_grad():
        other, chosen = original(logits, 8, **options)
    assert torch.equal(chosen, places) and (other - expected).abs().max() < 1e-6  # rounding only, but not always equal
