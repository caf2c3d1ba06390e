"""Both transfers over random layouts, ranks as threads: weights, bytes, balance, and the memory that they take."""

import sys
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.device import StorageMeter
from mindspeed_rl_plugin.reshard.allgather import allgather, make_allgather_plan
from mindspeed_rl_plugin.reshard.layout import (
    ModelShape,
    canonical_tensors,
    engine_layout,
    engine_shapes,
    megatron_layout,
    megatron_shapes,
)
from mindspeed_rl_plugin.reshard.p2p import P2PChannel
from mindspeed_rl_plugin.reshard.plan import make_plan
from mindspeed_rl_plugin.reshard.transfer import copy_pieces, stream
from mindspeed_rl_plugin.tools.layout_args import engine_layout_of, train_layout
from mindspeed_rl_plugin.tools.plan.estimate import Machine, Run, estimate
from mindspeed_rl_plugin.tools.plan.flow import Cells

sys.path.insert(0, str(Path(__file__).parent))
from plan_cases import LATENT, TINY, cases  # noqa: E402
from reshard_reference import engine_weights, megatron_weights, random_weights  # noqa: E402

ITEM = 4


def carried_out(plan, source, rank):
    """What `rank` holds of every shard after all messages, as the executor would place it."""
    givers = {m.piece.destination.param: m.source for m in plan.gather.moves if m.destination == rank}
    shards = [(str(i), givers.get(str(i), rank), shard) for i, shard in enumerate(plan.shards)]
    return {number: source[giver][shard.names[giver]][: shard.shape[0]] for number, giver, shard in shards}


@settings(max_examples=50, deadline=None)
@given(cases(world_limit=8), st.sampled_from([1, 2, 8]), st.sampled_from([64, 8192]))
def test_every_engine_gets_its_weights_out_of_all_shards(case, node_size, bucket_bytes):
    sources, wanted = case.sources(), case.destinations()
    tensors, weights = canonical_tensors(case.shape), random_weights(case.shape)
    live, expected = case.trainer(weights), case.engines(weights)
    options = dict(itemsize=ITEM, bucket_bytes=bucket_bytes, node_size=node_size)
    plans = {r: make_allgather_plan(sources, case.stored(), wanted, tensors, rank=r, **options) for r in wanted}
    flow = Cells(sources, wanted, tensors, itemsize=ITEM, node_size=node_size).flow(everything=True)
    for rank, plan in plans.items():
        assert plan.traffic[rank].received == flow.received[rank]
        assert plan.traffic[rank].off_node == flow.received_far[rank]
        assert plan.gather.fingerprint == plans[case.ranks[0]].gather.fingerprint  # every rank finds the same alone
        engine = {n: torch.zeros_like(t) for n, t in expected[rank].items()}
        for copies in plan.copies:
            copy_pieces(copies, carried_out(plan, live, rank), engine)
        for name, tensor in expected[rank].items():
            assert torch.equal(engine[name], tensor), name


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


@settings(max_examples=15, deadline=None)
@given(cases(world_limit=8), st.booleans())
def test_both_transfers_write_the_engines_weights(case, narrow):
    """narrow: the engine's dtype is half as wide as the trainer's, in which weights then travel."""
    sources, wanted, tensors = case.sources(), case.destinations(), canonical_tensors(case.shape)
    weights = random_weights(case.shape)
    live, dtype = case.trainer(weights), torch.bfloat16 if narrow else torch.float32
    kept = {n: t if tensors[n].wide else t.to(dtype) for n, t in weights.items()}
    sizes = dict(itemsize=dtype.itemsize, node_size=2)

    def run(rank, channel):
        options = dict(channel=channel, dtype=dtype, device=torch.device("cpu"))
        if transfer is stream:
            plan = make_plan(sources, wanted, tensors, bucket_bytes=1024, rank=rank, **sizes)
        else:
            plan = make_allgather_plan(sources, case.stored(), wanted, tensors, bucket_bytes=1024, rank=rank, **sizes)
        transfer(plan, live.get(rank, {}), engines.get(rank, {}), **options)
        assert channel.received == plan.traffic[rank].received

    for transfer in (stream, allgather):
        expected = case.engines(kept)
        engines = {r: {n: torch.zeros_like(t) for n, t in params.items()} for r, params in expected.items()}
        together(run, sorted({*sources, *wanted}))
        for r, params in expected.items():
            for name, tensor in params.items():
                assert torch.equal(engines[r][name], tensor), (transfer.__name__, r, name)


