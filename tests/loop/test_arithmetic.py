"""Batch arithmetic: the numbers, and the default of the rollout size. What does not divide: launch/refusals.py."""

from argparse import Namespace
from contextlib import nullcontext

import pytest

from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.config.algorithm_flags import AlgorithmConfig
from mindspeed_rl_plugin.config.run_flags import ForwardConfig, RolloutConfig
from mindspeed_rl_plugin.loop.arithmetic import Arithmetic, check_batch, derive

pytestmark = pytest.mark.quick


def sizes(
    members: int = 8, prompts: int | None = 16, epochs: int = 1, max_tokens: int | None = None, **of_megatron: int
) -> Arithmetic:
    config = RLConfig(
        rollout=RolloutConfig(samples_per_prompt=members, rollout_prompts=prompts),
        algorithm=AlgorithmConfig(algorithm="grpo", ppo_epochs=epochs),
        forward=ForwardConfig(max_tokens_per_microbatch=max_tokens),
    )
    base = {"global_batch": 32, "micro_batch": 2, "data_parallel": 4, "train_iters": 100}
    return derive(config, 2, **base | of_megatron)


@pytest.mark.parametrize(
    ("change", "expected"),  # prompts, samples, steps, micro-batches, rollouts
    [
        ({}, (16, 128, 4, 4, 25)),
        ({"prompts": None}, (4, 32, 1, 4, 100)),
        ({"epochs": 3}, (16, 128, 12, 4, 9)),
        ({"members": 1, "prompts": None}, (32, 32, 1, 4, 100)),
        ({"members": 5, "prompts": 32}, (32, 160, 5, 4, 20)),
        ({"micro_batch": 8}, (16, 128, 4, 1, 25)),
        ({"train_iters": 1}, (16, 128, 4, 4, 1)),
    ],
)
def test_numbers(change, expected):
    of = sizes(**change)
    assert (of.prompts, of.samples, of.steps, of.micro_batches, of.rollouts) == expected and of.engines == 2


@pytest.mark.parametrize(("members", "batch"), [(6, 32), (8, 32), (7, 21), (3, 10)])
def test_the_fix_that_the_message_names_works(members, batch):
    given = {"members": members, "global_batch": batch, "data_parallel": 1, "micro_batch": 1}
    with pytest.raises(ValueError) as error:
        sizes(prompts=11, **given)
    for prompts in map(int, str(error.value).rpartition(" to ")[2].split(" or ")):
        sizes(prompts=prompts, **given)


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({}, True),
        ({"global_batch_size": 48}, False),
        ({"tensor_model_parallel_size": 2}, False),  # one data parallel rank
        ({"global_batch_size": None}, False),  # Megatron's default, not known yet
        ({"tensor_model_parallel_size": 3}, False),  # Megatron's to refuse
    ],
)
def test_a_batch_is_refused_before_megatron_names_other_flags(change, refused):
    args = Namespace(**{"world_size": 2, "global_batch_size": 60, "micro_batch_size": 12} | change)
    said = "--global-batch-size 60 is not a multiple of --micro-batch-size 12 x 2 data-parallel ranks = 24"
    with pytest.raises(ValueError, match=said) if refused else nullcontext():
        check_batch(args)


def test_table():
    text = sizes(epochs=3).table()
    for part in ("128  16 prompts x 8 responses", "12  128 / 32 x 3 epochs", "optimizer steps / 12, 4 for the last"):
        assert part in text, text
    cut = sizes(max_tokens=4096).table()
    assert "tokens per micro-batch, at most 4096 for 8 rows" in " ".join(cut.split())
    assert "micro-batches per step" not in cut
