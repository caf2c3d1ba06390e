"""--rl-trace in real jobs: a rank's stages, with iteration, rollout and weights, are ranges around the operators of
trainer and engine. A trace of Megatron's own profiler has the same ranges."""

import gzip
import json
import re

import pytest

pytestmark = pytest.mark.slow


def spans(path, name: str) -> dict[str, list[tuple[float, float]]]:
    """(begin, end) in microseconds of the events of each name that matches."""
    found: dict[str, list[tuple[float, float]]] = {}
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for event in json.loads(text)["traceEvents"]:
        if event.get("ph") == "X" and re.fullmatch(name, event["name"]):
            found.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    return found


def test_stages_hold_the_operators_of_trainer_and_engine(job, tmp_path):
    profile = ("--profile", "--use-pytorch-profiler", "--profile-step-start", "1", "--profile-step-end", "3")
    profile += ("--profile-ranks", "1", "--tensorboard-dir", str(tmp_path / "profile" / "tensorboard"))
    done = job("--train-iters", "4", "--rl-trace", "2-2", "--rl-trace-ranks", "0", *profile).run()
    (file,) = (done.run_dir / "trace").iterdir()
    assert file.name == "rank0-2-2.json"
    stages, products = spans(file, r".*, iteration \d+.*"), spans(file, "aten::mm")["aten::mm"]
    assert {"generate, iteration 2, rollout 1, weights 1", "update, iteration 2, rollout 1, weights 1"} <= {*stages}
    assert all(name.endswith(", iteration 2, rollout 1, weights 1") for name in stages)
    ((first, last),) = stages["generate, iteration 2, rollout 1, weights 1"]
    assert any(first <= begin and end <= last for begin, end in products), "the engine multiplies while it generates"
    assert any(begin > last for begin, _ in products), "and the trainer afterwards"
    milliseconds = {name: [round((end - begin) / 1e3) for begin, end in found] for name, found in stages.items()}
    print(file.name, milliseconds, "aten::mm:", round(sum(end - begin for begin, end in products) / 1e3))
    (of_megatron,) = (tmp_path / "profile").rglob("*.json*")  # where it is depends on Megatron's version
    assert "update, iteration 2, rollout 1, weights 1" in spans(of_megatron, "update, .*")


def test_a_generator_that_is_a_rank(job):
    flags = ("--rl-schedule", "async", "--rl-generators", "1", "--rl-correction", "truncate", "--train-iters", "4")
    done = job(*flags, "--rl-trace", "2-3", "--rl-trace-ranks", "0", "1").run()
    trainer, generator = (done.run_dir / "trace" / f"rank{rank}-2-3.json" for rank in (0, 1))
    assert "update, iteration 3, rollout 2, weights 2" in spans(trainer, "update.*")
    steps = spans(generator, r"generate.*")
    assert steps and all(re.fullmatch(r"generate, weights [12], rollout \d+(, \d+)*", name) for name in steps), steps
