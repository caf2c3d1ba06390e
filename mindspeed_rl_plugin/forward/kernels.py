"""Triton kernels of the chunked log-probs. They read a slice of logits once, in the dtype of the logits; torch's
operators read it several times, in float32.

Only `chunked.kernels_for` imports this file, which imports triton. One program handles one token: a row of the slice.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # columns of the vocabulary that a program handles at once
WARPS = 8


def add_slice(logits: Tensor, label: Tensor, temperature: float, sums: Tensor) -> None:
    """Add a slice of the vocabulary to the running sums of every token, in place.

    logits: `[T, n]`; label: `[T]` int64, column of the label in this slice (below 0, or at least n: the label is in
    another slice).
    sums: `[4, T]` float32, contiguous: the largest scaled logit m so far, sum e^(x-m), sum e^(x-m) (x-m), and x at the
    label. Before the first slice: a large negative number and three zeros.
    """
    tokens, n = logits.shape
    if tokens:
        _add_slice[(tokens,)](
            logits, label, sums, 1.0 / temperature, tokens, n, logits.stride(0), BLOCK=BLOCK, num_warps=WARPS
        )


def gradient_of_slice(
    logits: Tensor, label: Tensor, temperature: float, peak: Tensor, factor: Tensor, slope: Tensor, at_label: Tensor
) -> Tensor:
    """Replace the slice's logits by `e^(x-peak) (factor + slope (x-peak))`, plus `at_label` at the label.

    logits: `[T, n]`, overwritten and returned; label: as in `add_slice`; peak, factor, slope, at_label: `[T]` float32.
    """
    tokens, n = logits.shape
    if tokens:
        columns = (label, *(c.contiguous() for c in (peak, factor, slope, at_label)))
        _gradient_of_slice[(tokens,)](
            logits, *columns, 1.0 / temperature, n, logits.stride(0), BLOCK=BLOCK, num_warps=WARPS
        )
    return logits


@triton.jit
def _add_slice(logits, labels, sums, inverse_temperature, tokens, n, stride, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    peak = tl.load(sums + token)
    total = tl.load(sums + tokens + token)
    spread = tl.load(sums + 2 * tokens + token)
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        real = column < n
        x = tl.load(row + column, mask=real, other=float("-inf")).to(tl.float32) * inverse_temperature
        highest = tl.maximum(peak, tl.max(x, 0))
        by = peak - highest
        factor = tl.exp(by)
        # -inf x 0 on the columns beyond the slice would be NaN.
        shifted = tl.where(real, x - highest, 0.0)
        power = tl.where(real, tl.exp(shifted), 0.0)
        spread = factor * (spread + by * total) + tl.sum(power * shifted, 0)
        total = factor * total + tl.sum(power, 0)
        peak = highest
    label = tl.load(labels + token)
    here = (label >= 0) & (label < n)
    x = tl.load(row + label, mask=here, other=0.0).to(tl.float32) * inverse_temperature
    picked = tl.load(sums + 3 * tokens + token) + x
    tl.store(sums + token, peak)
    tl.store(sums + tokens + token, total)
    tl.store(sums + 2 * tokens + token, spread)
    tl.store(sums + 3 * tokens + token, picked)


@triton.jit
def _gradient_of_slice(
    logits, labels, peaks, factors, slopes, at_labels, inverse_temperature, n, stride, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    label = tl.load(labels + token)
    peak, factor = tl.load(peaks + token), tl.load(factors + token)
    slope, at_label = tl.load(slopes + token), tl.load(at_labels + token)
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        real = column < n
        shifted = tl.load(row + column, mask=real, other=0.0).to(tl.float32) * inverse_temperature - peak
        part = tl.exp(shifted) * (factor + slope * shifted)
        part += tl.where(column == label, at_label, 0.0)
        tl.store(row + column, part.to(logits.dtype.element_ty), mask=real)
