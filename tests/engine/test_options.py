"""What vLLM is given for an engine, and for a request."""

import pytest

from mindspeed_rl_plugin.engine.options import VllmOptions, engine_arguments, prompt_of, sampling_fields
from mindspeed_rl_plugin.rows import Completion, GenerateRequest, SampleId, Sampling

pytestmark = pytest.mark.quick

MOE, LATENT = {"model_type": "qwen3_moe"}, {"model_type": "deepseek_v3", "kv_lora_rank": 8}
DENSE = {"model_type": "qwen3"}
EXPANDABLE = "max_split_size_mb:8,expandable_segments: True"
GRAPHS = {"graph_sizes": (8, 1, 8)}


@pytest.mark.parametrize(
    ("name", "kind", "config", "options", "value"),
    [
        ("moe_backend", "cuda", MOE, {}, "triton"),  # whose kernels permute no weights
        ("moe_backend", "cuda", LATENT, {}, "triton"),
        ("moe_backend", "cuda", DENSE, {}, None),
        ("moe_backend", "npu", MOE, {}, None),
        ("block_size", "cpu", DENSE, {}, 32),  # prefixes are kept in short blocks
        ("block_size", "cpu", LATENT, {}, None),
        ("block_size", "cuda", DENSE, {}, None),
        ("attention_backend", "cpu", LATENT, {}, "CPU_MLA"),  # which keeps the weight that the reshard writes
        ("attention_backend", "cpu", DENSE, {}, None),
        ("compilation_config", "npu", DENSE, GRAPHS, {"cudagraph_capture_sizes": [1, 8]}),
        ("compilation_config", "npu", DENSE, {}, None),
        ("compilation_config", "cpu", DENSE, GRAPHS, None),
        ("async_scheduling", "cuda", DENSE, {}, True),
        ("async_scheduling", "npu", DENSE, {"expert_parallel": 4}, False),  # a step ahead is one more than others have
        ("async_scheduling", "cpu", DENSE, {}, None),
        ("additional_config", "cuda", DENSE, {}, None),
        ("data_parallel_size", "npu", MOE, {"tensor_parallel": 2, "expert_parallel": 2}, 1),
        ("data_parallel_size", "npu", MOE, {"tensor_parallel": 2, "expert_parallel": 64}, 32),
        ("enable_expert_parallel", "npu", MOE, {"tensor_parallel": 2, "expert_parallel": 2}, True),
        ("enable_expert_parallel", "npu", MOE, {"tensor_parallel": 2}, False),
        ("gpu_memory_utilization", "cuda", DENSE, {}, 0.5),
        ("gpu_memory_utilization", "cpu", DENSE, {}, None),
        ("kv_cache_memory_bytes", "cpu", DENSE, {}, 1 << 30),
        ("max_num_batched_tokens", "cuda", DENSE, {}, 8192),  # a longer step leaves less for the KV cache
    ],
)
def test_what_vllm_is_given(name, kind, config, options, value) -> None:
    given = engine_arguments(VllmOptions(config, 32768, memory_utilization=0.5, **options), kind, "there")
    assert given.get(name) == value


def test_no_thread_of_the_trainer_is_bound() -> None:
    assert engine_arguments(VllmOptions({}, 32), "npu", "there")["additional_config"]["enable_cpu_binding"] is False


@pytest.mark.parametrize(
    ("kind", "conf", "ranks", "own"),
    [
        ("cuda", EXPANDABLE, 2, False),
        ("cuda", "expandable_segments:False", 2, True),
        ("cuda", EXPANDABLE, 1, True),
        ("npu", EXPANDABLE, 2, True),
    ],
)
def test_vllms_own_all_reduce_is_off_where_it_cannot_map_memory(monkeypatch, kind, conf, ranks, own) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", conf)
    given = engine_arguments(VllmOptions({}, 32, tensor_parallel=ranks, memory_utilization=0.5), kind, "there")
    assert given.get("disable_custom_all_reduce", False) != own


def test_a_response_goes_on_and_stop_strings_want_text_unless_ends_are_ignored() -> None:
    def fields(begun=None, seeded=True, **sampling):
        request = GenerateRequest(SampleId(0, 0, 0), (5, 6), Sampling(4, stop=("x",), **sampling), 9, begun)
        return prompt_of(request), sampling_fields(request, (2,), seeded)

    prompt, given = fields()
    assert (prompt, given["max_tokens"], given["seed"], given["stop_token_ids"]) == ([5, 6], 4, 9, [2])
    assert given["stop"] == ["x"] and given["detokenize"] and given["ignore_eos"] and given["logprobs"] == 0
    prompt, given = fields(Completion(SampleId(0, 0, 0), (7,), (-1.0,), "abort", ((0, 1),)), seeded=False)
    assert (prompt, given["max_tokens"], given["seed"]) == ([5, 6, 7], 3, None)
    _, given = fields(stop_token_ids=(3,), ignore_eos=True)
    assert (given["stop"], given["stop_token_ids"], given["detokenize"]) == ([], [], False)
