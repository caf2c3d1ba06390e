"""The share of memory an engine gets; what sleeps and comes back: storages on a host, a pool on an accelerator."""

from types import SimpleNamespace

import pytest
import torch

from mindspeed_rl_plugin.engine import vllm_memory
from mindspeed_rl_plugin.engine.vllm_memory import HostMemory, PoolMemory, fill_with_zeros, free_share


@pytest.mark.parametrize("bytes_", [1, 64, 4096, 5000, 3 << 20, 40 << 20])
@pytest.mark.parametrize("drops", [True, False])
def test_zeros_stay_within_the_storage(bytes_, drops, monkeypatch) -> None:
    if not drops:
        monkeypatch.setattr(vllm_memory, "_drop_pages", lambda address, size: False)
    # Neighbours on the heap: what is not ours must not change.
    tensors = [torch.full((bytes_,), 7, dtype=torch.uint8) for _ in range(3)]
    fill_with_zeros(tensors[1].untyped_storage())
    assert [(int(t.min()), int(t.max())) for t in tensors] == [(7, 7), (0, 0), (7, 7)]
    tensors[1].fill_(3)
    assert int(tensors[1].min()) == 3


@pytest.mark.parametrize("dirty", [False, True])
def test_sleep_and_wake(monkeypatch, dirty) -> None:
    """A tied weight, a buffer, and a KV cache of two tensors in one storage. dirty: the allocator hands out what others
    have written, which resize_ alone leaves."""
    model = torch.nn.Module()
    model.embed = model.head = torch.nn.Parameter(torch.ones(6, 4))
    model.norm = torch.nn.Parameter(torch.ones(4))
    model.register_buffer("rotary", torch.arange(4.0))
    first, second = torch.full((2, 3000), torch.nan)
    runner = SimpleNamespace(get_model=lambda: model, kv_caches=[first, second])
    resize = torch.UntypedStorage.resize_

    def resized(storage, size):
        resize(storage, size)
        if size and dirty:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resized)
    memory = HostMemory(SimpleNamespace(model_runner=runner))
    memory.sleep()
    sizes = [t.untyped_storage().nbytes() for t in (model.embed, model.norm, first, model.rotary)]
    assert sizes == [0, 0, 0, 16]
    memory.wake_up(["weights"])
    assert [t.untyped_storage().nbytes() for t in (model.embed, model.norm, first)] == [96, 16, 0]
    model.embed.data.fill_(2)
    assert model.head.sum() == 48
    memory.wake_up(["kv_cache"])
    assert first.tolist() == second.tolist() == [0.0] * 3000
    assert model.rotary.tolist() == [0, 1, 2, 3]


