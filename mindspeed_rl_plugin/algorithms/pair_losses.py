"""DPO: losses over pairs of a chosen and a rejected response to one prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mindspeed_rl_plugin.config import AlgorithmConfig


@dataclass(frozen=True)
class PairBatch:
    """P pairs. Log-probs are sums over trained tokens, `[P]`; `chosen`, `rejected` (of the policy) have gradients."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    tokens_chosen: Tensor  # `[P]`, trained tokens of each response
    tokens_rejected: Tensor  # `[P]`


@dataclass(frozen=True)
class PairTerms:
    """What a pair loss returns for each pair."""

    loss: Tensor  # `[P]`
    margin: Tensor  # `[P]`, detached, `beta * h`: implicit reward of chosen minus that of rejected


def sigmoid(h: Tensor, config: AlgorithmConfig) -> Tensor:
    """`-(1 - ls) * log sigmoid(beta*h) - ls * log sigmoid(-beta*h)`, `[P]`.

    Source: DPO, arXiv 2305.18290, Eq. 7; label smoothing: E. Mitchell, "A note on DPO with noisy preferences", 2023.
    """
    pull = config.dpo_beta * h
    return -(1.0 - config.dpo_label_smoothing) * logsigmoid(pull) - config.dpo_label_smoothing * logsigmoid(-pull)


def hinge(h: Tensor, config: AlgorithmConfig) -> Tensor:
    """`relu(1 - beta*h)`, `[P]`. Source: SLiC-HF, arXiv 2305.10425; RSO, arXiv 2309.06657."""
    return torch.relu(1.0 - config.dpo_beta * h)


def ipo(h: Tensor, config: AlgorithmConfig) -> Tensor:
    """`(h - 1 / (2*beta))^2`, `[P]`; h: of sums or means, see `pair_terms`. Source: IPO, arXiv 2310.12036, Eq. 17."""
    return (h - 1.0 / (2.0 * config.dpo_beta)).square()


PAIR_LOSSES: dict[str, Callable[[Tensor, AlgorithmConfig], Tensor]] = {"sigmoid": sigmoid, "hinge": hinge, "ipo": ipo}


def pair_terms(pairs: PairBatch, config: AlgorithmConfig) -> PairTerms:
    """The loss `dpo_loss` of each pair, from `h = (chosen - rejected) - (ref_chosen - ref_rejected)`.

    With `dpo_length_norm` each summed log-prob is divided by the number of trained tokens of its response. The loss
    of a step is the mean over the pairs of the global batch. Source: arXiv 2305.18290, Eq. 7.
    """
    chosen, rejected = pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected
    if config.dpo_length_norm:
        chosen, rejected = chosen / pairs.tokens_chosen.clamp(min=1), rejected / pairs.tokens_rejected.clamp(min=1)
    h = chosen - rejected
    return PairTerms(PAIR_LOSSES[config.dpo_loss](h, config), (config.dpo_beta * h).detach())
