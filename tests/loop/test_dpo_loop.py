"""DPO end to end: two ranks, the same launch script, a preference file, no engine."""

import json
import math

import pytest


@pytest.fixture
def dpo(job, arithmetic, tmp_path):
    """A factory of jobs on pairs: the answer of the careful pupil against that of the careless one."""
    for name in ("prompts", "heldout"):
        numbers = [json.loads(line) for line in (arithmetic / f"{name}.jsonl").read_text().splitlines()]
        wrong = ({"rejected": str(int(row["answer"]) - 10), "chosen": row["answer"]} for row in numbers)
        rows = [json.dumps({"prompt": row["prompt"], **w}) for row, w in zip(numbers, wrong, strict=True)]
        (tmp_path / f"{name}-pairs.jsonl").write_text("\n".join(rows))

    def make(*more, **named):
        made = job(*more, **named)
        data = ("--rl-prompt-data", str(tmp_path / "prompts-pairs.jsonl"), "--rl-algorithm", "dpo")
        made.extra = (*data, "--rl-eval-data", str(tmp_path / "heldout-pairs.jsonl"), "--lr", "1e-3", *made.extra)
        command = made.command

        def without_generation(agent, port):
            words = command(agent, port)
            generation = ("--rl-reward", "--rl-samples-per-prompt", "--rl-kv-cache-gb", "--rl-reward-workers")
            for flag in (*generation, "--rl-old-logprobs"):
                at = words.index(flag)
                del words[at : at + 2]
            return words

        made.command = without_generation
        return made

    return make


def test_the_margin_rises_and_the_reference_is_read_from_disk_on_a_resume(dpo):
    """64 pairs, eight a step: twelve steps go through the data one and a half times."""
    run = dpo("--train-iters", "12", "--save-interval", "6", "--rl-eval-every", "6")
    first = run.stop_at(6)
    assert "log-probs of the reference are kept in" in first.log and "pairs per optimizer step" in first.log
    again = run.run()
    assert "training resumes from" in again.log and "log-probs of the reference are read from" in again.log
    lines, held_out = again.metrics, again.evaluations
    assert [line["iteration"] for line in lines] == list(range(1, 13))
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-4) and abs(lines[0]["dpo/margin"]) < 1e-4
    assert all(line["grad_norm"] > 1e-3 for line in lines)
    assert lines[-1]["dpo/margin"] > 0.05 + lines[5]["dpo/margin"] and lines[-1]["loss"] < 0.68
    assert [line["iteration"] for line in held_out] == [0, 6, 12]
    margins = [line["eval/dpo_margin"] for line in held_out]
    assert abs(margins[0]) < 1e-4 and margins[1] < margins[2] and margins[2] > 0.05
    assert held_out[-1]["eval/dpo_accuracy"] > 0.5 and lines[-1]["dpo/accuracy"] > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hinge", "ipo"])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("--tensor-model-parallel-size", "2"), id="TP2"),
        pytest.param(("--pipeline-model-parallel-size", "2", "--micro-batch-size", "4"), id="PP2"),
    ],
)
def test_other_losses_and_layouts(dpo, kind, layout):
    """The margin of the held-out pairs rises; eight new pairs per step say less than chance."""
    result = dpo("--train-iters", "6", "--rl-dpo-loss", kind, *layout).run()
    start = {"hinge": 1.0, "ipo": 25.0}[kind]
    assert result.metrics[0]["loss"] == pytest.approx(start, rel=1e-3)
    before, after = (line["eval/dpo_margin"] for line in result.evaluations)
    assert abs(before) < 1e-4 and after > 0.02
