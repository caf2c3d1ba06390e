"""What a plan reads of a launch script: layout, vocabulary, RL flags; what a run refuses of it."""

import json
import re

import pytest

from mindspeed_rl_plugin.adapters.targets import saved_numel
from mindspeed_rl_plugin.layout.layout import ModelShape
from mindspeed_rl_plugin.tools.plan import plan
from mindspeed_rl_plugin.tools.plan.script_args import read_arguments, read_script
from mindspeed_rl_plugin.tools.rehearse.command_line import Flags

PLAIN = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope"
)
DENSE = PLAIN + " --add-qkv-bias --vocab-size 250"
LATENT = (
    f"{PLAIN} --untie-embeddings-and-output-weights --qk-layernorm --vocab-size 250 --multi-latent-attention "
    "--q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --num-experts 8 "
    "--moe-ffn-hidden-size 32 --n-shared-experts 2 --moe-layer-freq [0]+[1]*3 --mtp-num-layers 1 "
    "--moe-router-score-function sigmoid"
)
SCRIPT = """#!/bin/bash
TP=2; PP=4
GPT_ARGS="--tensor-model-parallel-size ${TP} --pipeline-model-parallel-size ${PP} --num-layers 8
 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --kv-channels 16 --bf16
 --ffn-hidden-size 96 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
 --untie-embeddings-and-output-weights --qk-layernorm --num-experts 8 --moe-ffn-hidden-size 32 --moe-layer-freq -1
 --expert-model-parallel-size 2 --moe-tp-extend-ep --moe-token-dispatcher-type alltoall_seq
 --first-k-dense-replace 1 --use-distributed-optimizer
 --padded-vocab-size 256 --rl-generate-tp 2 --rl-reshard-bucket-mb 8"
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py $GPT_ARGS
"""


def read(words, world=4, **more):
    return read_arguments(Flags.parse(words.split()), world, **more)


@pytest.fixture
def planned(tmp_path, capsys):
    """Writes a script, or its arguments on two nodes of four, and prints its plan; None: the one before."""
    script = tmp_path / "train.sh"

    def run(text, *more):
        if text and not text.startswith("#!"):
            text = f'cd "$(dirname "$0")"\ntorchrun --nproc_per_node 4 --nnodes 2 pretrain_gpt.py {text}\n'
        script.write_text(text or script.read_text())
        assert plan.main([str(script), *more]) == 0
        return capsys.readouterr().out

    return run


def test_a_launch_script_is_read(planned, tmp_path, capsys):
    out = planned(SCRIPT)
    assert "tp2 pp4 vpp1 cp1 dp2, experts etp1 ep4 dp1: 16 ranks, layers per stage 2" in out
    assert "engines 8 x (tp2 ep1: 2 ranks), on ranks 0 to 15" in out
    assert read_script(tmp_path / "train.sh").shape.dense_layers == (0,)
    assert "engines 4 x (tp2 ep4: 4 ranks)" in planned(None, "--generate", "tp2,ep4")
    assert plan.main([str(tmp_path / "train.sh"), "--model", "qwen3-8b"]) == 1
    assert "leave out --model" in capsys.readouterr().err


