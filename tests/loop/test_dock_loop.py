"""The loop on the dock with 1, 2 and 4 ranks: each reads what it needs, and none sees everything."""

import json
from collections import Counter

import pytest

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.stages.stage import states_of
from mindspeed_rl_plugin.stages.table import stage_table

TENSOR, PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
FIRST_STAGE = {"tokens", "loss_mask", "valid"}


def test_two_stages_read_what_they_need(pp2) -> None:
    result = pp2.wait(1)
    result.check_agreement(4)
    assert "[rl] training starts from random weights" in result.log
    check_dock(result, tensor=1, pipeline=2)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tensor", "pipeline"), [(1, 1, 1), (4, 2, 1), (4, 1, 2)])
def test_each_rank_reads_what_it_needs(job, ranks: int, tensor: int, pipeline: int) -> None:
    layout = (TENSOR, str(tensor), PIPELINE, str(pipeline), "--rl-generate-tp", "1")
    result = job("--train-iters", "2", "--rl-verify-weights", *layout, ranks=ranks, cold=True).run(timeout=500)
    result.check_agreement(2)
    check_dock(result, tensor=tensor, pipeline=pipeline)


def check_dock(result, tensor: int, pipeline: int) -> None:
    """Of a GRPO run with these parallel sizes, one rollout an iteration; TP is innermost, PP outermost."""
    files = sorted(result.run_dir.glob("dock-rank*.jsonl"), key=lambda p: int(p.stem.removeprefix("dock-rank")))
    ranks = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
    world, states = len(ranks), states_of(stage_table(resolve(AlgorithmConfig(algorithm="grpo")), 1))
    for rollout, metrics in enumerate(result.metrics):
        check_rollout([lines[rollout] for lines in ranks], metrics, states, tensor, pipeline)
    assert all([line["iteration"] for line in lines] == [m["iteration"] for m in result.metrics] for lines in ranks)
    last = [lines[-1] for lines in ranks]
    assert sorted(sum((line["states"] for line in last), [])) == sorted(s.name for s in states)
    held = [len(line["states"]) for line in last]
    assert max(held) - min(held) <= 1, f"controllers lie on different ranks: {held}"
    messages = [line["messages"] for line in last]
    assert world == 1 or max(messages) < 0.8 * sum(messages), f"no process sees all the traffic: {messages}"


def check_rollout(lines: list[dict], metrics: dict, states: list, tensor: int, pipeline: int) -> None:
    world = len(lines)
    stage_of = [rank // (world // pipeline) for rank in range(world)]
    moved = [Counter({tuple(m[:3]): m[4] for m in line["moved"]}) for line in lines]
    assert {m[3] for line in lines for m in line["moved"]} == {"local"}, "all ranks map one machine's memory"
    for rank, moves in enumerate(moved):
        for state in ("logp_old", "logp_ref", "update"):
            reads = set(next(s.reads for s in states if s.name == state))
            wanted = reads if stage_of[rank] == pipeline - 1 else reads & FIRST_STAGE
            assert {c for way, s, c in moves if (way, s) == ("read", state)} == wanted, (rank, state)
    generated = sum(m["written", "generate", "tokens"] for m in moved)
    # A data parallel rank reads its own rows; each of its tensor and pipeline ranks maps them itself.
    read = [m["read", "update", "tokens"] for m in moved]
    assert sum(read) == generated * tensor * pipeline
    assert world == tensor * pipeline or max(read) < generated, "no rank reads what others train on"
    written = [m["written", "logp_old", "logp_old"] for m in moved]
    assert sum(written) == generated and sum(n > 0 for n in written) == world // tensor // pipeline
    assert all(stage_of[r] == pipeline - 1 for r, n in enumerate(written) if n)
    assert sum(m["read", "measure", "reward"] for m in moved[1:]) == 0 < moved[0]["read", "measure", "reward"]
    assert "tokens" not in {c for _, state, c in moved[0] if state == "measure"}, "only numbers go to one rank"
    total = {way: sum(n for m in moved for (w, *_), n in m.items() if w == way) for way in ("read", "written")}
    assert (metrics["dock/bytes_read"], metrics["dock/bytes_written"]) == (total["read"], total["written"])
    assert metrics["dock/bytes_remote"] == 0
