"""KL of the policy to the frozen reference, estimated from the log-probs of sampled tokens.

With `x = logp_ref - logp`, all estimate KL(policy || reference): k1 and k3 without bias (if no value is clamped), k2
with a small bias. As terms of a loss their mean gradients differ: that of k1 is zero, that of k3 is the gradient of
KL(reference || policy), and that of k2 is the gradient of KL(policy || reference). `k3-unbiased` has the value of k3
and the gradient of k2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LOG_LIMIT = 20.0
K3_LIMIT = 10.0


def k1(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """`-x`, `[T]`. Source: J. Schulman, "Approximating KL divergence", 2020."""
    return -_gap(logp, logp_ref)


def k2(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """`x^2 / 2`, `[T]`. Source: J. Schulman, "Approximating KL divergence", 2020."""
    return 0.5 * _gap(logp, logp_ref).square()


def k3(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """`exp(x) - x - 1`, `[T]`, at most 10. Source: J. Schulman, "Approximating KL divergence", 2020."""
    gap = _gap(logp, logp_ref)
    # exp(x) - 1 would round small values to 0, expm1 does not.
    return (torch.expm1(gap) - gap).clamp(max=K3_LIMIT)


def k3_unbiased(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Value of k3, gradient of k2, `[T]`. Source: arXiv 2506.09477; verl, kl_penalty ("k3+")."""
    pull = k2(logp, logp_ref)
    return k3(logp, logp_ref).detach() + pull - pull.detach()


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3-unbiased": k3_unbiased,
}


def _gap(logp: Tensor, logp_ref: Tensor) -> Tensor:
    return (logp_ref - logp).clamp(-LOG_LIMIT, LOG_LIMIT)
