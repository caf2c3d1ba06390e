"""Two jobs that train alike, in one table: a schedule against another, a resume against the run that nobody stops,
layouts, micro-batches and tokenizers that should make no difference."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from own_tokenizer import write

HERE = Path(__file__).parent
GATHERED, LAGGED, TALK = (HERE / name for name in ("gathered_script.py", "lagged_script.py", "talk.py"))
GATHER = {"script": GATHERED, "path": (HERE.parent / "update" / "ranks",)}
STAGE = HERE.parents[1] / "examples" / "stages" / "short_first.py"
# Responses are graded in another order than they are sampled, and earn the same for even numbers.
GRADERS = """
import asyncio, time
def grade(prompt, response):
    time.sleep(sum(map(ord, response)) % 7 / 20)
    return sum(map(ord, response)) % 5 / 4 if int(prompt.split('*')[0]) % 2 else 1.0
async def score(response):
    await asyncio.sleep(0.1)
    return len(response) % 3 / 2
def fails(response):
    return 1 / (sum(map(ord, response)) % 8)
async def longest(responses):
    await asyncio.sleep(0.1)
    return [float(len(r) == max(map(len, responses))) for r in responses]
"""
EXACT = ("loss", "grad_norm", "entropy", "kl/ref", "kl/old", "ratio/mean", "ratio/max", "clip_fraction", "reward/mean")
EXACT += ("reward/errors", "response/length_mean", "rollout/kl", "version", "lr")
NEAR = ("loss", "grad_norm", "entropy", "trained/tokens", "reward/mean", "lr")  # of the first step


@dataclass(frozen=True)
class Twins:
    """One job, and another one that should train as it does.

    `{held_out}`, `{own}` and `{graders}` in flags are files of the test.
    """

    common: str  # flags of both
    one: str = ""  # more flags of the first
    other: str = ""  # more flags of the second
    cut: int = 0  # iteration at which the second one is stopped and resumed, 0: it is not
    then: str = ""  # more flags of the resume
    near: bool = False  # whether they differ by rounding
    model: str = "dense_model"
    first: dict[str, Any] = field(default_factory=dict)  # more of the first job
    second: dict[str, Any] = field(default_factory=dict)  # more of the second job


TWO_STEPS = "--train-iters 3 --rl-rollout-prompts 8 --lr 3e-3"  # a rollout of two optimizer steps, and a half
BY_TOKENS = "--rl-max-tokens-per-microbatch 48"
EVALUATED = "--rl-eval-data {held_out} --rl-eval-every 2 --rl-eval-pass-k 2"
ASYNC = "--rl-schedule async --rl-correction truncate --rl-async-order strict --rl-generators"
STREAMED = f"--train-iters 4 --rl-verify-weights --rl-reward-workers 3 {EVALUATED} --save-interval 2 --rl-reward"
EPISODES = f"--rl-environment {TALK}:Talk --rl-environment-workers 1 --rl-environment-lockstep --lr 3e-3"
EPISODES += f" --rl-stop-token-ids {' '.join(map(str, range(0, 97, 2)))} --rl-max-response-length 30"
EPISODES += " --rl-max-turn-length 8 --rl-max-turns 4 --rl-reward environment"

TWINS = {
    # The engine wakes between two optimizer steps of a rollout, with parameters that were not gathered yet.
    "an evaluation in the middle of a rollout": Twins(
        "--train-iters 5 --rl-rollout-prompts 12 --lr 3e-3 --overlap-param-gather --overlap-grad-reduce",
        other=EVALUATED.replace("every 2", "every 1"),
    ),
    "a resume in the second pass of a rollout under bf16": Twins(
        "--bf16 --train-iters 6 --rl-rollout-prompts 8 --rl-ppo-epochs 2 --lr 3e-3 --save-interval 3", cut=3
    ),
    "episodes in lockstep, resumed": Twins(
        f"--train-iters 4 --rl-verify-weights --save-interval 2 {EPISODES}", cut=2, model="long_model"
    ),
    # A pass for old log-probs changes nothing but the time.
    **{
        f"old log-probs of the update itself, {preset}": Twins(
            f"--rl-algorithm {flags} --train-iters 3 --lr 3e-3 --rl-kl-loss-coef 0.1",
            other="--rl-old-logprobs auto",
            first={"ranks": 1},
            second={"ranks": 1},
        )
        for preset, flags in {"grpo": "grpo", "ppo": "ppo --rl-kl-reward-coef 0"}.items()
    },
    # Micro-batches by tokens, resumed in the middle of the first rollout.
    **{
        f"a step by tokens, {layout}": Twins(
            TWO_STEPS + flags, other=f"{BY_TOKENS} --save-interval 1{pack}", cut=1, near=True
        )
        for layout, pack, flags in (
            ("DP2", "", ""),
            ("TP2 packed", " --rl-pack-sequences", " --tensor-model-parallel-size 2 --sequence-parallel"),
            ("PPO packed", " --rl-pack-sequences", " --rl-algorithm ppo --rl-critic-lr 1e-3"),
            ("PP2 packed", " --rl-pack-sequences", " --pipeline-model-parallel-size 2"),
            ("TP2 shared", " --rl-share-prompts", " --tensor-model-parallel-size 2 --sequence-parallel"),
            ("PPO shared", " --rl-share-prompts", " --rl-algorithm ppo --rl-critic-lr 1e-3"),
            ("PP2 shared", " --rl-share-prompts", " --pipeline-model-parallel-size 2"),
        )
    },
    "context parallel ranks": Twins(
        "--train-iters 2 --rl-verify-weights",
        other="--context-parallel-size 2",
        near=True,
        first={"ranks": 1},
        second=GATHER,
    ),
    "context parallel ranks by tokens": Twins(
        f"--train-iters 2 {BY_TOKENS} --rl-algorithm gspo --rl-kl-loss-coef 0.04",
        other="--context-parallel-size 2",
        near=True,
        first={"ranks": 1},
        second=GATHER,
    ),
    # In trainers, in the engine, which needs it for --rl-stop, and in one apart.
    **{
        f"a tokenizer of its own code{where}": Twins(
            f"--train-iters 2 --rl-stop 7 {schedule}", other="--rl-tokenizer {own} --rl-trust-remote-code"
        )
        for where, schedule in (("", ""), (", async", f"{ASYNC} 1 --rl-max-staleness 0"))
    },
    "streamed: groups are graded, one engine of two ranks, a users stage": Twins(
        f"{STREAMED} {{graders}}:grade {{graders}}:longest=0.5 --rl-algorithm dapo --rl-rollout-prompts 8 --lr 3e-3 "
        f"--rl-overlong-buffer 4 --rl-generate-tp 2 --rl-stage {STAGE}:ShortFirst",
        other="--rl-schedule streamed",
        cut=2,
    ),
    "streamed after sync: responses are graded, some fail, engines share experts": Twins(
        f"{STREAMED} {{graders}}:grade {{graders}}:score=0.5 {{graders}}:fails=0.1 --rl-reward-on-error zero "
        "--rl-filtration best-random --expert-model-parallel-size 2 --rl-generate-ep 2",
        cut=2,
        then="--rl-schedule streamed",
        model="moe_model",
    ),
    "strict without lag": Twins(
        f"--train-iters 12 --rl-rollout-prompts 8 --rl-correction truncate {EVALUATED}",
        other=f"{ASYNC} 1 --rl-max-staleness 0 --save-interval 6",
        cut=6,
        first={"ranks": 1},
    ),
    # Each samples its part of a rollout, whichever is the faster one.
    "two strict engines with lag 1": Twins(
        "--train-iters 8 --rl-rollout-prompts 8 --rl-correction truncate",
        other=f"{ASYNC} 2 --rl-max-staleness 1 --save-interval 4",
        cut=4,
        first={"script": LAGGED},
        second={"ranks": 4},
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", TWINS)
def test_two_jobs_train_alike(job, request, arithmetic, tmp_path, monkeypatch, case) -> None:
    monkeypatch.setenv("LAG", "1")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    its, graders = TWINS[case], tmp_path / "graders.py"
    graders.write_text(GRADERS)
    model = request.getfixturevalue(its.model)
    files = {"held_out": arithmetic / "heldout.jsonl", "own": write(tmp_path / "own"), "graders": graders}
    first, second = (
        job(*f"{its.common} {flags}".format(**files).split(), name=name, model=model, **more)
        for name, flags, more in (("one", its.one, its.first), ("other", its.other, its.second))
    )
    one = first.run(400)
    if its.cut:
        second.stop_at(its.cut, 400)
        second.extra = (*second.extra, *its.then.split())
    other = second.run(400)
    assert ("training resumes from" in other.log) == bool(its.cut)
    check_alike(one, other, near=its.near)
    for run, flags in ((one, its.one), (other, its.other)):
        assert bool(run.evaluations) == ("--rl-eval-data" in its.common + flags)
        assert ("seconds/logp_old" in run.metrics[0]) == ("auto" not in flags)
    if its.near and its.cut:
        assert [line["ratio/max"] > 1 for line in other.metrics] == [False, True, False]


def check_alike(one, other, near: bool = False) -> None:
    lines, others = one.metrics, other.metrics
    assert [line["iteration"] for line in lines] == [line["iteration"] for line in others]
    if near:
        first, second = ([line[name] for name in NEAR] for line in (lines[0], others[0]))
        assert second == pytest.approx(first, rel=1e-4, abs=1e-7)
        other.check_log_probs()
        return
    names = (*EXACT, "weights/digest") if "weights/digest" in others[0] else EXACT
    assert [[line.get(n) for n in names] for line in lines] == [[line.get(n) for n in names] for line in others]
    assert len({line["grad_norm"] for line in lines}) > 1 and all(line["grad_norm"] > 1e-3 for line in lines)
    if one.evaluations and other.evaluations:
        evaluated, again = (
            [{n: v for n, v in line.items() if n.startswith(("eval/", "iteration"))} for line in run.evaluations]
            for run in (one, other)
        )
        assert evaluated == again
