"""Trainer and engine in turns: the order in which memory is given up, copied and taken back."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from mindspeed_rl_plugin.forward import Step
from mindspeed_rl_plugin.loop import colocation
from mindspeed_rl_plugin.loop.colocation import Colocation
from mindspeed_rl_plugin.loop.loop import Loop
from mindspeed_rl_plugin.loop.schedules.schedule import SyncSchedule
from mindspeed_rl_plugin.rows import SampleId

ALL = ("params", "grads", "optimizer")


class Recorder:
    """Notes calls of any method as `name.method categories`."""

    def __init__(self, events, name, **returns):
        self._events, self._name, self._returns = events, name, returns

    def __getattr__(self, method):
        def call(*args, **named):
            sets = (",".join(sorted(a)) for a in args if isinstance(a, (set, frozenset, tuple)))
            self._events.append(f"{self._name}.{method} {next(sets, '')}".strip())
            return self._returns.get(method)

        return call


@pytest.fixture
def make(monkeypatch):
    """`make(offloaded, critic)` -> (colocation of recorders, events)."""
    monkeypatch.setattr(colocation, "gathered", lambda model: nullcontext())

    def made(offloaded=ALL, critic=False):
        events = []
        mine = Recorder(events, "critic") if critic else None
        if critic:
            mine.state = Recorder(events, "critic state")
        reshard = Recorder(events, "reshard", to_engine=SimpleNamespace(digest="d"))
        parts = Recorder(events, "state"), mine, Recorder(events, "engine"), reshard
        return Colocation(None, *parts, offloaded, lambda name: nullcontext()), events

    return made


def test_waits_come_in_the_order_of_need(make):
    both, events = make()
    with both.awake(3) as transfer:
        events.append("generate")
    events.append("log-probs")
    assert transfer.digest == "d"
    assert [e for e in events if e != "engine.parameters"] == [
        "state.start_offload grads,optimizer",
        "state.finish_offload",
        "engine.wake weights",
        "state.start_offload params",
        "reshard.to_engine",
        "engine.update_weights",
        "state.finish_offload",
        "engine.wake kv_cache",
        "generate",
        "engine.sleep",
        "state.onload params",
        "reshard.check_return",
        "state.start_onload optimizer",
        "log-probs",
    ]


@pytest.mark.parametrize("offloaded", [ALL, ("optimizer",)])
def test_the_critic_leaves_before_the_engine_wakes_and_is_back_for_its_values(make, offloaded):
    """Out before the engine wakes, which needs its memory; in after the policy, whole."""
    both, events = make(offloaded, critic=True)
    with both.awake(3):
        early = ",".join(sorted(set(offloaded) - {"params"}))
        assert events[:5] == [
            f"state.start_offload {early}",
            f"critic state.start_offload {early}",
            "critic.offload params" if "params" in offloaded else "critic.offload",  # and ends what began to leave
            "state.finish_offload",
            "engine.wake weights",
        ]
        events.append("generate")
    assert [e for e in events if e.startswith(("critic.", "engine.sleep", "reshard.check"))][1:] == [
        "engine.sleep",
        "reshard.check_return",
        "critic.onload",
    ]
    assert events[-1] == "state.start_onload optimizer", "what overlaps the log-probs begins last"


def test_an_evaluation_alone_ends_with_everything_back_and_a_rollout_begins_with_the_optimizer_leaving(make):
    (both, alone), (first, started) = make(), make()
    monitor = SimpleNamespace(stage=lambda name: nullcontext())
    job = SimpleNamespace(plan=None, monitor=monitor, admit=lambda stage: 1 / 0)
    evaluation = SimpleNamespace(run=lambda done: alone.append("evaluate"))
    SyncSchedule(job, None, 0, colocation=both, evaluation=evaluation).evaluate(3)
    assert alone[-1] == "state.onload" and "evaluate" in alone
    with pytest.raises(ZeroDivisionError):
        SyncSchedule(job, {"prompts": None}, 0, colocation=first, evaluation=None).collect(0)
    assert started == ["state.start_offload grads,optimizer"]


def test_a_checkpoint_of_an_offloaded_trainer_is_refused(make):
    both, _ = make()
    both.state = SimpleNamespace(off_device=frozenset({"params", "optimizer"}))
    with pytest.raises(RuntimeError, match="would lack optimizer, params"):
        both.refuse_save()


def test_a_run_ends_without_a_copy_to_the_host(make):
    both, events = make(critic=True)
    both.close()
    assert events == ["state.discard", "critic state.discard", "engine.shutdown"]


@pytest.mark.parametrize(
    "left, done, evaluates, leaves",
    [
        (0, 3, False, True),  # a rollout comes next
        (1, 3, False, False),  # another step of this one
        (0, 9, False, False),  # the last iteration of all
        (0, 9, True, True),  # with an evaluation behind it, for which the engine wakes
    ],
)
def test_the_update_begins_with_everything_back_and_then_the_optimizer_leaves(make, left, done, evaluates, leaves):
    both, events = make()
    step = Step((((SampleId(0, 0, 0),),),))
    steps = [step] * left
    plan = SimpleNamespace(
        steps=[step], groups=(), next_step=lambda rank: (plan.steps.clear() or step.of_rank(rank), 0, True)
    )
    job = SimpleNamespace(
        plan=plan,
        topology=SimpleNamespace(dp_rank=0),
        monitor=SimpleNamespace(
            stage=lambda name: nullcontext(), begin=lambda n: None, clock=SimpleNamespace(trace=SimpleNamespace())
        ),
        due=lambda number: evaluates and number == done + 1,
        forget=lambda groups: None,
    )

    def run(batches, call, **named):
        assert batches == step.of_rank(0) and named == {"done": done, "version": done, "last_pass": True}
        events.append("optimizer step")
        plan.steps.extend(steps)
        return "result", {}

    log = SimpleNamespace(write=lambda *_, **__: events.append("log"))
    schedule = SyncSchedule(job, None, 0, colocation=both, evaluation=None)
    schedule.evaluate = lambda number: events.append("evaluate")
    args = SimpleNamespace(curr_iteration=done, train_iters=10)
    loop = Loop(args, job, schedule, SimpleNamespace(run=run), log, both)
    assert loop.train_step(None) == "result" and loop.trained
    start = ["state.start_offload grads,optimizer"] if leaves else []
    assert events == ["state.onload", "optimizer step", *start, "log", *["evaluate"] * evaluates]
