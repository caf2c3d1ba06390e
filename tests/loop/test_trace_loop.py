"""--rl-trace in a real job: the file of each rank has its stages, and the operators of trainer and engine in them."""

import json

import pytest

pytestmark = pytest.mark.slow


def spans(trace: dict, name: str) -> list[tuple[float, float]]:
    """(begin, end) of the events of a name, in microseconds."""
    events = (e for e in trace["traceEvents"] if e.get("name") == name and e.get("ph") == "X")
    return [(e["ts"], e["ts"] + e["dur"]) for e in events]


def test_stages_hold_the_operators_of_trainer_and_engine(job):
    done = job("--train-iters", "3", "--rl-trace", "2-2", "--rl-trace-ranks", "0", "1").run()
    files = sorted((done.run_dir / "trace").iterdir())
    assert [file.name for file in files] == ["rank0-2-2.json", "rank1-2-2.json"]
    for file in files:
        trace = json.loads(file.read_text())
        ((first, last),) = spans(trace, "generate, iteration 2")
        inside = [begin for begin, end in spans(trace, "aten::mm") if first <= begin and end <= last]
        outside = [begin for begin, end in spans(trace, "aten::mm") if begin > last]
        assert inside and outside, "the engine multiplies while it generates, the trainer afterwards"
        assert spans(trace, "update, iteration 2") and not spans(trace, "update, iteration 3")
        total, counted = sum(end - begin for begin, end in spans(trace, "aten::mm")), {}
        for event in trace["traceEvents"]:
            if event.get("ph") == "X" and event["name"].endswith(", iteration 2"):
                counted[event["name"]] = round(event["dur"] / 1e3)
        print(file.name, "milliseconds:", counted, "aten::mm:", round(total / 1e3))
