"""Flags of the algorithm: the preset, and each of its parts."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl_plugin.config.flag import DPO_ONLY, FlagReader, flag

_ADVANTAGE_NAMES = ("group-norm", "group-mean", "rloo", "reinforce++", "reinforce++-baseline", "gae")
_LOSS_NAMES = ("clip", "clip-higher", "gspo", "cispo", "sapo", "reinforce")
_AGGREGATION_NAMES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum-norm")
_KL = ("k1", "k2", "k3", "k3-unbiased")
_REFERENCE = FlagReader(
    "a KL to the reference (--rl-kl-loss-coef or --rl-kl-reward-coef)", lambda a, _: a.needs_reference
)
_KL_REWARD = FlagReader("--rl-kl-reward-coef above 0", lambda a, _: a.kl_reward_coef != 0)
_GROUP_NORM = FlagReader("--rl-advantage group-norm", lambda a, _: a.advantage == "group-norm")
_GAMMA = FlagReader("--rl-advantage gae or reinforce++", lambda a, _: a.advantage in ("gae", "reinforce++"))
_GAE = FlagReader("--rl-advantage gae", lambda a, _: a.advantage == "gae")
_CRITIC_ONLY = FlagReader("a critic (--rl-advantage gae)", lambda a, _: a.needs_critic)
_CLIP = "a --rl-loss that clips the ratio at this bound"
_CLIP_LOW = FlagReader(_CLIP, lambda a, _: a.loss_spec.clip_low is not None)
_CLIP_HIGH = FlagReader(_CLIP, lambda a, _: a.loss_spec.clip_high is not None)
_DUAL = FlagReader("a --rl-loss with dual clip", lambda a, _: a.loss_spec.dual)
_SAPO = FlagReader("--rl-loss sapo", lambda a, _: a.loss_spec.gate)
_CORRECTION = FlagReader("a --rl-correction other than off", lambda a, _: a.correction != "off")
_OVERLONG = FlagReader("--rl-overlong-buffer above 0", lambda a, _: a.buffer(1) > 0)
_DYNAMIC = FlagReader("--rl-dynamic-sampling", lambda a, _: a.dynamic_sampling)
_POW = FlagReader("--rl-filtration pow", lambda a, _: a.filtration == "pow")
_FILTRATION = FlagReader("a --rl-filtration other than none", lambda a, _: a.filters)


@dataclass(frozen=True)
class AlgorithmConfig:
    """The algorithm: a preset, and a flag for each of its parts."""

    algorithm: str | None = flag(
        None,
        "turns RL on; the preset to train with (`python -m mindspeed_rl_plugin algorithms` prints all presets)",
        pairs=True,
    )
    advantage: str | None = flag(None, "advantage estimator (default: the preset's)", choices=_ADVANTAGE_NAMES)
    loss: str | None = flag(None, "policy loss (default: the preset's)", choices=_LOSS_NAMES)
    aggregation: str | None = flag(
        None, "how token losses are reduced to one number (default: the preset's)", choices=_AGGREGATION_NAMES
    )
    clip_low: float | None = flag(
        None, "sets the lower bound of the ratio to 1 - N (default: that of the loss)", least=0, reader=_CLIP_LOW
    )
    clip_high: float | None = flag(
        None, "sets the upper bound of the ratio to 1 + N (default: that of the loss)", least=0, reader=_CLIP_HIGH
    )
    dual_clip: float | None = flag(
        None,
        "dual clip: the loss of a token with an advantage A < 0 is at most -N A; usually 3 (default: off)",
        above=1,
        reader=_DUAL,
    )
    sapo_tau_positive: float | None = flag(
        None, "temperature of the gate of sapo for advantages above 0 (default: 1)", above=0, reader=_SAPO
    )
    sapo_tau_negative: float | None = flag(
        None, "temperature of the gate of sapo for other advantages (default: 1.05)", above=0, reader=_SAPO
    )
    kl_loss_coef: float | None = flag(
        None, "N times the KL to the reference is added to the loss (default: the preset's)", least=0
    )
    kl_estimator: str | None = flag(
        None, "KL estimator of the loss and the metric kl/ref (default: the preset's)", choices=_KL, reader=_REFERENCE
    )
    kl_reward_coef: float | None = flag(
        None, "N times the KL to the reference is subtracted from the reward (default: the preset's)", least=0
    )
    kl_reward_estimator: str | None = flag(
        None, "KL estimator of the reward (default: the preset's)", choices=_KL, reader=_KL_REWARD
    )
    entropy_coef: float = flag(0.0, "weight of the entropy bonus", least=0)
    advantage_eps: float = flag(1e-6, "added to the std by which group-norm divides", least=0, reader=_GROUP_NORM)
    gamma: float = flag(1.0, "discount of the reward per token (reinforce++ and gae)", least=0, most=1, reader=_GAMMA)
    gae_lambda: float = flag(1.0, "lambda of gae", least=0, most=1, reader=_GAE)
    value_clip: float = flag(
        0.2, "the critic's loss clips a value to within N of the value before the update", above=0, reader=_GAE
    )
    critic_load: str | None = flag(
        None,
        "checkpoint from which the critic starts: a critic (SAVE/iter_*/critic) or a language model of the policy's "
        "architecture; a language model gets a new value head (default: the policy's weights and a new value head)",
        reader=_CRITIC_ONLY,
    )
    critic_lr: float | None = flag(
        None,
        "peak learning rate of the critic; its schedule is that of the policy, scaled to this peak (default: --lr)",
        above=0,
        reader=_CRITIC_ONLY,
    )
    critic_warmup: int = flag(
        0, "train only the critic in the first N iterations", unit="iterations", least=0, reader=_CRITIC_ONLY
    )
    correction: str = flag(
        "off",
        "factor of a token's policy loss: its importance weight (probability when the update starts / when sampled). "
        "Out of bounds it becomes the bound (truncate, decoupled-clip) or 0 (mask, decoupled). off: it is only logged",
        choices=("off", "truncate", "mask", "decoupled", "decoupled-clip"),
    )
    correction_level: str = flag(
        "token",
        "token: one importance weight for each token; sequence: one for each response, the product over its tokens; "
        "geometric: one for each response, the geometric mean over its tokens",
        choices=("token", "sequence", "geometric"),
        reader=_CORRECTION,
    )
    correction_low: float | None = flag(
        None, "lower bound of importance weights (default: that of --rl-correction)", reader=_CORRECTION
    )
    correction_high: float | None = flag(
        None, "upper bound of importance weights (default: that of --rl-correction)", reader=_CORRECTION
    )
    overlong_buffer: int | None = flag(
        None,
        "the penalty for long responses rises from 0 over the last N tokens before --rl-max-response-length; 0: no "
        "penalty (default: the preset's)",
        unit="tokens",
        least=0,
    )
    overlong_penalty: float = flag(
        1.0, "subtracted from the reward of a response of --rl-max-response-length tokens", least=0, reader=_OVERLONG
    )
    dynamic_sampling: bool | None = flag(
        None, "replace groups whose rewards are all equal by new groups (default: the preset's)"
    )
    dynamic_sampling_rounds: int = flag(
        10,
        "dynamic sampling samples at most N rounds of --rl-rollout-prompts prompts for a rollout; surplus groups are "
        "kept for the next rollout; if groups are missing after the last round, groups that count in no loss are added",
        unit="rounds",
        least=1,
        reader=_DYNAMIC,
    )
    filtration: str | None = flag(
        None,
        "resample the responses of each prompt, with weights from their rewards (default: the preset's)",
        choices=("none", "best-worst", "best-random", "pow"),
    )
    filtration_power: float = flag(2.0, "filtration pow gives a reward R the weight |R|^N", least=0, reader=_POW)
    filtration_whole_batch: bool = flag(
        False,
        "resample among all responses of an optimizer step, as verl does, and not among those of each prompt",
        reader=_FILTRATION,
    )
    dpo_loss: str = flag("sigmoid", "loss of a pair", choices=("sigmoid", "hinge", "ipo"), reader=DPO_ONLY, pairs=True)
    dpo_beta: float = flag(
        0.1, "beta of dpo; a larger beta keeps the policy closer to the reference", above=0, reader=DPO_ONLY, pairs=True
    )
    dpo_label_smoothing: float = flag(
        0.0,
        "assumed probability that chosen and rejected are swapped in a pair; only for --rl-dpo-loss sigmoid",
        least=0,
        below=0.5,
        reader=DPO_ONLY,
        pairs=True,
    )
    dpo_length_norm: bool = flag(
        False, "compare the mean log-probs of a pair's two responses, not their sums", reader=DPO_ONLY, pairs=True
    )
    dpo_reference_cache: str | None = flag(
        None,
        "directory for the reference's log-probs of all pairs, which are computed once (default: SAVE/rl/reference)",
        reader=DPO_ONLY,
        pairs=True,
    )
    ppo_epochs: int = flag(1, "number of times that the update trains on a rollout", unit="epochs", least=1)