def test_what_is_wide_stays_float32_on_its_way():
    """The router's expert bias of a bfloat16 model, on one rank."""
    shape = ModelShape("deepseek_v3", 2, vocab=60, padded_vocab=64, tied=False, dense_layers=(0,), **TINY, **LATENT)
    one, tensors = train_layout("tp1", 1), canonical_tensors(shape)
    weights = random_weights(shape)
    kept = {n: t if tensors[n].wide else t.bfloat16() for n, t in weights.items()}
    assert any(tensors[n].wide and not torch.equal(t, t.bfloat16().float()) for n, t in kept.items())
    source = megatron_weights(shape, one, 0, kept, "local", "sequential")
    engine, _ = engine_layout_of("tp1", 1)
    expected = engine_weights(shape, engine, 0, kept)
    found = {n: torch.zeros_like(t) for n, t in expected.items()}
    layouts = {0: megatron_layout(shape, one, 0)}, {0: megatron_shapes(shape, one, 0)}, {0: engine_layout(shape, 1, 0)}
    plan = make_allgather_plan(*layouts, tensors, itemsize=2, bucket_bytes=1024, rank=0)
    options = dict(channel=P2PChannel(0), dtype=torch.bfloat16, device=torch.device("cpu"))
    allgather(plan, source, found, **options)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name


def test_experts_are_parcels_of_their_own_and_shared_weights_travel_once():
    shape = ModelShape.from_hf_config(
        dict(model_type="qwen3_moe", vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
        | dict(num_key_value_heads=2, head_dim=8, intermediate_size=48, num_experts=8, moe_intermediate_size=16)
        | dict(num_experts_per_tok=2, decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=False),
        64,
    )
    parallel = train_layout("tp2,ep4,etp1", 4)
    engine, _ = engine_layout_of("tp2,ep4", 4)
    sources = {r: megatron_layout(shape, parallel, r) for r in range(4)}
    shapes = {r: megatron_shapes(shape, parallel, r) for r in range(4)}
    wanted = {r: engine_layout(shape, engine, r) for r in range(4)}
    tensors = canonical_tensors(shape)
    plan = make_allgather_plan(sources, shapes, wanted, tensors, itemsize=2, bucket_bytes=8192, rank=0)
    flow = Cells(sources, wanted, tensors, itemsize=2, node_size=4).flow(everything=True)
    assert [plan.traffic[r].received for r in range(4)] == flow.received.tolist()
    whole = sum(t.slices * t.slice_bytes(2) for t in tensors.values())
    assert sum(2 * prod(shard.shape) for shard in plan.shards) == whole
    sent = [plan.traffic[r].sent for r in range(4)]
    assert max(sent) <= 1.1 * min(sent), sent


def test_far_sources_balance_the_links_of_their_nodes():
    """A node with two holders and one with one, a rank of a third node that wants everything: both links carry half."""
    shape = ModelShape("qwen2", 4, 32, 4, 2, 8, 48, 64, 64)
    whole, tensors = megatron_layout(shape, train_layout("tp1", 1), 0), canonical_tensors(shape)
    wanted = {4: engine_layout(shape, 1, 0)}
    options = dict(itemsize=4, bucket_bytes=2048, node_size=2)
    plan = make_plan(dict.fromkeys(range(3), whole), wanted, tensors, **options)
    links = [plan.traffic[0].sent + plan.traffic[1].sent, plan.traffic[2].sent]
    assert plan.traffic[4].off_node == sum(links) and max(links) <= 1.2 * min(links), links


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
    machine = Machine(8, 1, 1, 1, 1)
    sizes = dict(itemsize=4, bucket_bytes=bucket)
    run = Run(shape, parallel, itemsize=4, engine_itemsize=4, bucket_bytes=bucket)
    planned = estimate(run, engine, engines, machine, first).footprint
    sources = {r: megatron_layout(shape, parallel, r) for r in range(2)}
    wanted = {first + r: engine_layout(shape, engine, r % engine.ranks) for r in range(2)}
    taken = []
    for rank in wanted:
        plan = make_plan(sources, wanted, tensors, rank=rank, node_size=8, **sizes)
        stored = megatron_shapes(shape, parallel, rank) if rank in sources else {}
        source = {n: torch.zeros(s) for n, s in stored.items()}
        into = {n: torch.zeros(s) for n, s in engine_shapes(shape, engine, (rank - first) % engine.ranks).items()}
        with StorageMeter() as meter:
            meter.track(*source.values(), *into.values())
            base = meter.allocated()
            meter.reset_peak()
            stream(plan, source, into, channel=Deaf(rank), dtype=torch.float32, device=torch.device("cpu"))
            taken.append(meter.peak() - base)
    assert 0.9 * planned.in_flight < max(taken) <= planned.in_flight <= 2 * bucket
    assert (
        planned.peak("stream") == (planned.policy.weights if first == 0 else 0) + planned.generate + planned.in_flight
    )
    if bucket == 4 << 20:
        assert max(taken) == planned.in_flight < bucket // 2
