"""Engine and trainer agree on the log-prob of every sampled token, after each number of updates: in one table over
layouts of both, schedules, models and kinds of rows. Two rows of it run in the ordinary tier, which is the first half
of this file; it also has PP2 in test_dock_loop.py, DP2 in test_episode_loop.py and test_resume_loop.py."""

import re
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from mindspeed_rl_plugin.checkpoints.checkpoint_files import read_state
from mindspeed_rl_plugin.tools.convert import to_hf

HERE = Path(__file__).parent
STAGE = HERE.parents[1] / "examples" / "stages" / "short_first.py"
IMPOSED = HERE / "imposed_script.py"
# Runs pretrain_gpt.py where a copy of training state comes late and what is not waited for reads as NaN.
HOSTILE = f"""
import runpy, sys
sys.path.insert(0, {str(HERE.parent / "weights")!r})
import hostile
hostile.install()
runpy.run_path({str(HERE.parents[1] / "examples" / "pretrain_gpt.py")!r}, run_name="__main__")
"""
# By Python's resource tracker: semaphores, shared memory. nanobind counts triton's own objects at every end.
LEAKED = re.compile(r"leaked (?!(\d+ )?(instance|type|function|keep_alive))")
# An untrained model ends a response by one token in four: most are short, some reach the limit.
STOPS = ("--rl-stop-token-ids", *map(str, range(0, 97, 4)))
MOVED = 1e-4  # nats, least KL to the reference after an update of a model with experts


@pytest.mark.parametrize("mode", ["allgather", pytest.param("stream", marks=pytest.mark.slow)])
def test_tp2_streamed_packed_with_a_users_stage_and_a_resume_under_late_copies_and_poison(job, tmp_path, mode):
    """To two engines. Weights as large as a trained model's, where another rotary embedding shows."""
    script = tmp_path / "hostile.py"
    script.write_text(HOSTILE)
    layout = ("--tensor-model-parallel-size", "2", "--rl-generate-tp", "1", "--rl-swap", "params,grads,optimizer")
    layout += ("--init-method-std", "0.1", "--rotary-base", "1000000", "--norm-epsilon", "1e-6", "--rl-verify-weights")
    more = ("--rl-reshard", mode, "--rl-reshard-bucket-mb", "1", "--rl-temperature", "0.8")
    more += ("--rl-pack-sequences", "--rl-max-tokens-per-microbatch", "48", "--rl-schedule", "streamed")
    own = (*STOPS, "--rl-stage", f"{STAGE}:ShortFirst", "--save-interval", "2")
    run = job("--train-iters", "4", *layout, *more, *own, script=script).dumping()
    run.stop_at(2)
    result = run.run()
    assert "training resumes from" in result.log
    result.check_agreement(4)
    for line in result.metrics:
        received, temporary = line["reshard/bytes_received"], line["reshard/temporary_bytes"]
        if mode == "allgather":
            assert temporary > received > 0  # each rank receives half of the model, and the buffer holds all of it
        else:
            assert 0 < temporary <= 2 << 20
    check_short_first(run, result)


def check_short_first(run, result) -> None:
    """The reward of the stage is trained on, and its column is in the dump."""
    cut = 0.0
    for path, line in zip(sorted((run.save / "dump").glob("*.parquet")), result.metrics, strict=True):
        rows = pq.read_table(path).to_pylist()
        for row in rows:
            (part,), shortest = row["reward_parts"], row["is_shortest"]
            assert row["reward"] == pytest.approx(part - 0.1 * (part >= 1 and not shortest))
            assert part >= 1 or not shortest
        valid = [row["reward"] for row in rows if row["finish"] != "length"]
        cut += 1 - len(valid) / len(rows)
        assert line["groups/dropped"] == pytest.approx(1 - len(valid) / len(rows))
        assert line["reward/mean"] == pytest.approx(sum(valid) / len(valid))
    assert cut > 0, "some responses reach the limit"


# Rollouts of two optimizer steps; not all rows of an engine fit beside each other.
CARRY = (
    *("--rl-rollout-prompts", "8", "--rl-max-response-length", "16", "--rl-max-running", "12"),
    *("--rl-schedule", "streamed", "--rl-carry-unfinished", "--rl-correction", "truncate", "--rl-oversample", "1.5"),
)


