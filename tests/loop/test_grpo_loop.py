"""GRPO end to end: layouts, context parallel ranks, several agents, filtration, micro-batches by tokens, a
tokenizer with code of its own, a reward model."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from own_tokenizer import write
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

STAND_IN = Path(__file__).parents[1] / "update" / "ranks"
OVERLAP = ("--overlap-param-gather", "--overlap-grad-reduce")
VIRTUAL, CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "1"), ("--rl-logprob-chunk-tokens", "3")
PP2 = ("--pipeline-model-parallel-size", "2")
TP2, CP2 = ("--tensor-model-parallel-size", "2"), ("--context-parallel-size", "2")
BY_TOKENS = ("--rl-max-tokens-per-microbatch", "48", "--rl-algorithm", "gspo", "--rl-kl-loss-coef", "0.04")
FAMILIES = {
    "qwen2": "--add-qkv-bias --rotary-base 1000000 --norm-epsilon 1e-6",
    "qwen3": "--qk-layernorm --kv-channels 48",
    "llama": "--use-rope-scaling --rotary-base 500000",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("--rl-generate-tp", "1"), id="DP2-to-TP1"),
        pytest.param(("--rl-generate-tp", "2"), id="DP2-to-TP2"),
        pytest.param((*TP2, "--rl-generate-tp", "2"), id="TP2-to-TP2"),
        pytest.param((*TP2, "--sequence-parallel", "--rl-generate-tp", "1"), id="TP2SP-to-TP1"),
        # Parameters are gathered only by the next forward pass: neither the engine nor an output layer that scores in
        # chunks must get stale shards.
        pytest.param((*OVERLAP, *CHUNKS), id="overlapped-gather"),
        pytest.param(("--num-layers", "4", *PP2, *VIRTUAL, *CHUNKS), id="virtual-pipeline"),
        pytest.param(("--num-layers", "3", *PP2, "--decoder-first-pipeline-num-layers", "1"), id="uneven-pipeline"),
    ],
)
def test_engine_and_trainer_agree_after_0_to_3_updates(job, layout):
    """The ordinary tier has PP2 in test_dock_loop.py, TP2 in test_reshard_loop.py and EP2 in test_moe_loop.py."""
    job("--train-iters", "4", "--rl-verify-weights", *layout).run().check_agreement(4)


@pytest.mark.slow
@pytest.mark.parametrize("tp", ["1", "2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_trainer_agree_on_other_families(job, dense_model, family, tp):
    """With weights as large as a trained model's, where another rotary embedding shows."""
    model = dense_model.replace("--add-qkv-bias", FAMILIES[family])
    options = ("--init-method-std", "0.1", "--rl-temperature", "0.7", *TP2, "--rl-generate-tp", tp)
    job("--train-iters", "4", "--rl-verify-weights", *options, model=model).run().check_agreement(4)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), BY_TOKENS], ids=["rows", "tokens"])
def test_context_parallel_ranks_read_the_same_rows_and_agree_with_the_engine(job, more):
    script = Path(__file__).with_name("gathered_script.py")
    common = ("--train-iters", "4", "--rl-verify-weights", *more)
    result = job(*common, *CP2, script=script, path=(STAND_IN,)).run()
    result.check_agreement(4)
    alone = job(*common, ranks=1, name="alone").run().metrics
    for name in ("loss", "grad_norm", "entropy", "trained/tokens", "reward/mean"):
        assert result.metrics[0][name] == pytest.approx(alone[0][name], rel=1e-4, abs=1e-7), name


@pytest.mark.slow
def test_two_agents_train_as_one(job):
    """--nnodes 2 on one machine: RANK and LOCAL_RANK differ."""
    common = ("--train-iters", "2", "--lr", "3e-3")
    one = job(*common, name="one").run()
    two = job(*common, name="two", ranks=1, agents=2).run()
    same = ("loss", "reward/mean", "entropy", "grad_norm", "kl/ref")
    assert [[line[k] for k in same] for line in one.metrics] == [[line[k] for k in same] for line in two.metrics]


