"""The story of a job that hangs: whom it names, by the status files of the processes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from mindspeed_rl_plugin.processes import began, machine, state_of
from mindspeed_rl_plugin.status import status_file, story
from mindspeed_rl_plugin.status.status_file import FILE_BYTES
from mindspeed_rl_plugin.tools.doctor.doctor import main

pytestmark = pytest.mark.quick

FAR = "far 12345678 1:2"  # another machine
COLLECTIVE = ("a collective of the job", "ranks", 90)


class Job:
    """Status files in a folder, as processes of several machines write them."""

    def __init__(self, save):
        self.save, self.folder = str(save), status_file.folder_of(str(save))
        self.folder.mkdir(parents=True)

    def add(self, name, *doing, silent=0.0, where=FAR, process=(1, 1), ended="", **facts):
        """doing: (what, whom, for how many seconds) of the main thread; silent: seconds since the last write."""
        status = dict(name=name, ranks=2, signal="none", machine=where, process=process[0], began=process[1])
        status |= dict(ended=ended, said="", threads=[doing], facts=facts)
        path = self.folder / name.replace(" ", "-")
        path.write_bytes(json.dumps(status).encode().ljust(FILE_BYTES))
        os.utime(path, (time.time() - silent,) * 2)
        return self

    @property
    def first(self):
        return story.tell(self.folder).splitlines()[0]


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def test_who_gives_no_sign_of_life_is_late_first(job):
    job.add("rank 0", ("update", "", 95), COLLECTIVE).add("rank 1", ("reward", "", 3), silent=90)
    assert job.first == "late first: rank 1 on far: no sign of life for 90 s; its last status: reward for 93 s"


def test_who_failed_is_late_first_and_who_left_in_order_is_not(job):
    job.add("rank 0", COLLECTIVE).add("rank 1", silent=50, ended="ValueError: no\nmore")
    job.add("generator rank 2", silent=99, ended="in order")
    assert job.first.startswith("late first: rank 1 on far: ended: ValueError: no")


def test_a_network_between_two_that_live(job):
    job.add("rank 0", COLLECTIVE, links=[("rank 1", 21.0)]).add("rank 1", COLLECTIVE, where="near 1 1:1")
    assert job.first == "late first: the network between rank 0 on far and rank 1 on near"


def test_a_grader_for_which_a_rank_waits(job):
    job.add("rank 0", ("reward", "", 60), calls=[("a reward worker of slow", 58.0)]).add("rank 1", COLLECTIVE)
    assert job.first == "late first: a reward worker of slow for 58 s, for which rank 0 waits"


def test_an_engine_without_a_report_and_what_else_is_known(job):
    """Facts are told, the longest first; they name an engine and a call as late after a time, but no groups."""
    engines = [("the engine a, silent", 1.0), ("the engine b, silent", 31.0)]
    job.add("rank 0", COLLECTIVE, at=[("weights 3", 0)], engines=engines, calls=[("x", 4)] * 9)
    job.add(
        "rank 1", COLLECTIVE, at=[("weights 3", 0)], groups=[("generate 3, the first, group 1 of rollout 0,", 90.0)]
    )
    job.add("rank 2", COLLECTIVE, at=[("weights 2", 0)])
    assert story.tell(job.folder).splitlines() == [
        "late first: the engine b, silent for 31 s, for which rank 0 waits",
        "  rank 0 to rank 1 (far, weights 3): a collective of the job for 90 s, waits for ranks",
        "  rank 2 (far, weights 2): a collective of the job for 90 s, waits for ranks",
        "  groups: generate 3, the first, group 1 of rollout 0, for 90 s",
        "  engines: the engine b, silent for 31 s; the engine a, silent for 1 s",
        "  calls: " + "x for 4 s; " * 6 + "and 3 more",
    ]


def test_a_server_that_a_thread_asks(job):
    job.add("rank 0", ("a response", "the server at URL", 44)).add("rank 1", COLLECTIVE)
    assert job.first == "late first: the server at URL, for which rank 0 waits (a response)"


def test_the_rank_that_works_while_the_others_wait(job):
    job.add("rank 0", ("update", "", 95), COLLECTIVE).add("rank 1", ("logp_old", "", 94))
    assert job.first == "late first: rank 1 on far: logp_old for 94 s"


def test_the_rank_that_stays_in_a_stage_while_nobody_says_for_whom_it_waits(job):
    """A collective of Megatron's own hangs."""
    for rank in range(3):
        job.add(f"rank {rank}", ("update", "", 300))
    job.add("rank 3", ("logp_old", "", 330))
    assert job.first == "late first: rank 3 on far: logp_old for 330 s, while other ranks are in another stage"
    job.add("rank 3", ("update", "", 301))
    assert job.first.startswith("no process is late, as far as the status files show; `doctor --job SAVE --stacks`")
    job.add("rank 3", ("logp_old", "", 2))
    for rank in range(3):
        job.add(f"rank {rank}", ("update", "", 1))
    assert job.first.startswith("no process is late"), "stages begin at about the same time"


