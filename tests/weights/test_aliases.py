"""Swap of training state whose storages point into others, as in the three layouts of --reuse-fp32-param, in small."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hostile import poisoned_release
from torch import nn

from mindspeed_rl_plugin.device import Device
from mindspeed_rl_plugin.host import reuse
from mindspeed_rl_plugin.host.reuse import reuse_data_ptr
from mindspeed_rl_plugin.weights import aliases, offload
from mindspeed_rl_plugin.weights.host_memory import HostWeights
from mindspeed_rl_plugin.weights.offload import TrainState
from mindspeed_rl_plugin.weights.verify import WeightMismatch

CPU = Device("cpu")
SIZES = (24, 40)
TOTAL = sum(SIZES)


@pytest.fixture(autouse=True)
def builder(monkeypatch):
    """Nothing recorded before, and MindSpeed's builder of operators."""
    monkeypatch.setattr(aliases, "_calls", [])
    module = ModuleType("mindspeed.op_builder.builder")
    module.MindSpeedOpBuilder = type("MindSpeedOpBuilder", (), {"load": lambda self: self.operators})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.MindSpeedOpBuilder


def operator(builder):
    made = builder()
    made.operators = SimpleNamespace(reuse_data_ptr=reuse_data_ptr)
    return made.load().reuse_data_ptr


def starts():
    return [sum(SIZES[:i]) for i in range(len(SIZES))]


class Chunk(nn.Module):
    """Two bf16 parameters, views of a parameter buffer as with a distributed optimizer, or of their own."""

    def __init__(self, in_buffer):
        super().__init__()
        self.module = nn.Module()
        data = torch.randn(TOTAL).bfloat16()
        self.buffers = [SimpleNamespace(param_data=data, grad_data=torch.zeros(TOTAL))] if in_buffer else []
        for i, (at, size) in enumerate(zip(starts(), SIZES, strict=True)):
            piece = data[at : at + size] if in_buffer else data[at : at + size].clone()
            self.module.register_parameter(f"p{i}", nn.Parameter(piece))


def optimizer(mains, **more):
    inner = torch.optim.AdamW(mains)
    for main in mains:
        inner.state[main] = {"exp_avg": torch.randn_like(main)}
    return SimpleNamespace(optimizer=inner, **more)


def alone(reuse):
    """A distributed optimizer of one rank (reuse_buffer_single): residuals beside weights in the owner."""
    chunk = Chunk(in_buffer=True)
    (buffer,), params = chunk.buffers, list(chunk.module.parameters())
    owner, integers = torch.randn(2 * TOTAL).bfloat16(), torch.empty(TOTAL, dtype=torch.int32)
    mains = [torch.empty(size) for size in SIZES]
    reuse(integers, owner, 0)
    for param, main, at, size in zip(params, mains, starts(), SIZES, strict=True):
        reuse(main, owner, at)
        param.data = owner[2 * at + size : 2 * (at + size)]
    reuse(buffer.param_data, owner, TOTAL)
    return chunk, optimizer(mains, shard_main_param_res_buffers=[owner]), [integers]


