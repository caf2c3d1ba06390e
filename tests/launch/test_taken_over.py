"""What RL takes over from a command line of pretraining: before and after, and under MindSpeed its patches."""

import ast
import json
import os
import sys
from pathlib import Path

import pytest
from checkouts import checkouts, cores
from commands import ended

from mindspeed_rl_plugin.checks import flag_checks, taken_over
from mindspeed_rl_plugin.checks.taken_over import BESIDE_ADAPTERS, LORA_OF_LLM, TAKEN_OVER, take_over
from mindspeed_rl_plugin.config.flag import spelt

pytestmark = pytest.mark.quick

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
        ("--tp-comm-overlap --sequence-parallel", "--sequence-parallel", "--tp-comm-overlap: off: its buffers"),
        ("--moe-fb-overlap --moe-grouped-gemm", "--moe-grouped-gemm", "--moe-fb-overlap: off"),
        ("--moe-fb-overlap --moe-zero-memory level1", "", "--moe-fb-overlap --moe-zero-memory: off"),
        (
            "--moe-fb-overlap --moe-zero-memory level1 --moe-alltoall-overlap-comm",
            "--moe-zero-memory level1 --moe-alltoall-overlap-comm",
            "--moe-fb-overlap: off",
        ),
        ("--moe-fb-overlap --mla-swap-core-attn-out", "", "--moe-fb-overlap --mla-swap-core-attn-out: off"),
        ("--optimizer adam", "--optimizer adam", ""),
        ("--optimizer=soap --lr 1", "--optimizer=soap --lr 1", "--optimizer: untested"),
        ("--ema-decay 0.9 --lr 1", "--ema-decay 0.9 --lr 1", "--ema-decay: untested"),
        ("--rampup-batch-size 4 4 100", "--rampup-batch-size 4 4 100", ""),  # and no batch size: refused
        ("--global-batch-size 8 --rampup-batch-size 4 4 100", "--global-batch-size 8", "--rampup-batch-size 4 4 100: "),
        (
            "--step-batch-size-schedule 0:16,2.4B:320 --lr 1",
            "--global-batch-size 320 --lr 1",
            "--step-batch-size-schedule 0:16,2.4B:320: each",
        ),
        (
            f"{SAMPLES} --step-batch-size-schedule 0:2 8:4",
            "--train-iters 250 --lr-decay-iters 225 --lr-warmup-iters 9 --global-batch-size 4",
            "--step-batch-size-schedule 0:2 8:4: each ... --train-samples 1000: RL counts",
        ),
        (
            "--lora-target-modules linear_qkv linear_fc1 --lora-r 8 --lora-fusion --lr 1",
            "--lr 1 @ --rl-lora-rank 8 --rl-lora-alpha 32 --rl-lora-targets linear_qkv linear_fc1",
            "--lora-target-modules linear_qkv linear_fc1 --lora-r 8: RL's own ... A each): --rl-lora-rank 8 --rl-lora-a"
            " ... --lora-fusion: RL's own",
        ),
        (  # ours count, and theirs of the others
            "--lora-target-modules x --lora-r=8 --lora-alpha 4 --rl-lora-rank 2 --rl-lora-targets y",
            "--rl-lora-rank 2 --rl-lora-targets y @ --rl-lora-alpha 4",
            "--lora-target-modules x --lora-r=8 --lora-alpha 4: RL's own ... --rl-lora-rank 2 --rl-lora-targets y --rl",
        ),
        (
            "--rl-lora-rank 2 --reuse-fp32-param --moe-alltoall-overlap-comm",
            "--rl-lora-rank 2",
            "--reuse-fp32-param: off: with adapters ... --moe-alltoall-overlap-comm: off",
        ),
        ("--reuse-fp32-param --moe-alltoall-overlap-comm", "--reuse-fp32-param --moe-alltoall-overlap-comm", ""),
        ("--lora-r 8 --lora-alpha 16 --lora-ckpt-filter", "", "--lora-r 8 --lora-alpha 16: of no ... --lora-ckpt-filt"),
        ("--phase-transition-iterations 5,9", "", "--phase-transition-iterations: no pretraining"),
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
    first, _, last = kept.partition("@")  # what becomes a flag of RL stands at the end
    assert argv == [*first.split(), *RL, *last.split()]
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
    monkeypatch.setattr(sys, "argv", ["a.py", "--moe-fb-overlap", "--reset-attention-mask", "--ema-decay", "1", *RL])
    monkeypatch.setattr(taken_over, "_lines", [])
    monkeypatch.setattr(taken_over, "_late", [])
    taken_over.from_command_line(read_by="mindspeed.megatron_adaptor")
    assert sys.argv == ["a.py", "--ema-decay", "1", *RL] and len(taken_over.lines()) == 3
    taken_over.from_command_line()
    assert len(taken_over.lines()) == 3
    with pytest.raises(ValueError) as error:
        flag_checks.check_unvalidated(build({}))
    flags = [line.removeprefix("  - ").partition(":")[0] for line in str(error.value).splitlines()[1:]]
    assert flags == ["--reset-attention-mask", "--moe-fb-overlap"]
    monkeypatch.setattr(taken_over, "_late", [])
    flag_checks.check_unvalidated(build({}))


