"""Batch arithmetic: the numbers, the default of the rollout size, and what does not divide."""

from argparse import Namespace
from contextlib import nullcontext

import pytest

from mindspeed_rl_plugin.loop.arithmetic import check_batch, derive

BASE = {
    "global_batch": 32,
    "members": 8,
    "prompts": 16,
    "epochs": 1,
    "micro_batch": 2,
    "data_parallel": 4,
    "engines": 2,
    "train_iters": 100,
}


@pytest.mark.parametrize(
    ("change", "prompts", "samples", "steps", "micro_batches", "rollouts"),
    [
        ({}, 16, 128, 4, 4, 25),
        ({"prompts": None}, 4, 32, 1, 4, 100),
        ({"epochs": 3}, 16, 128, 12, 4, 9),
        ({"members": 1, "prompts": None}, 32, 32, 1, 4, 100),
        ({"members": 5, "prompts": 32}, 32, 160, 5, 4, 20),
        ({"micro_batch": 8}, 16, 128, 4, 1, 25),
        ({"train_iters": 1}, 16, 128, 4, 4, 1),
    ],
)
def test_numbers(change, prompts, samples, steps, micro_batches, rollouts):
    sizes = derive(**{**BASE, **change})
    assert (sizes.prompts, sizes.samples, sizes.steps, sizes.micro_batches, sizes.rollouts) == (
        prompts,
        samples,
        steps,
        micro_batches,
        rollouts,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"members": 6, "prompts": None},
            r"--global-batch-size 32 is not a multiple of --rl-samples-per-prompt 6, so --rl-rollout-prompts has no",
        ),
        (
            {"prompts": 17},
            r"136 samples \(--rl-rollout-prompts 17 x --rl-samples-per-prompt 8 \(the default\)\), not a multiple of "
            r"--global-batch-size 32; set --rl-rollout-prompts to 16 or 20",
        ),
        ({"prompts": 1}, r"set --rl-rollout-prompts to 4$"),
        (
            {"micro_batch": 3},
            r"--global-batch-size 32 is not a multiple of --micro-batch-size 3 x 4 data-parallel ranks = 12; change",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_a_fix(change, message):
    with pytest.raises(ValueError, match=message):
        derive(**{**BASE, **change})


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


def test_a_group_size_that_nobody_gave_is_said_to_be_the_default():
    with pytest.raises(ValueError, match=r"32 is not a multiple of --rl-samples-per-prompt 5, so"):
        derive(**{**BASE, "prompts": None, "global_batch": 32, "members": 5})
    with pytest.raises(ValueError, match=r"60 is not a multiple of --rl-samples-per-prompt 8 \(the default\), so"):
        derive(**{**BASE, "prompts": None, "global_batch": 60, "members": 8})


def test_the_fix_that_the_message_names_works():
    for members, batch in ((6, 32), (8, 32), (7, 21), (3, 10)):
        sizes = {**BASE, "members": members, "global_batch": batch, "data_parallel": 1, "micro_batch": 1}
        with pytest.raises(ValueError) as error:
            derive(**{**sizes, "prompts": 11})
        choices = str(error.value).rpartition(" to ")[2].split(" or ")
        for prompts in map(int, choices):
            derive(**{**sizes, "prompts": prompts})


def test_table():
    text = derive(**{**BASE, "epochs": 3}).table()
    assert text.splitlines()[0] == "[rl] batch arithmetic"
    for part in (
        "128  16 prompts x 8 responses",
        "32  --global-batch-size",
        "12  128 / 32 x 3 epochs",
        "4  32 / (2 x 4 data-parallel ranks)",
        "9  100 optimizer steps / 12, the last serves 4",
    ):
        assert part in text, text
    cut = derive(**BASE, max_tokens=4096).table()
    assert "tokens per micro-batch, at most 4096 out of 8 rows" in " ".join(cut.split())
    assert "micro-batches per step" not in cut
