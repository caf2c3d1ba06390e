"""The plan over random layouts: exact cover, minimal bytes, one plan on every rank. What it delivers: test_transfer."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import cases, holds, moved, slices
from reshard_reference import random_weights

from mindspeed_rl_plugin.layout.layout import (
    Canonical,
    EngineParallel,
    ModelShape,
    Parallel,
    Segment,
    canonical_tensors,
    engine_layout,
    megatron_layout,
)
from mindspeed_rl_plugin.layout.transfer_plan import make_plan
from mindspeed_rl_plugin.weights.allgather import make_allgather_plan


@settings(max_examples=80, deadline=None)
@given(cases())
def test_both_sides_store_what_their_layouts_say(case):
    weights, sources, wanted = random_weights(case.shape), case.sources(), case.destinations()
    for r, params in case.trainer(weights).items():
        holds(params, sources[r], weights)
    for r, params in case.engines(weights).items():
        holds(params, wanted[r], weights)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_both_modes_leave_out_the_same_tensors(case):
    """Also where each rank of an engine stores some of the experts."""
    given = case.sources(), case.destinations(), canonical_tensors(case.shape)
    unused = make_plan(*given, itemsize=4, bucket_bytes=4096).unused
    for rank in given[1]:
        assert make_allgather_plan(*given, itemsize=4, bucket_bytes=4096, rank=rank).unused == unused


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([1, 2, 4, 8]), st.sampled_from([192, 512, 4096]))
def test_cover_bytes_and_buckets(case, node_size, bucket_bytes):
    sources, destinations, tensors = case.sources(), case.destinations(), canonical_tensors(case.shape)
    plan = make_plan(sources, destinations, tensors, itemsize=4, bucket_bytes=bucket_bytes, node_size=node_size)
    assert case.shape.tied or plan.unused == ()
    local, remote, load = {}, {}, {}
    for rank, piece in plan.copies:
        cells(local, rank, piece)
    for m in plan.moves:
        assert m.source != m.destination
        cells(remote, m.destination, m.piece)
        for end in (("out", m.source), ("in", m.destination)):
            load[m.bucket, end] = load.get((m.bucket, end), 0) + m.piece.nbytes
    assert max(load.values(), default=0) <= bucket_bytes // 2
    holders = {rank: slices(layout) for rank, layout in sources.items()}
    for rank, layout in destinations.items():
        wanted = [(p, s.name, i) for p, segments in layout.items() for s in segments for i in range(s.start, s.stop)]
        here, there = local.get(rank, []), remote.get(rank, [])
        assert sorted(here + there) == sorted(wanted)  # each exactly once
        held = holders.get(rank, set())
        assert sorted(there) == sorted(w for w in wanted if w[1:] not in held)  # and only what it lacks moves
    for m in plan.moves:
        near = [r for r in sources if r // node_size == m.destination // node_size]
        first = m.piece.destination.segment.name, m.piece.start
        assert m.source in near or not any(first in holders[r] for r in near)  # a holder on the node goes first


def cells(into, rank, piece):
    held = into.setdefault(rank, [])
    param, segment = piece.destination
    held += [(param, segment.name, i) for i in range(piece.start, piece.start + piece.size)]


@pytest.mark.parametrize("parallel, ranks", [(Parallel(4), range(4, 16)), (Parallel(4, pp=4), range(4))])
def test_sources_share_the_sending_from_the_first_bucket_on(parallel, ranks):
    """Four replicas, and twelve engine ranks elsewhere: none sends much more than its share. Four pipeline stages."""
    small = ModelShape("qwen2", 8, 64, 8, 4, 8, 128, 1000, 1024)
    sources = {r: megatron_layout(small, parallel, r) for r in range(4)}
    destinations = {r: engine_layout(small, EngineParallel(), 0) for r in ranks}
    plan = make_plan(sources, destinations, canonical_tensors(small), itemsize=2, bucket_bytes=1 << 20)
    sent = [moved(plan, "source", r) for r in range(4)]
    assert parallel.pp > 1 or max(sent) < 1.1 * sum(sent) / 4
    assert {m.source for m in plan.moves if m.bucket == 0} == {0, 1, 2, 3}


def test_512_ranks_in_seconds():
    shape = ModelShape("qwen2", 64, 5120, 40, 8, 128, 27648, 152064, 152064)
    parallel, engine = Parallel(512, tp=8, pp=4), EngineParallel(4)
    begin = time.process_time()
    sources = {r: megatron_layout(shape, parallel, r) for r in range(512)}
    destinations = {r: engine_layout(shape, engine, r % 4) for r in range(512)}
    make_plan(sources, destinations, canonical_tensors(shape), itemsize=2, bucket_bytes=256 << 20, rank=7, node_size=8)
    assert time.process_time() - begin < 20


TENSORS = {"a": Canonical((8, 3), 0)}
WHOLE = {"p": (Segment("a", 0, 0, 8, 0),)}


@pytest.mark.parametrize(
    "sources, destinations, bucket_bytes, message",
    [
        ({0: {"p": (Segment("a", 0, 0, 5, 0),)}}, {7: WHOLE}, 999, r"a: no trainer rank holds slices \[5, 8\).*rank 7"),
        ({0: {}}, {7: WHOLE}, 999, r"a: no trainer rank holds slices \[0, 8\).*engine rank 7"),
        ({0: WHOLE}, {1: {"p": (Segment("b", 0, 0, 1, 0),)}}, 999, "engine rank 1 stores .*'b'.* is None"),
        ({0: WHOLE}, {1: {"p": (Segment("a", 0, 6, 3, 0),)}}, 999, r"engine rank 1 stores .*start=6, size=3.*\(8, 3\)"),
        ({0: {"p": (Segment("a", 1, 0, 3, 0),)}}, {1: WHOLE}, 999, "trainer rank 0 stores .*axis=1.*axis=0"),
        (
            {0: WHOLE},
            {1: {"p": (Segment("a", 0, 0, 4, 0), Segment("a", 0, 4, 4, 3))}},
            999,
            "p of engine rank 1: .*offset=3.* overlaps .*offset=0",
        ),
        (
            {0: WHOLE},
            {1: {"p": tuple(Segment("a", 0, o, 3, o, slot) for o, slot in ((0, 0), (1, 1), (2, 0), (5, 1)))}},
            999,
            "p of engine rank 1: .*offset=2, slot=0.* overlaps .*offset=0, slot=0",  # within slot 0 of stacked experts
        ),
        ({0: WHOLE}, {1: WHOLE}, 20, "bucket of 20 bytes cannot hold two slices of 12 bytes of a.*raise"),
    ],
)
def test_plan_refuses(sources, destinations, bucket_bytes, message):
    with pytest.raises((ValueError, AssertionError), match=message):
        make_plan(sources, destinations, TENSORS, itemsize=4, bucket_bytes=bucket_bytes)


def test_unused_tensors_are_named():
    tensors = TENSORS | {"b": Canonical((2,), 0)}
    sources = {0: WHOLE | {"q": (Segment("b", 0, 0, 2, 0),)}}
    assert make_plan(sources, {0: WHOLE}, tensors, itemsize=4, bucket_bytes=999).unused == ("b",)
