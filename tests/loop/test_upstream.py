"""Unmodified upstream `pretrain_gpt.py`, plain and under MindSpeed: three GRPO iterations with TP2.

MEGATRON_LM_PATH: checkouts of any supported version, separated by a colon; MINDSPEED_PATH: a checkout of
MindSpeed, which goes with core 0.12.1.
"""

import os
from pathlib import Path

import family_models
import pytest
from checkouts import checkouts, cores

pytestmark = [pytest.mark.upstream, pytest.mark.slow]

MINDSPEED = os.environ.get("MINDSPEED_PATH")
MINDSPEED_LLM = os.environ.get("MINDSPEED_LLM_PATH")
PACKED = ("--use-flash-attn", "--rl-pack-sequences", "--rl-max-tokens-per-microbatch", "48")
SHARED = (*PACKED[2:], "--rl-share-prompts")
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# MindSpeed's context parallelism: ranks, and flags.
CONTEXT = {
    "ulysses": (2, "--context-parallel-algo ulysses_cp_algo"),
    "ulysses, packed": (2, f"--context-parallel-algo ulysses_cp_algo {' '.join(PACKED[1:])} {RECOMPUTED}"),
    "ring": (2, "--context-parallel-algo megatron_cp_algo"),
    "ring, sends overlapped": (2, "--context-parallel-algo megatron_cp_algo --use-cp-send-recv-overlap"),
    "double ring": (4, "--context-parallel-algo megatron_cp_algo --cp-window-size 2 --megatron-cp-in-bnsd"),
    "hybrid": (4, "--context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2"),
}
LAYOUT = ("--train-iters", "3", "--tensor-model-parallel-size", "2", "--rl-generate-tp", "2", "--mock-data")


# The first lines of an entry: a copy of training state comes late, and memory that was given back or is not filled yet
# reads as NaN.
HOSTILE = """
import sys
sys.path.insert(0, {folder!r})
import hostile
hostile.install()
"""
# The first lines of an entry: the engine's routers choose other experts than the trainer's.
REROUTED = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import rerouted_script
rerouted_script.vllm_api.build = rerouted_script.built
"""
# Runs a script; Python modules that it imports for features it does not use, such as peft, may be absent.
STAND_INS = """
import runpy
from mindspeed_rl_plugin.tools.rehearse import absent_modules
absent_modules.install()
runpy.run_path({script!r}, run_name="__main__")
"""


def check(result) -> None:
    assert [line["iteration"] for line in result.metrics] == [1, 2, 3]
    for line in result.metrics:
        assert line["logp_diff/max"] < 2e-5 and line["ratio/max"] == 1.0 and line["grad_norm"] > 1e-3
    assert result.metrics[0]["kl/ref"] < 1e-8 < result.metrics[-1]["kl/ref"]


def measured(result, *more: str) -> list[list[float]]:
    """What two equal runs have bitwise in common."""
    return [[line[name] for name in (*SAME, *more)] for line in result.metrics]


def mindspeed_entry(folder: Path, checkout: Path, first: str = "") -> Path:
    """A file that holds MindSpeed's import line and runs the checkout's script."""
    script, entry = checkout / "pretrain_gpt.py", folder / "entry.py"
    entry.write_text(
        f"{first}import runpy, sys\nsys.path.insert(0, {str(checkout)!r})\nimport mindspeed.megatron_adaptor\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
    )
    return entry


@pytest.mark.skipif(MINDSPEED is None, reason="MINDSPEED_PATH is not set")
@pytest.mark.parametrize("more", [(), PACKED, (PACKED[0], *SHARED)], ids=["rows", "packed", "shared"])
def test_megatron_under_mindspeed(job, arithmetic, tmp_path, more):
    """The script is unmodified; the file that runs it holds MindSpeed's own import line. Packed: the boundaries of the
    rows go to its flash attention, in whose place on a host the same is computed by torch. Shared: the NPU's kernel is
    called directly. The evaluation counts the answers of the engine's first rank on both: MindSpeed's all_reduce would
    leave the second with none."""
    checkout = cores()["0.12"]
    more += ("--rl-eval-data", str(arithmetic / "heldout.jsonl"), "--rl-eval-every", "3", "--rl-eval-prompts", "4")
    result = job(*LAYOUT, *more, script=mindspeed_entry(tmp_path, checkout), path=[Path(MINDSPEED), checkout]).run(400)
    check(result)
    assert [line["iteration"] for line in result.evaluations] == [0, 3]
    assert "RL is attached to Megatron, through MindSpeed" in result.log
    assert all(line.get("tokens/shared", 0) > 0 for line in result.metrics) is ("--rl-share-prompts" in more)


@pytest.fixture(scope="module")
def one_rank(shared_job, tmp_path_factory):
    """Three iterations of one rank under MindSpeed, with its flash attention."""
    checkout = cores()["0.12"]
    script = mindspeed_entry(tmp_path_factory.mktemp("alone"), checkout)
    flags = ("--train-iters", "3", "--mock-data", "--use-flash-attn")
    return shared_job(*flags, script=script, path=[Path(MINDSPEED), checkout], ranks=1, name="alone").run(400)


@pytest.mark.skipif(MINDSPEED is None, reason="MINDSPEED_PATH is not set")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("algorithm", CONTEXT)
def test_mindspeeds_context_parallelism_agrees_with_the_engine(job, one_rank, tmp_path, algorithm):
    """MindSpeed's own split of the rows, rotary embeddings and exchange of heads, or keys and values, between ranks."""
    checkout = cores()["0.12"]
    ranks, flags = CONTEXT[algorithm]
    given = ("--train-iters", "3", "--mock-data", "--use-flash-attn", "--context-parallel-size", str(ranks))
    script = mindspeed_entry(tmp_path, checkout)
    result = job(*given, *flags.split(), script=script, path=[Path(MINDSPEED), checkout], ranks=ranks).run(400)
    check(result)
    one, several = one_rank.metrics[0], result.metrics[0]
    assert {name: several[name] for name in ("loss", "grad_norm", "entropy", "trained/tokens")} == pytest.approx(
        {name: one[name] for name in ("loss", "grad_norm", "entropy", "trained/tokens")}, rel=1e-4, abs=1e-7
    )


