"""Flags that were given a value and that nothing in the run would read: refused, never ignored without a word."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from mindspeed_rl_plugin.algorithms import Algorithm, resolve
from mindspeed_rl_plugin.algorithms.presets import assemble, meaningless, shown
from mindspeed_rl_plugin.config import AlgorithmConfig, RLConfig

_PAIRS = (lambda a: a.from_pairs, "--rl-algorithm dpo")
_CORRECTION = (lambda a: a.correction != "off", "a --rl-correction other than off")
_GAE = (lambda a: a.advantage == "gae", "--rl-advantage gae")

# Field -> whether an algorithm reads it, and what does. Fields that are not here are read by all that draw responses.
# Bounds of a loss and flags of the critic are checked where an algorithm is resolved.
READERS: dict[str, tuple[Callable[[Algorithm], bool], str]] = {
    "kl_estimator": (lambda a: a.needs_reference, "a KL to the reference, --rl-kl-loss-coef or --rl-kl-reward-coef,"),
    "kl_reward_estimator": (lambda a: a.kl_reward_coef != 0, "--rl-kl-reward-coef above 0"),
    "advantage_eps": (lambda a: a.advantage == "group-norm", "--rl-advantage group-norm"),
    "gamma": (lambda a: a.advantage in ("gae", "reinforce++"), "--rl-advantage gae or reinforce++"),
    "gae_lambda": _GAE,
    "value_clip": _GAE,
    **dict.fromkeys(("correction_level", "correction_low", "correction_high"), _CORRECTION),
    "overlong_penalty": (lambda a: a.buffer(1) > 0, "--rl-overlong-buffer above 0"),
    "dynamic_sampling_rounds": (lambda a: a.dynamic_sampling, "--rl-dynamic-sampling"),
    "filtration_power": (lambda a: a.filtration == "pow", "--rl-filtration pow"),
    "filtration_whole_batch": (lambda a: a.filters, "a --rl-filtration other than none"),
    **dict.fromkeys(("chosen_key", "rejected_key", "dpo_loss", "dpo_beta", "dpo_label_smoothing"), _PAIRS),
    **dict.fromkeys(("dpo_length_norm", "dpo_reference_cache"), _PAIRS),
}
# All that a run over given pairs reads.
READ_BY_PAIRS = {
    *("prompt_data", "prompt_key", "chosen_key", "rejected_key", "apply_chat_template", "max_prompt_length"),
    *("tokenizer", "data_seed", "max_response_length", "temperature", "hf_model", "logprob_chunk_tokens"),
    *("algorithm", "dpo_loss", "dpo_beta", "dpo_label_smoothing", "dpo_length_norm", "dpo_reference_cache"),
    *("run_dir", "eval_data", "eval_every", "eval_prompts", "wait_timeout", "progress"),
}


def refused(args: Any, config: RLConfig) -> Iterator[str]:
    """One message for each flag whose value differs from its default, the preset's included, and is read nowhere."""
    name = config.algorithm.algorithm
    try:
        algorithm, preset = assemble(config.algorithm), resolve(AlgorithmConfig(algorithm=name))
    except ValueError:
        return  # a name that is unknown: reported by another check
    reported = meaningless(config.algorithm, algorithm)  # where the algorithm is resolved, beside this
    for field, value, default in _fields(config):
        if field in reported:
            continue
        reads, reader = READERS.get(field, (lambda a: True, ""))
        if algorithm.from_pairs:
            reads, reader = (lambda a, field=field: field in READ_BY_PAIRS), "an algorithm that draws responses"
        if value in (default, getattr(preset, field, default)) or reads(algorithm):
            continue
        yield f"{shown(field, value)} has no meaning for --rl-algorithm {name} here: only {reader} reads it; remove it"


def _fields(config: RLConfig) -> Iterator[tuple[str, Any, Any]]:
    """Name, value and default of every field of every group."""
    for group in dataclasses.fields(config):
        given = getattr(config, group.name)
        for field in dataclasses.fields(given):
            yield field.name, getattr(given, field.name), field.default
