"""Flags that nothing would read: which are refused for which algorithm, and which values are always accepted."""

import dataclasses
import typing
from types import UnionType

import pytest

from mindspeed_rl_plugin.algorithms import ALGORITHMS, resolve
from mindspeed_rl_plugin.algorithms.presets import unread
from mindspeed_rl_plugin.config import AlgorithmConfig, RLConfig, as_given, flag_name

pytestmark = pytest.mark.quick


def chosen(algorithm, **fields):
    return RLConfig(algorithm=AlgorithmConfig(algorithm=algorithm, **fields))


# A flag, a run that would ignore it, what the message must name, and a run that reads it.
ROWS = [
    ({"overlong_penalty": 0.5}, {"algorithm": "grpo"}, "--rl-overlong-buffer", {"overlong_buffer": 4}),
    ({"overlong_penalty": 0.5}, {"algorithm": "dapo", "overlong_buffer": 0}, "buffer", {"algorithm": "dapo"}),
    ({"filtration_power": 3.0}, {"algorithm": "grpo"}, "--rl-filtration pow", {"filtration": "pow"}),
    ({"filtration_power": 3.0}, {"algorithm": "pf-ppo"}, "--rl-filtration pow", {"filtration": "pow"}),
    ({"filtration_whole_batch": True}, {"algorithm": "ppo"}, "--rl-filtration", {"algorithm": "pf-ppo"}),
    ({"gamma": 0.9}, {"algorithm": "grpo"}, "--rl-advantage gae or reinforce++", {"algorithm": "reinforce++"}),
    ({"gamma": 0.9}, {"algorithm": "grpo", "advantage": "reinforce++-baseline"}, "gae", {"algorithm": "ppo"}),
    ({"gae_lambda": 0.9}, {"algorithm": "reinforce++"}, "--rl-advantage gae", {"algorithm": "ppo"}),
    ({"value_clip": 0.5}, {"algorithm": "dapo"}, "--rl-advantage gae", {"advantage": "gae"}),
    ({"dynamic_sampling_rounds": 3}, {"algorithm": "grpo"}, "--rl-dynamic-sampling", {"dynamic_sampling": True}),
    (
        {"dynamic_sampling_rounds": 3},
        {"algorithm": "dapo", "dynamic_sampling": False},
        "--rl-dynamic-sampling",
        {"algorithm": "dapo"},
    ),
    ({"correction_level": "sequence"}, {"algorithm": "grpo"}, "--rl-correction", {"correction": "mask"}),
    ({"correction_low": 0.1}, {"algorithm": "grpo"}, "--rl-correction other than off", {"correction": "mask"}),
    ({"correction_high": 5.0}, {"algorithm": "ppo"}, "--rl-correction other than off", {"correction": "truncate"}),
    ({"kl_reward_estimator": "k3"}, {"algorithm": "grpo"}, "--rl-kl-reward-coef", {"algorithm": "rloo"}),
    ({"kl_reward_estimator": "k2"}, {"algorithm": "rloo", "kl_reward_coef": 0.0}, "coef", {"algorithm": "rloo"}),
    ({"kl_estimator": "k1"}, {"algorithm": "dapo"}, "--rl-kl-loss-coef", {"kl_loss_coef": 0.1}),
    ({"kl_estimator": "k1"}, {"algorithm": "grpo", "kl_loss_coef": 0.0}, "--rl-kl-loss-coef", {"algorithm": "ppo"}),
    ({"advantage_eps": 1e-3}, {"algorithm": "ppo"}, "--rl-advantage group-norm", {"algorithm": "dapo"}),
    ({"dpo_beta": 0.3}, {"algorithm": "grpo"}, "--rl-algorithm dpo", {"algorithm": "dpo"}),
    ({"dpo_length_norm": True}, {"algorithm": "ppo"}, "--rl-algorithm dpo", {"algorithm": "dpo"}),
    ({"dual_clip": 3.0}, {"algorithm": "grpo", "loss": "cispo"}, "dual clip", {"algorithm": "grpo"}),
    ({"clip_low": 0.1}, {"algorithm": "grpo", "loss": "sapo"}, "clips", {"algorithm": "grpo"}),
    ({"clip_high": 0.1}, {"algorithm": "rloo"}, "clips", {"algorithm": "dapo"}),
    ({"sapo_tau_positive": 2.0}, {"algorithm": "grpo"}, "--rl-loss sapo", {"loss": "sapo"}),
    ({"sapo_tau_negative": 2.0}, {"algorithm": "grpo"}, "--rl-loss sapo", {"loss": "sapo"}),
    ({"critic_lr": 1e-3}, {"algorithm": "grpo"}, "--rl-advantage gae", {"algorithm": "ppo"}),
    ({"critic_load": "x"}, {"algorithm": "grpo"}, "--rl-advantage gae", {"advantage": "gae"}),
    ({"critic_warmup": 3}, {"algorithm": "rloo"}, "--rl-advantage gae", {"algorithm": "pf-ppo"}),
]


