"""The Triton kernels of the chunked log-probs: by Triton's interpreter on a host, on CUDA where there is one.

Triton's interpreter runs the kernels on a host, a program after another. float64 stays with torch's operators, as on
CUDA.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mindspeed_rl_plugin.forward import chunked

CALLS = {"add_slice": 0, "gradient_of_slice": 0}
CHUNKED = (
    *(f"same_as_over_all_logits[{case}]" for case in ("True-1.0-3", "True-0.6-5", "False-0.6-13", "True-0.6-1000")),
    "bfloat16_rounds_the_logits_as_a_linear_layer_does",
    "padded_rows_have_no_probability_and_no_gradient[in_chunks]",
    "certain_tokens_have_no_nan[in_chunks]",
    "nothing_to_score_gives_zero_gradients",
    "accumulates_into_main_grad[True-dtype1]",
)
without_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@without_triton
def test_the_tests_of_the_chunks_pass_with_the_kernels():
    root = Path(__file__).parents[2]
    # Read when triton is imported, so it needs a process of its own.
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=env, timeout=240, capture_output=True, text=True)
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


def run_chunked_with_kernels():
    """The tests of the chunks, with the kernels in use, each of which must have been; blocks are small, so that a slice
    has several. Returns pytest's exit code."""
    from mindspeed_rl_plugin.forward import kernels

    def counted(name, own):
        def call(*args):
            CALLS[name] += 1
            return own(*args)

        return call

    for name in CALLS:
        setattr(kernels, name, counted(name, getattr(kernels, name)))
    kernels.BLOCK = 64
    chunked.kernels_for = lambda hidden: None if hidden.dtype == torch.float64 else kernels
    file = Path(__file__).with_name("test_chunked.py")
    code = pytest.main(["-q", "-p", "no:cacheprovider", *(f"{file}::test_{name}" for name in CHUNKED)])
    print(CALLS)
    return code or not all(CALLS.values())


if __name__ == "__main__":
    sys.exit(run_chunked_with_kernels())
