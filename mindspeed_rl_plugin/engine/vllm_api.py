"""Functions for the parts of vLLM's interface that differ between 0.9.1 and 0.32.

Only this file and `host.vllm_live` import vLLM. The imports are inside the functions: an import takes seconds, and the
environment must be prepared before it.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl_plugin.device import Device
from mindspeed_rl_plugin.engine.options import PROCESSED, sampling_fields
from mindspeed_rl_plugin.host.engine_env import in_group
from mindspeed_rl_plugin.rows import GenerateRequest

# Tensors of multi-latent attention that vLLM derives from `kv_b_proj` for decoding. Some versions keep them as
# parameters, some as attributes of the layer or of its implementation, some as views of the weight itself.
DERIVED = ("W_UV", "W_UK_T")
# Engine arguments that older versions lack; the engine works without them.
OPTIONAL_ARGUMENTS = (
    "logprobs_mode",
    "kv_cache_memory_bytes",
    "attention_backend",
    "moe_backend",
    "async_scheduling",
    "additional_config",
)
# Kernels that read expert weights in the order that vLLM declares. "OOT" are vllm-ascend's: the shapes of the weights
# show whether it has transposed them.
PLAIN_EXPERTS = ("TRITON", "BATCHED_TRITON", "CPU", "OOT")
_LAYER_NUMBER = re.compile(r"\.layers\.(\d+)\.")
_CHOSEN_KERNEL = re.compile(r"\w*(flashinfer|aiter)\w*_enabled")  # flags of kernels, before 0.14


def build(arguments: dict[str, Any], loaded: Callable[[Any], None] | None = None) -> Any:
    """An in-process LLMEngine with these `EngineArgs` fields, without optional ones that this vLLM lacks.

    loaded: called with the worker when it has loaded its model, before graphs are captured. Collective over the whole
    world: vLLM makes its process groups here.
    """
    from vllm import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.llm_engine import LLMEngine

    know_config(json.loads((Path(arguments["model"]) / "config.json").read_text())["model_type"])
    known = {f.name for f in dataclasses.fields(EngineArgs)}
    given = EngineArgs(**usable(arguments, known, EngineCore))
    gc.freeze()  # vLLM runs the garbage collector several times while it builds; frozen objects are skipped
    shared, kind = arguments.get("data_parallel_size", 1) > 1, _calling(LLMEngine, loaded) if loaded else LLMEngine
    engine = _sharing_experts(kind, given) if shared else kind.from_engine_args(given)
    # Newer versions (0.32) destroy torch's default process group, the trainer's, when an engine is garbage-collected.
    finalizer = getattr(engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()
    _drop_message_queues()
    return engine


def _calling(engine: type, loaded: Callable[[Any], None]) -> type:
    """This class of engine, which calls `loaded` with the worker as soon as its model is loaded."""

    def __init__(self: Any, *, executor_class: type, **named: Any) -> None:
        def _init_executor(executor: Any) -> None:
            executor_class._init_executor(executor)
            loaded(_unwrapped(executor.driver_worker))

        own = type(executor_class.__name__, (executor_class,), {"_init_executor": _init_executor})
        engine.__init__(self, executor_class=own, **named)

    return type(engine.__name__, (engine,), {"__init__": __init__})


def architectures() -> Collection[str]:
    """Names of the models that this vLLM has, as in `architectures` of config.json."""
    from vllm import ModelRegistry

    return ModelRegistry.get_supported_archs()


def _sharing_experts(engine: type, given: Any) -> Any:
    """An engine with these `EngineArgs`, which is one data parallel rank of the engines that share experts.

    vLLM (0.11 to 0.32, config/parallel.py) derives the data parallel rank from RANK as if there were no other engines.
    With an external launcher it counts data parallel ranks twice in `world_size_across_dp`, by which vllm-ascend
    chooses how tokens reach their experts (0.18: `select_moe_comm_method`).
    """
    size = given.tensor_parallel_size
    with in_group(size * given.data_parallel_size):
        config = given.create_engine_config()
    config.parallel_config.world_size = size
    return engine.from_vllm_config(config, disable_log_stats=True)


def batches_in_flight(engine: Any) -> int:
    """Number of steps whose tokens are not returned yet (asynchronous scheduling)."""
    return len(getattr(engine.engine_core.engine_core, "batch_queue", None) or ())


def dummy_step(engine: Any) -> None:
    """A step of an engine without requests, in which its experts serve the engines that share them."""
    engine.engine_core.execute_dummy_batch()


def usable(arguments: dict[str, Any], known: Collection[str], core: type) -> dict[str, Any]:
    """These arguments without optional ones that are unknown, and without asynchronous steps that depend on timing."""
    given = {k: v for k, v in arguments.items() if k in known or k not in OPTIONAL_ARGUMENTS}
    if "async_scheduling" in given and steps_look_at_the_clock(core):
        given["async_scheduling"] = False
    return given


def steps_look_at_the_clock(core: type) -> bool:
    """Whether an asynchronous step depends on the device's progress (`future.done()`, 0.10 to 0.18). Each rank
    schedules its own steps; if these differ between ranks, the ranks wait for each other for ever."""
    step = getattr(core, "step_with_batch_queue", None)
    return step is not None and "done" in step.__code__.co_names


def know_config(model_type: str) -> None:
    """Let transformers read a config.json of a model that only vLLM has (Ling)."""
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        AutoConfig.register(model_type, type("EngineConfig", (PretrainedConfig,), {"model_type": model_type}))


def _drop_message_queues() -> None:
    """Free vLLM's message queues between the ranks of an engine: their shared memory and sockets would remain after the
    end of the process. The queues are not used, since each rank schedules its own steps."""
    from vllm.distributed import parallel_state

    for reference in list(parallel_state._groups.values()):
        group = reference()
        queue = getattr(group, "mq_broadcaster", None)
        if queue is not None:
            group.mq_broadcaster = None
            for name in ("local_subscribe_addr", "local_notify_addr"):
                address = getattr(queue.handle, name, None) or ""
                if address.startswith("ipc://"):  # ZeroMQ does not remove the file of a closed socket
                    Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


def demand_processed_logprobs(worker: Any) -> bool:
    """Make the sampler report log-probs of the distribution that it samples from. Returns False if this vLLM cannot
    (0.9).

    The engine argument is not enough: vllm-ascend 0.18 and 0.23 build their sampler without it
    (worker/model_runner_v1.py, `AscendSampler()`), and report log-probs of temperature 1 without a warning.
    """
    sampler = getattr(worker.model_runner, "sampler", None)
    modes = [p for p in (sampler, getattr(sampler, "topk_topp_sampler", None)) if hasattr(p, "logprobs_mode")]
    for part in modes:
        part.logprobs_mode = PROCESSED
    return bool(modes)


def demand_base_format(worker: Any, device: Device) -> None:
    """Raise ValueError for weights in an NPU-specific format: a reshard writes plain bytes into views of them."""
    for name, parameter in model(worker).named_parameters():
        if not device.in_base_format(parameter):
            raise ValueError(
                f"vLLM stores {name} in a format of the NPU, into which a reshard cannot write. This vllm-ascend does "
                "so even with VLLM_ASCEND_ENABLE_NZ=0; install a version of vllm-ascend that README names"
            )


def captured_graphs() -> int:
    from vllm.compilation.counter import compilation_counter

    return compilation_counter.num_cudagraph_captured


def has_batched_seeds(worker: Any) -> bool:
    """Whether one kernel samples for all requests, each by its own seed, as in vLLM's second model runner
    (v1/worker/gpu/sample). Other samplers call `exponential_` for each request with a generator (`random_sample` of
    v1/sample/ops/topk_topp_sampler.py, vllm-ascend's sample/sampler.py): 768 launches a step with 256 running."""
    states = getattr(getattr(worker.model_runner, "sampler", None), "sampling_states", None)
    return hasattr(states, "seeds")


def demand_plain_experts(worker: Any) -> None:
    """Raise ValueError for kernels that permute the expert weights in place: a reshard would write wrong experts. vLLM
    0.32 chooses FlashInfer's on sm100 by default (fused_moe/oracle/unquantized.py). Before 0.14, FlashInfer's and
    AITER's kernels were chosen by environment variables."""
    for name, module in model(worker).named_modules():
        method = getattr(module, "quant_method", None)
        backend = getattr(getattr(method, "unquantized_backend", None), "name", PLAIN_EXPERTS[0])
        flags = vars(method) if method is not None else {}
        named = [flag for flag, on in flags.items() if on is True and _CHOSEN_KERNEL.fullmatch(flag)]
        if named or backend not in PLAIN_EXPERTS:
            raise ValueError(
                f"vLLM runs the experts of {name} by {named[0] if named else backend}, a kernel that permutes their "
                "weights; unset VLLM_USE_FLASHINFER_MOE_FP16 and VLLM_ROCM_USE_AITER, or install a vLLM whose engine "
                "arguments have moe_backend"
            )


def sampling_params(request: GenerateRequest, eos: Sequence[int], seeded: bool) -> Any:
    """vLLM's form of one request; see `sampling_fields`. DELTA output: each step returns only its new tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(**sampling_fields(request, eos, seeded), output_kind=RequestOutputKind.DELTA)


def worker(engine: Any) -> Any:
    """This rank's worker, without its wrapper. The functions of this module accept the worker of an engine in this
    process or in a server."""
    return _unwrapped(engine.model_executor.driver_worker)


def _unwrapped(worker: Any) -> Any:
    return getattr(worker, "worker", worker)


def model(worker: Any) -> torch.nn.Module:
    runner = worker.model_runner
    return runner.get_model() if hasattr(runner, "get_model") else runner.model


def model_device(worker: Any) -> torch.device:
    return next(model(worker).parameters()).device


def routers(worker: Any) -> dict[int, Any]:
    """The router with a callback of each layer with experts, by the layer's number; before 0.16 none has one. Draft
    models are models of their own, so they are not here."""
    found: dict[int, Any] = {}
    for name, module in model(worker).named_modules():
        if hasattr(router := getattr(module, "router", None), "set_capture_fn"):
            number = int(_LAYER_NUMBER.search(f".{name}.")[1])
            assert found.setdefault(number, router) is router, f"layer {number} has two routers"
    return found


def returns_routes(worker: Any) -> bool:
    """Whether a server was started with --enable-return-routed-experts (0.32; before: of the model's config)."""
    config = worker.vllm_config
    places = (getattr(config, "aux_output_config", None), config.model_config)
    return any(getattr(place, "enable_return_routed_experts", False) for place in places)


def own_rows(ids: torch.Tensor) -> torch.Tensor:
    """The rows `[T, k]` of this engine's tokens, of what a router chose. Called inside a step.

    ids: `[rows, k]`. Engines that share experts route together (vLLM 0.32, routed_experts_capturer.py): rows of all
    engines; the same with each engine's rows padded and divided among its ranks; this engine's rows; or this rank's
    share of them.
    """
    from vllm.distributed.parallel_state import get_dp_group
    from vllm.forward_context import get_forward_context

    engines = get_forward_context().dp_metadata
    if engines is None:
        return ids
    counts, place = engines.num_tokens_across_dp_cpu.tolist(), get_dp_group().rank_in_group
    own, shares, group = counts[place], getattr(engines, "local_sizes", None) or [], tp_group()
    if len(ids) == own:
        return ids
    for sizes in (counts, shares):
        if len(ids) == sum(sizes):
            return ids[sum(sizes[: place * len(sizes) // len(counts)]) :][:own]
    assert len(ids) == -(-own // group.world_size), (len(ids), counts, shares, group.world_size)
    return group.all_gather(ids, dim=0)[:own]


def kv_slots(worker: Any) -> tuple[int, int, int]:
    """Of the KV cache: a group of layers with full attention, the tokens of its block, and the number of slots. Raises
    ValueError for a model whose layers all forget tokens."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = worker.model_runner.kv_cache_config
    for number, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        first = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
        if isinstance(first, FullAttentionSpec):
            return number, spec.block_size, spec.block_size * config.num_blocks
    kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups}))
    raise ValueError(
        f"routes cannot be recorded: the KV cache of this model has no layer with full attention, but {kinds}; remove "
        "--rl-router-replay rollout"
    )


def step_slots(worker: Any, group: int, tokens: int) -> torch.Tensor:
    """`[tokens]` slots of the KV cache that the last step wrote, in the order of its rows; -1: none."""
    runner = worker.model_runner
    if hasattr(runner, "block_tables"):  # vLLM's second model runner
        return runner.block_tables.slot_mappings[group, :tokens]
    mapping = runner.input_batch.block_table[group].slot_mapping
    return getattr(mapping, "gpu", mapping)[:tokens]


def parameters(worker: Any) -> dict[str, torch.Tensor]:
    """The live weights without derived tensors. Tied weights appear once, under the name of the embedding."""
    live = model(worker).named_parameters()
    return {name: p.data for name, p in live if name.rpartition(".")[2] not in DERIVED}


@torch.no_grad()
def refresh_derived(worker: Any) -> None:
    """Compute the derived tensors (`DERIVED`) again. This is done in place, since captured graphs and the sleep mode
    use their addresses. Prefill uses the weight itself, and decoding the derived tensors."""
    for tensor, new in latent_parts(worker):
        if tensor.data_ptr() != new.data_ptr():
            tensor.copy_(new)


def derived(worker: Any) -> list[torch.Tensor]:
    return [getattr(holder, name) for holder in _latent(worker) for name in DERIVED]


def _latent(worker: Any) -> list[Any]:
    """The objects with derived tensors: layers, or their implementations."""
    both = ((module, getattr(module, "impl", None)) for module in model(worker).modules())
    return [
        holder
        for pair in both
        for holder in pair
        if all(isinstance(getattr(holder, name, None), torch.Tensor) for name in DERIVED)
    ]


def weights_pool(kind: str) -> list[range]:
    """Address ranges of the weights' memory, which vLLM's sleep mode frees. kind: "npu" | "cuda"."""
    if kind == "npu":
        from vllm_ascend.device_allocator.camem import CaMemAllocator as Allocator
    else:
        from vllm.device_allocator.cumem import CuMemAllocator as Allocator
    pieces = Allocator.get_instance().pointer_to_data.items()  # handle: device, bytes, address, memory
    return [range(address, address + data.handle[1]) for address, data in pieces if data.tag == "weights"]


def latent_parts(worker: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each derived tensor, with its values as a view of the weight kv_b_proj `[heads x (nope + value), lora]`: W_UK_T
    `[heads, nope, lora]` and W_UV `[heads, lora, value]`."""
    out = []
    for holder in _latent(worker):
        weight = holder.kv_b_proj.weight
        per_head = weight.view(holder.num_heads, -1, weight.shape[1])
        keys, values = per_head.split([holder.qk_nope_head_dim, holder.v_head_dim], dim=1)
        out += [(holder.W_UK_T, keys), (holder.W_UV, values.transpose(1, 2))]
    return out


def tp_group() -> Any:
    """vLLM's group coordinator of this engine's ranks: `cpu_group`, `rank_in_group`, `world_size`."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group()


def teardown(engine: Any) -> None:
    """Free the engine and vLLM's process groups. The engine core's own shutdown would also destroy the trainer's."""
    from vllm.distributed import parallel_state

    engine.model_executor.shutdown()
    core = engine.engine_core.engine_core
    core.scheduler.shutdown()
    if torch.distributed.is_initialized():  # otherwise vLLM's groups were destroyed together with the trainer's
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None
    gc.unfreeze()  # vLLM froze all objects when it started
