"""What the loop reports: solved from single grades, the slowest rank, evaluations aside, what a reshard moved."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.dock import Lease, Traffic
from mindspeed_rl_plugin.forward import Step
from mindspeed_rl_plugin.loop import loop as iteration
from mindspeed_rl_plugin.monitor.monitor import Monitor
from mindspeed_rl_plugin.monitor.names import meaning
from mindspeed_rl_plugin.monitor.run_files import check_dumps, dump_file, dump_files, read_events, read_metrics
from mindspeed_rl_plugin.monitor.run_summary import summarize
from mindspeed_rl_plugin.reshard.resharder import Transfer
from mindspeed_rl_plugin.reward import Grade
from mindspeed_rl_plugin.rows import Completion, Prompt, Rows, SampleId, Sampling
from mindspeed_rl_plugin.stages import measure as reporting
from mindspeed_rl_plugin.stages.generate import weights_number
from mindspeed_rl_plugin.stages.select import Verdict

RESULT = ({}, 0, False, 0, 0, 2.0)  # of Megatron's train_step: the gradient norm is used
LIMITS = SimpleNamespace(data=SimpleNamespace(max_prompt_length=100), rollout=SimpleNamespace(max_response_length=1000))
WEIGHTS = (1.0, -0.5)  # a grader of the answer, and a penalty


def parts(tmp_path, others=(), **more):
    """Rank 0 of a world whose other ranks contribute `others`, one list a collective call."""
    calls = iter(others)
    defaults = {
        "dock": SimpleNamespace(traffic=Traffic(), served={"states": ["a"], "messages": 1}, states=range(6)),
        "sizes": SimpleNamespace(prompts=4, members=2),
        "placement": SimpleNamespace(node=(0, 1)),
        "inputs": SimpleNamespace(config=LIMITS),
    }
    return SimpleNamespace(
        topology=SimpleNamespace(leader=True, world=2),
        monitor=Monitor(tmp_path, 0, 1, is_terminal=False, stream=io.StringIO()),
        gather=lambda value: [value, *next(calls, [])],
        share=lambda value: value,
        reference=None,
        **{**defaults, **more},
    )


def rows(reward_parts, weights=0):
    """Groups of two responses of two prompt and two response tokens."""
    grades = torch.tensor(reward_parts)
    count = len(grades)
    ids = tuple(SampleId(0, i // 2, i % 2) for i in range(count))
    columns = {
        "length": torch.full((count,), 4),
        "response_length": torch.full((count,), 2),
        "finish": torch.zeros(count, dtype=torch.int8),
        "version": torch.full((count,), 6),
        "weights": torch.full((count,), weights),
        "reward": grades @ torch.tensor(WEIGHTS),
        "reward_parts": grades,
        "kept": torch.ones(count, dtype=torch.int8),
    }
    return Rows(ids, columns)


def measured(tmp_path, reward_parts, transfer, others=(), weights=None, preset="grpo", limit=8):
    found = rows(reward_parts, weights_number(transfer.digest) if weights is None else weights)
    dock = SimpleNamespace(lease=lambda state, ids, deadline: Lease(1, state, found.select(ids)), commit=lambda _: None)
    inputs = SimpleNamespace(
        config=SimpleNamespace(
            monitor=SimpleNamespace(dump_dir=None), rollout=SimpleNamespace(max_response_length=limit)
        ),
        graders=SimpleNamespace(weights=WEIGHTS, names=("math", "length")),
    )
    algorithm = resolve(AlgorithmConfig(algorithm=preset))
    p = parts(tmp_path, others, dock_of_rank=dock, deadline=5.0, inputs=inputs, algorithm=algorithm)
    return reporting.rollout(p, found.ids, 6, transfer)


def test_groups_are_solved_by_grades_and_not_by_totals(tmp_path):
    """Long right answers fall below the sum of the weights, short wrong ones rise above it."""
    right, wrong = [1.0, 4.0], [0.0, -4.0]
    grades = [right, right, right, right, right, wrong, right, right, wrong, wrong]
    found = measured(tmp_path, grades, Transfer(6, 0, 0, 0, 0, 0.0, None)).metrics
    assert found["reward/mean"] == pytest.approx((7 * -1.0 + 3 * 2.0) / 10)
    assert (found["reward/mean/math"], found["reward/mean/length"]) == pytest.approx((0.7, (7 * 4.0 - 3 * 4.0) / 10))
    assert [found[f"groups/{k}"] for k in ("solved", "unsolved", "informative")] == pytest.approx([0.6, 0.2, 0.2])


def test_what_the_penalty_on_length_takes_is_told(tmp_path):
    """DAPO's buffer is the last fifth of the limit: two tokens of ten."""
    moved = Transfer(6, 0, 0, 0, 0, 0.0, None)
    for limit, taken, share in ((2, -1.0, 1.0), (10, 0.0, 0.0)):
        found = measured(tmp_path, [[1.0, 0.0]] * 2, moved, preset="dapo", limit=limit).metrics
        assert (found["reward/overlong"], found["response/overlong"]) == (taken, share) and found["reward/mean"] == 1.0
    assert "reward/overlong" not in measured(tmp_path, [[1.0, 0.0]] * 2, moved).metrics


