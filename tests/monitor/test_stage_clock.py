"""Stage events: times, peaks of nested stages, failures, resume."""

import pytest

from mindspeed_rl_plugin.monitor.run_files import event_files, read_events, read_jsonl
from mindspeed_rl_plugin.monitor.stage_clock import StageClock, drop_foreign_events

pytestmark = pytest.mark.quick


def clock_at(tmp_path, time, **kwargs):
    return StageClock(tmp_path, kwargs.pop("rank", 0), now=time, tick=time, **kwargs)


def test_a_stage_is_one_line_with_its_times_and_peak(tmp_path, time, meter):
    clock = clock_at(tmp_path, time, meter=meter, rank=3)
    clock.begin(7)
    with clock.stage("generate"):
        meter.use(500)
        time.at += 2
        meter.use(100)
    with clock.stage("update"):
        time.at += 1
    assert read_jsonl(tmp_path / "events-rank3.jsonl") == [
        {"iteration": 7, "stage": "generate", "rank": 3, "start": 100.0, "end": 102.0, "peak_bytes": 500},
        {"iteration": 7, "stage": "update", "rank": 3, "start": 102.0, "end": 103.0, "peak_bytes": 100},
    ]


def test_nested_stages_each_see_the_peak_of_their_own_span(tmp_path, time, meter):
    clock = clock_at(tmp_path, time, meter=meter)
    with clock.stage("outer"):
        meter.use(900)
        meter.use(50)
        with clock.stage("inner"):
            meter.use(300)
            meter.use(50)
        with clock.stage("second"):
            meter.use(60)
    peaks = {e["stage"]: e["peak_bytes"] for e in read_events(tmp_path)}
    assert peaks == {"inner": 300, "second": 60, "outer": 900}


def test_metrics_add_repeated_stages_and_leave_evaluation_out_of_the_iteration(tmp_path, time, meter):
    """What is done for an evaluation alone is evaluation, and still an event."""
    clock = clock_at(tmp_path, time, meter=meter)
    clock.begin(1)
    for level in (10, 30, 20):
        with clock.stage("update"):
            meter.use(level)
            time.at += 1.5
        meter.use(0)
    with clock.stage("evaluate"):
        time.at += 1
        with clock.stage("reshard"):
            meter.use(70)
            time.at += 3
        meter.use(0)
    with clock.stage("reshard"):
        time.at += 1
    time.at += 0.5
    assert clock.metrics() == {
        "seconds/update": 4.5,
        "seconds/evaluate": 4.0,
        "seconds/reshard": 1.0,
        "seconds/iteration": 6.0,
        "peak_bytes/update": 30,
        "peak_bytes/evaluate": 70,
        "peak_bytes/reshard": 0,
    }
    events = [(e["stage"], e["end"] - e["start"]) for e in read_events(tmp_path)]
    assert events == [("update", 1.5)] * 3 + [("evaluate", 4), ("reshard", 3), ("reshard", 1)]
    clock.begin(2)
    assert clock.metrics() == {"seconds/iteration": 0.0}


def test_a_stage_waits_for_the_device_and_one_that_raises_is_recorded_with_the_error(tmp_path, time):
    """Work that is queued on the device is booked where it was launched; a device that failed is not waited for."""

    def synchronize():
        time.at += 3

    clock = clock_at(tmp_path, time, synchronize=synchronize)
    with clock.stage("update"):
        pass
    with pytest.raises(KeyError):
        with clock.stage("reward"):
            time.at += 1
            raise KeyError("x")
    update, reward = read_events(tmp_path)
    assert reward | {"failed": "KeyError", "peak_bytes": None} == reward
    assert clock.metrics() | {"seconds/update": 3.0, "seconds/reward": 1.0} == clock.metrics()


def test_resume_keeps_what_the_checkpoint_holds(tmp_path, time):
    clock = clock_at(tmp_path, time)
    for k in (1, 2, 3):
        clock.begin(k)
        with clock.stage("update"):
            time.at += 1
    clock.close()
    with open(tmp_path / "events-rank0.jsonl", "a") as f:
        f.write('{"iteration": 3, "sta')  # the line that a kill cut
    resumed = clock_at(tmp_path, time, resume_iteration=2)
    assert [e["iteration"] for e in read_events(tmp_path)] == [1, 2]
    assert resumed.iteration == 2
    resumed.begin(3)
    with resumed.stage("update"):
        pass
    assert [e["iteration"] for e in read_events(tmp_path)] == [1, 2, 3]


def test_ranks_that_the_run_no_longer_has_are_trimmed_too(tmp_path, time):
    for rank in (0, 1, 11):
        clock = clock_at(tmp_path, time, rank=rank)
        for k in (1, 2):
            clock.begin(k)
            with clock.stage("update"):
                pass
        clock.close()
    drop_foreign_events(tmp_path, world_size=1, resume_iteration=1)
    assert list(event_files(tmp_path)) == [0, 1, 11]
    assert [(e["rank"], e["iteration"]) for e in read_events(tmp_path)] == [(0, 1), (0, 2), (1, 1), (11, 1)]
    drop_foreign_events(tmp_path, world_size=1, resume_iteration=0)
    assert list(event_files(tmp_path)) == [0]
