"""Weights by publish and pull, without processes: every layout, the least bytes, versions that are gone."""

import dataclasses
import itertools
import secrets
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import cases, slices
from publish_help import Alone, Gone, Memory, chunks_of
from reshard_reference import engine_weights, megatron_weights, random_weights

from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.dock.rpc import Process
from mindspeed_rl_plugin.layout.layout import EngineParallel, ModelShape, Parallel, canonical_tensors, engine_layout
from mindspeed_rl_plugin.processes import machine
from mindspeed_rl_plugin.weights import publish as publishing
from mindspeed_rl_plugin.weights import pull
from mindspeed_rl_plugin.weights.host_memory import HostWeights
from mindspeed_rl_plugin.weights.machine_staging import Shared
from mindspeed_rl_plugin.weights.publish import Publisher, TrainerWeights
from mindspeed_rl_plugin.weights.pull import Puller
from mindspeed_rl_plugin.weights.resharder import Resharder
from mindspeed_rl_plugin.weights.verify import BrokenWeights, WeightMismatch

SHAPE = ModelShape("qwen3", 2, 32, 4, 2, 8, 48, 60, 64)


def trainer_of(shape, parallel, params, dtype, verify=False, versions=2):
    """The description, and (publisher, its memory, its chunks) of each rank. params: rank -> stored tensors."""
    chunks = {rank: chunks_of(mine, parallel.vpp) for rank, mine in params.items()}
    own = [
        TrainerWeights.of(shape, parallel, r, c, dtype, lambda k: [k] * parallel.world).kinds[0]
        for r, c in chunks.items()
    ]
    weights = TrainerWeights.of(shape, parallel, 0, chunks[0], dtype, lambda kind: own, verify)
    weights = TrainerWeights.parse(weights.text())
    ranks = []
    for rank, mine in chunks.items():
        made = []
        offer = lambda nbytes, count, made=made: made.append(Memory(nbytes, count)) or made[0]  # noqa: E731
        publisher = Publisher(weights, rank, offer, versions, gather=lambda first: [first] * parallel.world)
        ranks.append((publisher, made[0], mine))
    return weights, ranks


