"""`replay` of real jobs: bit for bit on the same layout, faults in a dump named first, other flags, other layouts."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_partial_loop import CARRY

from mindspeed_rl_plugin.tools.replay import repeat

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
GRADER = (
    "def grade(prompt, response, answer):\n    return sum(map(ord, response)) % 5 / 4 if ord(prompt[0]) % 2 else 1\n"
)
STEPS = ("--train-iters", "4", "--rl-rollout-prompts", "8", "--save-interval", "1", "--lr", "3e-3")
ASYNC = ("--rl-schedule", "async", "--rl-generators", "1", "--rl-correction", "truncate")


def begin_at(save: Path, iteration: int) -> Path:
    """Leave only the checkpoint of one iteration."""
    for folder in save.glob("iter_*"):
        if folder.name != f"iter_{iteration:07d}":
            shutil.rmtree(folder)
    return save


@pytest.fixture(scope="module")
def save(shared_job) -> Path:
    """Four iterations, two of each rollout; a checkpoint in the middle of the first rollout."""
    flags = ("--ckpt-format", "torch_dist", "--rl-kl-loss-coef", "0")  # for other layouts: no random reference
    made = shared_job(*STEPS, *flags, name="recorded").dumping()
    made.run()
    return begin_at(made.save, 1)


@pytest.fixture
def replay(warm_python, monkeypatch, capsys) -> Callable[..., list[str]]:
    """Lines of `replay SAVE --iteration K ...`. Nothing in SAVE changes."""
    monkeypatch.setattr("sys.executable", warm_python)
    for name, value in {"PYTHON_EXEC": warm_python, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)

    def files(save: Path) -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in save.rglob("*")}

    def run(save: Path, iteration: int, *more: str, code: int = 0) -> list[str]:
        before = files(save)
        ended = repeat.main([str(save), "--iteration", str(iteration), *more])
        told = capsys.readouterr()
        assert ended == code, told.err
        assert files(save) == before, "a replay writes nothing of the job"
        return (told.err if code else told.out).splitlines()

    return run


def table(lines: list[str], head: str) -> list[list[str]]:
    """The words of the lines below a line that has `head`, and below the names of its columns."""
    first = next(i for i, line in enumerate(lines) if re.search(head, line))
    end = next((i for i in range(first, len(lines)) if not lines[i]), len(lines))
    return [line.split() for line in lines[first + 2 : end]]


def difference(lines: list[str], name: str) -> float:
    (words,) = (words for words in table(lines, "numbers are") if words[0] == name)
    return abs(float(words[1]) - float(words[2]))


def test_the_same_layout_gives_the_recorded_numbers(replay, save):
    lines = replay(save, 3, "--sample", "1,2,3")
    assert lines[0] == "iteration 3, from the checkpoint of 1; 1 steps in between are repeated"
    assert re.fullmatch(r"(3\d) of \1 numbers are the recorded ones, bit for bit", lines[2]), lines[2]
    assert "16 of 16 rows have the advantage of the dump" in lines
    assert any(line.startswith("worst tokens: 0 of ") for line in lines)
    (norm, share), tokens = (
        re.search(r"gradient (\S+), (\S+)% of", "\n".join(lines)).groups(),
        table(lines, "^row 1,2,3:"),
    )
    assert float(norm) > 1e-3 and float(share) > 1 and len(tokens) >= 1
    assert {words[-2] for words in tokens} == {"1.000000"}, "the first step of a rollout"


def test_other_flags_and_a_sample_of_another_step(replay, save):
    """The second step of a rollout has ratios; the rows of the first one count in no loss of it."""
    lines = replay(save, 4, "--sample", "1,2,3", "--", "--rl-clip-high", "1e-6", "--rl-clip-low", "1e-6")
    assert difference(lines, "clip_fraction") > 0.1 and difference(lines, "lr") == 0
    assert any(line.startswith("row 1,2,3 counts in no loss of this iteration") for line in lines)


@pytest.mark.parametrize("fault", ["reward", "stale", "token"])
def test_a_fault_in_the_dump_is_named_first(replay, save, tmp_path, fault):
    path = save / "dump" / "rollout-000002.parquet"
    kept = shutil.copy(path, tmp_path)
    rows, schema = (found := pq.read_table(path)).to_pylist(), found.schema
    at = next(i for i, row in enumerate(rows) if row["group"] < 4 and len(row["response_tokens"]) == 8)
    row, of = rows[at], ",".join(str(rows[at][name]) for name in ("epoch", "group", "member"))
    if fault == "reward":
        row["reward"] = 0.0 if row["reward"] > 0.5 else 1.0
    elif fault == "stale":
        row["logp_rollout"] = [logp + 0.01 for logp in row["logp_rollout"]]
    else:
        row["response_tokens"][3] = (row["response_tokens"][3] + 7) % 90
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    lines = replay(save, 3)
    shutil.move(kept, path)
    first = re.search(r"the first other one is (\S+)", lines[2])[1]
    if fault == "reward":
        assert first == "reward/mean" and table(lines, "rows have the advantage")[0][0] == of
    else:
        assert "16 of 16 rows have the advantage of the dump" in lines
        assert table(lines, "^worst tokens: [1-8] of")[0][:2] == [of, "0" if fault == "stale" else "3"]
        assert first.startswith("logp_diff") if fault == "stale" else not first.startswith("reward")


def test_fewer_ranks_give_nearly_the_recorded_numbers(replay, save):
    lines = replay(save, 3, "--ranks", "1")
    assert re.fullmatch(r"(3\d) of \1 numbers are the recorded ones, within 0.0001", lines[2]), lines[2]
    assert max(difference(lines, name) for name in ("loss", "grad_norm", "entropy")) < 1e-4


def test_a_job_that_cannot_start_says_why(replay, save):
    lines = replay(save, 3, "--", "--rl-clip-hihg", "1", code=1)
    assert lines[0].startswith("replay: the job ended with status 1") and any(
        "--rl-clip-high" in line for line in lines
    )


@pytest.mark.parametrize("kind", ["carried", "async"])
def test_rollouts_of_several_epochs(replay, job, tmp_path, kind):
    """Groups that dynamic sampling deferred and responses that went on, and rollouts of engines that are apart."""
    grader = tmp_path / "grader.py"
    grader.write_text(GRADER)
    dapo = ("--rl-algorithm", "dapo", "--rl-reward", f"{grader}:grade", *CARRY)
    made = job(*(dapo if kind == "carried" else ASYNC), *STEPS, "--train-iters", "6", ranks=2 + (kind == "async"))
    made.dumping().run()
    lines = replay(begin_at(made.save, 2), 5)
    assert re.fullmatch(r"(\d+) of \1 numbers are the recorded ones, bit for bit", lines[2]), lines[2:5]
