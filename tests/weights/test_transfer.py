"""Both transfers over random layouts, ranks as threads: weights, bytes, balance, and the memory that they take."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from queue import Queue
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import cases, moved
from reshard_reference import random_weights

from mindspeed_rl_plugin.device import StorageMeter
from mindspeed_rl_plugin.layout.layout import (
    EngineParallel,
    ModelShape,
    canonical_tensors,
    engine_layout,
    megatron_layout,
)
from mindspeed_rl_plugin.layout.transfer_plan import make_plan
from mindspeed_rl_plugin.tools.layout_args import engine_layout_of, train_layout
from mindspeed_rl_plugin.tools.plan.estimate import PlannedRun, estimate
from mindspeed_rl_plugin.tools.plan.flow import FlowCells
from mindspeed_rl_plugin.weights.resharder import MODES
from mindspeed_rl_plugin.weights.transfer import stream


class Channel:
    """Messages between threads: sent as they are when they are posted, received in the wait."""

    def __init__(self, rank, mail):
        self.rank, self._mail, self.received = rank, mail, 0

    def post(self, what, sends, receives):
        for tensor, peer, tag in sends:
            self._box(self.rank, peer, tag).put(tensor.clone())
        self.received += sum(t.nbytes for t, _, _ in receives)
        return SimpleNamespace(wait=lambda: [self._take(*message) for message in receives])

    def _take(self, tensor, peer, tag):
        tensor.copy_(self._box(peer, self.rank, tag).get(timeout=60))

    def _box(self, *message):
        return self._mail.setdefault(message, Queue())  # atomic, unlike a defaultdict


def together(work, ranks):
    """`work(rank, its channel)` on all ranks at once."""
    mail = {}
    with ThreadPoolExecutor(len(ranks)) as pool:
        for done in [pool.submit(work, rank, Channel(rank, mail)) for rank in ranks]:
            done.result(timeout=120)


@settings(max_examples=40, deadline=None)
@given(cases(world_limit=8), st.booleans(), st.sampled_from([1, 2, 8]))
def test_both_transfers_write_the_engines_weights(case, narrow, node_size):
    """narrow: the engine's dtype is half as wide as the trainer's, in which weights then travel. What is wide stays."""
    sources, wanted, tensors = case.sources(), case.destinations(), canonical_tensors(case.shape)
    weights = random_weights(case.shape)
    live, dtype = case.trainer(weights), torch.bfloat16 if narrow else torch.float32
    kept = {n: t if tensors[n].wide else t.to(dtype) for n, t in weights.items()}
    sizes = dict(itemsize=dtype.itemsize, node_size=node_size)
    flow = FlowCells(sources, wanted, tensors, **sizes).flow(everything=True)
    plans = {}

    def run(make, transfer, rank, channel):
        options = dict(channel=channel, dtype=dtype, device=torch.device("cpu"))
        plan = make(sources, wanted, tensors, bucket_bytes=1024, rank=rank, **sizes)
        transfer(plan, live.get(rank, {}), engines.get(rank, {}), **options)
        gather = plan if transfer is stream else plan.gather
        assert channel.received == moved(gather, "destination", rank)
        plans[rank] = plan

    for make, transfer in MODES.values():
        expected = case.engines(kept)
        engines = {r: {n: torch.zeros_like(t) for n, t in params.items()} for r, params in expected.items()}
        together(partial(run, make, transfer), sorted({*sources, *wanted}))
        assert len({plan.fingerprint for plan in plans.values()}) == 1  # every rank finds the same alone
        for r, params in expected.items():
            for name, tensor in params.items():
                assert torch.equal(engines[r][name], tensor), (transfer.__name__, r, name)
    for rank in wanted:
        assert moved(plans[rank].gather, "destination", rank) == flow.received[rank]
        assert moved(plans[rank].gather, "destination", rank, node_size) == flow.received_far[rank]
    # Every expert is a shard of its own, and what ranks have alike travels once.
    shards = sum(prod(s.shape) * s.dtype(dtype).itemsize for s in plans[case.ranks[0]].shards)
    assert shards == sum(t.slices * t.slice_bytes(dtype.itemsize) for t in tensors.values())


def test_far_sources_balance_the_links_of_their_nodes():
    """A node with two holders and one with one, a rank of a third node that wants everything: both links carry half."""
    shape = ModelShape("qwen2", 4, 32, 4, 2, 8, 48, 64, 64)
    whole, tensors = megatron_layout(shape, train_layout("tp1", 1), 0), canonical_tensors(shape)
    wanted = {4: engine_layout(shape, EngineParallel(), 0)}
    options = dict(itemsize=4, bucket_bytes=2048, node_size=2)
    plan = make_plan(dict.fromkeys(range(3), whole), wanted, tensors, **options)
    links = [moved(plan, "source", 0) + moved(plan, "source", 1), moved(plan, "source", 2)]
    assert moved(plan, "destination", 4, 2) == sum(links) and max(links) <= 1.2 * min(links), links


class Deaf:
    """A wire on which messages arrive empty; it keeps what it carries until the wait, as the real one does."""

    def __init__(self, rank):
        self.rank = rank

    def post(self, what, sends, receives):
        kept = [t for t, _, _ in (*sends, *receives)]
        return SimpleNamespace(wait=kept.clear)


@pytest.mark.parametrize(("train", "generate", "first"), [("tp2", "tp1", 0), ("pp2", "tp2", 0), ("tp2", "tp2", 2)])
@pytest.mark.parametrize("bucket", [8 << 10, 4 << 20])
def test_the_plan_counts_what_stream_has_in_flight(train, generate, first, bucket):
    """Never below what the executor takes on the fullest engine rank, and all of it where one bucket holds it all."""
    shape = ModelShape("qwen2", 4, 32, 4, 2, 8, 48, 60, 64)
    parallel, tensors = train_layout(train, 2), canonical_tensors(shape)
    engine, engines = engine_layout_of(generate, 2)
    sizes = dict(itemsize=4, bucket_bytes=bucket)
    run = PlannedRun(shape, parallel, itemsize=4, engine_itemsize=4, bucket_bytes=bucket)
    planned = estimate(run, engine, engines, first)
    sources = {r: megatron_layout(shape, parallel, r) for r in range(2)}
    wanted = {first + r: engine_layout(shape, engine, r % engine.ranks) for r in range(2)}
    taken = []
    for rank in wanted:
        plan = make_plan(sources, wanted, tensors, rank=rank, node_size=8, **sizes)
        held = (sources[rank].shapes if rank in sources else {}, wanted[rank].shapes)
        source, into = ({name: torch.zeros(size) for name, size in shapes.items()} for shapes in held)
        with StorageMeter() as meter:
            meter.track(*source.values(), *into.values())
            base = meter.allocated()
            meter.reset_peak()
            stream(plan, source, into, channel=Deaf(rank), dtype=torch.float32, device=torch.device("cpu"))
            taken.append(meter.peak() - base)
    assert 0.9 * planned.in_flight < max(taken) <= planned.in_flight <= 2 * bucket
    weights = planned.generate + (planned.policy.weights if first == 0 else 0)
    assert planned.peak("stream") == weights + planned.in_flight
    if bucket == 4 << 20:
        assert max(taken) == planned.in_flight < bucket // 2