def puller_of(weights, engine, live, sources, rank=0, deadline=60.0, sharing=Alone, machines=1):
    """Of one rank of an engine, whose ranks are on so many machines, the same number on each."""
    each = max(engine.ranks // machines, 1)
    here = range(rank // each * each, (rank // each + 1) * each)
    return Puller(weights, engine, live, sources, rank=rank, ranks=here, deadline=deadline, sharing=sharing)


def publish(ranks, version):
    return [publisher.publish(chunks, version) for publisher, _, chunks in ranks]


def least(weights, layouts):
    """Bytes of all slices that one of the layouts stores."""
    tensors, item = weights.tensors, weights.engine_dtype.itemsize
    return sum(tensors[name].slice_bytes(item) for name, _ in set().union(*map(slices, layouts)))


@settings(max_examples=20, deadline=None)
@given(
    cases(world_limit=8), st.booleans(), st.booleans(), st.sampled_from([512, pull.READ_BYTES]), st.sampled_from([1, 2])
)
def test_every_engine_gets_its_weights_for_the_least_bytes(case, narrow, verify, chunk, machines):
    """Each trainer layout to each engine layout; what is published is one model over the whole job. chunk: bytes of a
    read; machines: over which the engine's ranks lie."""
    canonical, dtype = random_weights(case.shape), torch.bfloat16 if narrow else torch.float32
    tensors, digests = canonical_tensors(case.shape), set()
    weights, ranks = trainer_of(case.shape, case.parallel, case.trainer(canonical), dtype, verify)
    published = publish(ranks, 3)
    whole = sum(t.slices * t.slice_bytes(dtype.itemsize) for t in tensors.values())
    blocks = [b for share in weights.shares for b in share.blocks]
    assert sum(tensors[b.segment.name].slice_bytes(dtype.itemsize) * b.segment.size for b in blocks) == whole
    assert [done.nbytes for done in published] == [share.nbytes for share in weights.shares]
    kept = {n: t if tensors[n].wide else t.to(dtype) for n, t in canonical.items()}
    spread = case.engine.ep > case.engine.tp > 1  # else no version of vLLM keeps the shared experts whole
    case = case._replace(engine=dataclasses.replace(case.engine, whole_shared=case.engine.whole_shared and spread))
    for at in range(case.engine.ranks):
        expected = engine_weights(case.shape, case.engine, at, kept)
        live = {name: torch.zeros_like(t) for name, t in expected.items()}
        for _, memory, _ in ranks:
            memory.reads = 0
        with patch.object(pull, "READ_BYTES", chunk):
            puller = puller_of(weights, case.engine, live, [m for _, m, _ in ranks], rank=at, machines=machines)
            puller.pull(3)
        digests.add(puller.apply(live).digest)
        for name, tensor in expected.items():
            assert torch.equal(live[name], tensor), (at, name)
        each = max(case.engine.ranks // machines, 1)
        here = range(at // each * each, (at // each + 1) * each)
        layouts = [engine_layout(case.shape, puller.engine, r) for r in here]
        if not verify:
            assert sum(m.reads for _, m, _ in ranks) <= 1.02 * least(weights, layouts)
    assert len(digests) == 1 and (digests == {None}) != verify


def shared():
    """What makes a staging that processes of this machine share."""
    return partial(Shared, Process("outside", -1, machine(), secrets.token_bytes(16)))


def two_ranks(dtype=torch.float32, **options):
    """TP2 trainers of SHAPE, one engine rank's parameters, and its puller."""
    stored = {r: megatron_weights(SHAPE, Parallel(2, tp=2), r, random_weights(SHAPE)) for r in range(2)}
    weights, ranks = trainer_of(SHAPE, Parallel(2, tp=2), stored, dtype, **options)
    expected = engine_weights(SHAPE, EngineParallel(1), 0, random_weights(SHAPE, dtype=dtype))
    live = {n: torch.zeros_like(t) for n, t in expected.items()}
    return stored, ranks, live, puller_of(weights, EngineParallel(1), live, [memory for _, memory, _ in ranks])


def test_each_version_is_what_was_published_and_has_the_reshards_digest():
    stored, ranks, live, puller = two_ranks(verify=True)
    whole = megatron_weights(SHAPE, Parallel(1), 0, random_weights(SHAPE))
    way = Resharder(SHAPE, Parallel(1), EngineParallel(1), rank=0, engine_dtype=torch.float32, verify=True)
    publish(ranks, 0)
    puller.pull(0)
    first = puller.apply(live)
    again = {n: torch.zeros_like(t) for n, t in live.items()}
    assert first.digest == way.to_engine(chunks_of(whole), again, 0).digest
    assert all(torch.equal(live[name], t) for name, t in again.items())
    for params in (*stored.values(), whole):
        params["decoder.final_layernorm.weight"].add_(1)
    publish(ranks, 7)
    assert puller.pull(7)[::2] == (7, puller.staging.nbytes)
    done = puller.apply(live)
    assert done.digest == way.to_engine(chunks_of(whole), again, 1).digest != first.digest
    assert done.version == 7 and torch.equal(live["model.norm.weight"], again["model.norm.weight"])


def test_replicas_share_the_memory_of_one_model_evenly():
    """Four data parallel replicas of two tensor parallel ranks: what they have alike is published once."""
    parallel = Parallel(8, tp=2)
    weights = TrainerWeights(SHAPE, parallel, (("local", "sequential"),) * 8, "bfloat16")
    sizes = [share.nbytes for share in weights.shares]
    whole = sum(t.slices * t.slice_bytes(2) for t in canonical_tensors(SHAPE).values())
    assert whole <= sum(sizes) <= 1.02 * whole and max(sizes) <= 1.25 * whole / 8, sizes


@pytest.mark.parametrize("once", [True, False])
def test_engine_ranks_of_one_machine_pull_what_they_need_once(once):
    """Of experts spread over two ranks, each has its own, and both have all of the rest, a router's bias too."""
    shape = ModelShape("glm4_moe", 2, 32, 4, 2, 8, 48, 60, 64, experts=4, expert_ffn=16, shared_ffn=16)
    canonical, sizes = random_weights(shape), EngineParallel(1, 2)
    stored = {r: megatron_weights(shape, Parallel(2, ep=2), r, canonical) for r in range(2)}
    weights, ranks = trainer_of(shape, Parallel(2, ep=2), stored, torch.float32)
    publish(ranks, 0)
    more = dict(sharing=shared()) if once else {}
    expected = [engine_weights(shape, sizes, r, canonical) for r in range(2)]
    live = [{n: torch.zeros_like(t) for n, t in each.items()} for each in expected]
    memories = [memory for _, memory, _ in ranks]
    pullers = [puller_of(weights, sizes, each, memories, rank=r, **more) for r, each in enumerate(live)]
    with ThreadPoolExecutor(2) as pool:
        pulled = [done.result() for done in [pool.submit(p.pull, 0) for p in pullers]]
    need = least(weights, [engine_layout(shape, pullers[0].engine, r) for r in range(2)])
    read = sum(m.reads for m in memories)
    assert read <= 1.02 * need if once else read == 2 * need
    assert sum(done.nbytes for done in pulled) == pullers[0].staging.nbytes * (1 if once else 2)
    for puller, mine, all_of_it in zip(pullers, live, expected, strict=True):
        puller.apply(mine)
        assert all(torch.equal(mine[name], t) for name, t in all_of_it.items())
        puller.close()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_version_that_is_overwritten_is_gone_and_never_torn(when):
    _, ranks, live, puller = two_ranks()
    publish(ranks, 0)
    before = {name: t.clone() for name, t in live.items()}
    newer = lambda: [publish(ranks, 1 + max(ranks[0][1].about)) for _ in range(2)]  # noqa: E731
    if when == "before":
        newer()
    else:
        ranks[1][1].meanwhile = newer
    with pytest.raises(Gone):
        puller.pull(0)
    with pytest.raises(ValueError, match="pull one first"):
        puller.apply(live)
    assert all(torch.equal(live[name], t) for name, t in before.items())
    ranks[1][1].meanwhile = lambda: None
    assert puller.pull(2).version == 2 and puller.apply(live).version == 2


def test_a_value_that_differs_is_named():
    _, ranks, live, puller = two_ranks(verify=True)
    publish(ranks, 0)
    name = "model.layers.1.self_attn.k_proj.weight"
    at = next(b.at for b in ranks[0][0].share.blocks if b.segment.name == name)
    ranks[0][1].slots[0][at] ^= 1
    puller.pull(0)
    with pytest.raises(
        WeightMismatch, match=rf"{name} \[0, 16\) of axis 0: .*1.self_attn.qkv_proj.weight of engine rank 0"
    ):
        puller.apply(live)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_not_published(value):
    stored, ranks, live, puller = two_ranks()
    publish(ranks, 0)
    stored[1]["decoder.layers.1.mlp.linear_fc1.weight"][40, 3] = value
    publisher, memory, chunks = ranks[1]
    publisher._gather = lambda mine: [("", 0), mine]
    with pytest.raises(BrokenWeights, match=r"layers.1.mlp.linear_fc1.weight of trainer rank 1 .* after 1 updates"):
        publisher.publish(chunks, 1)
    assert memory.held == [0, -1] and puller.pull(0).version == 0
    with pytest.raises(BrokenWeights, match="holds NaN or infinity before a checkpoint"):
        publisher.refuse_broken(chunks)
    stored[1]["decoder.layers.1.mlp.linear_fc1.weight"][40, 3] = 0.0
    publisher.refuse_broken(chunks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_that_goes_through_other_memory_is_waited_for(monkeypatch, dtype):
    """torch_npu 2.7.1 reads that memory before it is filled: where it converts, and where the place has gaps."""
    seen, copy = [], torch.Tensor.copy_

    def watched(place, live, non_blocking=False):
        seen.append(non_blocking)
        return copy(place, live, non_blocking)

    _, ranks, *_ = two_ranks(dtype)
    monkeypatch.setattr(torch.Tensor, "copy_", watched)
    publish(ranks, 0)
    assert {*seen} == {dtype == torch.float32}


def test_what_does_not_fit_is_refused():
    stored, ranks, live, puller = two_ranks()
    publisher, memory, chunks = ranks[0]
    del stored[0]["decoder.final_layernorm.weight"]
    gathered = []
    publisher._gather = lambda mine: gathered.append(mine) or [mine, ("", 0)]
    with pytest.raises(ValueError, match=r"final_layernorm.weight \(32,\) is missing"):
        publisher.publish(chunks, 1)
    assert len(gathered) == 1, "the other ranks, which wait for this one, raise too"
    wrong = {name: t.half() for name, t in live.items()}
    with pytest.raises(ValueError, match="is torch.float16, not torch.float32"):
        puller_of(puller.weights, EngineParallel(1), wrong, [memory, memory])
    puller.deadline = 0.0
    with pytest.raises(TimeoutError, match="version 0"):
        puller.pull(0)
    for text in ("", "{}", puller.weights.text().replace('"tp":2', '"tp":3')):
        with pytest.raises(ValueError, match="malformed description"):
            TrainerWeights.parse(text)


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_is_lost_ends_the_pull_while_another_is_slow(dead):
    _, ranks, live, puller = two_ranks()
    publish(ranks, 0)
    memories, entered = [memory for _, memory, _ in ranks], Event()

    def lost():
        entered.wait(10)
        raise ConnectionError(f"rank {dead} is gone")

    memories[dead].meanwhile = lost
    memories[1 - dead].meanwhile = lambda: (entered.set(), time.sleep(0.05))
    with patch.object(pull, "READ_BYTES", 64), pytest.raises(ConnectionError, match=f"rank {dead} is gone"):
        puller.pull(0)
    assert memories[1 - dead].reads < puller.staging.nbytes / 4, "the other has some hundred reads to go"


@pytest.mark.parametrize("once", [True, False])
def test_closing_ends_a_pull_that_waits(once):
    """For a version that does not come: an engine that is to leave leaves."""
    _, ranks, live, puller = two_ranks()
    memories, asked = [memory for _, memory, _ in ranks], Event()

    def seek(version, seconds, alive):
        asked.set()
        while True:
            alive()
            time.sleep(0.05)

    for memory in memories:
        memory.seek = seek
    more = dict(sharing=shared()) if once else {}
    puller = puller_of(puller.weights, EngineParallel(1), live, memories, **more)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(puller.pull, 0)
        assert asked.wait(10)
        begin = time.monotonic()
        puller.close()
        with pytest.raises(TimeoutError, match="the pull of version 0 was ended"):
            waits.result(timeout=10)
    assert time.monotonic() - begin < 20


def test_staging_that_another_took_the_place_of_is_let_go():
    """Else the memory of each reader that has gone would stay until the engine ends."""
    _, ranks, live, puller = two_ranks()
    old = []

    class Turning(Alone):
        def get(self, version, seconds):
            self.memory = np.empty_like(self.memory)
            old.append(weakref.ref(self.memory))
            return super().get(version, seconds)

    puller = puller_of(puller.weights, EngineParallel(1), live, [m for _, m, _ in ranks], sharing=Turning)
    publish(ranks, 0)
    for _ in range(3):
        puller.pull(0)
    assert [there() is None for there in old] == [True, True, False]


def test_copies_follow_the_gather_and_have_ended_before_others_use_them(monkeypatch):
    """Else engines would read torn weights of an accelerator; on CPU a copy ends at once."""
    _, ranks, live, puller = two_ranks()
    log, copy = [], torch.Tensor.copy_

    def copy_(self, source, non_blocking=False):
        log.append("copy" if non_blocking else "")
        return copy(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    wait = partial(log.append, "synchronize")
    device = SimpleNamespace(page_lock=id, synchronize=wait, synchronize_stream=wait)
    for module in (publishing, pull):
        monkeypatch.setattr(module, "get_device", lambda: device)
    for publisher, memory, chunks in ranks:
        chunks[0].start_param_sync = lambda force_sync: log.append("gather")
        chunks[0].use_forward_hook, chunks[0].remove_forward_pre_hook_handles = True, {}
        monkeypatch.setattr(memory, "commit", lambda *given, end=memory.commit: log.append("commit") or end(*given))
        publisher.publish(chunks, 0)
    puller.pull(0)
    puller.apply(live)
    model = [torch.nn.Linear(3, 3, bias=False)]
    host = SimpleNamespace(places=lambda *_: {"": [[torch.empty(36, dtype=torch.uint8)]]})
    with HostWeights.capture(model, device, host).swapped_into(model):
        log.append("forward")
    once = [what for what, _ in itertools.groupby(filter(None, log))]
    copied = ["copy", "synchronize"]
    assert once == ["gather", *copied, "commit"] * 2 + copied + copied + [*copied, "forward", *copied]


@pytest.mark.gpu
def test_an_accelerators_weights_go_over_the_host():
    """Both ends on the device, page-locked memory between them."""
    device = get_device().current()
    stored = {0: megatron_weights(SHAPE, Parallel(1), 0, random_weights(SHAPE))}
    on_device = {0: {name: t.to(device) for name, t in stored[0].items()}}
    weights, ranks = trainer_of(SHAPE, Parallel(1), on_device, torch.bfloat16, verify=True)
    kept = {name: t.bfloat16() for name, t in random_weights(SHAPE).items()}
    for rank in range(2):
        expected = engine_weights(SHAPE, EngineParallel(2), rank, kept)
        live = {name: torch.zeros_like(t, device=device) for name, t in expected.items()}
        publish(ranks, rank)
        puller = puller_of(weights, EngineParallel(2), live, [memory for _, memory, _ in ranks], rank=rank)
        puller.pull(rank)
        puller.apply(live)
        assert all(torch.equal(live[name].cpu(), t) for name, t in expected.items())
