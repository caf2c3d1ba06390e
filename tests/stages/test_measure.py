"""What a rollout and an iteration tell: solved by single grades, the slowest rank, what a reshard moved, dumps."""

import io
import json
from types import SimpleNamespace

import pytest
import torch
from stage_context import Ranks, context_of

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.config import AlgorithmConfig, RLConfig
from mindspeed_rl_plugin.config.run_flags import MonitorConfig
from mindspeed_rl_plugin.dock import Lease, Traffic
from mindspeed_rl_plugin.monitor.monitor import Monitor
from mindspeed_rl_plugin.monitor.names import meaning
from mindspeed_rl_plugin.monitor.run_files import check_dumps, dump_file, dump_files, read_jsonl, read_metrics
from mindspeed_rl_plugin.reward import Grade, GradeItem
from mindspeed_rl_plugin.rows import Completion, Prompt, Ragged, Rows, SampleId, Sampling, digest_number, pack_json
from mindspeed_rl_plugin.stages import evaluate, measure, update
from mindspeed_rl_plugin.stages.prompts import meta_of
from mindspeed_rl_plugin.stages.reward import FailureLog
from mindspeed_rl_plugin.update import objective, value_step
from mindspeed_rl_plugin.weights.resharder import Transfer

WEIGHTS = (1.0, -0.5)  # a grader of the answer, and a penalty
PLAIN = Transfer(0, 0, 0, 0, 0.0, None)


def monitor(folder):
    return Monitor(folder, 0, 1, is_terminal=False, stream=io.StringIO())


