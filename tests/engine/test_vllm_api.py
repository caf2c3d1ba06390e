"""What differs between versions of vLLM: their samplers, kernels, formats, derived weights and steps."""

import inspect
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mindspeed_rl_plugin.device import Device
from mindspeed_rl_plugin.engine import vllm_api

HEADS, NOPE, VALUE, LORA = 2, 3, 4, 5


def worker_of(*layers):
    return SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: nn.Sequential(*layers)))


@pytest.mark.parametrize(
    ("sampler", "processed"),
    [
        # vllm-ascend leaves both parts at their default; 0.9 has no mode at all.
        (SimpleNamespace(logprobs_mode="raw", topk_topp_sampler=SimpleNamespace(logprobs_mode="raw")), True),
        (SimpleNamespace(logprobs_mode="processed_logprobs"), True),
        (SimpleNamespace(topk_topp_sampler=SimpleNamespace()), False),
    ],
)
def test_the_sampler_itself_is_told(sampler, processed) -> None:
    worker = SimpleNamespace(model_runner=SimpleNamespace(sampler=sampler))
    assert vllm_api.demand_processed_logprobs(worker) == processed
    for part in (sampler, getattr(sampler, "topk_topp_sampler", None)):
        assert getattr(part, "logprobs_mode", "processed_logprobs") == "processed_logprobs"


class Experts(nn.Module):
    """vLLM's layer of experts, as far as it tells by what it is run."""

    def __init__(self, backend=None, **flags) -> None:
        super().__init__()
        self.quant_method = SimpleNamespace(**flags)
        if backend:
            self.quant_method.unquantized_backend = SimpleNamespace(name=backend)


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (Experts("FLASHINFER_TRTLLM"), "experts of 2 by FLASHINFER_TRTLLM"),
        (Experts("AITER"), "by AITER"),
        (Experts(flashinfer_cutlass_moe_enabled=True), "by flashinfer_cutlass_moe_enabled"),
        (Experts(rocm_aiter_moe_enabled=True), "by rocm_aiter_moe_enabled"),
    ],
)
def test_kernels_that_permute_experts_in_place_are_refused(layer, named) -> None:
    plain = [nn.Linear(2, 2), Experts("TRITON", flashinfer_cutlass_moe_enabled=False), Experts("OOT"), Experts()]
    vllm_api.demand_plain_experts(worker_of(*plain))
    with pytest.raises(ValueError, match=named):
        vllm_api.demand_plain_experts(worker_of(*plain[:2], layer))


def test_the_names_of_kernels_are_vllms() -> None:
    """What 0.32 leaves as it is declared: read from its own function."""
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    assert set(vllm_api.PLAIN_EXPERTS) <= {b.name for b in unquantized.UnquantizedMoeBackend}
    assert unquantized.map_unquantized_backend("triton").name == "TRITON"
    source = inspect.getsource(unquantized.convert_to_unquantized_kernel_format)
    rearranged = [b.name for b in unquantized.UnquantizedMoeBackend if f"Backend.{b.name}:" in source]
    assert rearranged and not set(rearranged) & set(vllm_api.PLAIN_EXPERTS)


def test_weights_in_a_format_of_the_npus_own_are_refused(monkeypatch) -> None:
    layer = nn.Linear(2, 2)
    own = []
    npu = SimpleNamespace(get_npu_format=lambda t: 29 if any(t is one for one in own) else 2)
    monkeypatch.setitem(sys.modules, "torch_npu", npu)
    vllm_api.demand_base_format(worker_of(layer), Device("npu"))
    own.append(layer.weight)
    vllm_api.demand_base_format(worker_of(layer), Device("cuda"))
    with pytest.raises(ValueError, match=r"stores 0\.weight in a format"):
        vllm_api.demand_base_format(worker_of(layer), Device("npu"))


