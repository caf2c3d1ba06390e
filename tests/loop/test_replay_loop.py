"""`replay` of real jobs: bit for bit on the same layout, faults in a dump named first, other flags, other layouts."""

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs import Job
from test_episode_loop import CASES, EPISODES
from test_lora_loop import LORA
from test_partial_loop import CARRY, IMPOSED
from test_resume_loop import dapo
from test_routes_loop import REPLAY

from mindspeed_rl_plugin.tools.replay import repeat

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = ("--train-iters", "4", "--rl-rollout-prompts", "8", "--save-interval", "1", "--lr", "3e-3")
ASYNC = ("--rl-schedule", "async", "--rl-generators", "1", "--rl-correction", "truncate")


def recorded(run: Job, iteration: int) -> Path:
    """Run a job, and leave only the checkpoint of one iteration. Returns its SAVE."""
    run.dumping().run()
    for folder in {*run.save.glob("iter_*")} - {run.save / f"iter_{iteration:07d}"}:
        shutil.rmtree(folder)
    return run.save


@pytest.fixture(scope="module")
def save(shared_job) -> Path:
    """Four iterations on two machines, two of each rollout; a checkpoint in the middle of the first rollout."""
    flags = ("--ckpt-format", "torch_dist", "--rl-kl-loss-coef", "0")  # for other layouts: no random reference
    return recorded(shared_job(*STEPS, *flags, agents=2, ranks=1), 1)


@pytest.fixture(scope="module")
def turns(shared_job, long_model) -> Path:
    """The same with episodes, in trees; each turn has its own advantage."""
    flags = ("--rl-algorithm", "reinforce++", "--rl-kl-reward-coef", "0", *EPISODES)
    flags += ("--rl-share-prompts", "--rl-max-tokens-per-microbatch", "512")
    return recorded(shared_job(*STEPS, *flags, name="turns", model=long_model), 1)


@pytest.fixture
def replay(warm_python, monkeypatch, capsys) -> Callable[..., list[str]]:
    """Lines of `replay SAVE --iteration K ...`. Nothing in SAVE changes."""
    monkeypatch.setattr("sys.executable", warm_python)
    for name, value in {"PYTHON_EXEC": warm_python, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)

    def run(save: Path, iteration: int, *more: str, code: int = 0) -> list[str]:
        before = {path: path.stat().st_mtime_ns for path in save.rglob("*")}
        ended, told = repeat.main([str(save), "--iteration", str(iteration), *more]), capsys.readouterr()
        assert ended == code, told.err
        assert code or all(f"rl {done}/" in told.err for done in range(iteration - repeated(told.out), iteration + 1))
        assert {path: path.stat().st_mtime_ns for path in save.rglob("*")} == before
        return (told.err if code else told.out).splitlines()

    return run


def repeated(out: str) -> int:
    """The number of steps that a replay repeats before its iteration."""
    return int(re.search(r"; (\d+) steps in between are repeated", out)[1])


def table(lines: list[str], head: str) -> list[list[str]]:
    """The words of the lines below a line that has `head`, and below the names of its columns."""
    first = next(i for i, line in enumerate(lines) if re.search(head, line))
    end = next((i for i in range(first, len(lines)) if not lines[i]), len(lines))
    return [line.split() for line in lines[first + 2 : end]]


@contextlib.contextmanager
def changed(save: Path, change: Callable[[list[dict]], object]) -> Iterator[None]:
    """Within the context the dump of the second rollout has other rows."""
    path = save / "dump" / "rollout-000002.parquet"
    good, found = path.read_bytes(), pq.read_table(path)
    change(rows := found.to_pylist())
    pq.write_table(pa.Table.from_pylist(rows, schema=found.schema), path)
    try:
        yield
    finally:
        path.write_bytes(good)


def of_sample(lines: list[str]) -> list[float]:
    """Weight of a token, norm of the gradient, share in percent."""
    return [*map(float, re.search(r"loss (\S+); norm of its gradient (\S+), (\S+)% of", "\n".join(lines)).groups())]


def test_the_same_layout_gives_the_recorded_numbers(replay, save):
    """The gradient of one response is that of a step in which no other one is trained, apart from its weight."""
    lines = replay(save, 3, "--sample", "1,2,3")
    assert lines[0] == "iteration 3, from the checkpoint of 1; 1 steps in between are repeated"
    assert re.fullmatch(r"(3\d) of \1 numbers are equal bit for bit", lines[2]), lines[2]
    assert "16 of 16 rows have the advantage of the dump" in lines
    assert table(lines, "^0 have a gap")
    assert {words[-3] for words in table(lines, "^row 1,2,3:")} == {"1.000000"}, "the first step of a rollout"
    weight, norm, _ = of_sample(lines)

    def alone(rows: list[dict]) -> None:
        for row in rows:
            if row["group"] < 4 and (row["group"], row["member"]) != (2, 3):
                row["loss_mask"] = [0 for _ in row["loss_mask"]]

    with changed(save, alone):
        own_weight, own_norm, share = of_sample(replay(save, 3, "--sample", "1,2,3"))
    assert share == 100 and own_weight > weight and norm / weight == pytest.approx(own_norm / own_weight, rel=1e-4)