LATENT = "deepseek_v2"


def heads_are_exchanged_under_latent_attention() -> bool:
    adaptor = Path(MINDSPEED.split(os.pathsep)[0], "mindspeed", "core", "context_parallel", "adaptor.py")
    return "multi_latent_attention_init_wrapper" in adaptor.read_text()


@pytest.mark.skipif(MINDSPEED is None, reason="MINDSPEED_PATH is not set")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family, algorithm", [("mixtral", "ring"), (LATENT, "ring"), (LATENT, "ulysses")])
def test_mindspeeds_context_parallelism_takes_the_step_of_one_rank(job, imported, tmp_path, family, algorithm):
    """Experts, and latent attention. From one checkpoint: ranks would initialise experts otherwise."""
    if (family, algorithm) == (LATENT, "ulysses") and not heads_are_exchanged_under_latent_attention():
        pytest.skip("this MindSpeed has no ulysses under latent attention: refused")
    checkout = cores()["0.12"]
    model, loads, _ = imported(family, "--train", "tp1")
    model = model.replace("--rope-type rope ", "")  # core 0.12 has one kind, which scaling by 1 makes the same
    given = ("--train-iters", "3", "--mock-data", "--use-flash-attn", *loads)
    common = {"script": mindspeed_entry(tmp_path, checkout), "path": [Path(MINDSPEED), checkout], "model": model}
    split = ("--context-parallel-size", "2", *CONTEXT[algorithm][1].split())
    one = job(*given, name="one", ranks=1, **common).run(400)
    several = job(*given, *split, name="split", ranks=2, **common).run(400)
    check(several)
    for name in ("loss", "grad_norm", "entropy", "kl/ref"):
        expected, measured = ([line[name] for line in result.metrics] for result in (one, several))
        assert measured == pytest.approx(expected, rel=1e-4, abs=1e-7), name


@pytest.mark.skipif(MINDSPEED is None, reason="MINDSPEED_PATH is not set")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["mixtral", LATENT])
def test_trees_under_mindspeed_take_the_step_of_rows(job, imported, tmp_path, family):
    """Experts, and MindSpeed's own latent attention."""
    checkout = cores()["0.12"]
    model, loads, _ = imported(family, "--train", "tp1")
    model = model.replace("--rope-type rope ", "")  # as above
    common = {"script": mindspeed_entry(tmp_path, checkout), "path": [Path(MINDSPEED), checkout], "model": model}
    given = ("--train-iters", "3", "--mock-data", "--use-flash-attn", *loads)
    rows = job(*given, name="rows", ranks=1, **common).run(400)
    trees = job(*given, *SHARED, name="trees", ranks=1, **common).run(400)
    check(trees)
    assert all(line["tokens/shared"] > 0 for line in trees.metrics)
    for name in ("loss", "grad_norm", "entropy", "kl/ref"):
        expected, measured = ([line[name] for line in result.metrics] for result in (rows, trees))
        assert measured == pytest.approx(expected, rel=1e-4, abs=1e-7), name