class Pool:
    """vllm-ascend's CaMemAllocator on host memory: pieces by address, with a handle and a tag. Memory that sleeps holds
    NaN, also when it is taken again; moved: bytes that went over the bus."""

    def __init__(self) -> None:
        self.pointer_to_data, self.moved = {}, 0

    def piece(self, tag: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Copies of tensors beside each other in a new piece."""
        memory = bytearray(4096)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        handle = (0, len(memory), whole.data_ptr(), 0)
        self.pointer_to_data[whole.data_ptr()] = SimpleNamespace(handle=handle, tag=tag, copy=None, memory=memory)
        copies = [
            torch.frombuffer(memory, dtype=t.dtype, count=t.numel(), offset=512 * i).view(t.shape)
            for i, t in enumerate(tensors)
        ]
        return [copy.copy_(tensor) for copy, tensor in zip(copies, tensors, strict=True)]

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        for data in self.pointer_to_data.values():
            if data.tag in offload_tags:
                data.copy = bytes(data.memory)
                self.moved += len(data.copy)
            data.memory[:] = b"\xff" * len(data.memory)

    def wake_up(self, tags: list[str]) -> None:
        for data in self.pointer_to_data.values():
            if data.tag in tags and data.copy is not None:
                data.memory[:] = data.copy
                self.moved += len(data.copy)
                data.copy = None


class Worker:
    """vllm-ascend's NPUWorker, as far as tests/ascend compares these bodies: 0.9.1 saves no buffers, 0.18 and 0.23
    replace experts by transposed views."""

    def __init__(self, model, pool, saves: bool, transposes: bool) -> None:
        self.model, self.pool, self.saves, self.transposes, self.saved = model, pool, saves, transposes, {}
        self.model_runner = SimpleNamespace(get_model=lambda: model)

    def sleep(self, level: int = 1) -> None:
        if level == 2 and self.saves:
            self.saved = {name: buffer.cpu().clone() for name, buffer in self.model.named_buffers()}
        self.pool.sleep(offload_tags=("weights",) if level == 1 else ())

    def wake_up(self, tags: list[str]) -> None:
        self.pool.wake_up(tags=tags)
        if self.transposes and "weights" in tags:
            for name, param in list(self.model.named_parameters()):
                if param.shape[{"w13_weight": 1, "w2_weight": 2}[name]] == HIDDEN:
                    setattr(self.model, name, torch.nn.Parameter(param.transpose(1, 2), requires_grad=False))
        for name, buffer in self.model.named_buffers():
            if name in self.saved:
                buffer.copy_(self.saved[name])


HIDDEN, INNER = 6, 4
TABLE = []  # as vllm-ascend's rotary_embedding module holds its tables, in no module of the model


@pytest.fixture
def experts():
    """One layer of two experts and what lies beside them in the pool; its forward is need_trans=False's."""
    pool, model = Pool(), torch.nn.Module()
    given = torch.randn(2, HIDDEN, 2 * INNER), torch.randn(2, INNER, HIDDEN), torch.arange(5.0), torch.tensor([1, 0])
    w13, w2, table, expert_map = pool.piece("weights", *given)
    model.w13_weight, model.w2_weight = (torch.nn.Parameter(w, requires_grad=False) for w in (w13, w2))
    model.register_buffer("rotary", table)
    TABLE[:] = pool.piece("weights", torch.arange(3.0))
    model.impl = SimpleNamespace(expert_map=expert_map)
    (model.cache,) = pool.piece("kv_cache", torch.ones(3))
    return pool, model


def forward(model, x):
    gate, up = torch.einsum("eth,ehf->etf", x, model.w13_weight).chunk(2, -1)
    return torch.einsum("etf,efh->eth", gate.sigmoid() * up, model.w2_weight) * model.rotary[1] + TABLE[0][2]


@pytest.mark.parametrize("saves, transposes", [(False, False), (True, False), (True, True)])
def test_a_rollout_moves_no_weights_and_leaves_the_layer_as_it_was(experts, saves, transposes) -> None:
    pool, model = experts
    ranges = [range(p, p + d.handle[1]) for p, d in pool.pointer_to_data.items() if d.tag == "weights"]
    memory = PoolMemory(worker := Worker(model, pool, saves, transposes), worker, ranges)
    x = torch.randn(2, 3, HIDDEN)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    known = {name: (p.data_ptr(), p.shape, p) for name, p in model.named_parameters()}
    before = forward(model, x)
    for _ in range(2):
        memory.sleep()
        kept = sum(copy.nbytes for copy in memory._copies)
        assert model.w2_weight.isnan().all() and model.rotary.isnan().all()
        memory.wake_up(["weights"])
        memory.wake_up(["kv_cache"])
        for name, p in model.named_parameters():
            address, shape, parameter = known[name]
            assert p is parameter and p.is_contiguous() and (p.data_ptr(), p.shape) == (address, shape)
            p.data.copy_(weights[name])
        assert torch.equal(forward(model, x), before) and model.impl.expert_map.tolist() == [1, 0]
    assert (pool.moved, kept) == (0, 5 * 4 + 3 * 4 + 2 * 8)


GIB = 1 << 30


def accelerator(free, total, kind="cuda"):
    """A device of which so many GiB are free; events: what was done with it."""
    events = []
    calls = {name: lambda name=name: events.append(name) for name in ("synchronize", "empty_cache")}
    info = lambda: events.append("measure") or (free * GIB, total * GIB)  # noqa: E731
    return SimpleNamespace(kind=kind, events=events, memory_info=info, current=lambda: torch.device("cpu"), **calls)


def ranks(monkeypatch, *others):
    """The world has these shares besides this rank's."""

    def share(channel, what, mine, length, device):
        assert channel.deadline == 9.0
        return [[*mine], *([int(1000 * other)] for other in others)]

    monkeypatch.setattr(vllm_memory.dist, "get_world_size", lambda: 1 + len(others))
    monkeypatch.setattr(vllm_memory.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(vllm_memory.P2PChannel, "share", share)
    monkeypatch.setattr(vllm_memory.gc, "collect", lambda: None)  # takes a second


@pytest.mark.parametrize(
    "free, total, others, expected",
    [
        (60, 64, (), 0.837),  # (60 - 6.4) / 64
        (80, 80, (), 0.9),
        (60, 64, (0.5, 0.9), 0.5),  # another rank has less
        (8, 12, (), 0.5),  # at least two GiB stay
    ],
)
def test_the_engine_gets_what_is_free_less_a_reserve(monkeypatch, free, total, others, expected):
    ranks(monkeypatch, *others)
    device = accelerator(free, total)
    share = free_share(device, 9.0)
    assert share == expected and share * total + max(0.1 * total, 2) <= free
    assert device.events == ["synchronize", "empty_cache", "measure"]  # what torch keeps is free too


@pytest.mark.parametrize("free, others", [(6, ()), (60, (-0.1,))])
def test_no_memory_for_an_engine_is_refused_on_every_rank(monkeypatch, free, others):
    ranks(monkeypatch, *others)
    with pytest.raises(ValueError, match=f"{free} of 64 GiB .*--rl-device-memory-utilization"):
        free_share(accelerator(free, 64), 9.0)


@pytest.mark.parametrize("version", [(0, 9), (0, 11), (0, 14), (0, 15), (0, 23)])
def test_the_kv_cache_gets_what_is_free_less_reserve_weights_and_activations(monkeypatch, version):
    """vllm-ascend's formulas, of whose bodies tests/ascend has rows, on a device of which the trainer holds a part."""
    ranks(monkeypatch)
    total, others, weights, activations = 64, 7, 20, 3
    device = accelerator(total - others, total, "npu")
    monkeypatch.setattr(vllm_memory.engine_env, "vllm_version", lambda: version)
    requested = free_share(device, 9.0) * total
    cache = requested - weights - activations
    if version < (0, 15):
        cache -= others  # `non_torch_allocations`, and what torch has of the trainer
    else:
        assert requested <= total - others, "vLLM refuses to ask for more than is free"
    assert cache == pytest.approx(total - others - 0.1 * total - weights - activations, abs=total / 1000)