def test_a_rank_that_never_wrote(job):
    job.add("rank 0", COLLECTIVE)
    assert job.first == "late first: rank 1, which has not written a status here"


def test_clocks_of_machines_may_differ_by_an_hour(job, monkeypatch):
    job.add("rank 0", ("generate", "", 40)).add("rank 1", ("generate", "", 20), COLLECTIVE)
    monkeypatch.setattr(time, "time", lambda: 3600.0)
    assert "rank 0 (far): generate for 40 s" in story.tell(job.folder)
    assert "rank 1 (far): in generate; a collective of the job for 90 s, waits for ranks" in story.tell(job.folder)


def test_thousands_of_ranks_are_a_few_lines(job):
    for rank in range(1000):
        job.add(f"rank {rank}", ("update", "", 60), COLLECTIVE)
    job.add("rank 421", ("update", "", 60), silent=44)
    text = story.tell(job.folder)
    assert text.startswith("late first: rank 421 on far") and "  rank 0 to rank 420 (far): in update;" in text
    assert len(text.splitlines()) < 20


def test_a_process_of_this_machine_that_a_signal_stops_or_kills(job):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        mine = dict(where=machine(), process=(child.pid, began(child.pid)))
        job.add("rank 0", COLLECTIVE).add("rank 1", ("update", "", 9), **mine)
        assert ": update for 9 s" in job.first
        child.send_signal(signal.SIGSTOP)
        while "stopped by a signal" not in job.first:
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    assert "its process does not exist any more" in job.first


def test_a_process_of_this_machine_that_runs_without_a_status_comes_after_all_that_name_somebody(job):
    """Code that holds Python's lock writes none."""
    mine = dict(where=machine(), process=(os.getpid(), began(os.getpid())))
    job.add("rank 0", ("reward", "", 60), calls=[("a reward worker of slow", 58.0)])
    job.add("rank 1", COLLECTIVE, silent=44, **mine)
    assert job.first == "late first: a reward worker of slow for 58 s, for which rank 0 waits"
    job.add("rank 0", COLLECTIVE).add("rank 1", ("update", "", 9), silent=44, **mine)
    runs = "(it runs, but has written no status for 44 s)"
    assert job.first.endswith(f": update for 53 s {runs}")
    job.add("rank 0", silent=1).add("rank 1", silent=44, **mine)
    assert job.first.endswith(f": between two stages {runs}")


def run_in_child(save, code):
    """Run code in a process with a status file of `save`."""
    start = f"from mindspeed_rl_plugin.status import status_file\nstatus_file.begin({save!r}, 'rank 0', 1, 'SIGUSR2')\n"
    return subprocess.Popen([sys.executable, "-c", start + code], stdout=subprocess.PIPE, text=True)


