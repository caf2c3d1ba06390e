"""Episodes in whole jobs: engine and trainer agree on every sampled token, under all schedules and layouts."""

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from last_parts import LAST_PART, check_log_probs

from mindspeed_rl_plugin.monitor.dump import read_rollout
from mindspeed_rl_plugin.monitor.run_files import dump_files

TALK, CACHED, GATHERED = (
    Path(__file__).with_name(f"{name}.py") for name in ("talk", "cached_script", "gathered_script")
)
STAND_IN = Path(__file__).parents[1] / "update" / "ranks"  # attention over context parallel ranks, for a CPU
# An untrained model ends a turn by every other token.
STOPS = ("--rl-stop-token-ids", *map(str, range(0, 97, 2)))
LENGTHS = ("--rl-max-response-length", "30", "--rl-max-turn-length", "8", "--rl-max-turns", "4")
WHO = ("--rl-environment", f"{TALK}:Talk", "--rl-environment-workers", "1")
EPISODES = (*WHO, *STOPS, *LENGTHS, "--rl-reward", "environment", f"{TALK}:grade=0.5")
COMMON = ("--train-iters", "3", "--rl-rollout-prompts", "4", "--lr", "3e-3", *EPISODES)


def check_dump(folder: Path, iteration: int) -> None:
    """Masks, turns, rewards and conversations of a rollout say the same."""
    path = [*dump_files(folder).values()][iteration]
    table, rows = pq.read_table(path).to_pylist(), read_rollout(path)
    assert max(len(row["turns"]) for row in table) == 4
    for row, mask, logps in zip(table, rows["loss_mask"].rows(), rows["logp_rollout"].rows(), strict=True):
        sampled = [place for first, end in row["turns"] for place in range(first, end)]
        before = len(row["prompt_tokens"])
        assert mask.nonzero().flatten().tolist() == [before + place for place in sampled]
        assert logps.nonzero().flatten().tolist() == [before + place for place in sampled]
        assert row["response_length"] == len(sampled) and row["turns"][-1][1] == len(row["response_tokens"])
        said = json.loads(row["conversation"])
        spoken = [message for message in said if message["role"] == "assistant"]
        assert [message["turn"] for message in spoken] == row["turns"]
        assert [message["reward"] for message in spoken] == pytest.approx(row["turn_reward"])
        assert row["reward_parts"][0] == pytest.approx(sum(row["turn_reward"]))
        answers = [message["content"] for message in said[1:] if message["role"] == "user"]
        counted = [int(re.match(r"\[(\d)\]", answer)[1]) for answer in answers]
        first = counted[0] if counted else 1
        assert first in (1, 2) and counted == [*range(first, first + len(counted))], "one environment gave all answers"


def test_episodes_train(job, arithmetic, long_model, nothing_left) -> None:
    held_out = ("--rl-eval-data", str(arithmetic / "heldout.jsonl"), "--rl-eval-every", "2", "--rl-eval-pass-k", "2")
    made = job(*COMMON, *held_out, "--rl-verify-weights", "--rl-dock-gb", "0.1", model=long_model).dumping()
    result = made.run()
    result.check_agreement(3)
    for line in result.metrics:
        assert 1.5 < line["episode/turns_mean"] <= line["episode/turns_max"] == 4
        assert line["episode/turn_limit"] > 0 and line["episode/observation_tokens"] > 3
    check_dump(made.save / "dump", 0)
    for row in pq.read_table([*dump_files(made.save / "dump").values()][0]).to_pylist():
        assert len(row["response_tokens"]) <= 30 and all(end - first <= 8 for first, end in row["turns"])
    assert [line["iteration"] for line in result.evaluations] == [0, 2, 3]
    for line in result.evaluations:
        assert line["eval/reward_mean"] > 0 and 0 <= line["eval/accuracy"] <= 1 and 0 <= line["eval/pass@2"] <= 1
        assert line["eval/response_length"] > 1 and "eval/environment_failed" not in line
    nothing_left()


