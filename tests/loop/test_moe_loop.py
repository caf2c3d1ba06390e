"""GRPO on models with experts: layouts of trainer and engine, agreement of their log-probs after every update.

Of the shapes of Qwen3-MoE and of DeepSeek-V3: latent attention, a biased router, shared experts.
"""

import re

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_rl_plugin.tools.convert import to_hf

TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
EP2, ETP1 = ("--expert-model-parallel-size", "2"), ("--expert-tensor-parallel-size", "1")
EP4 = ("--expert-model-parallel-size", "4")
PP2 = ("--pipeline-model-parallel-size", "2")
CUT1, CUT2, SPREAD2 = (), ("--rl-generate-tp", "2"), ("--rl-generate-tp", "2", "--rl-generate-ep", "2")
SHARED2, SHARED4 = ("--rl-generate-ep", "2"), ("--rl-generate-ep", "4")
SPREAD4 = ("--rl-generate-tp", "4", "--rl-generate-ep", "4")
FOUR_HEADS = ("--num-attention-heads", "4", "--num-layers", "4", "--moe-layer-freq", "[0,1]*2")
# By Python's resource tracker: semaphores, shared memory. nanobind counts triton's own objects at every end.
LEAKED = re.compile(r"leaked (?!(\d+ )?(instance|type|function|keep_alive))")
MOVED = 1e-4  # nats, least KL to the reference after an update


@pytest.mark.parametrize(
    "train, generate",
    [
        pytest.param(EP2, SPREAD2, id="EP2-to-TP2EP2"),
        pytest.param(EP2, CUT1, id="EP2-to-TP1", marks=pytest.mark.slow),
        pytest.param((*TP2, *EP2, *ETP1), CUT2, id="TP2EP2ETP1-to-TP2", marks=pytest.mark.slow),
        pytest.param(TP2, SPREAD2, id="TP2ETP2-to-TP2EP2", marks=pytest.mark.slow),
        pytest.param(PP2, SPREAD2, id="PP2-to-TP2EP2", marks=pytest.mark.slow),
    ],
)
def test_engine_and_trainer_agree(job, nothing_left, moe_model, train, generate):
    """And the end leaves nothing behind: the engine was ended, not dropped."""
    done = job("--train-iters", "3", "--rl-verify-weights", *train, *generate, model=moe_model, cold=True).run()
    done.check_agreement(3, MOVED)
    assert not LEAKED.search(done.log) and "Traceback" not in done.log
    nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    "train, generate",
    [
        pytest.param((*TP2, *EP2, *PP2, *ETP1), SPREAD2, id="TP2EP2ETP1PP2-to-TP2EP2"),
        pytest.param((*TP2, *EP2), SPREAD4, id="TP2EP2ETP2DP2-to-TP4EP4"),
        pytest.param((*EP2, *PP2), CUT2, id="EP2PP2-to-TP2"),
        pytest.param(EP4, SHARED4, id="EP4-to-EP4"),
        pytest.param(EP2, (*CUT2, *SHARED4), id="EP2-to-TP2EP4"),
        pytest.param((*TP2, *EP2, *ETP1), SHARED2, id="TP2EP2ETP1DP2-to-two-EP2"),
    ],
)
def test_engine_and_trainer_agree_on_four_ranks(job, moe_model, train, generate):
    options = (*FOUR_HEADS, "--train-iters", "3", "--rl-verify-weights")
    job(*options, *train, *generate, model=moe_model, ranks=4).run(400).check_agreement(3, MOVED)


@pytest.mark.slow
def test_engines_that_share_experts_and_have_no_rows(job, arithmetic, moe_model):
    """Of four, two have rows of the rollout, and one has a prompt of the evaluation."""
    rows = ("--global-batch-size", "2", "--micro-batch-size", "1", "--rl-samples-per-prompt", "2")
    held_out = ("--rl-eval-data", str(arithmetic / "heldout.jsonl"), "--rl-eval-every", "1", "--rl-eval-prompts", "1")
    options = (*FOUR_HEADS, *TP2, *EP2, *ETP1, *SHARED4, *rows, *held_out, "--train-iters", "3")
    done = job(*options, model=moe_model, ranks=4).run(400)
    assert max(line["logp_diff/max"] for line in done.metrics) < 2e-5 and len(done.metrics) == 3
    assert [line["iteration"] for line in done.evaluations] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "train, generate, ranks",
    [
        pytest.param(EP2, SPREAD2, 2, id="EP2-to-TP2EP2"),
        pytest.param((*TP2, *EP2, *ETP1, *PP2), SPREAD2, 4, id="TP2EP2ETP1PP2-to-TP2EP2"),
        pytest.param((*TP2, *EP2, *ETP1, *PP2), (*CUT2, *SHARED4), 4, id="TP2EP2ETP1PP2-to-TP2EP4"),
    ],
)
def test_latent_attention(job, latent_model, train, generate, ranks):
    options = ("--train-iters", "3", "--rl-verify-weights", *train, *generate)
    job(*options, model=latent_model, ranks=ranks).run(400).check_agreement(3, MOVED)


@pytest.mark.slow
@pytest.mark.parametrize("train", [EP2, PP2], ids=["EP2", "PP2"])
def test_mtp_layers_are_frozen(job, latent_model, train, tmp_path):
    """With layers for multi-token prediction: neither generated with nor trained, kept in the checkpoints, and not
    exported, nor is the last stage's copy of the embedding for them."""
    options = ("--mtp-num-layers", "1", "--train-iters", "2", "--save-interval", "1", "--rl-verify-weights")
    done = job(*options, *train, *SPREAD2, model=latent_model).run(400)
    done.check_agreement(2, MOVED)
    first, second = (weights(done.run_dir.parent / f"iter_000000{i}") for i in (1, 2))
    frozen = [name for name in first if ".mtp." in f".{name}"]
    assert frozen and all(torch.equal(first[name], second[name]) for name in frozen)
    assert not all(torch.equal(first[name], second[name]) for name in first.keys() - set(frozen))
    assert to_hf.main(["--load", str(done.run_dir.parent), "--out", str(tmp_path / "hf")]) == 0
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert not any("mtp" in name for name in exported)
    ours, theirs = exported["model.embed_tokens.weight"], second["embedding.word_embeddings.weight of mp_rank_00_000"]
    assert torch.equal(ours, theirs[: len(ours)])  # of the first stage, or the first expert parallel rank


def weights(checkpoint) -> dict[str, torch.Tensor]:
    """Tensors of all ranks by name and file."""
    out = {}
    for file in sorted(checkpoint.glob("*/model_optim_rng.pt")):
        state = torch.load(file, weights_only=False)["model"]
        out |= {f"{n} of {file.parent.name}": t for n, t in state.items() if isinstance(t, torch.Tensor)}
    return out
