"""The plan of a reshard: the paper's numbers, and bytes as the executor's plan has them."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import cases, moved, slices

from mindspeed_rl_plugin.layout.layout import ModelShape, canonical_tensors
from mindspeed_rl_plugin.layout.transfer_plan import make_plan
from mindspeed_rl_plugin.tools.layout_args import engine_layout_of, model_shape, train_layout
from mindspeed_rl_plugin.tools.plan.estimate import PlannedRun, estimate
from mindspeed_rl_plugin.tools.plan.flow import FlowCells

GB = 1e9
MACHINE = dict(far=0.3 * GB, host=50 * GB)


def run(model, train, generate, world=None):
    parallel = train_layout(train, world)
    engine, engines = engine_layout_of(generate, parallel.world)
    return estimate(PlannedRun(model_shape(model, parallel.tp), parallel, **MACHINE), engine, engines)


def test_figure_10_of_the_paper():
    """Qwen2.5-32B, TP8DP2 to TP4DP4: 8 GB of training weights released a device."""
    planned = f = run("qwen2.5-32b", "tp8,dp2", "tp4,dp4")
    held = f.policy.weights
    assert held / GB == pytest.approx(8.19, abs=0.005) and held / 2**30 == pytest.approx(7.63, abs=0.005)
    assert planned.redundant / planned.gdp == pytest.approx(8.19 * GB, rel=1e-3)
    # FACTS: 57.3 GB received a rank by a whole allgather, 14.3 by what is lacking
    received = {mode: flow.received.mean() / GB for mode, flow in planned.flows.items()}
    assert received["allgather"] == pytest.approx(57.3, abs=0.05)
    assert received["stream"] == pytest.approx(14.3, abs=0.05)
    assert f.peak("stream") == held + f.generate + 2 * (256 << 20)
    assert f.peak("allgather") == held + f.generate + f.whole
    assert f.policy.optimizer == pytest.approx(12 * held / 2 / 2, rel=1e-3)  # a parameter's 12 bytes over two replicas
    assert f.offloaded == held + f.policy.optimizer, "gradients are freed, not copied"


@pytest.mark.parametrize("train", ["tp2,pp2,dp2", "tp1,pp1,dp1"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_takes_what_its_parameters_take(train, tied):
    """Counted by hand: the policy's, less the output layer of an own, and one value a hidden number on the last stage.
    It is gone during generation."""
    hidden, ffn, vocab, layers = 8, 12, 64, 4
    shape = ModelShape("qwen2", layers, hidden, 2, 2, 4, ffn, vocab, vocab, tied)
    parallel = train_layout(train, None)
    engine, engines = engine_layout_of("tp1", parallel.world)
    plain, planned = (estimate(PlannedRun(shape, parallel, critic=critic), engine, engines) for critic in (False, True))
    attention = hidden * (3 * hidden + hidden) // parallel.tp + 3 * hidden // parallel.tp
    layer = attention + 3 * hidden * ffn // parallel.tp + 2 * hidden
    rows = vocab * hidden // parallel.tp
    body = layers // parallel.pp * layer
    # Alone the policy is largest on the last stage, for its head and norm; with a critic, which has no such head, both
    # together are on the first, for its embedding.
    alone = body + (rows if parallel.pp > 1 or tied else 2 * rows) + hidden
    policy = alone if parallel.pp == 1 else body + rows
    critic = body + rows + (2 * hidden if parallel.pp == 1 else 0)
    each = 2 + 4 + 12 // parallel.dp
    assert plain.update == each * alone and plain.critic.device == 0
    assert planned.critic.weights == 2 * critic and planned.critic.device == each * critic
    assert planned.update == each * (policy + critic) == planned.offloaded + 4 * (policy + critic)
    assert planned.generate == plain.generate


def test_a_float32_weight_is_its_own_main_parameter():
    """Adam's two moments beside it, and no third copy; half the trainer's bytes where the engine has bfloat16."""
    shape, parallel = model_shape("qwen2.5-0.5b", 2), train_layout("tp2,dp1", None)
    engine, engines = engine_layout_of("tp1", 2)
    two, four, mixed = (
        estimate(PlannedRun(shape, parallel, itemsize=n, engine_itemsize=m), engine, engines)
        for n, m in ((2, 2), (4, 4), (4, 2))
    )
    parameters = two.policy.weights // 2
    assert [x.policy.optimizer for x in (two, four, mixed)] == [12 * parameters, *[8 * parameters] * 2]
    assert mixed.policy.weights == 4 * parameters
    assert mixed.generate == two.generate and mixed.whole == two.whole
    for mode in ("stream", "allgather"):
        received = [planned.flows[mode].received.sum() for planned in (two, four, mixed)]
        assert received[2] == received[0] == received[1] / 2


def test_equation_3_of_the_paper():
    """Qwen3-MoE-30B: more than 60 GB."""
    planned = run("qwen3-30b-a3b", "tp4,dp2,ep8,etp1", "tp1,ep8")
    assert planned.redundant / GB == pytest.approx(64.1, abs=0.05)
    assert planned.weights.sum() / 2 == pytest.approx(30.53e9, rel=1e-3)
    stream, whole = planned.flows["stream"], planned.flows["allgather"]
    assert whole.received.sum() > 20 * stream.received.sum()


def test_engines_on_ranks_of_their_own():
    """Nothing is released where nothing is shared, and every byte of the engine's weights travels."""
    parallel = train_layout("tp4,dp2", None)
    engine, engines = engine_layout_of("tp2", 8)
    run = PlannedRun(model_shape("qwen3-8b", 1), parallel)
    planned = f = estimate(run, engine, engines, first=8)
    assert not f.shared
    assert f.peak("stream") == f.generate + (256 << 20)  # they send nothing
    received = planned.flows["stream"].received
    assert not received[:8].any() and received[8:].min() > 0.999 * f.generate
    overlap = estimate(run, engine, engines, first=4)
    assert overlap.peak("stream") == f.policy.weights + f.generate + overlap.in_flight