FILTERED = {
    "pf-ppo": ("--rl-algorithm", "pf-ppo"),
    "grpo-pow": ("--rl-filtration", "pow"),
    "grpo-whole-batch": ("--rl-filtration", "best-random", "--rl-filtration-whole-batch"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FILTERED)
def test_what_was_drawn_is_trained_and_nothing_else(job, case):
    """Two optimizer steps per rollout: each trains as many responses as it has, some of them more than once."""
    lines = job(*FILTERED[case], "--train-iters", "2", "--rl-rollout-prompts", "8", "--lr", "3e-3").run().metrics
    first, second = lines
    assert first["trained/sequences"] == second["trained/sequences"] == 16
    assert 0 < first["filtration/distinct"] < 1 and first["ratio/mean"] == first["ratio/max"] == 1.0
    assert second["ratio/max"] > 1.0 and all(line["grad_norm"] > 1e-3 for line in lines)
    if case == "grpo-pow":
        assert first["filtration/reward_mean"] > first["reward/mean"], "large rewards are sampled more often"


BUDGET = ("--rl-max-tokens-per-microbatch", "48")
BUDGETED = {
    "DP2": (),
    "DP2-packed": ("--rl-pack-sequences",),
    "TP2-packed": ("--rl-pack-sequences", "--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "PPO-packed": ("--rl-pack-sequences", "--rl-algorithm", "ppo", "--rl-critic-lr", "1e-3"),
    "PP2-packed": ("--rl-pack-sequences", "--pipeline-model-parallel-size", "2"),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", BUDGETED)
def test_a_step_by_tokens_is_the_step_by_rows(job, layout):
    common = ("--train-iters", "3", "--rl-rollout-prompts", "8", "--lr", "3e-3")
    rows = job(*common, *BUDGETED[layout][1:], name="rows").run().metrics
    run = job(*common, *BUDGET, *BUDGETED[layout], "--save-interval", "1", name="tokens")
    run.stop_at(1)
    result = run.run()  # goes on in the middle of the first rollout
    result.check_log_probs()
    tokens = result.metrics
    assert [line["iteration"] for line in tokens] == [1, 2, 3]
    for line in (tokens[0], tokens[2]):
        assert line["ratio/mean"] == line["ratio/max"] == 1.0 and line["clip_fraction"] == line["kl/old"] == 0.0
    assert tokens[1]["ratio/max"] > 1.0
    for name in ("loss", "grad_norm", "entropy", "trained/tokens", "reward/mean", "lr"):
        assert tokens[0][name] == pytest.approx(rows[0][name], rel=1e-4, abs=1e-7), name


ASYNC = "--rl-schedule async --rl-generators 1 --rl-async-order strict --rl-correction truncate --rl-max-staleness 0"
NUMBERS = ("loss", "grad_norm", "reward/mean", "response/length_mean", "entropy")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["", ASYNC])
def test_a_tokenizer_of_its_own_code_trains_as_the_one_with_the_same_tokens(job, schedule, tmp_path, monkeypatch):
    """In trainers, in the engine, which needs it for --rl-stop, and in one apart. Without the flag it is refused."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    flags = ["--train-iters", "2", "--rl-stop", "7", *schedule.split()]
    own = ["--rl-tokenizer", str(write(tmp_path / "own"))]
    plain = job(*flags, name="plain").run()
    result = job(*flags, *own, "--rl-trust-remote-code", name="own").run()
    one, other = ([[line[name] for name in NUMBERS] for line in run.metrics] for run in (plain, result))
    assert one == other and len(one) == 2
    if not schedule:
        result = job(*flags, *own, name="refused").fail(120)
        assert "code of its own (own_tokens.OwnTokenizer), which is not run" in result.log


@pytest.mark.slow
def test_a_reward_model_and_a_rule(job, arithmetic, tmp_path):
    """In the grader processes of both ranks."""
    tokenizer = AutoTokenizer.from_pretrained(arithmetic / "tokenizer")
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=1)
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, initializer_range=0.5, **sizes)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")
    rewards = ("--rl-reward", f"model:{tmp_path / 'rm'}=0.5", "exact=2", "--rl-reward-timeout", "60")
    run = job("--train-iters", "2", *rewards).dumping()
    result = run.run(400)
    assert [line["reward/errors"] for line in result.metrics] == [0.0, 0.0]
    assert all(line["groups/informative"] == 1.0 and line["grad_norm"] > 1e-3 for line in result.metrics)
    for row in pq.read_table(run.save / "dump" / "rollout-000000.parquet").to_pylist():
        score, equal = row["reward_parts"]
        assert equal in (0.0, 1.0) and score not in (0.0, 1.0)
        assert row["reward"] == pytest.approx(0.5 * score + 2 * equal, abs=1e-5)
