"""The swap on plain modules and hand-written buffers: storages really empty, views alive, bytes back."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mindspeed_rl_plugin.device import Device, StorageMeter
from mindspeed_rl_plugin.weights.host_memory import HostWeights
from mindspeed_rl_plugin.weights.offload import TrainState, gathered
from mindspeed_rl_plugin.weights.verify import WeightMismatch

pytestmark = pytest.mark.quick
CPU = Device("cpu")


class FakeDDP(nn.Module):
    """Megatron's wrapper in small: parameters and gradients are views of two buffers, or of one shared storage."""

    def __init__(self, shared=False):
        super().__init__()
        self.module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        self.module.register_parameter("frozen", nn.Parameter(torch.randn(100), requires_grad=False))
        self.module.register_buffer("counter", torch.arange(10.0))
        weights = [m.weight for m in self.module]
        total, at = sum(w.numel() for w in weights), 0
        param_data = torch.zeros(total)
        grad_data = param_data if shared else torch.zeros(total)
        for w in weights:
            piece = slice(at, at + w.numel())
            param_data[piece].copy_(w.data.flatten())
            w.data = param_data[piece].view(w.shape)
            w.main_grad = grad_data[piece].view(w.shape)
            at += w.numel()
        self.buffers = [SimpleNamespace(param_data=param_data, grad_data=grad_data)]
        self.expert_parallel_buffers = []
        self.remove_forward_pre_hook_handles = {}

    def forward(self, x):
        return self.module(x)


def adam(params):
    inner = torch.optim.AdamW(params, lr=1e-2)
    for p in params:
        inner.state[p] = {"step": torch.tensor(1.0), "exp_avg": torch.randn_like(p), "exp_avg_sq": torch.rand_like(p)}
    return SimpleNamespace(optimizer=inner)


def distributed_adam(model, dtype):
    """Main parameters as views of the parameter buffer (fp32) or as tensors of their own (bf16)."""
    data = model.buffers[0].param_data
    views = [data[:4096], data[4096:]]
    return adam([v if dtype == torch.float32 else v.detach().clone().float() for v in views])


def trainer(device=CPU, dtype=torch.bfloat16, **options):
    """A model, its optimizer, and the training state of both."""
    torch.manual_seed(0)
    model = FakeDDP()
    optimizer = distributed_adam(model, dtype)
    return model, optimizer, TrainState([model], optimizer, device, **options)


def state_of(model, optimizer):
    inner = optimizer.optimizer
    tensors = [p.data for p in model.module.parameters()] + [model.module.counter]
    tensors += [p.data for g in inner.param_groups for p in g["params"]]
    return tensors + [t for s in inner.state.values() for t in s.values()]


def copies_of(model, optimizer):
    return [t.clone() for t in state_of(model, optimizer)]


def same(before, after):
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_leaves_and_returns_bitwise(dtype):
    model, optimizer, state = trainer(dtype=dtype)
    model.module[0].weight.grad = torch.ones(64, 64)
    optimizer.optimizer.param_groups[0]["params"][0].grad = torch.ones(4096)
    tensors = state_of(model, optimizer)
    before = [t.clone() for t in tensors]
    big = [t for t in tensors if t.numel() > 1] + [model.module[0].weight.main_grad]
    freed = state.offload()
    assert all(t.untyped_storage().nbytes() == 0 for t in big)
    assert model.module[0].weight.grad is None and optimizer.optimizer.param_groups[0]["params"][0].grad is None
    own_main = 0 if dtype == torch.float32 else 4 * 8192
    assert freed == 4 * (8192 + 100 + 10) + 4 * 8192 + own_main + 2 * 4 * 8192
    assert state.off_device == {"params", "grads", "optimizer"}
    assert state.onload() == freed and not state.off_device
    assert same(before, tensors)
    model.module[1].weight.data.fill_(3.0)
    assert (model.buffers[0].param_data[4096:] == 3).all()  # still one memory
    assert not model.buffers[0].grad_data.any()


def test_gradients_within_parameters_and_outside_of_buffers_and_chained_optimizers():
    model = FakeDDP(shared=True)
    state = TrainState([model], None, CPU)
    weight = model.module[0].weight.data.clone()
    assert state.offload(["grads"]) == 0 and torch.equal(model.module[0].weight, weight)
    plain = nn.Linear(32, 32)
    plain.weight.main_grad = torch.ones(32, 32)
    chained = SimpleNamespace(chained_optimizers=[adam([plain.weight]), SimpleNamespace(optimizer=None)])
    state = TrainState([plain], chained, CPU)
    state.offload()
    moment = chained.chained_optimizers[0].optimizer.state[plain.weight]["exp_avg"]
    assert plain.weight.main_grad.untyped_storage().nbytes() == 0 == moment.untyped_storage().nbytes()
    state.onload()
    assert not plain.weight.main_grad.any()


def test_host_buffers_are_allocated_once_and_memory_returns():
    with StorageMeter() as meter:
        _, _, state = trainer()
        base, buffers = meter.allocated(), None
        for _ in range(20):
            state.offload()
            assert meter.allocated() == 2 * 4  # two counters of steps, and not one byte of training state
            away = sorted(h.data_ptr() for parts in state._offloaded.values() for a in parts for h in a.host or [])
            assert buffers in (None, away)
            buffers = away
            state.onload()
            assert meter.allocated() == base