def one_of_two(reuse):
    """A shard of a distributed optimizer (reuse_buffer_dis): main parameters over half of the parameter buffer."""
    chunk = Chunk(in_buffer=True)
    buffer, residual = chunk.buffers[0].param_data, torch.randn(TOTAL // 2).bfloat16()
    integers, mains = torch.empty(TOTAL // 2, dtype=torch.int32), [torch.empty(TOTAL // 4), torch.empty(TOTAL // 4)]
    reuse(integers, buffer, 0)
    for i, main in enumerate(mains):
        reuse(main, buffer, i * TOTAL // 4)
    return chunk, optimizer(mains, shard_main_param_res_buffers=[residual]), [integers]


def plain(reuse):
    """An optimizer of whole parameters (ConvertFp32BF16): the weight itself points into its main parameter."""
    chunk, mains, others = Chunk(in_buffer=False), [], []
    for param in chunk.module.parameters():
        main, both = torch.randn(param.numel()), torch.empty(2 * param.numel(), dtype=torch.bfloat16)
        integers, residual = torch.empty(param.numel(), dtype=torch.int32), torch.empty_like(param.data)
        reuse(both, main, 0)
        reuse(integers, main, 0)
        reuse(residual, both, 0)
        reuse(param, both, residual.numel())
        mains.append(main)
        others += [both, integers, residual]
    return chunk, optimizer(mains), others


def built(layout, builder, **options):
    """Training state of a layout, and every tensor that sees its memory."""
    torch.manual_seed(0)
    with aliases.recording():
        chunk, optim, others = layout(operator(builder))
    inner = optim.optimizer
    seen = [*chunk.module.parameters(), *inner.param_groups[0]["params"], *others]
    seen += [state["exp_avg"] for state in inner.state.values()] + getattr(optim, "shard_main_param_res_buffers", [])
    seen += [buffer.param_data for buffer in chunk.buffers]
    return TrainState([chunk], optim, CPU, **options), [tensor.detach() for tensor in seen]


def bits(tensors):
    return [t.contiguous().view(torch.uint8).clone() for t in tensors]


def same(before, tensors):
    return all(torch.equal(a, b) for a, b in zip(before, bits(tensors), strict=True))


LAYOUTS = pytest.mark.parametrize("layout", [alone, one_of_two, plain])


@LAYOUTS
def test_every_alias_sees_what_left_and_no_byte_leaves_twice(layout, builder, monkeypatch):
    """The memory that an owner gives back is overwritten, so that what still points there reads it."""
    state, seen = built(layout, builder)
    monkeypatch.setattr(offload, "_release", poisoned_release)
    before, addresses, freed = bits(seen), {t.data_ptr() for t in seen}, 0
    for what in (["params", "optimizer"], ["params"], ["optimizer"]):
        state.start_offload(what)
        places = [part.storage.data_ptr() for parts, _ in state._offloading.values() for part in parts]
        freed += state.finish_offload()
        assert len(places) == len(set(places))
        kept = [torch.empty(n) for n in (TOTAL // 4, TOTAL // 2, TOTAL, *SIZES)]  # takes the addresses
        state.onload()
        assert same(before, seen), what
        del kept
    assert {t.data_ptr() for t in seen} != addresses
    moments = 4 * (TOTAL // 2 if layout is one_of_two else TOTAL)
    weights = {alone: 4 * TOTAL, one_of_two: 2 * TOTAL + TOTAL, plain: 4 * TOTAL}[layout]
    assert freed == 2 * (moments + weights)
    seen[0].zero_()  # a weight
    assert sum(not torch.equal(a, b) for a, b in zip(before, bits(seen), strict=True)) > 2, "still one memory"


@LAYOUTS
def test_reference_weights_change_places_with_the_actors(layout, builder):
    state, seen = built(layout, builder)
    reference, first = HostWeights.capture(state.chunks, CPU), bits(state.chunks[0].module.parameters())
    for param in state.chunks[0].module.parameters():
        param.data.add_(1)
    actor = bits(seen)
    for _ in range(2):
        with reference.swapped_into(state.chunks):
            assert same(first, state.chunks[0].module.parameters())
        assert same(actor, seen)


@LAYOUTS
def test_one_bit_that_changed_on_the_host_names_the_weight(layout, builder):
    state, _ = built(layout, builder, verify=True)
    state.offload()
    state._offloaded["params"][-1].host[0][-2] ^= 1
    with pytest.raises(WeightMismatch, match=r"chunk 0 p1"):
        state.onload()


def test_outside_of_the_context_nothing_is_recorded(builder):
    a, b = torch.arange(4.0), torch.empty(2)
    with aliases.recording():
        pass
    operator(builder)(b, a, 1)
    assert b.tolist() == [1, 2] and aliases.places() == {}
    with pytest.raises(ValueError, match="2 elements of 4 bytes from element 3 on exceed 16 bytes"):
        reuse_data_ptr(b, a, 3)


def test_without_a_compiler_its_variable_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for compiler in ("/nowhere/c++", "false"):
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises(RuntimeError, match=f"--reuse-fp32-param .*{compiler[:4]}"):
            reuse._library()
    assert list(tmp_path.iterdir()) == []