def test_the_first_failure_of_each_grader_is_told_once(tmp_path, capsys):
    told = set()
    p = parts(tmp_path)
    reporting.failures(p, [{}, {"a": "reward 'a' ran out of time"}, {"a": "another", "b": "reward 'b' raised"}], told)
    reporting.failures(p, [{"a": "a third"}], told)
    lines = [line.split("for the first time in this rollout: ")[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["reward 'a' ran out of time", "reward 'b' raised"]
    reporting.failures(p, [{"a": "a fourth"}], set(), "the evaluation")
    assert "in the evaluation: a fourth" in capsys.readouterr().out


def test_what_a_reshard_moved_is_summed_over_ranks(tmp_path):
    others = [[Transfer(6, 10, 20, 30, 50, 0.5, "d1")]]
    found = measured(tmp_path, [[1.0, 0.0]] * 2, Transfer(6, 1, 2, 3, 60, 0.25, "d1"), others).metrics
    got = {k: v for k, v in found.items() if k.startswith(("reshard/", "weights/", "version"))}
    assert got == {
        "reshard/bytes_copied": 11,
        "reshard/bytes_sent": 22,
        "reshard/bytes_received": 33,
        "reshard/temporary_bytes": 60,
        "reshard/transfer_seconds": 0.5,
        "weights/digest": "d1",
        "version": 6,
    }
    assert all(meaning(name).text for name in found)
    assert "weights/digest" not in measured(tmp_path, [[1.0, 0.0]] * 2, Transfer(6, 1, 2, 3, 60, 0.25, None)).metrics


def test_an_evaluation_asks_the_same(tmp_path, monkeypatch):
    """Greedy answers: three right but long, one wrong but short."""
    graded = [Grade(-1.0, (1.0, 4.0))] * 3 + [Grade(2.0, (0.0, -4.0))]
    prompts = tuple(Prompt((1, 2), f"p{i}", "a", i) for i in range(4))
    inputs = SimpleNamespace(
        config=SimpleNamespace(monitor=SimpleNamespace(eval_pass_k=0)),
        graders=SimpleNamespace(weights=WEIGHTS, grade=lambda items: graded, take_failures=dict),
        decode=str,
        held_out=prompts,
    )
    monkeypatch.setattr(reporting.dist, "all_reduce", lambda tensor, group: None)
    monkeypatch.setattr("mindspeed_rl_plugin.stages.evaluate.generate", answers)
    engine = SimpleNamespace(replica=0, replicas=1, leader=True)
    more = {"engine": engine, "sampling": Sampling(max_tokens=4), "response_seed": 0, "deadline": 5.0, "group": None}
    reporting.evaluation(parts(tmp_path, inputs=inputs, **more), 3)
    assert read_metrics(tmp_path)[0]["eval/accuracy"] == 0.75


def answers(engine, requests, **_):
    return [Completion(id=r.id, tokens=(3,), logps=(0.0,), finish="stop", version=0) for r in requests]


def test_stages_and_throughput_are_those_of_the_slowest_rank(tmp_path):
    slow = {"seconds/update": 7.0, "peak_bytes/update": 900, "seconds/iteration": 8.0}
    moved = [dict.fromkeys(("read", "written", "remote"), 0), {"read": 5, "written": 7, "remote": 3}]
    p = parts(tmp_path, [[({"loss": 99.0}, slow, each)] for each in moved])
    p.dock.traffic.read["update", "tokens", "local"] = 30
    p.dock.traffic.written["generate", "tokens", "remote"] = 200
    p.monitor.stage_metrics = lambda: {"seconds/update": 3.0, "seconds/reward": 2.0, "seconds/iteration": 5.0}
    state = reporting.Rollout({"reward/mean": 0.5}, tokens=320)
    for number in (1, 2):
        reporting.iteration(p, number, state, {"loss": 1.0}, last_step=number == 2)
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
    rows = [["read", "update", "tokens", "local", 30], ["written", "generate", "tokens", "remote", 200]]
    assert line["moved"] == rows
    assert (line["iteration"], line["states"], line["messages"]) == (2, ["a"], 1) and not p.dock.traffic.take()


def test_the_gradient_norms_of_policy_and_critic_are_told_apart():
    assert reporting.of_step(RESULT) == {"grad_norm": 2.0} and reporting.of_step((*RESULT[:5], None)) == {}
    assert reporting.of_step(RESULT, "critic_") == {"critic_grad_norm": 2.0}


def test_every_metric_of_the_update_has_its_line_in_the_register():
    assert all(meaning(name).text for name in reporting.UPDATE_NAMES.values())


class Time:
    at = 100.0

    def __call__(self) -> float:
        return self.at


class LoopOfFakes(iteration.Loop):
    """Stages that take a known time: one rollout of two optimizer steps, evaluations before each and at the end."""

    def __init__(self, tmp_path, monkeypatch) -> None:
        super().__init__()
        self.time, self.done, self.told = Time(), 0, []
        takes = self.takes
        self.parts = parts(
            tmp_path,
            model=None,
            critic=None,
            offloaded=("params",),
            ids=lambda groups: [],
            plan=lambda groups, lengths: 2 * [Step((((SampleId(0, 0, 0),),),))],
            forget=lambda groups: None,
            algorithm=SimpleNamespace(dynamic_sampling=False, ppo_epochs=1, old_logps=True),
            sizes=SimpleNamespace(prompts=1, members=1),
            meet=lambda what: None,
            total_iterations=2,
            iterations_done=lambda: self.done,
            evaluation_due=lambda done: True,
            start_offload=lambda: None,
            finish_offload=lambda: None,
            train_state=SimpleNamespace(
                start_offload=lambda what: None,
                finish_offload=lambda: None,
                onload=lambda what=None: takes(2)() if what else None,
                start_onload=lambda what: None,
            ),
            resharder=SimpleNamespace(to_engine=self.to_engine, release=lambda: None, check_return=takes(0)),
            engine=SimpleNamespace(
                wake=lambda tags: None,
                sleep=lambda: None,
                parameters=dict,
                update_weights=lambda version, digest=None: self.told.append((version, digest)),
            ),
        )
        clock = self.parts.monitor.clock
        clock._now = clock._tick = self.time
        monkeypatch.setattr(iteration, "gathered", lambda model: nullcontext())
        monkeypatch.setattr(reporting, "evaluation", lambda p, done: takes(11)())
        monkeypatch.setattr(reporting, "rollout", lambda p, ids, done, transfer, drawn: self.rolled_out(transfer))
        verdict = {(0, 0): Verdict(False, True, 0.5)}
        self._generate, self._grade, self._advantages = takes(20), lambda: takes(5)() or verdict, takes(1)
        self._per_token = lambda state, *_: takes(4)()

    def takes(self, seconds):
        def spend(*_):
            self.time.at += seconds

        return spend

    def to_engine(self, model, parameters, version):
        self.time.at += 3
        return Transfer(version, 1, 0, 0, 0, 3.0, f"digest {version}")

    def rolled_out(self, transfer):
        self.transfer = transfer
        return reporting.Rollout({}, tokens=640)

    def _open_rollout(self) -> None:
        self.epoch = 0

    def _update(self, done, *_):
        self.steps.pop()
        with self.parts.monitor.stage("update"):
            self.time.at += 6
        reporting.iteration(self.parts, done + 1, self._rollout, {"loss": 1.0}, last_step=not self.steps)
        self.done += 1


def test_evaluations_cost_the_rollout_nothing_and_stay_on_the_timeline(tmp_path, monkeypatch):
    loop = LoopOfFakes(tmp_path, monkeypatch)
    for _ in range(2):
        loop.train_step(None, (), {})
    first, second = read_metrics(tmp_path)
    training = 3 + 20 + 5 + 2 + 4 + 1 + 6  # reshard, generate, reward, swap back, log-probs, advantages, update
    assert (first["seconds/iteration"], first["seconds/evaluate"], first["seconds/reshard"]) == (training, 11, 3)
    # The second evaluation wakes the engine for itself alone.
    assert (second["seconds/iteration"], second["seconds/evaluate"]) == (6, 3 + 11 + 2)
    assert "seconds/reshard" not in second and "seconds/swap_back" not in second
    assert second["tokens_per_second"] == pytest.approx(640 / 2 / (training + 6))
    spans = [(e["stage"], e["end"] - e["start"]) for e in read_events(tmp_path) if e["iteration"] == 2]
    woken = [("reshard", 3), ("transfer", 3), ("evaluate", 16), ("swap_back", 2)]
    assert sorted(spans) == sorted(2 * woken + [("update", 6)])
    assert summarize(tmp_path)["seconds"] == training + 6 + 11 + 16 + 16


def test_the_engine_learns_the_digest_and_the_rollout_its_transfer(tmp_path, monkeypatch):
    loop = LoopOfFakes(tmp_path, monkeypatch)
    loop.train_step(None, (), {})
    assert loop.told == [(0, "digest 0")]
    assert loop.transfer == Transfer(0, 1, 0, 0, 0, 3.0, "digest 0")


def test_rows_that_other_weights_drew_are_found(tmp_path):
    measured(tmp_path, [[1.0, 0.0]] * 2, Transfer(6, 0, 0, 0, 0, 0.0, "d1"))
    with pytest.raises(RuntimeError, match="of weight version 6 was drawn with other weights .* verified, digest d1"):
        measured(tmp_path, [[1.0, 0.0]] * 2, Transfer(6, 0, 0, 0, 0, 0.0, "d1"), weights=0xD2)


def test_dumps_carry_the_name_of_their_run_and_an_earlier_start_is_set_aside(tmp_path):
    run, dumps = tmp_path / "rl", tmp_path / "dumps"
    config = SimpleNamespace(monitor=SimpleNamespace(dump_dir=str(dumps)))
    p = parts(run, inputs=SimpleNamespace(config=config))
    reporting.prepare_dumps(p, -1, resumed=False)
    for epoch in (0, 1):
        dump_file(dumps, epoch).write_bytes(b"")
    check_dumps(dumps, run, resumed=True)
    with pytest.raises(ValueError, match="of another run"):
        check_dumps(dumps, tmp_path / "other", resumed=False)
    reporting.prepare_dumps(p, 0, resumed=True)
    assert list(dump_files(dumps)) == [0]
    reporting.prepare_dumps(p, -1, resumed=False)
    assert list(dump_files(dumps)) == [] and (dumps / "rollout-000000.parquet.old").exists()
