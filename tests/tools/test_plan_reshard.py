"""The plan of a reshard: the paper's numbers, bytes as the executor's plan has them, scripts, and what it refuses."""

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.reshard.families import FAMILIES
from mindspeed_rl_plugin.reshard.layout import (
    EngineParallel,
    ModelShape,
    Parallel,
    canonical_tensors,
    engine_layout,
    megatron_layout,
)
from mindspeed_rl_plugin.reshard.plan import make_plan
from mindspeed_rl_plugin.tools.layout_args import engine_layout_of, model_shape, parse_sizes, train_layout
from mindspeed_rl_plugin.tools.plan import plan
from mindspeed_rl_plugin.tools.plan.estimate import Machine, Run, estimate
from mindspeed_rl_plugin.tools.plan.flow import Cells
from mindspeed_rl_plugin.tools.plan.known_models import known_model
from mindspeed_rl_plugin.tools.plan.script_args import read_arguments, read_script
from mindspeed_rl_plugin.tools.rehearse.command_line import Flags

GB = 1e9
PLAIN = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope --add-qkv-bias --vocab-size 250"
)
MACHINE = Machine(8, 50 * GB, 0.3 * GB, 50 * GB, int(64 * GB))


def run(model, train, generate, world=None, machine=MACHINE):
    parallel = train_layout(train, world)
    engine, engines = engine_layout_of(generate, parallel.world)
    return estimate(Run(model_shape(model, parallel.tp), parallel), engine, engines, machine)


def test_figure_10_of_the_paper():
    """Qwen2.5-32B, TP8DP2 to TP4DP4: 8 GB of training weights released a device."""
    planned = run("qwen2.5-32b", "tp8,dp2", "tp4,dp4")
    f = planned.footprint
    held = f.policy.weights
    assert held / GB == pytest.approx(8.19, abs=0.005) and held / 2**30 == pytest.approx(7.63, abs=0.005)
    assert planned.redundant / planned.gdp == pytest.approx(8.19 * GB, rel=1e-3)
    # FACTS: 57.3 GB received a rank by a whole allgather, 14.3 by what is lacking
    received = {mode: cost.flow.received.mean() / GB for mode, cost in planned.costs.items()}
    assert received["allgather"] == pytest.approx(57.3, abs=0.05)
    assert received["stream"] == pytest.approx(14.3, abs=0.05)
    assert f.peak("stream") == held + f.generate + 2 * (256 << 20)
    assert f.peak("allgather") == held + f.generate + f.whole
    assert f.policy.optimizer == pytest.approx(12 * held / 2 / 2, rel=1e-3)  # a parameter's 12 bytes over two replicas
    assert planned.out_seconds == pytest.approx(0.164, abs=0.001)
    assert f.offloaded == held + f.policy.optimizer, "gradients are freed, not copied"


