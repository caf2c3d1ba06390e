"""Resharder in a world of one rank, without a process group: what it moves, and what it refuses."""

from types import SimpleNamespace

import pytest
import torch
from plan_cases import LATENT, TINY
from reshard_reference import engine_weights, megatron_weights, random_weights

from mindspeed_rl_plugin.layout.layout import EngineParallel, ModelShape, Parallel
from mindspeed_rl_plugin.weights.resharder import Resharder
from mindspeed_rl_plugin.weights.verify import BrokenWeights, WeightMismatch

pytestmark = pytest.mark.quick
ONE = EngineParallel()
SHAPE = ModelShape("qwen3", 2, 32, 4, 2, 8, 48, 60, 64)


def trainer(shape=SHAPE, impl="local", seed=0):
    """Something that looks like Megatron's one model chunk."""
    params = megatron_weights(shape, Parallel(1), 0, random_weights(shape, seed), impl)
    live = lambda: list(params.items())  # noqa: E731
    return [SimpleNamespace(named_parameters=live, named_buffers=list, params=params)]


def engine(shape=SHAPE):
    return {n: torch.zeros_like(t) for n, t in engine_weights(shape, ONE, 0, random_weights(shape)).items()}


def resharder(shape=SHAPE, **options):
    return Resharder(shape, Parallel(1), ONE, rank=0, engine_dtype=torch.float32, **options)


@pytest.mark.parametrize("impl", ["local", "te"])
def test_weights_follow_the_trainer(impl):
    chunks, live, way = trainer(impl=impl), engine(), resharder(verify=True)
    first = way.to_engine(chunks, live, 3)
    expected = engine_weights(SHAPE, ONE, 0, random_weights(SHAPE))
    assert all(torch.equal(live[name], t) for name, t in expected.items())
    assert (first.sent, first.received) == (0, 0)
    assert first.copied == 4 * sum(t.numel() for t in random_weights(SHAPE).values())  # not the padding
    chunks[0].params["decoder.final_layernorm.weight"].add_(1)
    second = way.to_engine(chunks, live, 4)
    assert torch.equal(live["model.norm.weight"], expected["model.norm.weight"] + 1)
    assert first.digest == resharder(verify=True).to_engine(trainer(), live, 0).digest != second.digest


def test_a_wrong_value_in_the_engine_is_named(monkeypatch):
    way, live = resharder(verify=True), engine()
    way.to_engine(trainer(), live, 0)
    monkeypatch.setattr(way, "_carry_out", lambda *given, **named: None)
    live["model.layers.1.self_attn.qkv_proj.weight"][33] = 7  # row 1 of the keys
    with pytest.raises(WeightMismatch, match=r"1.self_attn.k_proj.weight \[0, 16\) of axis 0: engine ranks \[0\]"):
        way.to_engine(trainer(), live, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_never_reaches_the_engine(value):
    chunks, live, way = trainer(), engine(), resharder()
    chunks[0].params["decoder.layers.1.mlp.linear_fc1.weight"][60, 3] = value
    where = r"layers.1.mlp.linear_fc1.weight of trainer rank 0 .* \(.*1.mlp.gate_proj.weight \[0, 48\), .*up_proj"
    with pytest.raises(BrokenWeights, match=where):
        way.to_engine(chunks, live, 7)
    assert not any(t.any() for t in live.values())
    with pytest.raises(BrokenWeights, match="NaN or infinity .*checkpoint"):
        way.refuse_broken(chunks)


def test_a_bit_that_changed_during_generation_is_named():
    """Also one that the engine's narrower dtype, and so its digest, does not see."""
    chunks, live = trainer(), {name: t.bfloat16() for name, t in engine().items()}
    options = dict(rank=0, engine_dtype=torch.bfloat16, verify=True)
    way = Resharder(SHAPE, Parallel(1), ONE, **options)
    way.check_return(chunks)  # nothing was exported yet
    before = way.to_engine(chunks, live, 0).digest
    way.check_return(chunks)
    weight = chunks[0].params["decoder.layers.0.mlp.linear_fc2.weight"]
    weight.view(torch.int32)[2, 5] ^= 1
    assert Resharder(SHAPE, Parallel(1), ONE, **options).to_engine(chunks, live, 0).digest == before
    with pytest.raises(WeightMismatch, match=r"fc2.weight of .* rank 0 \(.*0.mlp.down_proj.weight \[0, 48\)\) has"):
        way.check_return(chunks)
    way.verify = False
    way.to_engine(chunks, live, 1)
    weight[0, 0] += 1
    way.check_return(chunks)  # not asked for


def test_differences_of_the_live_models_are_listed():
    live = engine()
    del live["model.norm.weight"]
    live["model.layers.0.mlp.gate_up_proj.weight"] = torch.zeros(3, 3)
    live["model.layers.0.mlp.experts.w13"] = torch.zeros(1)
    with pytest.raises(ValueError) as caught:
        resharder().to_engine(trainer(), live, 0)
    assert str(caught.value).splitlines()[1:] == [
        "  model.norm.weight (32,) is missing",
        "  model.layers.0.mlp.experts.w13 (1,) is unknown",
        "  model.layers.0.mlp.gate_up_proj.weight has shape (3, 3), not (96, 32)",
    ]
    chunks = trainer()
    del chunks[0].params["decoder.layers.1.mlp.linear_fc2.weight"]
    with pytest.raises(ValueError, match=r"Megatron's parameters on rank 0 .*\n.*1.mlp.linear_fc2.weight .* missing"):
        resharder().to_engine(chunks, engine(), 0)


V3 = ModelShape("deepseek_v3", layers=3, vocab=60, padded_vocab=64, dense_layers=(0,), shared_ffn=16, **TINY | LATENT)


@pytest.mark.parametrize("mode", ["stream", "allgather"])
def test_an_engine_that_keeps_the_routers_bias_in_its_own_dtype_gets_it_narrowed(mode):
    """As vLLM 0.9 keeps it, and vllm-ascend after it."""
    weights = random_weights(V3)
    chunks = trainer(V3)
    narrow = {name: t.bfloat16() for name, t in weights.items()}
    expected = {n: t.bfloat16() for n, t in engine_weights(V3, ONE, 0, narrow).items()}
    biases = [name for name in expected if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2 and not torch.equal(weights[biases[0]], weights[biases[0]].bfloat16().float())
    live = {name: torch.zeros_like(t) for name, t in expected.items()}
    options = dict(rank=0, engine_dtype=torch.bfloat16, mode=mode, verify=True)
    way = Resharder(V3, Parallel(1), ONE, **options)
    done = way.to_engine(chunks, live, 0)
    assert all(live[name].dtype == t.dtype and torch.equal(live[name], t) for name, t in expected.items())
    wide = {name: t.float() if name in biases else torch.zeros_like(t) for name, t in expected.items()}
    assert Resharder(V3, Parallel(1), ONE, **options).to_engine(chunks, wide, 0).digest != done.digest
    with pytest.raises(ValueError, match="_bias is torch.float16, not torch.bfloat16 or torch.float32"):
        way.to_engine(chunks, live | {biases[0]: live[biases[0]].half()}, 1)
