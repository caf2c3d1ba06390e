"""Run by test_kernels.py with TRITON_INTERPRET=1: the tests of the chunked log-probs, with the Triton kernels in use.

Triton's interpreter runs the kernels on a host, a program after another. Blocks are small, so that a slice has several.
float64 stays with torch's operators, as on CUDA.
"""

import sys
from pathlib import Path

import pytest
import torch

from mindspeed_rl_plugin.forward import chunked, kernels

CALLS = {"add_slice": 0, "gradient_of_slice": 0}
TESTS = (
    *(f"same_as_over_all_logits[{case}]" for case in ("True-1.0-3", "True-0.6-5", "False-0.6-13", "True-0.6-1000")),
    "bfloat16_rounds_the_logits_as_a_linear_layer_does",
    "padded_rows_have_no_probability_and_no_gradient[in_chunks]",
    "certain_tokens_have_no_nan[in_chunks]",
    "nothing_to_score_gives_zero_gradients",
    "accumulates_into_main_grad[True-dtype1]",
)


def counted(name):
    own = getattr(kernels, name)

    def call(*args):
        CALLS[name] += 1
        return own(*args)

    return call


for each in CALLS:
    setattr(kernels, each, counted(each))
kernels.BLOCK = 64
chunked.kernels_for = lambda hidden: None if hidden.dtype == torch.float64 else kernels
file = Path(__file__).with_name("test_chunked.py")
code = pytest.main(["-q", "-p", "no:cacheprovider", *(f"{file}::test_{name}" for name in TESTS)])
print(CALLS)
sys.exit(code or not all(CALLS.values()))
