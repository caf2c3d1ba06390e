"""One `--save` has one job: who owns it, whether it lives, and who comes after it."""

import json
import os
import re
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
from commands import until

from mindspeed_rl_plugin.launch import one_job
from mindspeed_rl_plugin.processes import began


@pytest.fixture
def save(tmp_path, monkeypatch):
    """A directory, of which this test's process lets go at the end."""
    ending = []
    monkeypatch.setattr(one_job, "_over", threading.Event())
    monkeypatch.setattr(one_job, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(one_job.atexit, "register", lambda *call: ending.append(call))
    (tmp_path / "rl").mkdir()
    yield tmp_path
    for function, *arguments in ending:
        function(*arguments)


def owned(save, process: int, machine: str = "") -> None:
    owner = {"machine": machine or one_job.machine(), "process": process, "began": began(process)}
    owner |= {"name": f"a job, process {process} on node7", "since": "yesterday", "launch": "a"}
    (save / "rl" / one_job.FILE).write_text(json.dumps(owner))


def owner(save) -> int:
    return json.loads((save / "rl" / one_job.FILE).read_text())["process"]


def test_a_second_job_is_refused_while_the_first_lives_and_takes_over_when_it_is_dead(save, capsys) -> None:
    first = subprocess.Popen(["sleep", "100"])
    owned(save, first.pid)
    text = f"--save {save} belongs to a job, process {first.pid} on node7 since yesterday, which runs: .* other's check"
    with pytest.raises(ValueError, match=re.escape(text).replace(r"\.\*", ".*").replace(r"\ ", " ")):
        one_job.own(str(save))
    assert owner(save) == first.pid
    first.kill()
    first.wait()
    one_job.own(str(save))
    one_job.own(str(save))
    said = f"its owner, a job, process {first.pid} on node7 since yesterday, is gone; this job takes it over\n"
    assert owner(save) == os.getpid() and capsys.readouterr().out == f"[rl] --save {save}: {said}"


def test_of_another_machine_the_heartbeat_tells(save, monkeypatch, capsys) -> None:
    path = save / "rl" / one_job.FILE
    monkeypatch.setattr(one_job, "DEAD_SECONDS", 2.0)
    owned(save, 1, "another")
    os.utime(path, (time.time() - 500,) * 2)
    one_job.own(str(save))
    assert (
        owner(save) == os.getpid()
        and "(last sign of life 500 s ago) since yesterday, is gone" in capsys.readouterr().out
    )
    one_job._over.set()
    owned(save, 1, "another")
    beats = threading.Timer(0.2, os.utime, [path])
    beats.start()
    with pytest.raises(ValueError, match="process 1 on node7 since yesterday, which runs"):
        one_job.own(str(save))
    assert "last sign of life 0 s ago; if none follows in 2 s this job takes it over" in capsys.readouterr().out
    one_job.own(str(save))
    assert owner(save) == os.getpid(), "it was silent"
    owned(save, 1, "another")
    monkeypatch.setattr(one_job, "launch_name", lambda: "a")
    monkeypatch.setattr(one_job, "DEAD_SECONDS", 60.0)
    began_at = time.monotonic()
    one_job.own(str(save))
    assert owner(save) == os.getpid() and time.monotonic() - began_at < 30, "torchrun has started the job again"


def test_the_owner_beats_until_it_ends_and_ends_where_another_has_taken_over(save, monkeypatch, capfd) -> None:
    path, ended = save / "rl" / one_job.FILE, threading.Event()
    monkeypatch.setattr(one_job, "os", SimpleNamespace(**vars(os) | {"_exit": lambda code: ended.set()}))
    one_job.own(str(save))
    for cleaned_up in (False, True):
        before = path.stat().st_mtime_ns
        path.unlink() if cleaned_up else None
        until(lambda before=before: path.exists() and path.stat().st_mtime_ns > before)
    owned(save, 1, "another")
    assert ended.wait(10)
    assert (
        f"--save {save} was taken over by a job, process 1 on node7 since yesterday, so this" in capfd.readouterr().err
    )
    one_job._leave(path, {"machine": "mine", "process": 2, "began": 3})
    assert owner(save) == 1, "what another owns stays"


@pytest.mark.parametrize("text", ["", "[]", '{"machine": "m"}'])
def test_a_file_that_names_no_job_is_refused_by_its_name(save, text) -> None:
    (path := save / "rl" / one_job.FILE).write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{path} names no job; remove it")):
        one_job.own(str(save))
    path.unlink()
    one_job.own(str(save))
    path.write_text(text)  # neither the heartbeat nor the end is stopped by it
