"""`--rl-algorithm`: presets, each of which names the parts of an algorithm, and how flags override them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from mindspeed_rl_plugin.algorithms.algorithm import Algorithm
from mindspeed_rl_plugin.algorithms.corrections import CORRECTIONS
from mindspeed_rl_plugin.algorithms.losses import LOSSES, Bounds
from mindspeed_rl_plugin.config import AlgorithmConfig, RLConfig, flag_name, limit_problems, unread_flags

PAIRS = "pairs"  # written as advantage and aggregation of DPO, which has neither


@dataclass(frozen=True)
class Preset:
    """One row of `ALGORITHMS`: the name of each part, its coefficients, and the source of each choice."""

    advantage: str
    loss: str
    aggregation: str
    source: str  # the paper or code that each choice comes from
    kl_loss_coef: float = 0.0
    kl_reward_coef: float = 0.0
    overlong: float = 0.0  # fraction of the response limit over which DAPO's length penalty rises; 0: no penalty
    dynamic_sampling: bool = False
    filtration: str = "none"  # a name in `FILTRATIONS`, or "none"
    kl_estimator: str = "k3"
    kl_reward_estimator: str = "k1"


_PPO_KL = "KL coefficient: verl"
ALGORITHMS: dict[str, Preset] = {
    "ppo": Preset(
        "gae", "clip", "token-mean", f"arXiv 1707.06347, for language 2203.02155; {_PPO_KL}", kl_reward_coef=0.001
    ),
    "grpo": Preset("group-norm", "clip", "seq-mean-token-mean", "arXiv 2402.03300", kl_loss_coef=0.001),
    "dapo": Preset("group-norm", "clip-higher", "token-mean", "arXiv 2503.14476", overlong=0.2, dynamic_sampling=True),
    "pf-ppo": Preset(
        "gae", "clip", "token-mean", f"arXiv 2409.06957; {_PPO_KL}", kl_reward_coef=0.001, filtration="best-worst"
    ),
    "dr-grpo": Preset("group-mean", "clip", "token-sum-norm", "arXiv 2503.20783"),
    "rloo": Preset(
        "rloo", "reinforce", "seq-mean-token-sum", "arXiv 2402.14740; KL coefficient: TRL", kl_reward_coef=0.05
    ),
    "reinforce++": Preset(
        "reinforce++", "clip", "token-mean", "arXiv 2501.03262; KL coefficient: OpenRLHF", kl_reward_coef=0.01
    ),
    "gspo": Preset("group-norm", "gspo", "seq-mean-token-mean", "arXiv 2507.18071"),
    "cispo": Preset("group-norm", "cispo", "token-mean", "arXiv 2506.13585"),
    "dpo": Preset(PAIRS, "dpo", PAIRS, "arXiv 2305.18290"),
}


def learns_from_pairs(name: str | None) -> bool:
    """Whether the preset of this name learns from given pairs and samples nothing; False for an unknown name."""
    return name in ALGORITHMS and ALGORITHMS[name].advantage == PAIRS


def resolve(config: AlgorithmConfig) -> Algorithm:
    """The checked algorithm: the preset, in which given flags replace parts and values.

    Default bounds are those of the loss that is used, even if the preset has another loss. Raises ValueError for an
    unknown name (listing the known ones), for a value outside its limits, and for flags that contradict each other.
    """
    if problems := limit_problems(config):
        raise ValueError("\n".join(problems))
    algorithm = assemble(config)
    _check_together(algorithm)
    return algorithm


def unread(config: RLConfig) -> list[str]:
    """One message for each flag that nothing reads with this algorithm; no message if a name is unknown."""
    try:
        algorithm = assemble(config.algorithm)
    except ValueError:
        return []  # `resolve` reports this
    preset = resolve(AlgorithmConfig(algorithm=config.algorithm.algorithm))
    return list(unread_flags(config, algorithm, preset))


def assemble(config: AlgorithmConfig) -> Algorithm:
    """As `resolve`, but only names are checked. Raises ValueError for an unknown name."""
    preset = ALGORITHMS[_known("algorithm", config.algorithm, ALGORITHMS)]
    parts = vars(config) | {n: _given(getattr(config, n), v) for n, v in vars(preset).items() if hasattr(config, n)}
    fixed = ("loss", "advantage", "aggregation") if preset.advantage == PAIRS else ()  # flags cannot replace these
    parts |= {name: getattr(preset, name) for name in fixed}
    for field in fields(config):
        if field.metadata["choices"] and field.name not in fixed:
            _known(field.name, parts[field.name], field.metadata["choices"])
    low, high = CORRECTIONS[config.correction].bounds(config.correction_level)
    parts["correction_low"] = _given(config.correction_low, low)
    parts["correction_high"] = _given(config.correction_high, high)
    return Algorithm(**parts, bounds=_bounds(config, parts["loss"]), overlong_share=preset.overlong)


def _bounds(config: AlgorithmConfig, loss: str) -> Bounds:
    spec = LOSSES.get(loss)
    if spec is None:
        return Bounds()
    return Bounds(
        low=_given(config.clip_low, spec.clip_low or 0.0),
        high=_given(config.clip_high, spec.clip_high or 0.0),
        dual=config.dual_clip,
        tau_positive=_given(config.sapo_tau_positive, Bounds.tau_positive),
        tau_negative=_given(config.sapo_tau_negative, Bounds.tau_negative),
    )


def _check_together(algorithm: Algorithm) -> None:
    """Raise ValueError for flags that contradict each other."""
    low, high = algorithm.correction_low, algorithm.correction_high
    if not (0.0 <= low <= 1.0 <= high and low < high):
        raise ValueError(
            f"--rl-correction-low {low} and --rl-correction-high {high}: give bounds with 0 <= low <= 1 <= high, "
            "low < high; a token that the policy itself sampled has weight 1"
        )
    if algorithm.dpo_label_smoothing and algorithm.dpo_loss != "sigmoid":
        raise ValueError(f"--rl-dpo-label-smoothing has no meaning for --rl-dpo-loss {algorithm.dpo_loss}; remove it")


def _given(value, default):
    return default if value is None else value


def _known(name: str, value: str | None, table: Iterable[str]) -> str:
    if value not in table:
        raise ValueError(f"{flag_name(name)} {value!r} is unknown; known: {', '.join(table)}")
    return value