@pytest.mark.parametrize("train", ["tp2,pp2,dp2", "tp1,pp1,dp1"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_takes_what_its_parameters_take(train, tied):
    """Counted by hand: the policy's, less the output layer of an own, and one value a hidden number on the last stage.
    It is gone during generation."""
    hidden, ffn, vocab, layers = 8, 12, 64, 4
    shape = ModelShape("qwen2", layers, hidden, 2, 2, 4, ffn, vocab, vocab, tied)
    parallel = train_layout(train, None)
    engine, engines = engine_layout_of("tp1", parallel.world)
    plain, planned = (
        estimate(Run(shape, parallel, critic=critic), engine, engines, MACHINE).footprint for critic in (False, True)
    )
    attention = hidden * (3 * hidden + hidden) // parallel.tp + 3 * hidden // parallel.tp
    layer = attention + 3 * hidden * ffn // parallel.tp + 2 * hidden
    rows = vocab * hidden // parallel.tp
    body = layers // parallel.pp * layer
    # Alone the policy is largest on the last stage, for its head and norm; with a critic, which has no such head, both
    # together are on the first, for its embedding.
    alone = body + (rows if parallel.pp > 1 or tied else 2 * rows) + hidden
    policy = alone if parallel.pp == 1 else body + rows
    critic = body + rows + (2 * hidden if parallel.pp == 1 else 0)
    each = 2 + 4 + 12 // parallel.dp
    assert plain.update == each * alone and plain.critic.total == 0
    assert planned.critic.weights == 2 * critic and planned.critic.total == each * critic
    assert planned.update == each * (policy + critic) == planned.offloaded + 4 * (policy + critic)
    assert planned.generate == plain.generate


@pytest.mark.parametrize(
    ("flags", "critic"),
    [
        ("--rl-algorithm ppo", True),
        ("--rl-algorithm grpo --rl-advantage gae", True),
        ("--rl-algorithm ppo --rl-advantage group-norm", False),
        ("--rl-algorithm dpo", False),
        ("", False),
    ],
)
def test_a_scripts_algorithm_says_whether_there_is_a_critic(flags, critic):
    assert read_arguments(Flags.parse([*PLAIN.split(), *flags.split()]), 4).critic is critic


def test_the_plan_prints_the_critic(capsys):
    command = ["--model", "qwen2.5-32b", "--train", "tp8,dp2", "--generate", "tp4,dp4"]
    assert plan.main([*command, "--critic"]) == 0
    with_critic = capsys.readouterr().out
    assert "critic's weights" in with_critic
    assert plan.main(command) == 0
    assert "critic" not in capsys.readouterr().out


def test_a_float32_weight_is_its_own_main_parameter():
    """Adam's two moments beside it, and no third copy; half the trainer's bytes where the engine has bfloat16."""
    shape, parallel = known_model("qwen2.5-0.5b", 2), train_layout("tp2,dp1", None)
    engine, engines = engine_layout_of("tp1", 2)
    two, four, mixed = (
        estimate(Run(shape, parallel, itemsize=n, engine_itemsize=m), engine, engines, MACHINE)
        for n, m in ((2, 2), (4, 4), (4, 2))
    )
    parameters = two.footprint.policy.weights // 2
    assert [x.footprint.policy.optimizer for x in (two, four, mixed)] == [12 * parameters, *[8 * parameters] * 2]
    assert mixed.footprint.policy.weights == 4 * parameters
    assert mixed.footprint.generate == two.footprint.generate and mixed.footprint.whole == two.footprint.whole
    for mode in ("stream", "allgather"):
        received = [planned.costs[mode].flow.received.sum() for planned in (two, four, mixed)]
        assert received[2] == received[0] == received[1] / 2


def test_equation_3_of_the_paper():
    """Qwen3-MoE-30B: more than 60 GB."""
    planned = run("qwen3-30b-a3b", "tp4,dp2,ep8,etp1", "tp1,ep8")
    assert planned.redundant / GB == pytest.approx(64.1, abs=0.05)
    assert planned.weights.sum() / 2 == pytest.approx(30.53e9, rel=1e-3)
    stream, whole = planned.costs["stream"], planned.costs["allgather"]
    assert whole.flow.received.sum() > 20 * stream.flow.received.sum()


def test_engines_on_ranks_of_their_own():
    """Nothing is released where nothing is shared, and every byte of the engine's weights travels."""
    parallel = train_layout("tp4,dp2", None)
    engine, engines = engine_layout_of("tp2", 8)
    run = Run(known_model("qwen3-8b"), parallel)
    planned = estimate(run, engine, engines, MACHINE, first=8)
    f = planned.footprint
    assert not f.shared
    assert f.peak("stream") == f.generate + (256 << 20)  # they send nothing
    received = planned.costs["stream"].flow.received
    assert not received[:8].any() and received[8:].min() > 0.999 * f.generate
    overlap = estimate(run, engine, engines, MACHINE, first=4).footprint
    assert overlap.peak("stream") == f.policy.weights + f.generate + overlap.in_flight


def test_671_b_parameters_in_seconds():
    begin = time.process_time()
    planned = run("deepseek-r1", "tp4,pp6,ep16,etp1,first11", "tp2,ep64,dp6", world=384)
    assert time.process_time() - begin < 20
    assert planned.weights.sum() / 2 == pytest.approx(671.0e9, rel=1e-3)
    stream, whole = planned.costs["stream"], planned.costs["allgather"]
    assert whole.flow.received.sum() > 20 * stream.flow.received.sum()
    assert stream.flow.received.max() <= planned.footprint.generate
    assert stream.far_seconds == max(stream.flow.node_in.max(), stream.flow.node_out.max()) / (0.3 * GB)


@st.composite
def reshards(draw, least):
    """A tiny model of any family on some ranks from `least` on: sources, destinations and tensors of its reshard."""
    large = least > 1
    tp, pp = draw(st.sampled_from([1, 2, 4, 8] if large else [1, 2, 4])), draw(st.sampled_from([1, 2, 4][: 2 + large]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    family = draw(st.sampled_from(list(FAMILIES)))
    moe = FAMILIES[family].experts
    ep = draw(st.sampled_from([1, 4, 8, 16] if large else [1, 2, 4])) if moe else 1
    etp = draw(st.sampled_from([None, 1, 2])) if moe and tp > 1 else None
    need = pp * max(tp, ep * (etp or tp))
    world = need * draw(st.integers(least // need + 1, 512 // need if large else 3))
    more = dict(experts=16, expert_ffn=8) if moe else {}
    if family == "deepseek_v3":
        more |= dict(shared_ffn=8, dense_layers=(0,), q_lora=8, kv_lora=8, nope=2, rope=8, value=2)
    groups = 8 if family == "deepseek_v3" else draw(st.sampled_from([1, 2, 8]))
    vocab = draw(st.integers(3, 100))
    sizes = (pp * vpp, 4, 8, groups, 4, 8, vocab, -(-vocab // 64) * 64, draw(st.booleans()))
    shape = ModelShape(family, *sizes, **more)
    parallel = Parallel(world, tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp)
    engine = EngineParallel(draw(st.sampled_from([1, 2, 4, 8] if large else [1, 2])))
    if moe and draw(st.booleans()):
        engine = EngineParallel(engine.tp, engine.tp * draw(st.sampled_from([1, 2])))
    first = draw(st.sampled_from([0, world // 2, world]))
    engines = world // engine.ranks if large else draw(st.integers(1, 3))
    sources = {r: megatron_layout(shape, parallel, r) for r in range(world)}
    ranks = range(first, first + engines * engine.ranks)
    destinations = {r: engine_layout(shape, engine, (r - first) % engine.ranks) for r in ranks}
    return sources, destinations, canonical_tensors(shape)


@settings(max_examples=40, deadline=None)
@given(reshards(1), st.sampled_from([1, 2, 4, 8]))
def test_bytes_are_those_of_the_executors_plan(sides, node_size):
    sources, destinations, tensors = sides
    cells = Cells(*sides, itemsize=2, node_size=node_size)
    flow = cells.flow()
    made = make_plan(*sides, itemsize=2, bucket_bytes=1 << 20, node_size=node_size)
    for rank, traffic in made.traffic.items():
        assert (flow.received[rank], flow.received_far[rank]) == (traffic.received, traffic.off_node), rank
    assert flow.sent.sum() == pytest.approx(flow.received.sum())
    assert flow.sent_far.sum() == pytest.approx(flow.received_far.sum())
    assert flow.node_in.sum() == flow.received_far.sum() == pytest.approx(flow.node_out.sum())
    whole = cells.flow(everything=True)
    total = sum(t.slices * t.slice_bytes(2) for t in tensors.values())
    for r in destinations:
        held = {(s.name, i) for x in sources.get(r, {}).values() for s in x for i in range(s.start, s.stop)}
        assert whole.received[r] == total - sum(tensors[name].slice_bytes(2) for name, _ in held)
    assert not np.any(np.delete(whole.received, list(destinations)))


@settings(max_examples=10, deadline=None)
@given(reshards(64))
def test_hundreds_of_ranks(sides):
    """Every destination is covered exactly, with no byte above what it lacks."""
    flow = Cells(*sides, itemsize=2, node_size=8).flow()
    made = make_plan(*sides, itemsize=2, bucket_bytes=1 << 20, node_size=8, rank=min(sides[1]))
    assert made.unused == ()
    assert [t.received for t in made.traffic.values()] == [flow.received[r] for r in made.traffic]
    assert [t.off_node for t in made.traffic.values()] == [flow.received_far[r] for r in made.traffic]


def test_cells_name_what_nobody_holds():
    shape = ModelShape("qwen2", 2, 4, 4, 4, 2, 8, 30, 32)
    half = {0: megatron_layout(shape, Parallel(2, pp=2), 0)}
    with pytest.raises(ValueError, match=r"model.layers.1\..*: no trainer rank holds slices \[0, "):
        Cells(half, {0: engine_layout(shape, 1, 0)}, canonical_tensors(shape), itemsize=2, node_size=8)


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


def test_a_launch_script_is_read(tmp_path, capsys):
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT)
    assert plan.main([str(script)]) == 0
    out = capsys.readouterr().out
    assert "tp2 pp4 vpp1 cp1 dp2, experts etp1 ep4 dp1: 16 ranks, layers a stage 2" in out
    assert "engines 8 x (tp2 ep1: 2 ranks), on ranks 0 to 15" in out
    assert read_script(script).shape.dense_layers == (0,)
    assert plan.main([str(script), "--generate", "tp2,ep4"]) == 0
    assert "engines 4 x (tp2 ep4: 4 ranks)" in capsys.readouterr().out
    assert plan.main([str(script), "--model", "qwen3-8b"]) == 1
    assert "a script says model, layout and world itself" in capsys.readouterr().err


SMALL = """#!/bin/bash
cd "$(dirname "$0")"
torchrun --nproc_per_node 4 --nnodes 2 pretrain_gpt.py FLAGS
"""


def small_script(tmp_path, *more):
    """A script of a run on two nodes of four, as a new user has it; its vocabulary is its tokenizer's."""
    folder = tmp_path / "tokenizer"
    folder.mkdir(exist_ok=True)
    content = {
        "model": {"vocab": {"a": 0, "b": 1}},
        "added_tokens": [{"content": "b", "id": 1}, {"content": "<eos>", "id": 2}],
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    words = PLAIN.replace("--vocab-size 250", "--tensor-model-parallel-size 2")
    (tmp_path / "train.sh").write_text(SMALL.replace("FLAGS", " ".join([words, *more])))
    return tmp_path / "train.sh"


def test_a_script_of_a_run_needs_no_more_words(tmp_path, capsys):
    """The engines, the vocabulary and the node are those of a run with the same script."""
    script = small_script(tmp_path, "--tokenizer-name-or-path tokenizer")
    assert plan.main([str(script)]) == 0
    out = capsys.readouterr().out
    assert "engines 8 x (tp1 ep1: 1 ranks), on ranks 0 to 7" in out and "a node of 4 (" in out
    assert "note: the script has no --rl-generate-tp: engines of one rank" in out
    planned = read_script(script)
    assert (planned.shape.vocab, planned.shape.padded_vocab, planned.node) == (3, 256, 4)
    # float32: four layers with attention, MLP, bias and norms; a tied embedding of 3 rows; the last norm
    weights = 4 * (4 * (64 * 64 * 4 + 3 * 64 * 96 + 192 + 128) + 3 * 64 + 64)
    assert f" {weights / 1e6:.2f} MB of weights" in out and "MB a device, fullest" in out and " GB of" not in out
    assert plan.main([str(script), "--node", "8", "--generate", "tp2", "--vocab", "5"]) == 0
    out = capsys.readouterr().out
    assert "a node of 8 (" in out and "engines 4 x (tp2" in out and "note:" not in out


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
    small_script(tmp_path)
    for name in ("pairs", "hf"):
        (tmp_path / name).mkdir()
    (tmp_path / "pairs" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [[c, 0.0] for c in "abcd"]}}))
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"vocab_size": 7}))
    words = [*PLAIN.replace("--vocab-size 250", "").split(), *flags.split()]
    assert read_arguments(Flags.parse(words), 4, folder=tmp_path).shape.vocab == size


def test_the_rl_flags_of_a_script():
    """How its engines are cut, and in which dtype their weights travel."""
    moe = LATENT + " --rl-generate-tp 2 --rl-generate-ep 2 --rl-engine-dtype bfloat16"
    script = read_arguments(Flags.parse(moe.split()), 4)
    assert (script.generate, script.itemsize, script.engine_itemsize) == ("tp2,ep2", 4, 2)
    assert read_arguments(Flags.parse((moe + " --bf16").split()), 4).itemsize == 2


def test_layers_by_stage():
    """--num-layer-list; another spelling of rotary embeddings."""
    words = PLAIN.replace("--position-embedding-type rope", "--use-rotary-position-embeddings")
    words += " --pipeline-model-parallel-size 2 --num-layer-list 1,3"
    assert read_arguments(Flags.parse(words.split()), 2).train.chunk_sizes(4) == (1, 3)


LATENT = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --qk-layernorm "
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 16 --num-experts 8 --moe-ffn-hidden-size 32 --n-shared-experts 2 --moe-layer-freq [0]+[1]*3 "
    "--mtp-num-layers 1 --vocab-size 250"
)


def test_latent_attention_from_arguments():
    script = read_arguments(Flags.parse(LATENT.split()), 4)
    experts = dict(experts=8, expert_ffn=32, shared_ffn=64, dense_layers=(0,))
    latent = dict(q_lora=24, kv_lora=16, nope=16, rope=8, value=16)
    expected = ModelShape("deepseek_v3", 4, 64, 4, 4, 24, 96, 250, 256, **experts, **latent)
    assert script.shape == expected
    assert (script.itemsize, script.engine_itemsize, script.distributed, script.generate) == (4, 4, False, None)
    assert script.notes == ("--mtp-num-layers 1: these layers are not generated with, not counted",)


def plain(more):
    return read_arguments(Flags.parse([*PLAIN.split(), *more.split()]), 4)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: parse_sizes("tp4,xx2", ("tp", "pp"), "--train"), "--train tp4,xx2: 'xx2' is not one of tp, pp"),
        (lambda: parse_sizes("tp4,tp2", ("tp",), "--train"), "tp is given twice"),
        (lambda: train_layout("tp8,dp2", 32), "tp x pp x cp x dp = 16, but --world is 32"),
        (lambda: engine_layout_of("tp4", 6), "engines of 4 ranks do not divide 6 ranks"),
        (lambda: engine_layout_of("tp4,dp3", 16), "16 ranks have 4 engines and 4 data parallel ranks of tp 4, not 3"),
        (lambda: model_shape("gpt-5", 1), "--model gpt-5: neither a config.json, .*qwen2.5-32b"),
        (lambda: read_arguments(Flags.parse(["--swiglu"]), 1), "gives no --num-layers, --hidden-size"),
        (
            lambda: read_arguments(Flags.parse(["--num-layers", "two"]), 1),
            "--num-layers two: the plan needs a whole",
        ),
        (lambda: plain("--noop-layers 3"), "--noop-layers 3: layers that do nothing are not supported"),
        (lambda: plain("--schedules-method dualpipev"), "schedules_method is 'dualpipev'"),
        (lambda: plain("--tp-2d"), "--tp-2d"),
        (lambda: plain("--rotary-interleaved"), "--rotary-interleaved"),
        (lambda: plain("--rotary-percent 0.5"), "--rotary-percent 0.5"),
        (lambda: plain("--post-norm"), "--post-norm"),
        (lambda: plain("--use-megatron-fsdp"), "--use-megatron-fsdp"),
        (lambda: plain("--window-size (128,0)"), r"--window-size \(128,0\)"),
        (lambda: plain("--sliding-window 4096"), "--sliding-window 4096"),
        (lambda: plain("--tensor-parallel-num-weight-shards 2"), "--tensor-parallel-num-weight-shards 2"),
        (lambda: plain("--num-layer-list 1,3"), "--num-layer-list 1,3: 2 stages with 4 layers do not fit"),
        (
            lambda: plain("--num-layers-in-first-pipeline-stage 1"),
            "Megatron has no such flag; write --decoder-first-pipeline-num-layers",
        ),
        (
            lambda: read_arguments(Flags.parse(PLAIN.replace("--vocab-size 250", "--tokenizer-model x").split()), 1),
            r"a tokenizer whose tokenizer.json is not here \(x\); give its size with --vocab$",
        ),
        (
            lambda: read_arguments(Flags.parse(LATENT.replace("[0]+[1]*3", "[0]+x").split()), 1),
            r"--moe-layer-freq \[0\]\+x: .* as in \[0\]\*3\+\[1\]\*58",
        ),
        (
            lambda: read_arguments(Flags.parse(LATENT.replace("[0]+[1]*3", "[0]+[1]*4").split()), 1),
            "--moe-layer-freq describes 5 layers, the model has 4",
        ),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