def test_ep2_with_partial_rollouts_replayed_routes_and_a_resume(job, nothing_left, moe_model):
    """To one engine of two ranks. And the end leaves nothing behind: the engine was ended, not dropped."""
    spread = ("--expert-model-parallel-size", "2", "--rl-generate-tp", "2", "--rl-generate-ep", "2")
    flags = ("--train-iters", "6", *CARRY, *spread, "--rl-verify-weights", "--save-interval", "3")
    run = job(*flags, "--rl-router-replay", "rollout", script=IMPOSED, model=moe_model).dumping()
    run.stop_at(3)  # in the middle of a rollout
    state = read_state(str(run.save), 3)[0]["loop"]
    assert state["steps_left"] == 1 and state["making"]["begun"], "responses are begun, and go on"
    result = run.run()
    assert "training resumes from" in result.log
    assert not LEAKED.search(result.log) and "Traceback" not in result.log
    nothing_left()
    result.check_agreement(6, MOVED, steps=2)
    firsts = result.metrics[::2]
    assert max(line["segments/mean"] for line in firsts) > 1, "no response has parts of two versions"
    assert max(line["lag/max"] for line in firsts) == 1
    assert firsts[0]["router/differ"] < 1e-3  # later ones have parts that older weights sampled
    run.check_trained(24, of_epoch=0)


# The rest of the table.
TP2, SP, PP2 = "--tensor-model-parallel-size 2", "--sequence-parallel", "--pipeline-model-parallel-size 2"
TP2SP = f"{TP2} {SP}"
EP2, EP4 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4"
ETP1 = "--expert-tensor-parallel-size 1"
CUT2, SPREAD2, SPREAD4 = (
    "--rl-generate-tp 2",
    "--rl-generate-tp 2 --rl-generate-ep 2",
    "--rl-generate-tp 4 --rl-generate-ep 4",
)
SHARED2, SHARED4 = "--rl-generate-ep 2", "--rl-generate-ep 4"
FOUR_HEADS = "--num-attention-heads 4 --num-layers 4 --moe-layer-freq [0,1]*2"
CHUNKS = "--rl-logprob-chunk-tokens 3"
# Weights as large as a trained model's, where another rotary embedding shows.
LARGE = "--init-method-std 0.1 --rl-temperature 0.7"
APART = "--rl-schedule async --rl-correction truncate --rl-max-staleness 0 --rl-generators"


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    flags: str
    model: str = "dense_model"  # the fixture of it
    ranks: int = 2
    updates: int = 3
    moved: float = 1e-8  # nats, least KL to the reference after an update


def experts(flags: str, ranks: int = 2, model: str = "moe_model") -> Case:
    return Case(flags, model, ranks, moved=MOVED)


