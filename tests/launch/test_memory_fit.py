"""What is larger than all memory is refused with both sizes; what could fit is not."""

import types

import pytest
import torch

from mindspeed_rl_plugin.config.run_flags import LoraConfig
from mindspeed_rl_plugin.device import meters
from mindspeed_rl_plugin.launch import memory_fit

# One layer: four matrices of attention, three of a feed-forward, three norms; two embeddings of 1008 rows.
WIDE = dict(num_layers=1, hidden_size=4096, ffn_hidden_size=8192, num_attention_heads=32, kv_channels=128)
WIDE |= dict(group_query_attention=False, add_qkv_bias=False, tensor_model_parallel_size=1, world_size=1)
PARAMETERS = 4 * 4096**2 + 3 * 4096 * 8192 + 3 * 4096 + 2 * 1008 * 4096
BF16 = dict(params_dtype=torch.bfloat16, accumulate_allreduce_grads_in_fp32=True)
SPREAD = dict(world_size=4, use_distributed_optimizer=True)


@pytest.mark.parametrize(
    ("changes", "here", "nbytes"),
    [
        ({}, 1, 4 + 4 + 8),
        (BF16, 1, 2 + 4 + 12),
        (BF16 | {"optimizer": "sgd"}, 1, 2 + 4),
        (BF16 | {"optimizer_cpu_offload": True}, 1, 2 + 4),
        ({"world_size": 2}, 2, 2 * (4 + 4 + 8)),
        (SPREAD, 2, 2 * (4 + 4 + 2)),
    ],
)
def test_weights_gradients_and_optimizer_of_this_machine_are_counted(build, monkeypatch, changes, here, nbytes):
    needs(nbytes * PARAMETERS, build(WIDE | changes), here, LoraConfig(), monkeypatch)


@pytest.mark.parametrize(
    ("targets", "sides"), [((), 4 * 8192 + 3 * 12288), (("o_proj", "linear_fc1"), 8192 + 2 * 12288)]
)
def test_with_lora_only_factors_have_gradients_and_optimizer_state(build, monkeypatch, targets, sides):
    """sides: rows and columns of the matrices with adapters."""
    factors = 8 * sides
    nbytes = 2 * (2 * (PARAMETERS + factors) + (4 + 12 / 4) * factors)
    needs(nbytes, build(WIDE | BF16 | SPREAD), 2, LoraConfig(8, lora_targets=targets), monkeypatch)


def needs(nbytes, args, here, lora, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    monkeypatch.setattr(memory_fit, "host_total", lambda: nbytes)
    memory_fit.check(args, 1000, lora)
    monkeypatch.setattr(memory_fit, "host_total", lambda: nbytes - 1)
    with pytest.raises(
        ValueError, match=f"optimizer of {here} ranks need .* GiB or more, and the machine has .*--tensor"
    ):
        memory_fit.check(args, 1000, lora)


def test_a_device_is_asked_for_its_own_memory_and_an_unknown_family_is_not_estimated(build, monkeypatch):
    device = types.SimpleNamespace(is_cpu=False, memory_info=lambda: (0, 1 << 30))
    monkeypatch.setattr(memory_fit, "get_device", lambda: device)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ValueError, match="of 1 ranks need 2.6 GiB or more, and the device has 1.0 GiB"):
        memory_fit.check(build(WIDE), 1000, LoraConfig())
    memory_fit.check(build(WIDE | {"qk_layernorm": True, "add_qkv_bias": True}), 1000, LoraConfig())


def test_the_memory_of_a_host_is_what_its_control_group_allows(tmp_path):
    for name, text in (("proc/meminfo", "MemTotal: 100 kB\nSwapTotal: 5 kB\n"), ("proc/self/cgroup", "0::/a/b\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert meters.host_total(tmp_path) == 105 * 1024
    (group := tmp_path / "sys/fs/cgroup/a/b").mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("40960\n")
    assert meters.host_total(tmp_path) == 45 * 1024