def test_671_b_parameters_in_seconds():
    begin = time.process_time()
    planned = run("deepseek-r1", "tp4,pp6,ep16,etp1,first11", "tp2,ep64,dp6", world=384)
    assert time.process_time() - begin < 20
    assert planned.weights.sum() / 2 == pytest.approx(671.0e9, rel=1e-3)
    stream, whole = planned.flows["stream"], planned.flows["allgather"]
    assert whole.received.sum() > 20 * stream.received.sum()
    assert stream.received.max() <= planned.generate
    assert planned.seconds("stream")[1] == max(stream.node_in.max(), stream.node_out.max()) / (0.3 * GB)


@settings(max_examples=40, deadline=None)
@given(cases(world_limit=256), st.sampled_from([1, 2, 4, 8]))
def test_bytes_are_those_of_the_executors_plan(case, node_size):
    case = case._replace(engine=replace(case.engine, own_head=False))  # a plan takes the engine's default
    sources, destinations, tensors = case.sources(), case.destinations(), canonical_tensors(case.shape)
    cells = FlowCells(sources, destinations, tensors, itemsize=2, node_size=node_size)
    flow = cells.flow()
    made = make_plan(sources, destinations, tensors, itemsize=2, bucket_bytes=1 << 20, node_size=node_size)
    for rank in {*sources, *destinations}:
        assert flow.received[rank] == moved(made, "destination", rank), rank
        assert flow.received_far[rank] == moved(made, "destination", rank, node_size), rank
    assert flow.sent.sum() == pytest.approx(flow.received.sum())
    assert flow.sent_far.sum() == pytest.approx(flow.received_far.sum())
    assert flow.node_in.sum() == flow.received_far.sum() == pytest.approx(flow.node_out.sum())
    whole = cells.flow(everything=True)
    total = sum(t.slices * t.slice_bytes(2) for t in tensors.values())
    for rank in destinations:
        held = slices(sources.get(rank, {}))
        assert whole.received[rank] == total - sum(tensors[name].slice_bytes(2) for name, _ in held)
    assert not np.any(np.delete(whole.received, list(destinations)))