def test_the_stacks_of_a_process_that_hangs(tmp_path, capsys):
    code = "import time\ndef the_hanging_one():\n    print('up', flush=True)\n    time.sleep(60)\nthe_hanging_one()"
    child = run_in_child(str(tmp_path), code)
    try:
        assert child.stdout.readline() == "up\n"
        assert main(["--job", str(tmp_path), "--stacks"]) == 0
        assert "in the_hanging_one" in capsys.readouterr().out
        assert main(["--job", str(tmp_path), "--stacks"]) == 0  # it runs on, and can be asked again
        assert capsys.readouterr().out.count("in the_hanging_one") == 1
        child.send_signal(signal.SIGSTOP)
        while state_of(child.pid, began(child.pid)) != "stopped":
            time.sleep(0.01)
        assert main(["--job", str(tmp_path), "--stacks"]) == 0
        assert f"kill -CONT {child.pid}" in capsys.readouterr().out
    finally:
        child.kill()
        child.wait()


def test_what_a_process_writes_at_its_end(tmp_path):
    code = "from mindspeed_rl_plugin.environment import last_words\nlast_words('why it stops')\nimport os; os._exit(1)"
    run_in_child(str(tmp_path), code).wait()
    assert "rank 0" in story.tell(status_file.folder_of(str(tmp_path)))
    assert "ended: why it stops" in story.tell(status_file.folder_of(str(tmp_path)))


def test_at_a_deadline_the_first_process_tells_and_the_others_name_the_file(job, monkeypatch):
    job.add("rank 0", COLLECTIVE).add("rank 1", silent=90)
    monkeypatch.setattr(story, "own_folder", lambda: job.folder)
    first, second = story.at_deadline(), story.at_deadline()
    assert first.startswith("late first: rank 1") and second == f"where each process was: {job.folder / 'story.txt'}"
    assert (job.folder / "story.txt").read_text() == first
    assert job.first.startswith("late first: rank 1")  # the story's file is no process


def test_a_long_status_keeps_what_each_thread_does(tmp_path, monkeypatch):
    monkeypatch.setattr(status_file, "_facts", {"calls many": lambda: [("x" * 1000, 1.0)] * 1000})
    own = status_file.StatusFile(tmp_path, "rank 0", 1, "none")
    with status_file.doing("generate"):
        own.write()
        assert story.read(tmp_path)[0].inner[0][0] == "generate"


@pytest.mark.parametrize("made", [False, True])
def test_a_folder_without_a_job(tmp_path, made, capsys):
    if made:
        status_file.folder_of(str(tmp_path)).mkdir(parents=True)
    assert main(["--job", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err


def test_where_no_status_can_be_written_a_line_says_so_and_the_process_goes_on(tmp_path):
    (tmp_path / "rl").write_text("a file in the place of the folder")
    child = run_in_child(str(tmp_path), "print('goes on')")
    said = child.communicate()[0]
    assert child.returncode == 0 and said.startswith("[rl] warning: rank 0 writes no status") and "goes on" in said


def test_a_file_system_that_hangs_keeps_no_process_from_its_end(job, monkeypatch):
    """Neither the story of a message, nor the last write."""
    monkeypatch.setattr(story, "own_folder", lambda: job.folder)
    monkeypatch.setattr(story, "tell", lambda folder: time.sleep(30))
    monkeypatch.setattr(story, "STORY_SECONDS", 0.1)
    began = time.monotonic()
    assert "was not read in 0.1 s" in story.at_deadline()
    own = status_file.StatusFile(job.folder, "rank 0", 1, "none")
    monkeypatch.setattr(status_file, "LAST_SECONDS", 0.1)
    monkeypatch.setattr(own, "write", lambda how: time.sleep(30))
    own.fail("why it stops")
    assert time.monotonic() - began < 10


def test_a_file_that_is_being_written_is_read_again(job, monkeypatch):
    job.add("rank 0", COLLECTIVE).add("rank 1", COLLECTIVE)
    whole = (job.folder / "rank-1").read_bytes()
    (job.folder / "rank-1").write_bytes(b"}" + whole[1:])
    monkeypatch.setattr(story.time, "sleep", lambda seconds: (job.folder / "rank-1").write_bytes(whole))
    assert [seen.name for seen in story.read(job.folder)] == ["rank 0", "rank 1"]
