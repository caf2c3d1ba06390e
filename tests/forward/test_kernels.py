"""The Triton kernels of the chunked log-probs: by Triton's interpreter on a host, on CUDA where there is one."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mindspeed_rl_plugin.forward import chunked

without_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@without_triton
def test_the_tests_of_the_chunks_pass_with_the_kernels():
    script = Path(__file__).with_name("interpreted_kernels.py")
    root = Path(__file__).parents[2]
    # Read when triton is imported, so it needs a process of its own.
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script)], env=env, timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " failed" not in done.stdout


def test_a_host_and_float64_use_torch():
    assert chunked.kernels_for(torch.zeros(1)) is None
    meta = torch.zeros(1, dtype=torch.float64, device="meta")
    assert chunked.kernels_for(meta) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_they_agree_with_torch(dtype, monkeypatch):
    torch.manual_seed(0)
    hidden = torch.randn(300, 128, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(10_000, 128, device="cuda", dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 9_973, (300,), device="cuda")

    def both():
        settings = {"vocab_size": 9_973, "chunk_tokens": 64, "temperature": 0.7, "entropy_grad": True}
        logp, entropy = chunked.chunked_token_logps(hidden, weight, labels, **settings)
        return logp, entropy, *torch.autograd.grad((logp + 0.3 * entropy).sum(), (hidden, weight))

    assert chunked.kernels_for(hidden) is not None
    got = both()
    monkeypatch.setattr(chunked, "kernels_for", lambda hidden: None)
    rtol = 1e-4 if dtype == torch.float32 else 2e-2
    for a, b in zip(got, both(), strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=rtol, atol=rtol * float(b.abs().max()))
