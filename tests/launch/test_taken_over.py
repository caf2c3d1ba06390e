"""What RL takes over from a command line of pretraining: before and after, and under MindSpeed its patches."""

import sys

import pytest

from mindspeed_rl_plugin.launch import flag_checks, taken_over
from mindspeed_rl_plugin.launch.taken_over import take_over

RL = ["--rl-algorithm", "grpo"]
SAMPLES = "--train-samples 1000 --lr-decay-samples 900 --lr-warmup-samples 39"


@pytest.mark.parametrize(
    ("given", "kept", "said"),
    [
        ("--seq-length 8", "--seq-length 8", ""),
        ("--reset-attention-mask --neat-pack --lr 1", "--lr 1", "--reset-attention-mask --neat-pack: a row"),
        ("--attention-mask-type general", "", "--attention-mask-type: a row"),
        ("--attention-mask-type=general --bf16", "--bf16", "--attention-mask-type: a row"),
        ("--attention-mask-type causal", "--attention-mask-type causal", ""),
        ("--data-path a b c --split 1,0,0 --lr=-1", "--lr=-1", "--data-path --split: no pretraining"),
        ("--prompt-type qwen3 --enable-thinking true", "", "--prompt-type --enable-thinking: prompts are rendered"),
        ("--disable-gloo-group", "", "--disable-gloo-group: off"),
        ("--moe-fb-overlap --moe-grouped-gemm", "--moe-grouped-gemm", "--moe-fb-overlap: off"),
        ("--ema-decay 0.9 --lr 1", "--ema-decay 0.9 --lr 1", "--ema-decay: untested"),
        (SAMPLES, SAMPLES, ""),  # how many samples a step has is not known
        (f"{SAMPLES} --train-iters 3 --global-batch-size 4", f"{SAMPLES} --train-iters 3 --global-batch-size 4", ""),
        (
            f"{SAMPLES} --global-batch-size 4",
            "--train-iters 250 --lr-decay-iters 225 --lr-warmup-iters 9 --global-batch-size 4",
            "--train-samples 1000: RL counts ... --train-iters 250 ... --lr-decay-iters 225 ... --lr-warmup-iters 9",
        ),
    ],
)
def test_what_is_left_of_a_command_line(given, kept, said):
    argv, lines = take_over([*given.split(), *RL])
    assert argv == [*kept.split(), *RL]
    position = 0
    for piece in filter(None, said.split(" ... ")):
        position = "\n".join(lines).index(piece, position)
    assert bool(lines) == bool(said)


@pytest.mark.parametrize("rl", ["", "--rl-algorithm=grpo"])
def test_only_with_rl(rl):
    argv, lines = take_over(["script.py", "--mock-data", *rl.split()])
    assert argv == (["script.py", rl] if rl else ["script.py", "--mock-data"]) and bool(lines) == bool(rl)


def test_what_mindspeed_read_before_is_refused(build, monkeypatch):
    """Flags by which it patches Megatron; others can still be taken over."""
    monkeypatch.setattr(sys, "argv", ["a.py", "--moe-fb-overlap", "--reset-attention-mask", "--mock-data", *RL])
    monkeypatch.setattr(taken_over, "_lines", [])
    monkeypatch.setattr(taken_over, "_late", [])
    taken_over.from_command_line(read_by="mindspeed.megatron_adaptor")
    assert sys.argv == ["a.py", *RL] and len(taken_over.lines()) == 3
    taken_over.from_command_line()
    assert len(taken_over.lines()) == 3
    with pytest.raises(ValueError) as error:
        flag_checks.check_unvalidated(build({}))
    flags = [line.removeprefix("  - ").partition(":")[0] for line in str(error.value).splitlines()[1:]]
    assert flags == ["--reset-attention-mask", "--moe-fb-overlap"]
    monkeypatch.setattr(taken_over, "_late", [])
    flag_checks.check_unvalidated(build({}))
