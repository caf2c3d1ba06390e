"""Rotary embeddings of vLLM on CPU, given heads one by one as latent attention does, against complex numbers."""

import pytest
import torch

from mindspeed_rl_plugin.host import vllm_live

SIZE, HEADS, NOPE, LORA, BASE = 64, 4, 16, 32, 10000.0


def rotated(positions, x):
    """Pairs of neighbours as complex numbers, float64: `[T, heads, SIZE]`."""
    turns = positions[:, None].double() * BASE ** (-torch.arange(0, SIZE, 2).double() / SIZE)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(turns), turns)[:, None]).flatten(-2)


@pytest.fixture(scope="module")
def rotary():
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    kernel = RotaryEmbedding.forward_cpu
    vllm_live._rotary_by_heads()
    with set_current_vllm_config(VllmConfig()):
        yield RotaryEmbedding(SIZE, SIZE, 32, BASE, False, torch.float32)
    RotaryEmbedding.forward_cpu = kernel


@pytest.mark.parametrize("positions", [torch.arange(9), torch.tensor([9]), torch.tensor([3, 0, 7])], ids=len)
def test_slices_of_heads_one_by_one(rotary, positions):
    make = torch.Generator().manual_seed(1)
    heads = torch.randn(len(positions), HEADS, NOPE + SIZE, generator=make)
    row = torch.randn(len(positions), LORA + SIZE, generator=make)
    query, key = heads[..., NOPE:], row[:, LORA:].unsqueeze(1)
    wanted = rotated(positions, query), rotated(positions, key)
    results = rotary.forward_cpu(positions, query, key)
    for ours, theirs in zip(results, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=2e-6)


def test_what_the_kernel_knows_goes_to_it(rotary):
    make = torch.Generator().manual_seed(2)
    positions, flat = torch.arange(5), torch.randn(5, HEADS * SIZE, generator=make)
    wanted = rotated(positions, flat.view(5, HEADS, SIZE)).flatten(1)
    query, _ = rotary.forward_cpu(positions, flat, flat.clone())
    assert query.data_ptr() == flat.data_ptr()  # in place, as the kernel does it
    torch.testing.assert_close(query.double(), wanted, rtol=0, atol=2e-6)
