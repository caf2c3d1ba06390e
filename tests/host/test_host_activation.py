"""When host mode starts and when it must not, and that other libraries do not suffer from it."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mindspeed_rl_plugin import host
from mindspeed_rl_plugin.host.megatron_gaps import GAPS

ACTIVATE = "from mindspeed_rl_plugin import host; host.activate_if_needed()\n"


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_never_with_an_accelerator(snippet, kind):
    out = snippet(
        """
        import multiprocessing.spawn, sys, torch, torch.distributed as dist
        watched = [(torch.cuda, n) for n in vars(torch.cuda)] + [(torch, n) for n in ("empty", "zeros", "arange")]
        watched += [(torch.Tensor, n) for n in ("to", "type", "cuda", "pin_memory")]
        watched += [(dist, n) for n in ("init_process_group", "new_group", "isend", "all_reduce")]
        watched += [(multiprocessing.spawn, "get_preparation_data"), (sys, "meta_path")]
        before = [getattr(*w) for w in watched]
        finders = list(sys.meta_path)
        from mindspeed_rl_plugin import host
        assert host.activate_if_needed() is False and host.active() is False
        assert all(a is b for a, b in zip(before, [getattr(*w) for w in watched], strict=True))
        assert finders == sys.meta_path
        """,
        MINDSPEED_RL_DEVICE=kind,
    )
    assert out == ""


@pytest.mark.parametrize("rank, lines", [("0", 1), ("1", 0)])
def test_rank_0_says_it_once_and_the_users_environment_wins(snippet, rank, lines):
    code = ACTIVATE * 2 + "assert host.active(); import os, json; print(json.dumps(dict(os.environ)))"
    out = snippet(code, RANK=rank, WORLD_SIZE="2", MINDSPEED_RL_DEVICE="cpu", TORCHDYNAMO_DISABLE="0")
    *said, environment = out.splitlines()
    assert len(said) == out.count("host mode: ") == lines
    names = ("TORCHDYNAMO_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS")
    assert [json.loads(environment)[name] for name in names] == ["0", "1", "1"]


def test_too_late_is_an_error(monkeypatch):
    monkeypatch.setattr(host, "_active", False)
    monkeypatch.setattr(host, "get_device", lambda: SimpleNamespace(is_cpu=True))
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    with pytest.raises(ValueError, match="megatron.core .* `python -m mindspeed_rl_plugin SCRIPT`"):
        host.activate_if_needed()


def test_tensors_asked_of_an_accelerator_are_on_the_cpu(snippet):
    """An index is a device too: `current_device` gives one, and Megatron passes it to every kind of factory."""
    snippet(
        ACTIVATE
        + """
import io, torch
here = torch.cuda.current_device()
assert type(here) is int and here == 1 < torch.cuda.device_count()
saved = io.BytesIO()
torch.save(torch.ones(2), saved)
ones, linear = torch.ones(2), torch.nn.Linear
factories = ("empty", "zeros", "ones", "rand", "randn", "arange", "randperm", "eye", "tril_indices", "empty_strided")
shapes = {"tril_indices": (3, 3), "empty_strided": ((2,), (1,))}
like = ("empty_like", "zeros_like", "ones_like", "rand_like", "randn_like")
for device in ("cuda", "cuda:3", "npu", torch.device("cuda", 1), 0, here):
    for tensor in (*(getattr(torch, name)(*shapes.get(name, (2,)), device=device) for name in factories),
                   *(getattr(torch, name)(ones, device=device) for name in like),
                   torch.tensor([1.0], device=device), torch.as_tensor([1.0], device=device),
                   torch.full((2,), 1.0, device=device), torch.full_like(ones, 2.0, device=device),
                   torch.randint(3, (2,), device=device), torch.normal(0.0, 1.0, (2,), device=device),
                   torch.linspace(0, 1, 3, device=device), ones.new_zeros(3, device=device),
                   ones.new_tensor([1.0], device=device), ones.to(device), ones.to(device=device),
                   ones.to(device, torch.float64, non_blocking=True), ones.cuda(device), ones.cuda(device=device),
                   linear(2, 2, device=device).weight, linear(2, 2).to(device).weight,
                   linear(2, 2).to(device=device).weight, linear(2, 2).to(device, torch.float64).weight,
                   linear(2, 2).cuda(device).weight, linear(2, 2).to_empty(device=device).weight,
                   torch.randn(2, pin_memory=True), ones.cuda(), ones.pin_memory()):
        assert tensor.device == torch.device("cpu"), (device, tensor.device)
    torch.cuda.set_device(device)
    if not isinstance(device, int):  # torch itself takes no index there
        saved.seek(0)
        assert torch.load(saved, map_location=device).device == torch.device("cpu")