CASES = {
    "DP2-to-TP1": Case("--rl-generate-tp 1"),
    "DP2-to-TP2": Case(CUT2),
    "TP2-to-TP2": Case(f"{TP2} {CUT2}"),
    "TP2SP-to-TP1": Case(f"{TP2SP} --rl-generate-tp 1"),
    # Parameters are gathered only by the next forward pass: neither the engine nor an output layer that scores in
    # chunks must get stale shards.
    "overlapped-gather": Case(f"--overlap-param-gather --overlap-grad-reduce {CHUNKS}"),
    "virtual-pipeline": Case(f"--num-layers 4 {PP2} --num-layers-per-virtual-pipeline-stage 1 {CHUNKS}"),
    "uneven-pipeline": Case(f"--num-layers 3 {PP2} --decoder-first-pipeline-num-layers 1"),
    "TP2-of-qwen3": Case(f"--qk-layernorm --kv-channels 48 {LARGE} {TP2} {CUT2}", "plain_model"),
    "TP2-of-llama": Case(f"--use-rope-scaling --rotary-base 500000 {LARGE} {TP2} --rl-generate-tp 1", "plain_model"),
    # experts
    "EP2-to-TP1": experts(EP2),
    "TP2EP2ETP1-to-TP2": experts(f"{TP2SP} {EP2} {ETP1} {CUT2}"),
    "TP2ETP2-to-TP2EP2": experts(f"{TP2SP} {SPREAD2}"),
    "PP2-to-TP2EP2": experts(f"{PP2} {SPREAD2}"),
    "TP2EP2ETP1PP2-to-TP2EP2": experts(f"{FOUR_HEADS} {TP2SP} {EP2} {PP2} {ETP1} {SPREAD2}", 4),
    "TP2EP2ETP2DP2-to-TP4EP4": experts(f"{FOUR_HEADS} {TP2SP} {EP2} {SPREAD4}", 4),
    "TP2ETP2-to-TP2EP2-by-allgather": experts(f"{TP2SP} {SPREAD2} --rl-reshard allgather"),
    "EP2PP2-to-TP2": experts(f"{FOUR_HEADS} {EP2} {PP2} {CUT2}", 4),
    "EP4-to-EP4": experts(f"{FOUR_HEADS} {EP4} {SHARED4}", 4),
    "EP2-to-TP2EP4": experts(f"{FOUR_HEADS} {EP2} {CUT2} {SHARED4}", 4),
    "TP2EP2ETP1DP2-to-two-EP2": experts(f"{FOUR_HEADS} {TP2SP} {EP2} {ETP1} {SHARED2}", 4),
    # latent attention
    "latent-EP2-to-TP2EP2": experts(f"{EP2} {SPREAD2}", 2, "latent_model"),
    "latent-TP2EP2ETP1PP2-to-TP2EP4": experts(f"{TP2SP} {EP2} {ETP1} {PP2} {CUT2} {SHARED4}", 4, "latent_model"),
    # Engines on ranks of their own. Without lag each log-prob of theirs is the trainer's.
    "async-TP2-to-TP2": Case(f"{TP2} {CUT2} {APART} 2", ranks=4),
    "async-PP2-to-two-engines": Case(f"{PP2} {APART} 2", ranks=4),
    "async-DP2-to-TP1": Case(f"{APART} 1", ranks=3),
    "async-EP2-to-TP2EP2": experts(f"{EP2} {SPREAD2} {APART} 2 --rl-router-replay rollout", 4),
    "async-EP2-to-two-that-share-experts": experts(f"{EP2} {SHARED2} {APART} 2 --rl-router-replay rollout", 4),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_engine_and_trainer_agree(job, request, case):
    its = CASES[case]
    flags = ("--train-iters", str(its.updates), "--rl-verify-weights", *its.flags.split())
    result = job(*flags, model=request.getfixturevalue(its.model), ranks=its.ranks).run(400)
    result.check_agreement(its.updates, its.moved)
    assert "replay" not in its.flags or all(line["router/differ"] < 1e-3 for line in result.metrics)


@pytest.mark.slow
def test_engines_that_share_experts_and_have_no_rows(job, arithmetic, moe_model):
    """Of four, two have rows of the rollout, and one has a prompt of the evaluation."""
    rows = ("--global-batch-size", "2", "--micro-batch-size", "1", "--rl-samples-per-prompt", "2")
    held_out = ("--rl-eval-data", str(arithmetic / "heldout.jsonl"), "--rl-eval-every", "1", "--rl-eval-prompts", "1")
    layout = f"{FOUR_HEADS} {TP2SP} {EP2} {ETP1} {SHARED4}".split()
    done = job(*layout, *rows, *held_out, "--train-iters", "3", model=moe_model, ranks=4).run(400)
    done.check_log_probs(3)
    assert [line["iteration"] for line in done.evaluations] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("train", [EP2, PP2], ids=["EP2", "PP2"])
def test_mtp_layers_are_frozen(job, latent_model, train, tmp_path):
    """With layers for multi-token prediction: neither generated with nor trained, kept in the checkpoints, and not
    exported, nor is the last stage's copy of the embedding for them."""
    options = ("--mtp-num-layers", "1", "--train-iters", "2", "--save-interval", "1", "--rl-verify-weights")
    done = job(*options, *train.split(), *SPREAD2.split(), model=latent_model).run(400)
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