@pytest.mark.parametrize(("flag", "ignoring", "reader", "reading"), ROWS, ids=str)
def test_a_flag_is_refused_where_nothing_reads_it_and_nowhere_else(flag, ignoring, reader, reading):
    ((field, value),) = flag.items()
    (message,) = unread(chosen(**ignoring, **flag))
    given, _, rest = message.partition(" has no meaning in this run: only ")
    assert given == as_given(field, value) and reader in rest and "remove it" in rest
    assert unread(chosen(**{"algorithm": "grpo", **reading, **flag})) == []


def test_every_flag_with_a_reader_of_its_own_is_tried():
    tried = {field for flag, *_ in ROWS for field in flag}
    assert {f.name for group, f, _ in every_field() if group == "algorithm" and f.metadata["reader"]} - tried == {
        *("dpo_loss", "dpo_label_smoothing", "dpo_reference_cache")
    }


# What reads flags of a schedule and of episodes -> the values with which it is there.
READ_BY = {
    "--rl-schedule async": {"schedule": "async"},
    "--rl-schedule streamed": {"schedule": "streamed"},
    "--rl-schedule async or --rl-carry-unfinished": {"schedule": "streamed", "carry_unfinished": True},
    "--rl-tools, --rl-environment or --rl-agent": {"tools": ("a.py:f",)},
    "--rl-agent": {"agent": "a.py:f"},
    "--rl-agent with a command": {"agent": "bash"},
    "--rl-agent or --rl-environment verifiers:ID": {"environment": "verifiers:x"},
}


def of_group(group, **values):
    config = chosen("grpo")
    return dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **values)})


def test_flags_of_a_schedule_and_of_episodes_are_read_by_these_alone():
    seen = set()
    for group, field, hint in every_field():
        if group in ("schedule", "episodes") and (reader := field.metadata["reader"]):
            value = {field.name: other_than(field, hint)}
            (message,) = unread(of_group(group, **value))
            assert f"only {reader.what} reads it" in message
            assert unread(of_group(group, **value, **READ_BY[reader.what])) == []
            seen.add(reader.what)
    assert seen == {*READ_BY}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_a_preset_has_of_itself_is_accepted_when_it_is_given(name):
    assert unread(chosen(name)) == []
    preset = resolve(AlgorithmConfig(algorithm=name))
    for field in dataclasses.fields(AlgorithmConfig):
        value = getattr(preset, field.name)
        if field.name != "algorithm" and value != field.default:
            assert unread(chosen(name, **{field.name: value})) == [], field.name


def other_than(field, hint):
    """Some value of a field's type that is not its default."""
    value, choices = field.default, field.metadata["choices"]
    if isinstance(value, bool):
        return not value
    if typing.get_origin(hint) is UnionType:
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    if typing.get_origin(hint) is tuple:
        return (*value, typing.get_args(hint)[0]("7"))
    return {bool: True, int: 7, float: 0.7, str: choices[-1] if choices else "other"}[hint]


def every_field():
    for group, kind in typing.get_type_hints(RLConfig).items():
        hints = typing.get_type_hints(kind)
        yield from ((group, field, hints[field.name]) for field in dataclasses.fields(kind))


def test_pairs_refuse_whole_groups_less_what_they_read():
    config, read = chosen("dpo"), set()
    for group, field, hint in every_field():
        if field.name == "algorithm":
            continue
        changed = dataclasses.replace(getattr(config, group), **{field.name: other_than(field, hint)})
        lines = unread(dataclasses.replace(config, **{group: changed}))
        reader = field.metadata["reader"]
        if field.metadata["pairs"] and reader and not reader.reads(resolve(config.algorithm), config):
            assert f"only {reader.what} reads it" in lines[0], lines
        elif field.metadata["pairs"]:
            read.add(group)
            assert lines == [], field.name
        else:
            (message,) = lines
            name, _, rest = message.partition(" has no meaning in this run: only ")
            assert flag_name(field.name).removeprefix("--") in name, message
            assert rest == "an algorithm that samples responses reads it, and dpo generates nothing; remove it", message
    assert read == {"data", "rollout", "algorithm", "forward", "lora", "dock", "monitor"}
    assert unread(chosen("dpo", kl_loss_coef=0.0)) == [], "the preset's own value"
