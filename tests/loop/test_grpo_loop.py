"""GRPO end to end: layouts, context parallel ranks, several agents."""

from pathlib import Path

import pytest

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