def test_before_the_first_checkpoint_it_starts_as_the_job_did(replay, save):
    lines = replay(save, 1)
    assert lines[0].startswith("iteration 1, from the job's start (random weights") and repeated(lines[0]) == 0
    assert re.fullmatch(r"(3\d) of \1 numbers are equal bit for bit", lines[2]), lines[2]


def test_other_flags_and_a_sample_of_another_step(replay, save):
    """The second step of a rollout has ratios; the rows of the first one count in no loss of it."""
    lines = replay(save, 4, "--sample", "1,2,3", "--", "--rl-clip-high", "1e-6", "--lr", "1e-5")
    found = {name: float(now) - float(before) for name, before, now, *_ in table(lines, "numbers are")}
    assert found["clip_fraction"] > 0.05 and found["lr"] == 1e-5 - 3e-3
    assert lines[-1].startswith("row 1,2,3 counts in no loss of this iteration")


@pytest.mark.parametrize("fault", ["reward", "stale", "token"])
@pytest.mark.parametrize("kind", ["save", "turns"])
def test_a_fault_in_the_dump_is_named_first(request, replay, kind, fault):
    """With several turns the token may be one of the environment: then the first one of the model after it."""

    def plant(rows: list[dict]) -> None:
        row = next(row for row in rows if row["group"] == 1 and len(row["response_tokens"]) >= 8)
        named.append(f"1,1,{row['member']}")
        sampled.extend(place for place, trained in enumerate(row["loss_mask"]) if trained)
        if fault == "reward":
            row["reward"] = 0.0 if row["reward"] > 0.5 else 1.0
        elif fault == "stale":
            row["logp_rollout"] = [logp + 0.01 for logp in row["logp_rollout"]]
        else:
            row["response_tokens"][3] = (row["response_tokens"][3] + 7) % 90

    named, sampled = list[str](), list[int]()
    with changed(save := request.getfixturevalue(kind), plant):
        lines = replay(save, 3)
    first = re.search(r"the first that differs is (\S+)", lines[2])[1]
    worst, same = table(lines, "have a gap")[0], "16 of 16 rows have the advantage of the dump" in lines
    assert worst[0] == named[0] and same == (fault != "reward")
    if fault == "reward":
        assert first == "reward/mean"
    else:
        assert worst[3] == str(next(place for place in sampled if fault == "stale" or place >= 3))
        assert first == "logp_diff/mean" or fault == "token"


def test_fewer_ranks_give_nearly_the_recorded_numbers(replay, save):
    lines = replay(save, 3, "--ranks", "1")
    assert re.fullmatch(r"(3\d) of \1 numbers are equal within 0.0001", lines[2]), lines[2]


def test_a_job_that_cannot_start_says_why(replay, save):
    first, *lines = replay(save, 3, "--", "--rl-clip-hihg", "1", code=1)
    assert first.startswith("replay: the job ended with status 1") and "--rl-clip-high" in "".join(lines)


@pytest.mark.parametrize("kind", ["carried", "async", "turns, carried", "turns, async", "async, experts, LoRA"])
def test_rollouts_of_several_epochs(replay, job, tmp_path, long_model, moe_model, kind):
    """Groups that dynamic sampling deferred and responses that went on, and rollouts of engines that are apart, which
    tell the experts of each token."""
    flags, more = (dapo(tmp_path, *CARRY), {"script": IMPOSED}) if kind == "carried" else (ASYNC, {})
    if "experts" in kind:
        flags, more = (*ASYNC, *REPLAY, *LORA), {"model": moe_model}
    if "turns" in kind:
        carried = CASES["partial rollouts"] if kind == "turns, carried" else ASYNC
        flags, more = (*EPISODES, *carried, "--rl-algorithm", "reinforce++"), {"model": long_model}
    made = job(*flags, *STEPS, "--train-iters", "6", ranks=2 + ("async" in kind), **more)
    lines = replay(recorded(made, 2), 5)
    assert "async" in kind or max(len(row["segments"]) for row in made.dumped()) > 1, "no response went on"
    assert re.fullmatch(r"(\d+) of \1 numbers are equal bit for bit", lines[2]), lines[2:5]