def tokenizers(folder):
    """One of three entries, one of four of another kind, and a model's config.json."""
    added = [{"content": "b", "id": 1}, {"content": "<eos>", "id": 2}]
    contents = {
        "tokenizer/tokenizer.json": {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": added},
        "pairs/tokenizer.json": {"model": {"vocab": [[c, 0.0] for c in "abcd"]}},
        "hf/config.json": {"model_type": "qwen2", "vocab_size": 7},
    }
    for path, content in contents.items():
        (folder / path).parent.mkdir()
        (folder / path).write_text(json.dumps(content))


def test_a_script_of_a_run_needs_no_more_words(planned, tmp_path):
    """The engines, the vocabulary and the node are those of a run with the same script."""
    tokenizers(tmp_path)
    out = planned(f"{PLAIN} --add-qkv-bias --tensor-model-parallel-size 2 --tokenizer-name-or-path tokenizer")
    assert "engines 8 x (tp1 ep1: 1 ranks), on ranks 0 to 7" in out and "4 ranks per node" in out
    assert "--rl-generate-tp, so engines have 1 rank" in out
    run = read_script(tmp_path / "train.sh")
    assert (run.shape.vocab, run.shape.padded_vocab, run.node) == (3, 256, 4)
    # float32: four layers with attention, MLP, bias and norms; a tied embedding of 3 rows; the last norm
    weights = 4 * (4 * (64 * 64 * 4 + 3 * 64 * 96 + 192 + 128) + 3 * 64 + 64)
    assert f" {weights / 1e6:.2f} MB of weights" in out and "MB per device, fullest" in out and " GB of" not in out
    out = planned(None, "--node", "8", "--generate", "tp2", "--vocab", "5")
    assert "8 ranks per node" in out and "engines 4 x (tp2" in out and "note:" not in out


@pytest.mark.parametrize(
    "flags, size",
    [
        ("--tokenizer-model tokenizer", 3),
        ("--tokenizer-model tokenizer/tokenizer.json --rl-tokenizer pairs", 4),
        ("--rl-tokenizer nowhere --tokenizer-name-or-path tokenizer", 3),
        ("--rl-hf-model hf --rl-tokenizer tokenizer", 7),
        ("--vocab-size 9 --tokenizer-model tokenizer", 9),
        ("--padded-vocab-size 256 --tokenizer-model tokenizer", 3),
        ("--padded-vocab-size 256", 256),
    ],
)
def test_the_vocabulary_of_a_script(tmp_path, flags, size):
    tokenizers(tmp_path)
    assert read(f"{PLAIN} --add-qkv-bias {flags}", folder=tmp_path).shape.vocab == size


@pytest.mark.parametrize(
    ("flags", "critic", "reference"),
    [
        ("--rl-algorithm ppo", True, True),
        ("--rl-algorithm grpo --rl-advantage gae", True, True),
        ("--rl-algorithm ppo --rl-advantage group-norm", False, True),
        ("--rl-algorithm dapo", False, False),
        ("--rl-algorithm dpo", False, True),
        ("", False, None),
    ],
)
def test_the_algorithm_says_whether_there_is_a_critic_and_a_reference(flags, critic, reference):
    run = read(f"{DENSE} {flags}")
    assert (run.critic, run.reference) == (critic, reference)


def test_the_host_memory_of_a_script(planned):
    """Its algorithm says whether there is a reference, its lengths what the dock holds."""
    lengths = "--rl-max-prompt-length 100 --rl-max-response-length 900 --rl-samples-per-prompt 4 --global-batch-size 64"
    out = planned(f"{DENSE} --rl-algorithm grpo {lengths}", "--node", "8")
    line = next(x for x in out.splitlines() if x.startswith("host memory"))
    assert "reference" in line and "not counted" not in line
    # Of 1000 tokens: ids, a mask, three log-probs; the prompts' own, and a few numbers per row.
    dock = float(re.search(r"dock (\d+\.\d+)", line)[1])
    assert dock == pytest.approx(64 * 1000 * (4 + 1 + 4 + 4 + 4) / 1e6, rel=0.05)
    assert "reference" not in planned(f"{DENSE} --rl-algorithm dapo").split("host memory")[1]


def test_lora_of_a_script(planned):
    run = read(f"{DENSE} --rl-algorithm grpo --rl-lora-rank 2 --rl-lora-alpha 8 --rl-lora-targets o_proj linear_fc2")
    assert saved_numel(run.shape, run.lora) == 4 * 2 * (64 + 64 + 96 + 64)
    out = planned(f"{DENSE} --rl-algorithm grpo --rl-lora-rank 2 --rl-lora-alpha 8 --rl-lora-targets o_proj linear_fc2")
    assert "LoRA of rank 2, scale 4: 8 matrices (o_proj, down_proj), " in out and "copy of the reference" not in out
    assert "LoRA" not in planned(f"{DENSE} --rl-algorithm grpo --rl-lora-rank 0")


def test_what_mindspeed_saves_of_the_optimizer(planned):
    """Halves of main parameters that are the weights themselves; state that stays on the host."""
    bf16 = f"{DENSE} --bf16 --tensor-model-parallel-size 2 --use-distributed-optimizer --rl-generate-tp 2"

    def of(flags):
        out = planned(f"{bf16} {flags}")
        update = re.search(r"optimizer (\d\S*)", out)
        host = r"training state (\S+?)(?:, optimizer state \(--swap-optimizer\) (\S+?))?, copy of .* DPO\) (\d+\.\d+)"
        return [float(found or 0) for found in (update[1], *re.search(host, out).groups())]

    plain, offloaded, _, weights = of("")
    reused = plain * 10 / 12, offloaded - 4 * plain * 2 / 12, 0, weights
    assert of("--reuse-fp32-param") == pytest.approx(reused, abs=0.02)
    pieces = plain / 4, offloaded - 4 * plain, 4 * plain, weights
    assert of("--swap-optimizer --swap-optimizer-times 4") == pytest.approx(pieces, abs=0.03)
    # One data parallel rank: weights lie in the memory of whole main parameters, and leave and are copied with it.
    assert of("--pipeline-model-parallel-size 4 --reuse-fp32-param")[3] == pytest.approx(
        2 * of("--pipeline-model-parallel-size 4")[3], abs=0.02
    )
    assert read(f"{bf16} --swap-optimizer", 2).pieces == 16


def test_layers_by_stage(planned):
    """--num-layer-list; another spelling of rotary embeddings; dualpipev."""
    words = DENSE.replace("--position-embedding-type rope", "--use-rotary-position-embeddings")
    words += " --pipeline-model-parallel-size 2 --num-layer-list 1,3"
    assert read(words, 2).train.chunk_sizes(4) == (1, 3)
    both = f"{DENSE} --schedules-method dualpipev --pipeline-model-parallel-size 2"
    assert "tp1 pp2 dualpipev cp1 dp4: 8 ranks, layers per stage 2" in planned(both)


def test_latent_attention_from_arguments():
    run = read(LATENT)
    experts = dict(experts=8, expert_ffn=32, shared_ffn=64, dense_layers=(0,))
    latent = dict(q_lora=24, kv_lora=16, nope=16, rope=8, value=16)
    assert run.shape == ModelShape("deepseek_v3", 4, 64, 4, 4, 24, 96, 250, 256, **experts, **latent)
    assert (run.itemsize, run.engine_itemsize, run.distributed, run.generate) == (4, 4, False, None)
    assert run.notes == ("--mtp-num-layers 1: the engine has no such layers; not counted",)
    # How its engines are cut, and in which dtype their weights travel.
    run = read(f"{LATENT} --rl-generate-tp 2 --rl-generate-ep 2 --rl-engine-dtype bfloat16")
    assert (run.generate, run.itemsize, run.engine_itemsize) == ("tp2,ep2", 4, 2)
    assert read(f"{LATENT} --rl-engine-dtype bfloat16 --bf16").itemsize == 2
    assert read(f"{DENSE} --rl-swap params").notes[0].startswith("--rl-swap par")


@pytest.mark.parametrize(
    ("flags", "start"),
    [
        ("--hidden-dropout 0.1", "--hidden-dropout 0.1: dropout makes"),
        ("--fp8-format e4m3", "--fp8-format e4m3: trainer and engine"),
        ("--rl-reshard-bucket-mb -5", "--rl-reshard-bucket-mb is -5; give"),
        ("--rl-reshard all", "argument --rl-reshard: invalid choice: 'all'"),
        ("--rl-algorithm grpo --rl-share-prompts", "--rl-share-prompts needs a limit of tokens"),
        ("--rl-algorithm grpo --rl-lora-rank 4 --rl-lora-targets o_proj", ""),
        ("--rl-algorithm ppo --rl-lora-rank 4", "--rl-lora-rank 4 with --rl-advantage gae: a critic"),
        ("--rl-algorithm grpo --rl-lora-rank 4 --rl-lora-targets proj", "--rl-lora-targets proj: this model has no"),
        ("--rl-samples-per-promt 4", "--rl-samples-per-promt is unknown"),
        ("", ""),
        ("--rl-algorithm grpo --hidden-dropout 0.0 --rl-swap none", ""),
    ],
)
def test_what_a_run_refuses_is_said(flags, start):
    refused = read(f"{DENSE} {flags}").refused
    assert refused[0].startswith(start) if start else refused == ()


def test_a_plan_of_what_a_run_refuses(planned):
    out = planned(f"{DENSE} --rl-reshard-bucket-mb 0")
    assert "a run refuses: --rl-reshard-bucket-mb is 0; give a number at least 1" in out
    assert "two buckets of 256 MiB" in out


@pytest.mark.parametrize(
    "words, message",
    [
        ("--swiglu", "has no --num-layers, --hidden-size"),
        ("--num-layers two", "--num-layers two: the plan needs a whole"),
        ("--hidden-size --swiglu", "--hidden-size has no value; is a variable of the shell empty"),
        ("--num-layers 0", "--num-layers 0: give at least 1"),
        (f"{DENSE} --spec mindspeed_llm.tasks.models.spec.gemma2_spec layer_spec", "Gemma 2 is no family"),
        (f"{DENSE} --use-megatron-fsdp", "--use-megatron-fsdp"),
        (f"{DENSE} --window-size (128,0)", r"--window-size \(128,0\)"),
        (f"{DENSE} --num-layer-list 1,3", "--num-layer-list 1,3: 2 stages with 4 layers do not fit"),
        (f"{DENSE} --num-layers-in-first-pipeline-stage 1", "no such flag; write --decoder-first-pipeline-num-layers"),
        (f"{PLAIN} --tokenizer-model x", r"its tokenizer \(x\) has no tokenizer.json here; give --vocab$"),
        (LATENT.replace("[0]+[1]*3", "[0]+x"), r"--moe-layer-freq \[0\]\+x: .* as in \[0\]\*3\+\[1\]\*58"),
    ],
)
def test_refused(words, message):
    """The rest of what a start refuses: tests/launch/refusals.py."""
    with pytest.raises(ValueError, match=message):
        read(words, 1)


def test_the_dock_holds_routes_of_experts():
    """A byte for each layer with experts, of two experts a token: 64 rows of 2048 tokens."""
    moe = f"{DENSE.replace('--add-qkv-bias', '')} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64"
    moe += " --qk-layernorm --kv-channels 32 --global-batch-size 64 --rl-algorithm grpo"
    plain, replayed = (read(f"{moe}{more}").dock_bytes for more in ("", " --rl-router-replay rollout"))
    assert replayed - plain == 64 * 2048 * read(moe).shape.moe_layers * 2
