"""MindSpeed's grouped matrix products of experts (--moe-grouped-gemm), and its products that are added to a gradient
(--gemm-gradient-accumulation-fusion), with torch operators.

Signatures are those of MindSpeed's C++ (ops/csrc); all arguments are positional.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def grouped_matmul(
    xs: Sequence[Tensor], ws: Sequence[Tensor], bias: Sequence[Tensor], groups: Any, group_type: int, counts: int
) -> list[Tensor]:
    """x `[T, K]` and w `[experts, K, N]` to `[T, N]`: each expert's tokens times its matrix. group_type 2: x `[K, T]`
    and w `[T, N]` to `[experts, K, N]`. groups: end of each expert's tokens, or their number if counts is not 0."""
    if bias:
        raise ValueError("npu_gmm on a host: a bias is not supported; give --disable-bias-linear")
    x, w, spans = xs[0], ws[0], _spans(groups, counts)
    if group_type == 2:
        return [torch.stack([x[:, a:b] @ w[a:b] for a, b in spans])]
    return [torch.cat([x[a:b] @ w[expert] for expert, (a, b) in enumerate(spans)])]


def grouped_matmul_backward(
    dys: Sequence[Tensor], xs: Sequence[Tensor], ws: Sequence[Tensor], groups: Any, counts: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Gradients of x and w, and an empty list for the bias."""
    dx = grouped_matmul(dys, [ws[0].mT], (), groups, 0, counts)
    return dx, grouped_matmul([xs[0].t()], dys, (), groups, 2, counts), []


def grouped_matmul_backward_fusion(
    dys: Sequence[Tensor], ws: Sequence[Tensor], groups: Any, counts: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The gradient of x and two empty lists: `add_grouped_matmul` adds the gradient of w to Megatron's `main_grad`."""
    return grouped_matmul(dys, [ws[0].mT], (), groups, 0, counts), [], []


def add_grouped_matmul(x: Tensor, dy: Tensor, groups: Tensor, grad: Tensor) -> None:
    (product,) = grouped_matmul([x.t()], [dy], (), groups, 2, 0)
    grad.view(product.shape).add_(product)


def add_matmul(dy: Tensor, x: Tensor, grad: Tensor) -> None:
    grad.add_(dy.t() @ x)


def _spans(groups: Any, counts: int) -> list[tuple[int, int]]:
    """Begin and end of each expert's tokens."""
    ends = torch.as_tensor(groups)
    ends = (ends.cumsum(0) if counts else ends).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


_GROUPED = {
    "npu_gmm": grouped_matmul,
    "npu_gmm_backward": grouped_matmul_backward,
    "npu_gmm_backward_fusion": grouped_matmul_backward_fusion,
}
# Name of MindSpeed's builder -> functions of the module that the builder loads.
GROUPED_COMPILED = {
    "grouped_matmul": _GROUPED,
    "grouped_matmul_v2": _GROUPED,
    "npu_groupmatmul_add_fp32": {"npu_groupmatmul_add_fp32": add_grouped_matmul},
    "npu_matmul_add_fp32": {"npu_matmul_add_fp32": add_matmul},
}


def register(gmm: ModuleType) -> None:
    """Register `torch.ops.mindspeed.npu_gmm` and `npu_gmm_v2`, MindSpeed's NPU operators, for the CPU, too.
    gmm: `mindspeed.ops.gmm`."""
    for overload in ("npu_gmm.Tensor", "npu_gmm.List"):
        torch.library.impl(gmm.AS_LIBRARY, overload, "CPU")(gmm._npu_gmm)
    torch.library.impl(gmm.AS_LIBRARY, "npu_gmm_v2.Tensor", "CPU")(gmm._npu_gmm_v2)