def rows(reward_parts, digest=0):
    """Groups of two responses of two prompt and two response tokens."""
    grades = torch.tensor(reward_parts)
    count = len(grades)
    columns = {
        "length": torch.full((count,), 4),
        "response_length": torch.full((count,), 2),
        "finish": torch.zeros(count, dtype=torch.int8),
        "version": torch.full((count,), 6),
        "weights_digest": torch.full((count,), digest),
        "reward": grades @ torch.tensor(WEIGHTS),
        "reward_parts": grades,
        "valid": torch.ones(count, dtype=torch.int8),
    }
    return Rows(tuple(SampleId(0, i // 2, i % 2) for i in range(count)), columns)


def measured(reward_parts, transfer=PLAIN, others=(), digest=None, preset="grpo", limit=8):
    given = rows(reward_parts, digest_number(transfer.digest) if digest is None else digest)
    dock = SimpleNamespace(
        lease=lambda state, ids, deadline, columns: Lease(1, state, given.select(ids)), commit=lambda *_: None
    )
    algorithm = resolve(AlgorithmConfig(algorithm=preset))
    graders = SimpleNamespace(weights=WEIGHTS, names=("math", "length"))
    context = context_of(dock, algorithm=algorithm, ranks=Ranks(others), longest=limit, graders=graders)
    return measure.Measure(measure.spec(algorithm), context).run(given.ids, 6, transfer).metrics


def test_groups_are_solved_by_grades_and_not_by_totals():
    """Long right answers fall below the sum of the weights, short wrong ones rise above it."""
    right, wrong = [1.0, 4.0], [0.0, -4.0]
    got = measured([right, right, right, right, right, wrong, right, right, wrong, wrong])
    assert got["reward/mean"] == pytest.approx((7 * -1.0 + 3 * 2.0) / 10)
    assert (got["reward/mean/math"], got["reward/mean/length"]) == pytest.approx((0.7, (7 * 4.0 - 3 * 4.0) / 10))
    assert [got[f"groups/{k}"] for k in ("solved", "unsolved", "informative")] == pytest.approx([0.6, 0.2, 0.2])


def test_what_the_penalty_on_length_takes():
    """DAPO's buffer is the last fifth of the limit: two tokens of ten."""
    for limit, taken, share in ((2, -1.0, 1.0), (10, 0.0, 0.0)):
        got = measured([[1.0, 0.0]] * 2, preset="dapo", limit=limit)
        assert (got["reward/overlong"], got["response/overlong"], got["reward/mean"]) == (taken, share, 1.0)
    assert "reward/overlong" not in measured([[1.0, 0.0]] * 2)


def test_the_first_failure_of_each_grader_is_said_once(capsys):
    log = FailureLog()
    log.add([{}, {"a": "reward 'a' ran out of time"}, {"a": "another", "b": "reward 'b' raised"}], show=True)
    log.add([{"a": "a third"}], show=True)
    lines = [line.split("for the first time in this rollout: ")[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["reward 'a' ran out of time", "reward 'b' raised"]
    FailureLog("the evaluation").add([{"a": "a fourth"}], show=True)
    assert "in the evaluation: a fourth" in capsys.readouterr().out


def test_what_a_reshard_moved_is_summed_over_ranks():
    others = [[Transfer(10, 20, 30, 50, 0.5, "d1")]]
    got = measured([[1.0, 0.0]] * 2, Transfer(1, 2, 3, 60, 0.25, "d1"), others)
    assert {k: v for k, v in got.items() if k.startswith(("reshard/", "weights/", "version"))} == {
        "reshard/bytes_copied": 11,
        "reshard/bytes_sent": 22,
        "reshard/bytes_received": 33,
        "reshard/temporary_bytes": 60,
        "reshard/transfer_seconds": 0.5,
        "weights/digest": "d1",
        "version": 6,
    }
    assert all(meaning(name).text for name in got)
    assert "weights/digest" not in measured([[1.0, 0.0]] * 2)


def test_rows_that_other_weights_sampled_are_refused():
    verified = Transfer(0, 0, 0, 0, 0.0, "d1")
    measured([[1.0, 0.0]] * 2, verified)
    with pytest.raises(RuntimeError, match="of weight version 6 .* verified, digest d1"):
        measured([[1.0, 0.0]] * 2, verified, digest=0xD2)


def test_an_evaluation_asks_for_solved_and_tells_the_mean_reward(tmp_path, monkeypatch):
    """Greedy answers: three right but long, one wrong but short. Another engine adds four wrong ones, and that a grader
    and two environments failed; its second rank nothing. No collective of tensors adds them: MindSpeed's forgets sums
    of float64."""
    graded = [Grade(-1.0, (1.0, 4.0))] * 3 + [Grade(2.0, (0.0, -4.0))]
    graders = SimpleNamespace(weights=WEIGHTS, grade=lambda items: graded, take_failures=dict)
    sums = dict.fromkeys(evaluate.SUMS, 0.0) | {"prompts": 4.0, "reward": -7.0}
    sums |= {"errors": 1.0, "environment_failed": 2.0}
    others = [[*sums.values()], [0.0] * len(sums)]
    monkeypatch.setattr(evaluate, "generate", answers)
    parts = {"engine": SimpleNamespace(replica=0, replicas=1, leader=True), "graders": graders}
    parts |= {"decode": str, "seed": 0, "sampling": Sampling(max_tokens=4), "ranks": Ranks([others, [], [[[9, "x"]]]])}
    prompts = [Prompt((1, 2), f"p{i}", "a", i) for i in range(4)]
    evaluate.Evaluate(context_of(monitor=monitor(tmp_path), **parts), prompts).run(3)
    (line,) = read_metrics(tmp_path)
    assert line["eval/accuracy"] == 3 / 8 and line["eval/reward_mean"] == -1.0 and line["eval/errors"] == 1
    assert line["eval/environment_failed"] == 2
    (shown,) = read_jsonl(tmp_path / "heldout.jsonl")
    rewards = (-1.0, -1.0, -1.0, 2.0)
    assert shown == {"iteration": 3, "rows": [[i, f"p{i}", "[3]", "a", r] for i, r in enumerate(rewards)] + [[9, "x"]]}


def test_what_fails_in_an_evaluation_is_counted():
    """Where other processes generate too, where the rows say so."""
    graders = SimpleNamespace(weights=[1.0], grade=lambda items: [Grade(0.0, (0.0,), "raised")] * len(items))
    inside = evaluate.Evaluate(context_of(graders=graders, decode=str), ())
    masks = Ragged.from_rows([torch.tensor([0, 1])] * 3)
    meta = pack_json([meta_of(Prompt((1,), "p", "a", 0))] * 3)
    failed = {"tokens": masks, "loss_mask": masks, "meta": meta, "environment_failed": torch.tensor([0, 1, 1])}
    failed |= {"response_length": torch.ones(3), "finish": torch.zeros(3).int()}
    scored, _ = inside._score(Rows(tuple(SampleId(-1, i, 0) for i in range(3)), failed))
    assert evaluate.sums_of(scored, 0)[-2:] == [3, 2]
    logged, shown, columns = [], [], {name: torch.zeros(3) for name in ("meta", "reward", "grader_error")}
    columns |= {"reward_parts": torch.zeros(3, 1), "finish": torch.zeros(3).int()}
    columns |= {"response_length": torch.ones(3), "environment_failed": torch.ones(3)}
    log = SimpleNamespace(log_eval=lambda version, result: logged.append(result))
    log.log_held_out = lambda version, rows: shown.append(rows)
    context = context_of(SimpleNamespace(clear=lambda epoch: None), graders=graders, monitor=log)
    items = lambda rows: [GradeItem("p", "r", "a", {}, i) for i in rows.ids]  # noqa: E731
    for reads in (("meta", "environment_failed"), ("meta",)):
        read = lambda ids, more: Rows(ids, {n: columns[n] for n in (*more, "reward", "grader_error")})  # noqa: E731
        stage = SimpleNamespace(graded=read, context=context, spec=SimpleNamespace(reads=reads), items=items)
        evaluate.EvaluateApart(stage, [None] * 3).finish()
    assert shown == [[[i, "p", "r", "a", 0.0] for i in range(3)]] * 2
    assert logged[0].pop("eval/environment_failed") == 3 and logged[0] == logged[1] and "eval/errors" not in logged[0]


def test_an_evaluation_is_of_one_version():
    """Other engines may answer it by no other weights, neither older nor newer ones."""
    asked, epochs = [], []
    dock = SimpleNamespace(open=lambda *epoch: epochs.append(epoch), put=asked.append)
    config = RLConfig(monitor=MonitorConfig(eval_pass_k=2))
    reward = SimpleNamespace(context=context_of(dock, config=config))
    apart = evaluate.EvaluateApart(reward, [Prompt((1,), "p", "a", i) for i in range(3)])
    for version in (4, 6):
        apart.begin(version)
        assert len(asked[-1]) == 3 and epochs[-1][1:] == (3, 3, (version, version))
    assert [epoch for epoch, *_ in epochs] == [-1, -2]


def answers(engine, requests, **_):
    return [Completion(id=r.id, tokens=(3,), logps=(0.0,), finish="stop", segments=((0, 0),)) for r in requests]


def test_stages_and_throughput_are_those_of_the_slowest_rank(tmp_path):
    slow = {"seconds/update": 7.0, "peak_bytes/update": 900, "seconds/iteration": 8.0}
    moved = [dict.fromkeys(("read", "written", "remote"), 0), {"read": 5, "written": 7, "remote": 3}]
    dock = SimpleNamespace(traffic=Traffic(), served={"states": ["a"], "messages": 1})
    dock.traffic["read", "update", "tokens", "local"] = 30
    dock.traffic["written", "generate", "tokens", "remote"] = 200
    seen = monitor(tmp_path)
    seen.stage_metrics = lambda: {"seconds/update": 3.0, "seconds/reward": 2.0, "seconds/iteration": 5.0}
    log = measure.IterationLog(seen, Ranks([[({"loss": 99.0}, slow, each)] for each in moved], world=2), dock)
    rollout = measure.Rollout({"reward/mean": 0.5}, tokens=320)
    for number in (1, 2):
        log.write(number, rollout, {"loss": 1.0}, last_step=number == 2)
    first, second = read_metrics(tmp_path)
    expected = {"seconds/update": 7.0, "seconds/reward": 2.0, "peak_bytes/update": 900, "seconds/iteration": 8.0}
    assert {k: second[k] for k in expected} == expected and second["loss"] == 1.0
    assert second["tokens_per_second"] == 320 / 2 / 16.0 and "tokens_per_second" not in first
    assert {k: v for k, v in second.items() if k.startswith("dock/")} == {
        "dock/bytes_read": 35,
        "dock/bytes_written": 207,
        "dock/bytes_remote": 203,
    }
    (line,) = [json.loads(x) for x in (tmp_path / "dock-rank0.jsonl").read_text().splitlines()]
    cells = [["read", "update", "tokens", "local", 30], ["written", "generate", "tokens", "remote", 200]]
    assert line["moved"] == cells
    assert (line["iteration"], line["states"], line["messages"]) == (2, ["a"], 1) and not dock.traffic.take()


@pytest.mark.parametrize("whose", ["", "critic/"])
def test_the_gradient_norms_of_policy_and_critic_are_told_apart(whose):
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.5}])
    call = update.TrainStep(None, (None, None, None, optimizer), {})
    for norm, wanted in ((2.0, {f"{whose}grad_norm": 2.0}), (None, {})):
        run = lambda *_, norm=norm: ({}, 0, False, 0, 0, norm)  # noqa: E731
        step = SimpleNamespace(prepare=lambda parts: None, run=run, metrics=dict)
        assert update.take_step(step, [], call, whose)[1] == {f"{whose}lr": 0.5} | wanted


def test_every_metric_of_the_update_has_its_line_in_the_register():
    critic = value_step.value_metrics(dict(dict.fromkeys(value_step.TALLIED, 1.0), return_square=2.0), 1)
    sums = (*objective.WEIGHTED, *objective.PER_TOKEN, *objective.PER_SEQUENCE, *objective.MAXIMA)
    for name in (*sums, *critic, "trained/tokens", "trained/sequences", "lr", "critic/lr", "critic/grad_norm"):
        assert meaning(name).text, name


def test_dumps_carry_the_name_of_their_run_and_an_earlier_start_is_set_aside(tmp_path):
    run, dumps = tmp_path / "rl", tmp_path / "dumps"
    run.mkdir()
    measure.prepare_dumps(dumps, run, 0, resumed=False)
    for done in (0, 1):
        dump_file(dumps, done).write_bytes(b"")
    check_dumps(dumps, run, resumed=True)
    with pytest.raises(ValueError, match="of another run"):
        check_dumps(dumps, tmp_path / "other", resumed=False)
    measure.prepare_dumps(dumps, run, 1, resumed=True)
    assert list(dump_files(dumps)) == [0]
    measure.prepare_dumps(dumps, run, 0, resumed=False)
    assert list(dump_files(dumps)) == [] and (dumps / "rollout-000000.parquet.old").exists()
