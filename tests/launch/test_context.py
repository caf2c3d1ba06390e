"""What context parallelism goes with, and what it is refused with before anything is built."""

import dataclasses
import sys
from types import ModuleType, SimpleNamespace

import pytest

from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.launch import upstream_checks

DOT_PRODUCT = "megatron.core.transformer.dot_product_attention"
MINDSPEED = {"pre_tockens": 65536, "attention_mask_type": "causal", "context_parallel_algo": "megatron_cp_algo"}


def problems(*, packed=False, **changes):
    sizes = {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True, "seq_length": 64}
    args = SimpleNamespace(**{**sizes, "transformer_impl": "transformer_engine", **changes})
    config = RLConfig()
    forward = dataclasses.replace(config.forward, pack_sequences=packed)
    return list(upstream_checks.context_parallel(args, dataclasses.replace(config, forward=forward)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"seq_length": 68, "sequence_parallel": False},
        {"multi_latent_attention": True},
        MINDSPEED,
        MINDSPEED | {"context_parallel_algo": "ulysses_cp_algo"},
        MINDSPEED | {"context_parallel_algo": "hybrid_cp_algo"},
        {"context_parallel_size": 1, "seq_length": 63, "packed": True, "transformer_impl": "local"},
    ],
    ids=str,
)
def test_what_goes_with_it(changes):
    assert problems(**changes) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_length": 68}, "--seq-length 68 is not a multiple of 8, which --context-parallel-size 2"),
        ({"seq_length": 66, "sequence_parallel": False}, "--seq-length 66 is not a multiple of 4"),
        ({"packed": True}, "--rl-pack-sequences: --context-parallel-size 2"),
        (MINDSPEED | {"context_parallel_algo": "adaptive_cp_algo"}, "--context-parallel-algo adaptive_cp_algo"),
        (MINDSPEED | {"context_parallel_algo": "hybrid_adaptive_cp_algo"}, "one of megatron_cp_algo, ulysses_cp"),
        (MINDSPEED | {"attention_mask_type": "general"}, "--attention-mask-type general"),
        (MINDSPEED | {"multi_latent_attention": True}, "--context-parallel-size 2 with --multi-latent-attention"),
        ({"hybrid_context_parallel": True}, "--hybrid-context-parallel"),
        ({"transformer_impl": "local"}, "--transformer-impl transformer_engine"),
    ],
    ids=str,
)
def test_what_it_is_refused_with(monkeypatch, changes, message):
    monkeypatch.delitem(sys.modules, DOT_PRODUCT, raising=False)
    (found,) = problems(**changes)
    assert message in found


def test_local_attention_that_is_not_megatrons_own_may_know_it(monkeypatch):
    """MindSpeed's is a class of its own in the place of Megatron's."""
    module = ModuleType(DOT_PRODUCT)
    monkeypatch.setitem(sys.modules, DOT_PRODUCT, module)
    for where, count in ((DOT_PRODUCT, 1), ("mindspeed.core.context_parallel.adaptor", 0)):

        def init(self):
            pass

        init.__module__ = where
        module.DotProductAttention = type("DotProductAttention", (), {"__init__": init})
        assert len(problems(transformer_impl="local")) == count