def test_the_process_really_shrinks():
    """Freed gradients leave the resident set of the process, not just torch's books."""
    layer = nn.Linear(4096, 4096, bias=False)
    layer.weight.main_grad = torch.ones(4096, 4096)
    state, before = TrainState([layer], None, CPU), CPU.memory.allocated()
    assert state.offload(["grads"]) == 64 << 20
    assert before - CPU.memory.allocated() > 60 << 20


@pytest.mark.parametrize("scratch", [1000, 64 << 20])  # bytes: in several parts, and whole
def test_reference_weights_change_places_with_the_actors(monkeypatch, scratch):
    monkeypatch.setattr("mindspeed_rl_plugin.weights.host_memory._SCRATCH", scratch)
    model = FakeDDP()
    reference = HostWeights.capture([model], CPU)
    x = torch.randn(3, 64)
    expected = model(x)
    with torch.no_grad():
        for p in model.module.parameters():
            p.add_(torch.randn_like(p))
    main = model.buffers[0].param_data[:4096]  # as the distributed optimizer's fp32 main parameter
    actor, mine = [t.clone() for t in (*model.module.parameters(), main)], model(x)
    for _ in range(2):
        with pytest.raises(KeyError), reference.swapped_into([model]):
            assert torch.equal(model(x), expected)
            raise KeyError  # after which they return too
        assert same(actor, (*model.module.parameters(), main))
        assert torch.equal(model(x), mine)


def test_gathered_takes_the_hooks_off_and_puts_them_back():
    """Or gathers without them: Megatron takes them off for the first iteration of a process."""
    events = []
    hooked, first, plain = (nn.Linear(2, 2) for _ in range(3))
    hooked.use_forward_hook = first.use_forward_hook = True
    hooked.remove_forward_pre_hook_handles, first.remove_forward_pre_hook_handles = {"m": 1}, {}
    hooked.disable_forward_pre_hook = lambda: events.append("off")
    hooked.enable_forward_pre_hook = lambda: events.append("on")
    first.start_param_sync = lambda force_sync: events.append(f"gather {force_sync}")
    with pytest.raises(RuntimeError), gathered([hooked, first, plain]):
        events.append("inside")
        raise RuntimeError
    assert events == ["off", "gather True", "inside", "on"]


class Router(nn.Module):
    """Megatron's router in bf16 as core 0.12 builds it: narrow until it is used."""

    def __init__(self):
        super().__init__()
        self.register_buffer("expert_bias", torch.arange(4.0).bfloat16())

    def _maintain_float32_expert_bias(self):
        if self.expert_bias.dtype != torch.float32:
            self.expert_bias.data = self.expert_bias.data.float()


def test_a_bias_that_the_first_forward_pass_widens_stays_the_tensor_that_was_captured():
    router = Router()
    reference = HostWeights.capture([router])
    router._maintain_float32_expert_bias()  # what a forward pass does
    router.expert_bias.add_(1)
    with reference.swapped_into([router]):
        assert router.expert_bias.dtype == torch.float32 and router.expert_bias.tolist() == [0, 1, 2, 3]
    assert router.expert_bias.tolist() == [1, 2, 3, 4]
    state = TrainState([router])
    assert state.offload(["params"]) == 16
    state.onload()
    assert router.expert_bias.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "category, what, message",
    [
        ("params", lambda m, o: m.module[1].weight, r"0 1.weight, chunk 0 parameter buffer 0: bytes \[0, 32768\)"),
        ("params", lambda m, o: m.module.frozen, r"0 frozen: bytes \[0, 400\) of 400 of their storage on trainer"),
        ("params", lambda m, o: m.module.counter, "chunk 0 counter: bytes "),
        ("optimizer", lambda m, o: o.param_groups[0]["params"][1], "main parameter 1 of optimizer 0: bytes "),
        ("optimizer", lambda m, o: next(iter(o.state.values()))["exp_avg"], "exp_avg of parameter 0 of optimizer 0: "),
    ],
)
def test_one_bit_that_changed_on_the_host_is_named(category, what, message):
    """In whatever leaves, be it narrower in the engine or never there."""
    model, optimizer, state = trainer(verify=True)
    state.offload()
    state.onload()
    state.offload()
    damaged = what(model, optimizer.optimizer).untyped_storage()._cdata
    (place,) = (part.host for part in state._offloaded[category] if part.storage._cdata == damaged)
    place[-1][-4] ^= 1  # the lowest bit of the last number
    with pytest.raises(WeightMismatch, match=message):
        state.onload()
    quiet = TrainState([FakeDDP()], None, CPU)
    quiet.offload()
    quiet._offloaded["params"][0].host[0][0] ^= 1
    quiet.onload()  # not asked for


def test_a_wrong_block_of_a_large_storage_is_named(monkeypatch):
    layer = nn.Linear(1024, 3000, bias=False)  # 12 MB
    state = TrainState([layer], None, CPU, verify=True)
    state.offload()
    host = state._offloaded["params"][0].host
    host[0][5 << 20] ^= 4
    with pytest.raises(WeightMismatch, match=rf"chunk 0 weight: bytes \[{4 << 20}, {8 << 20}\) of 12288000"):
        state.onload()