def latent(holder, kept: str):
    """Attention with W_UK_T and W_UV made of its weight: as parameters, plain copies, or views."""
    holder.num_heads, holder.qk_nope_head_dim, holder.v_head_dim = HEADS, NOPE, VALUE
    holder.kv_b_proj = nn.Linear(LORA, HEADS * (NOPE + VALUE), bias=False)
    both = holder.kv_b_proj.weight.T.view(LORA, HEADS, NOPE + VALUE).split([NOPE, VALUE], -1)
    keys, values = both[0].permute(1, 2, 0), both[1].transpose(0, 1)
    make = {"views": lambda t: t.data, "copies": lambda t: t.data.contiguous(), "parameters": nn.Parameter}[kept]
    holder.W_UK_T, holder.W_UV = make(keys), make(values)
    return holder


@pytest.mark.parametrize("where", ["layer", "implementation"])
@pytest.mark.parametrize("kept", ["views", "copies", "parameters"])
def test_derived_tensors_follow_the_weight_in_place(where, kept) -> None:
    layer = nn.Module()
    if where == "layer":
        holder = latent(layer, kept)
    else:  # vllm-ascend
        holder = latent(SimpleNamespace(), kept)
        layer.impl, layer.kv_b_proj = holder, holder.kv_b_proj
    weight, addresses = holder.kv_b_proj.weight.data, [holder.W_UK_T.data_ptr(), holder.W_UV.data_ptr()]
    weight.copy_(torch.randn_like(weight))
    worker = worker_of(layer, nn.Linear(2, 2))
    vllm_api.refresh_derived(worker)
    assert all(torch.equal(*pair) for pair in vllm_api.latent_parts(worker)) and len(vllm_api.latent_parts(worker)) == 2
    query, key = torch.randn(HEADS, NOPE), torch.randn(LORA)
    whole = (weight @ key).view(HEADS, NOPE + VALUE)  # what a prompt computes
    torch.testing.assert_close((query[:, None] @ holder.W_UK_T)[:, 0] @ key, (query * whole[:, :NOPE]).sum(-1))
    torch.testing.assert_close((key @ holder.W_UV), whole[:, NOPE:])
    assert [holder.W_UK_T.data_ptr(), holder.W_UV.data_ptr()] == addresses


class Core:
    """Steps of vLLM's engine core, before and after it stopped to look whether the device is done."""

    def before(self):
        if len(self.batch_queue) < self.batch_queue_size and not self.batch_queue[-1][0].done():
            return None, True
        return self.batch_queue.pop()

    def after(self):
        return None if len(self.batch_queue) < self.batch_queue_size else self.batch_queue.pop()


@pytest.mark.parametrize(("step", "looks"), [(Core.before, True), (Core.after, False), (None, False)])
def test_asynchronous_steps_that_look_at_the_clock(step, looks) -> None:
    core = type("EngineCore", (), {"step_with_batch_queue": step} if step else {})
    assert vllm_api.steps_look_at_the_clock(core) == looks
    given = {"model": "m", "async_scheduling": True}
    assert vllm_api.usable(given, {"async_scheduling"}, core) == given | {"async_scheduling": not looks}
    assert vllm_api.usable(given, (), core) == {"model": "m"}


def test_the_steps_of_this_vllm_do_not_look_at_the_clock() -> None:
    from vllm.v1.engine.core import EngineCore

    assert not vllm_api.steps_look_at_the_clock(EngineCore)


def test_vllm_takes_the_place_of_an_engine_from_its_rank_in_the_job(monkeypatch) -> None:
    """And counts engines that share experts twice: `_sharing_experts` mends both."""
    from vllm.config import ParallelConfig

    class Given:
        tensor_parallel_size = data_parallel_size = 2

        def create_engine_config(self):
            sizes = dict(tensor_parallel_size=2, data_parallel_size=2, enable_expert_parallel=True)
            parallel = ParallelConfig(**sizes, distributed_executor_backend="external_launcher")
            assert parallel.world_size_across_dp == 8
            return SimpleNamespace(parallel_config=parallel)

    monkeypatch.setenv("RANK", "7")
    with pytest.raises(ValueError, match="data_parallel_rank"):
        Given().create_engine_config()
    engine = SimpleNamespace(from_vllm_config=lambda config, disable_log_stats: config)
    parallel = vllm_api._sharing_experts(engine, Given()).parallel_config
    assert (parallel.data_parallel_rank, parallel.world_size_across_dp, os.environ["RANK"]) == (1, 4, "7")