assert torch.ones(2, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
assert torch.ones(2).type("torch.cuda.HalfTensor").dtype is torch.float16
assert isinstance(torch.ones(1), torch.cuda.FloatTensor)
assert torch.nn.Linear(2, 2).cuda().to("cuda").weight.device.type == "cpu"
# Meta tensors, and the context that makes them, are no accelerator.
assert torch.empty(2, device="meta").device.type == "meta"
with torch.device("meta"):
    assert torch.arange(3).device.type == torch.empty(2).device.type == "meta"
    assert torch.nn.Linear(2, 2).weight.device.type == "meta"
assert torch.nn.Linear(2, 2).to("meta").weight.device.type == "meta"
""",
        RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2",
    )  # fmt: skip


def test_generator_streams_and_memory(snippet):
    snippet(
        ACTIVATE
        + """
import time
import torch
state = torch.cuda.get_rng_state()
first = torch.rand(3, device="cuda")
torch.cuda.set_rng_state(state)
assert torch.equal(torch.rand(3), first)
torch.cuda.manual_seed(5)
seeded = torch.rand(2)
assert torch.equal(torch.rand(2, generator=torch.Generator().manual_seed(5)), seeded)
stream = torch.cuda.Stream()
with torch.cuda.stream(stream), torch.cuda.device(0):
    event = stream.record_event()
torch.cuda.current_stream().wait_event(event)
begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
begin.record()
time.sleep(0.01)
end.record(stream)
assert end.query() and 9 < begin.elapsed_time(end) < 1000
used = torch.cuda.memory_allocated()  # before the peak: reading may take more
assert 1 << 20 < used <= torch.cuda.max_memory_allocated()
assert torch.cuda.memory_stats()["allocated_bytes.all.current"] > 0
assert torch.cuda.get_device_properties(0).total_memory == torch.cuda.mem_get_info()[1]
assert torch.cuda.is_available() and torch.cuda.device_count() == 1
"""
    )


@pytest.mark.slow
def test_models_of_transformers_are_whole(snippet, tmp_path):
    """Rotary buffers are not saved: they are computed in `torch.device("meta")` contexts' wake."""
    out = snippet(
        ACTIVATE
        + f"""
import json
from transformers import AutoModelForCausalLM, Qwen2Config
config = Qwen2Config(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=1)
AutoModelForCausalLM.from_config(config).save_pretrained({str(tmp_path)!r})
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
print(json.dumps([b.tolist() for b in model.buffers()]))
"""
    )
    expected = [10000.0 ** (-2 * i / 32) for i in range(16)]
    buffers = json.loads(out.splitlines()[-1])
    assert buffers and all(b == pytest.approx(expected) for b in buffers)


SPAWNING = """
import multiprocessing
import torch
from mindspeed_rl_plugin import host

def work(queue):
    queue.put([host.active(), torch.empty(2, device="cuda").device.type, __name__])

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print(queue.get(timeout=60))
    process.join(60)
"""


def test_spawned_processes_are_in_host_mode_too(snippet, tmp_path):
    script = tmp_path / "spawning.py"
    script.write_text(SPAWNING)
    out = snippet(ACTIVATE + f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')")
    assert out.splitlines()[1:] == ["[True, 'cpu', '__mp_main__']"]


def test_gaps_are_complete_rows():
    for gap in GAPS:
        texts = (gap.module, gap.name, gap.versions, gap.remove_when, gap.close.__doc__)
        assert all(text and len(text) > 2 for text in texts), gap
    assert len({(g.module, g.name) for g in GAPS}) == len(GAPS)


def test_experts_are_counted(monkeypatch):
    """As MindSpeed-LLM's router calls it."""
    monkeypatch.setattr(torch, "histc", torch.histc)
    next(gap.close for gap in GAPS if gap.name == "torch.histc")(SimpleNamespace(torch=torch))
    chosen = torch.tensor([0, 3, 1, 3], dtype=torch.int32)
    counts = torch.histc(chosen, bins=4, min=0, max=4)
    assert counts.tolist() == [1, 1, 0, 2] and counts.dtype == torch.int32


def test_gaps_close_when_their_modules_are_imported(snippet):
    """With the installed core: nothing of Megatron is imported by host mode, and each gap closes on import."""
    snippet(
        ACTIVATE
        + """
import sys, typing
assert not any(name.split(".")[0] == "megatron" for name in sys.modules)
assert typing.override
import torch
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer
from mindspeed_rl_plugin.host.optimizer import HostAdam
assert optimizer.Adam is distrib_optimizer.Adam is HostAdam and distrib_optimizer.HAVE_APEX_OR_TE
distrib_optimizer.quantize_param_shard([], [], [], None)
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer import TransformerConfig
for parallel in (True, False):
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, sequence_parallel=parallel,
                               tensor_model_parallel_size=2, normalization="RMSNorm", persist_layer_norm=True)
    norm = WrappedTorchNorm(config, 8, eps=1e-3)
    assert type(norm) is torch.nn.RMSNorm and norm.eps == 1e-3
    assert all(p.sequence_parallel is parallel for p in norm.parameters())
    assert config.sequence_parallel is parallel and config.persist_layer_norm
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
assert YarnRotaryEmbedding(kv_channels=8, scaling_factor=2.0).inv_freq_extra.device.type == "cpu"
"""
    )