CASES = {
    "an engine of two ranks": ("--rl-generate-tp", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "ppo, packed": ("--rl-algorithm", "ppo", "--rl-critic-lr", "1e-3", "--rl-pack-sequences")
    + ("--rl-max-tokens-per-microbatch", "96"),
    "reinforce++, two pipeline stages": ("--rl-algorithm", "reinforce++", "--pipeline-model-parallel-size", "2"),
    "streamed": ("--rl-schedule", "streamed"),
    "dapo, token budget": ("--rl-algorithm", "dapo", "--rl-max-tokens-per-microbatch", "96"),
    "one trains, one generates": ("--rl-schedule", "async", "--rl-generators", "1", "--rl-correction", "truncate"),
    "context parallel ranks": ("--context-parallel-size", "2", "--rl-max-tokens-per-microbatch", "96"),
    "partial rollouts": ("--rl-schedule", "streamed", "--rl-carry-unfinished", "--rl-oversample", "2")
    + ("--rl-correction", "truncate", "--rl-max-staleness", "1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_under_every_schedule_and_layout_engine_and_trainer_agree(job, long_model, case: str) -> None:
    more = {"script": GATHERED, "path": (STAND_IN,)} if case.startswith("context") else {}
    made = job(*COMMON, *CASES[case], model=long_model, **more).dumping()
    result = made.run(400)
    lines = result.metrics
    result.check_log_probs()
    assert len(lines) == 3 and all(line["episode/turns_mean"] > 1.5 and line["grad_norm"] > 1e-3 for line in lines)
    if case == "partial rollouts":
        assert max(line["segments/mean"] for line in lines) > 1, "no episode was interrupted in the middle"
    check_dump(made.save / "dump", 2)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["stop", "zero", "drop"])
def test_environments_that_fail(job, long_model, nothing_left, rule: str) -> None:
    who = ("--rl-environment", f"{TALK}:Fails", "--rl-environment-timeout", "2", "--rl-environment-on-error", rule)
    made = job(*COMMON, *who, "--rl-reward", "environment", model=long_model).dumping()
    if rule == "stop":
        result = made.fail()
        assert "--rl-environment-on-error zero or drop" in result.log
    else:
        result = made.run(400)
        assert all(line["episode/failed"] > 0 for line in result.metrics)
        assert "an environment failed, for the first time" in result.log
        dropped = [line["groups/dropped"] for line in result.metrics]
        assert max(dropped) > 0 if rule == "drop" else max(dropped) == 0
        if rule == "zero":
            rows = pq.read_table([*dump_files(made.save / "dump").values()][0]).to_pylist()
            nothing = [row for row in rows if not any(row["turn_reward"]) and row["reward"] == 0]
            assert len(nothing) >= result.metrics[0]["episode/failed"]
    nothing_left()


@pytest.mark.slow
def test_they_agree_with_the_engines_prefix_cache(job, dense_model) -> None:
    """Episodes that are longer than a block of the cache."""
    model = dense_model.replace("length 32", "length 640").replace("embeddings 32", "embeddings 640")
    long = ("--rl-environment", f"{TALK}:Verbose", "--rl-max-response-length", "600", "--rl-kv-cache-gb", "0.2")
    result = job(*COMMON, *long, "--rl-verify-weights", model=model, script=CACHED).run(400)
    result.check_agreement(3)
    assert all(line["episode/observation_tokens"] > 150 for line in result.metrics)
    assert max(map(int, re.findall(r"(\d+) tokens came from the prefix cache", result.log))) > 128


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_joins_with_environments_of_its_own(job, joined, long_model, nothing_left, ranks: int) -> None:
    """What it needs to know of them comes from the job."""
    apart = ("--rl-schedule", "async", "--rl-generators", "0", "--rl-max-staleness", "0", "--rl-correction", "truncate")
    running = job(*COMMON, *apart, model=long_model, ranks=1).dumping().start()
    engines = joined(running)
    engine = engines.join(ranks=ranks)
    result = running.wait(300)
    assert result.code == 0, result.log[-4000:] + engines.said()[-3000:]
    assert engine.wait(30) == 0, engines.said()[-3000:]
    running.check_trained(12)
    result.check_log_probs(3)
    check_dump(running.save / "dump", 2)
    nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("inflight", ["keep", "recompute", "drain"])
def test_new_weights_come_while_episodes_are_in_the_making(job, joined, long_model, inflight: str) -> None:
    """In the middle of a turn or between two; `drain` lets all turns of an episode come to their end."""
    apart = ("--rl-schedule", "async", "--rl-generators", "0", "--rl-max-staleness", "2", "--rl-correction", "truncate")
    flags = (*COMMON, "--train-iters", "8", "--rl-max-running", "7", *apart, "--rl-inflight", inflight, *LAST_PART)
    running = job(*flags, model=long_model, ranks=1).dumping().start()
    engine = joined(running).join("never, but slow")
    result = running.wait(300)
    assert result.code == 0 and engine.wait(30) == 0, result.log[-4000:]
    running.check_trained(32)
    segments = [line["segments/mean"] for line in result.metrics]
    assert len(segments) == 8 and (max(segments) > 1) == (inflight != "drain"), segments
    check_log_probs(running.dumped(), inflight)
    check_dump(running.save / "dump", 7)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_the_engine_is_killed_and_its_environments_end(job, long_model, nothing_left, rank: int) -> None:
    """The first one leads the engine, and has the environments."""
    made = job(*COMMON, "--train-iters", "50", "--rl-generate-tp", "2", model=long_model, cold=True)
    made.kill_after(2, "reshard", rank=rank)
    nothing_left()


@pytest.mark.slow
def test_a_resume_begins_interrupted_episodes_anew(job, long_model) -> None:
    """A checkpoint holds no environment."""
    flags = (*COMMON, *CASES["partial rollouts"], "--train-iters", "4", "--save-interval", "2")
    made = job(*flags, model=long_model).dumping()
    made.stop_at(2)
    lines = made.run().metrics
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4]
    assert lines[1]["making/responses"] > 0, "no episode was interrupted when the checkpoint was written"
    made.check_trained(16, of_epoch=0)
    check_dump(made.save / "dump", 3)
