"""What a run says when it cannot go on: refusals, a full disk, Ctrl-C; and what torchrun is left with."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mindspeed_rl_plugin import environment
from mindspeed_rl_plugin.checkpoints import checkpoint_files, disk
from mindspeed_rl_plugin.launch import endings

PROCESS = """
import hashlib, io, os, signal, sys, threading, types
from mindspeed_rl_plugin import processes
from mindspeed_rl_plugin.launch import endings

class OfTheUser(Exception):
    pass

args = types.SimpleNamespace(save=sys.argv[2], curr_iteration=6)
endings.watch(args)
kind = sys.argv[1]
if kind != "error":
    sys.stderr = io.StringIO()  # as torch does around an excepthook, to name the rank in every line
if kind == "refused":
    with endings.refusing():
        raise ValueError("--flag 3: too much")
if kind == "interrupted":
    raise KeyboardInterrupt
if kind == "stuck":  # in C, where no exception is raised
    processes.INTERRUPT_SECONDS = 0.1
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
with endings.stopping(args):
    raise OfTheUser("the grader\\nreturned nan")
"""


@pytest.fixture
def ending(tmp_path):
    """`ending(kind, rank)`: exit status, stderr, and what torchrun would read of a process that ends so."""

    def run(kind, rank=0):
        env = {**os.environ, "RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
        command = [sys.executable, "-c", PROCESS, kind, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=100)
        file = tmp_path / "error.json"
        reason = json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"] if file.exists() else None
        return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr, reason=reason)

    return run


def test_a_refusal_is_its_message_alone_an_error_keeps_its_traceback_and_torchrun_hears_of_both(ending, tmp_path):
    done = ending("refused")
    assert done.code == 1 and done.err == "[rl] RL cannot run:\n  - --flag 3: too much\n"
    assert done.reason == "RL cannot run:\n  - --flag 3: too much"
    (tmp_path / "error.json").unlink()
    done = ending("error", rank=3)
    assert done.code == 1 and "Traceback" in done.err
    assert done.out == "[rl] rank 3 stops: OfTheUser: the grader\n[rl] returned nan\n"
    assert done.reason == "rank 3 stops: OfTheUser: the grader\nreturned nan"
    assert ending("refused").reason == done.reason, "the first reason stays"


def test_an_interrupted_run_is_one_line_of_the_first_rank(ending, tmp_path):
    for kind in ("interrupted", "stuck"):
        done = ending(kind)
        assert done.code != 0 and done.err.startswith("\n[rl] interrupted in iteration 7; no checkpoint was saved")
        assert len(done.err.split("\n")) == 3 and done.reason is None
    (tmp_path / checkpoint_files.TRACKER).write_text("5")
    line = endings.interrupted(SimpleNamespace(save=str(tmp_path), curr_iteration=6))
    assert f"the last checkpoint is of iteration 5 in {tmp_path}" in line
    assert ending("interrupted", rank=1).err == ""


def test_a_refusal_is_said_once_a_machine_and_marked_once(monkeypatch):
    waited = []
    monkeypatch.setattr(environment.time, "sleep", waited.append)
    for rank, expected in (("0", []), ("1", [environment.SPEAK_SECONDS] * 2)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(endings.Refusal) as error:
            with endings.refusing(), endings.refusing():
                raise ValueError("too much")
        assert str(error.value) == "RL cannot run:\n  - too much" and waited == expected


def test_every_line_of_a_refusal_is_found_by_its_beginning():
    for text, expected in (
        ("different models: \r\n  theta: 1, 2", "  - different models: theta: 1, 2"),
        ('raised\n    File "x"\n      code\n  (advice)', '  - raised\n      File "x"\n        code\n  - (advice)'),
        ("different models:\n  theta: 1, 2\n  heads: 3, 4", "  - different models:\n  - theta: 1, 2\n  - heads: 3, 4"),
    ):
        with pytest.raises(endings.Refusal) as error, endings.refusing():
            raise ValueError(text)
        assert str(error.value) == f"RL cannot run:\n{expected}"


@pytest.mark.parametrize(
    ("error", "free", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 10**9, True),
        (RuntimeError("basic_ios::clear: iostream error"), 4096, True),
        (RuntimeError("basic_ios::clear: iostream error"), 10**9, False),
        (OSError(errno.EACCES, "Permission denied"), 10**9, False),
        (ValueError("something else"), 0, False),
    ],
    ids=str,
)
def test_a_full_disk_is_named(monkeypatch, capsys, error, free, full):
    sizes = {"out": free, "dumps": 10**12}
    monkeypatch.setattr(disk, "free_bytes", lambda directory: sizes[directory])
    args = SimpleNamespace(save="out", rl_run_dir=None, rl_dump_dir="dumps")
    with pytest.raises(type(error)), endings.stopping(args):
        raise error
    line = capsys.readouterr().out
    assert line.startswith("[rl] rank 0 stops: ") and (f"cannot write to out: {free} bytes free" in line) == full


def test_a_long_error_keeps_its_end(capsys):
    with pytest.raises(ValueError), endings.stopping(None):
        raise ValueError("\n".join(map(str, range(20))))
    lines = capsys.readouterr().out.splitlines()
    expected = ["rank 0 stops: ValueError: 0", *"1234", "  ...", "16", "17", "18", "19"]
    assert lines == [f"[rl] {line}" for line in expected]


def test_space_is_looked_at_before_anything_is_built(monkeypatch, tmp_path):
    args = SimpleNamespace(save=str(tmp_path / "not" / "there"), params_dtype=torch.bfloat16)
    assert list(disk.problems(args, None)) == [] and disk.small_disk(args, 1000) is None
    assert not Path(args.save).exists()
    monkeypatch.setattr(disk, "free_bytes", lambda directory: 4096)
    (line,) = disk.problems(args, None)
    assert line.startswith(f"--save {args.save}: 4096 bytes free")
    assert "0.0 GB free" in disk.small_disk(args, 10**9) and "14.0 GB" in disk.small_disk(args, 10**9)
    monkeypatch.setattr(disk.os, "access", lambda path, mode: False)
    (line,) = disk.problems(args, None)
    assert line.startswith(f"--save {args.save} is not writable")