ADAPTOR = """
import json, os, sys
from mindspeed_rl_plugin import host
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
host.activate_if_needed(announce=False)
order = sys.argv.pop(1)
if order == "before":
    import mindspeed_rl_plugin.adaptor
from mindspeed_llm import megatron_adaptor
if order == "after":
    import mindspeed_rl_plugin.adaptor
from mindspeed.patch_utils import MindSpeedPatchesManager
from mindspeed_rl_plugin.checks import taken_over
patches = MindSpeedPatchesManager.patches_info.items()
functions = [(name, f) for name, patch in patches for f in (patch.patch_func, *patch.wrappers)]
of_it = [name for name, f in functions if "reset_attention_mask" in str(getattr(f, "__module__", ""))]
lora = [name for name, f in functions if getattr(f, "__name__", "") == "lora_moe_layer_init"]
print("\\nRESULT " + json.dumps([len(of_it), len(lora), taken_over.problems()]), flush=True)
os._exit(0)
"""


@pytest.mark.upstream
@pytest.mark.slow
@pytest.mark.parametrize("order", ["never", "before", "after"])
def test_mindspeed_patches_nothing_for_what_was_taken_over(order):
    """Its adaptor reads the command line while it is imported; what came too late is refused."""
    first = (checkouts(name)[0] for name in ("MINDSPEED_LLM_PATH", "MINDSPEED_PATH"))
    path = (*first, cores()["0.12"], Path(__file__).parents[2], os.environ.get("PYTHONPATH", ""))
    late = ["--reset-attention-mask", "--lora-target-modules"]
    flags = (*late, "linear_qkv", "--transformer-impl", "local", *RL, "--rl-prompt-data", __file__)
    more = {"PYTHONPATH": os.pathsep.join(map(str, path))}
    done = ended(sys.executable, "-c", ADAPTOR, order, *flags, timeout=280, more=more)
    masks, adapters, problems = json.loads(done.stdout.rpartition("RESULT ")[2])
    assert (masks > 0) == (adapters > 0) == (order != "before")
    assert [line.partition(":")[0] for line in problems] == late * (order == "after")


@pytest.mark.upstream
def test_what_mindspeed_patches_by_is_known():
    """Of what is taken over, no other flag stands where features of MindSpeed and MindSpeed-LLM choose patches."""
    tables = (TAKEN_OVER | BESIDE_ADAPTERS).values()
    taken = {flag.partition("=")[0] for flags in tables for flag in flags.split()} | {*LORA_OF_LLM}
    files = [
        file
        for name in ("MINDSPEED_PATH", "MINDSPEED_LLM_PATH")
        for checkout in checkouts(name)
        for file in checkout.glob("mindspeed*/features_manager/**/*.py")
    ]
    words = set()
    for feature in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(feature, ast.FunctionDef) and feature.name in ("__init__", "register_patches", "is_need_apply"):
            words |= {node.attr for node in ast.walk(feature) if isinstance(node, ast.Attribute)}
            words |= {str(node.value) for node in ast.walk(feature) if isinstance(node, ast.Constant)}
    assert taken & {spelt(word) for word in words} == {*taken_over._PATCHING}
