"""The metrics of a job in the trackers that Megatron itself was set to use, read back from what they stored."""

import json
import struct
from pathlib import Path

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from mindspeed_rl_plugin.monitor.monitor import Monitor

BLOCK = 32 << 10
SLOW = Path(__file__).with_name("slow_grader.py")
ASYNC = "--rl-schedule async --rl-generators 1 --rl-correction truncate --rl-reward-workers 6"


@pytest.mark.slow
def test_trackers_get_every_number(job, tmp_path, monkeypatch):
    """Megatron's own flags; W&B offline, for which no account is needed. The first evaluation is late."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "late.jsonl").write_text('{"prompt": "1+1=", "answer": "late"}\n' * 2)
    where = ("--wandb-project", "rl", "--wandb-exp-name", "grpo", "--wandb-save-dir", str(tmp_path))
    board = ("--tensorboard-dir", str(tmp_path / "board"))
    data = ("--rl-eval-data", f"{tmp_path}/late.jsonl", "--rl-reward", f"{SLOW}:grade", "--rl-reward-timeout", "60")
    result = job("--train-iters", "4", "--rl-eval-every", "2", *where, *board, *data, *ASYNC.split()).run()
    check_wandb(tmp_path, result.metrics, result.evaluations)
    check_board(tmp_path / "board", result.metrics, result.evaluations)
    assert [e["iteration"] for e in result.evaluations] == [0, 2, 4]
    assert result.evaluations[0]["time"] > result.metrics[0]["time"]


def test_an_evaluation_that_is_late_is_logged_too(tmp_path, capsys):
    """In the order of an asynchronous run: Megatron logs behind the plugin, under the same step. Of those that end
    behind the plugin's last line W&B has the newest, and that is said."""
    run = wandb.init(project="rl", dir=tmp_path, mode="offline", settings=wandb.Settings(silent=True))
    board, late = SummaryWriter(tmp_path / "board"), {1: [0], 4: [2], 5: [3, 4]}
    monitor = Monitor(tmp_path / "rl", 0, 1, wandb=wandb, tensorboard_writer=board, is_terminal=False)
    for iteration in range(1, 6):
        monitor.begin(iteration)
        for version in late.get(iteration, ()):
            monitor.log_eval(version, {"accuracy": version / 8})
        monitor.log(iteration, {"loss": iteration / 4})
        wandb.log({"learning-rate": 0.5}, iteration)
    monitor.log_eval(5, {"accuracy": 0.75})
    for writer in (monitor, board):
        writer.close()
    run.finish()
    wandb.teardown()  # what holds the file ends
    lines = [json.loads(line) for line in (tmp_path / "rl" / "metrics.jsonl").read_text().splitlines()]
    metrics, evaluations = ([line for line in lines if line["kind"] == kind] for kind in ("train", "eval"))
    check_board(tmp_path / "board", metrics, evaluations)
    rows = check_wandb(tmp_path, metrics, [e for e in evaluations if e["iteration"] != 4])
    assert [rows[step]["learning-rate"] for step in range(1, 6)] == [0.5] * 5
    assert "[rl] W&B lacks an evaluation before iteration 5; see metrics.jsonl" in capsys.readouterr().out


def check_wandb(folder: Path, metrics: list[dict], evaluations: list[dict]) -> dict[int, dict]:
    """Every line is there, those of evaluations by the iteration of their own. Returns what was logged by step."""
    seen, evaluated = {}, {}
    for row in history(next(folder.rglob("*.wandb"))):
        seen.setdefault(row["_step"], {}).update(row)
        evaluated.setdefault(row.get("rl/eval/iteration"), {}).update(row)
    for line, rows in [*((line, seen) for line in metrics), *((line, evaluated) for line in evaluations)]:
        numbers = {f"rl/{k}": v for k, v in line.items() if isinstance(v, float) and k != "time"}
        assert numbers and {k: rows[line["iteration"]].get(k) for k in numbers} == pytest.approx(numbers)
    return seen


def check_board(folder: Path, metrics: list[dict], evaluations: list[dict]) -> None:
    board = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    board.Reload()
    for name, lines in (("loss", metrics), *((n, evaluations) for n in evaluations[0] if n.startswith("eval/"))):
        points = {event.step: event.value for event in board.Scalars(f"rl/{name}")}
        assert points == pytest.approx({line["iteration"]: line[name] for line in lines})


def history(file: Path) -> list[dict]:
    """Rows that wandb logged to its offline file."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for data in records(file.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("history"):
            items = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            rows.append({**items, "_step": record.history.step.num})
    return rows


def records(data: bytes) -> list[bytes]:
    """Payloads of a log in LevelDB's format: blocks of 32 KiB, each piece behind its checksum, length and kind."""
    values, at = [], 7  # wandb's own header comes first
    while at + 7 <= len(data):
        if (left := -at % BLOCK) and left < 7:  # a header is never split
            at += left
        size, kind = struct.unpack_from("<HB", data, at + 4)
        piece = data[at + 7 : at + 7 + size]
        if kind in (1, 2):  # whole, or the first piece
            values.append(piece)
        elif kind in (3, 4):
            values[-1] += piece
        at += 7 + size
    return values
