"""`--rl-algorithm`: presets as rows over the parts, and how flags override them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from mindspeed_rl_plugin.algorithms.advantages import ADVANTAGES, RewardBatch
from mindspeed_rl_plugin.algorithms.aggregate import AGGREGATIONS, Totals, sequence_weights
from mindspeed_rl_plugin.algorithms.kl import KL_ESTIMATORS
from mindspeed_rl_plugin.algorithms.losses import LOSSES, Bounds, PolicyTerms, TrainedTokens
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.types import Ragged


@dataclass(frozen=True)
class Preset:
    """One row: names of the parts, and the weight of the KL to the reference in the loss."""

    advantage: str
    loss: str
    aggregation: str
    kl_loss_coef: float
    kl_estimator: str = "k3"


ALGORITHMS: dict[str, Preset] = {
    "grpo": Preset("group-norm", "clip", "seq-mean-token-mean", kl_loss_coef=0.001),
}


@dataclass(frozen=True)
class Algorithm:
    """An algorithm with every part chosen, as `resolve` returns it.

    Fields are those of `AlgorithmConfig`, none of them None but `dual_clip` (None: off).
    """

    name: str
    advantage: str
    loss: str
    aggregation: str
    clip_low: float
    clip_high: float
    dual_clip: float | None
    kl_loss_coef: float
    kl_estimator: str
    entropy_coef: float
    advantage_eps: float
    ppo_epochs: int

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs under the frozen reference are needed at all."""
        return self.kl_loss_coef != 0.0

    def advantages(self, batch: RewardBatch) -> Tensor | Ragged:
        """Advantages of whole groups: `[B]`, or ragged `[L]` where the estimator tells tokens apart."""
        return ADVANTAGES[self.advantage](batch, eps=self.advantage_eps)

    def policy_terms(self, tokens: TrainedTokens) -> PolicyTerms:
        """Policy loss, ratio and clip of each trained token, `[T]`."""
        return LOSSES[self.loss].function(tokens, Bounds(self.clip_low, self.clip_high, self.dual_clip))

    def kl(self, logp: Tensor, logp_ref: Tensor) -> Tensor:
        """KL to the reference at each trained token, `[T]`."""
        return KL_ESTIMATORS[self.kl_estimator](logp, logp_ref)

    def weights(self, counts: Tensor, totals: Totals) -> Tensor:
        """Weight of a trained token of each sequence, `[B]` float64, from its trained tokens `counts` `[B]`."""
        return sequence_weights(self.aggregation, counts, totals)


def resolve(config: AlgorithmConfig) -> Algorithm:
    """Fill every part that the user left open from the preset, and check the result.

    An explicit flag always wins. Bounds follow the loss that is really used. Raises ValueError for an
    unknown name (listing the known ones) and for a value outside its range.
    """
    preset = ALGORITHMS[_known("--rl-algorithm", config.algorithm, ALGORITHMS)]
    loss = _known("--rl-loss", _given(config.loss, preset.loss), LOSSES)
    spec = LOSSES[loss]
    algorithm = Algorithm(
        name=str(config.algorithm),
        advantage=_known("--rl-advantage", _given(config.advantage, preset.advantage), ADVANTAGES),
        loss=loss,
        aggregation=_known("--rl-aggregation", _given(config.aggregation, preset.aggregation), AGGREGATIONS),
        clip_low=_given(config.clip_low, spec.clip_low),
        clip_high=_given(config.clip_high, spec.clip_high),
        dual_clip=config.dual_clip,
        kl_loss_coef=_given(config.kl_loss_coef, preset.kl_loss_coef),
        kl_estimator=_known("--rl-kl-estimator", _given(config.kl_estimator, preset.kl_estimator), KL_ESTIMATORS),
        entropy_coef=config.entropy_coef,
        advantage_eps=config.advantage_eps,
        ppo_epochs=config.ppo_epochs,
    )
    _check(algorithm, dual=spec.dual)
    return algorithm


def _check(algorithm: Algorithm, *, dual: bool) -> None:
    for flag in ("clip_low", "clip_high", "kl_loss_coef", "entropy_coef", "advantage_eps"):
        value = getattr(algorithm, flag)
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"--rl-{flag.replace('_', '-')} is {value}; give a finite number >= 0")
    if algorithm.ppo_epochs < 1:
        raise ValueError(f"--rl-ppo-epochs is {algorithm.ppo_epochs}; give at least 1")
    if algorithm.dual_clip is None:
        return
    if not dual:
        raise ValueError(
            f"--rl-dual-clip {algorithm.dual_clip} has no meaning for the loss {algorithm.loss!r}; losses that "
            f"know it: {', '.join(name for name, spec in LOSSES.items() if spec.dual)}"
        )
    if not algorithm.dual_clip > 1.0:
        raise ValueError(f"--rl-dual-clip is {algorithm.dual_clip}; the bound must be above 1 (3 is usual)")


def _given(value, default):
    return default if value is None else value


def _known(flag: str, name: str | None, table: Iterable[str]) -> str:
    if name not in table:
        raise ValueError(f"{flag} {name!r} is unknown; known: {', '.join(table)}")
    return name