# With sequence parallelism core 0.12.1 sums experts that are not split over TP ranks, unless EP is above 1.
SPLIT = "--tensor-model-parallel-size 2 --sequence-parallel"
REPLAYED = {
    "EP2": "--expert-model-parallel-size 2 --rl-generate-tp 2 --rl-generate-ep 2",
    "TP2SP, gathered": f"{SPLIT} --moe-token-dispatcher-type alltoall_seq --use-flash-attn {RECOMPUTED}",
    "TP2SP, EP2, trees": f"{SPLIT} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 {' '.join(SHARED)}",
}
# Qwen3-MoE, the first layer dense, as MindSpeed-LLM spells it.
OF_LLM = "--moe-layer-freq 1 --first-k-dense-replace 1 --moe-router-load-balancing-type softmax_topk --norm-topk-prob "
OF_LLM += "--spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec"
PAIRS = list(zip(checkouts("MINDSPEED_PATH"), checkouts("MINDSPEED_LLM_PATH"), strict=False))


def with_experts(job, arithmetic, model, folder, mindspeed, finetuned, flags, first=""):
    """The job under MindSpeed, or if `finetuned` is given under this MindSpeed-LLM, which has a router of its own."""
    checkout = cores()["0.12"]
    if finetuned is None:
        entry, path = mindspeed_entry(folder, checkout, first), [mindspeed, checkout]
        return job(*flags, "--mock-data", script=entry, path=path, model=model)
    entry, path = folder / "entry.py", [finetuned, mindspeed, checkout]
    entry.write_text(first + STAND_INS.format(script=str(finetuned / "pretrain_gpt.py")))
    flags += ("--use-mcore-models", "--make-vocab-size-divisible-by", "1", "--tokenizer-type", "PretrainedFromHF")
    flags += ("--tokenizer-name-or-path", str(arithmetic / "tokenizer"))
    return job(*flags, script=entry, path=path, model=model.replace("--moe-layer-freq [0]+[1]*1", OF_LLM))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", REPLAYED)
@pytest.mark.parametrize("llm", [False, True], ids=["MindSpeed", "MindSpeed-LLM"])
@pytest.mark.parametrize(("mindspeed", "finetuned"), PAIRS, ids=[pair[0].name for pair in PAIRS])
def test_experts_are_replayed_under_mindspeed(
    job, arithmetic, moe_model, tmp_path, monkeypatch, mindspeed, finetuned, llm, layout
):
    """As test_routes_loop.py: the engine chooses other experts."""
    monkeypatch.setenv("BIAS", "0.04")
    flags = ("--train-iters", "2", *REPLAYED[layout].split(), "--rl-router-replay", "rollout")
    where = (arithmetic, moe_model, tmp_path, mindspeed, finetuned if llm else None)
    result = with_experts(job, *where, flags, REROUTED).run(400)
    result.check_log_probs(2)
    for line in result.metrics:
        assert line["ratio/mean"] == line["ratio/max"] == 1.0 and line["grad_norm"] > 1e-3
        assert line["router/differ"] == line["router/differ/2"] > 0.02


@pytest.mark.parametrize("llm", [False, True], ids=["MindSpeed", "MindSpeed-LLM"])
def test_the_choice_of_old_log_probs_is_replayed_under_mindspeed(job, arithmetic, moe_model, tmp_path, llm):
    """As test_routes_loop.py: in the second step of a rollout the router would choose others."""
    mindspeed, finetuned = PAIRS[-1]
    flags = ("--train-iters", "2", "--rl-rollout-prompts", "8", "--lr", "3e-2", *REPLAYED["EP2"].split())
    flags += ("--rl-router-replay", "old")
    where = (arithmetic, moe_model, tmp_path, mindspeed, finetuned if llm else None)
    first, second = with_experts(job, *where, flags).run(400).metrics
    assert first["ratio/mean"] == first["ratio/max"] == 1.0 and first["router/differ"] == 0.0
    assert second["router/differ"] > 0.0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", [*REPLAYED][:2])
@pytest.mark.parametrize("llm", [False, True], ids=["MindSpeed", "MindSpeed-LLM"])
@pytest.mark.parametrize(("mindspeed", "finetuned"), PAIRS, ids=[pair[0].name for pair in PAIRS])
def test_adapters_under_mindspeed(job, arithmetic, moe_model, tmp_path, mindspeed, finetuned, llm, layout):
    """MindSpeed-LLM's own flags of LoRA are taken over."""
    flags = ("--train-iters", "4", "--save-interval", "2", "--rl-verify-weights", *REPLAYED[layout].split())
    ours, theirs = ("--rl-lora-rank", "4", "--rl-lora-alpha", "8"), ("--lora-r", "4", "--lora-alpha", "8")
    theirs += ("--lora-target-modules", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    flags += (*(theirs if llm else ours), "--lr", "2e-2", "--use-distributed-optimizer")
    run = with_experts(job, arithmetic, moe_model, tmp_path, mindspeed, finetuned if llm else None, flags)
    run.stop_at(2, 400)
    result = run.run(400)
    assert "training resumes from" in result.log
    result.check_agreement(4, 1e-6)


@pytest.mark.skipif(None in (MINDSPEED, MINDSPEED_LLM), reason="MINDSPEED_PATH or MINDSPEED_LLM_PATH is not set")
def test_fine_tuning_of_mindspeed_llm(job, arithmetic, tmp_path):
    """Its `posttrain_gpt.py --stage sft` with a trainer and a data set of its own, which RL replaces; cut and resumed.
    Flags that only its data set reads stand in the command line as its launch scripts have them."""
    checkout = cores()["0.12"]
    llm, mindspeed = (path.split(os.pathsep)[0] for path in (MINDSPEED_LLM, MINDSPEED))
    flags = ("--stage", "sft", "--finetune", "--is-instruction-dataset", "--prompt-type", "qwen", "--no-shared-storage")
    flags += ("--reset-attention-mask", "--neat-pack", "--padded-samples", "--data-path", "nowhere", "--split", "1,0,0")
    flags += ("--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", str(arithmetic / "tokenizer"))
    flags += ("--use-mcore-models", "--make-vocab-size-divisible-by", "1", "--use-flash-attn")
    layout = [word for word in LAYOUT if word != "--mock-data"]
    entry = tmp_path / "entry.py"
    entry.write_text(STAND_INS.format(script=str(Path(llm, "posttrain_gpt.py"))))
    run = job(*layout, *flags, "--save-interval", "1", script=entry, path=[Path(llm), Path(mindspeed), checkout])
    first = run.stop_at(2, 400)
    for taken in ("--reset-attention-mask --neat-pack: a row", "--prompt-type: prompts are", "no pretraining or fine-"):
        assert first.log.count(taken) == 1
    result = run.run(400)
    check(result)
    assert "training resumes from" in result.log and "at iteration 2, optimizer and RL state included" in result.log


# Where MindSpeed keeps main parameters and moments: ranks, flags in the place of --use-distributed-optimizer, more of
# them for the run that offloads, and for both.
DISTRIBUTED, PPO = "--use-distributed-optimizer --bf16", "--rl-algorithm ppo --rl-critic-lr 1e-3"
OPTIMIZERS = {
    "shared, one rank": (1, f"{DISTRIBUTED} --reuse-fp32-param", "", ""),
    "shared, sharded": (2, f"{DISTRIBUTED} --reuse-fp32-param --overlap-grad-reduce --overlap-param-gather", "", ""),
    "shared, whole": (2, "--bf16 --reuse-fp32-param", "", ""),
    "on the host": (2, DISTRIBUTED, " --swap-optimizer --swap-optimizer-times 4", ""),
    "shared, and a critic": (2, f"{DISTRIBUTED} --reuse-fp32-param", "", PPO),
    "on the host, and a critic": (2, DISTRIBUTED, " --swap-optimizer", PPO),
}
SAME = ("loss", "grad_norm", "entropy", "ratio/max", "kl/ref", "logp_diff/max", "weights/digest")


@pytest.mark.skipif(MINDSPEED is None, reason="MINDSPEED_PATH is not set")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", OPTIMIZERS)
def test_mindspeeds_layouts_of_the_optimizer(job, training_flags, tmp_path, layout):
    """Three iterations with everything offloaded, and a fourth after a resume, are bitwise those without an offload."""
    checkout = cores()["0.12"]
    ranks, optimizer, more, both = OPTIMIZERS[layout]
    common = {"ranks": ranks, "path": [Path(MINDSPEED), checkout]}
    train = training_flags.replace("--use-distributed-optimizer", optimizer)
    iterations = ("--train-iters", "4", "--mock-data", "--rl-verify-weights", "--lr", "3e-3", *both.split())
    script = mindspeed_entry(tmp_path, checkout)
    expected = job(*iterations, "--rl-swap", "none", name="kept", script=script, train=train, **common).run(400)
    hostile = HOSTILE.format(folder=str(Path(__file__).resolve().parents[1] / "weights"))
    script = mindspeed_entry(tmp_path, checkout, hostile)
    swap = ("--rl-swap", "params,grads,optimizer", "--save-interval", "3")
    offloaded = job(*iterations, *swap, name="offloaded", script=script, train=train + more, **common)
    offloaded.stop_at(3, 400)
    resumed = offloaded.run(400)
    assert len({line["weights/digest"] for line in expected.metrics}) == 4
    critic = ("critic/loss", "critic/grad_norm") if both else ()
    assert measured(resumed, *critic) == measured(expected, *critic)


@pytest.mark.timeout(900)
def test_gradients_of_a_model_with_mtp_layers_may_be_sent_early(job, dense_model):
    """The last stage's copy of the embedding, for MTP layers that RL does not run, gets no gradient to wait for.

    Core 0.12.1 wants sizes of which the distributed optimizer's buckets are multiples of 128 numbers."""
    checkout = cores()["0.12"]
    flags = ("--train-iters", "3", "--mock-data", "--rl-verify-weights")
    flags += ("--pipeline-model-parallel-size", "2", "--mtp-num-layers", "1")
    model = dense_model.replace("--hidden-size 64", "--hidden-size 128")
    common = {"script": checkout / "pretrain_gpt.py", "path": [checkout], "model": model}
    late = job(*flags, name="late", **common).run(400)
    early = job(*flags, "--overlap-grad-reduce", name="early", **common).run(400)
    check(late)
    assert measured(early) == measured(late)


@pytest.mark.parametrize("checkout", checkouts(), ids=lambda p: p.name)
def test_ppo_on_plain_megatron(job, checkout):
    """The critic is built by the script's own model provider; cut and resumed, it goes on where it was."""
    ppo = (*PPO.split(), "--save-interval", "1")
    run = job(*LAYOUT, *ppo, script=checkout / "pretrain_gpt.py", path=[checkout])
    first = run.stop_at(2, 400)
    assert "the critic starts from the policy's weights, with a fresh value head" in first.log
    result = run.run(400)
    check(result)
    assert "RL is attached to Megatron;" in result.log
    assert "iter_0000002/critic, its optimizer included" in result.log
    values = [line["critic/value_mean"] for line in result.metrics]
    assert values[0] == 0.0 and values[1] != 0.0 and abs(values[2] - values[1]) < 1.0


@pytest.mark.skipif(MINDSPEED is None, reason="MINDSPEED_PATH is not set")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stages", [2, 4])
def test_mindspeeds_dualpipev_agrees_with_one_stage(job, imported, tmp_path, monkeypatch, stages):
    """Policy and critic end on the first of the stages: log-probs, values, gradients and updates are those of one rank,
    the engine agrees, and a resume goes on. The second run's weights are placed by `import --schedules-method`."""
    checkout = cores()["0.12"]
    mindspeed = Path(MINDSPEED.split(os.pathsep)[0])
    monkeypatch.setitem(family_models.SIZES, "num_hidden_layers", 2 * stages)

    def run(name, ranks, *layout):
        model, loads, _ = imported("mistral", *layout, name=f"{name}-weights")
        given = ("--train-iters", "3", "--mock-data", *loads, "--rl-verify-weights", *PPO.split())
        paths = {"script": mindspeed_entry(tmp_path, checkout), "path": [mindspeed, checkout]}
        return job(*given, "--save-interval", "2", name=name, model=model, ranks=ranks, **paths)

    one = run("one", 1, "--train", "tp1").run(400)
    folded = run("folded", stages, "--train", f"pp{stages}", "--schedules-method", "dualpipev")
    folded.stop_at(2, 400)
    several = folded.run(400)
    check(several)
    assert "at iteration 2, optimizer and RL state included" in several.log
    of_critic = ("critic/loss", "critic/grad_norm", "critic/value_mean")
    for name in ("loss", "grad_norm", "entropy", "kl/ref", "trained/tokens", *of_critic):
        expected, measured = ([line[name] for line in result.metrics] for result in (one, several))
        assert measured == pytest.approx(expected, rel=1e-4, abs=1e-7), name
