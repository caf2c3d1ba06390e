"""What a launch script would start is recorded and not started; what it must not do to this machine is not done."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindspeed_rl_plugin.tools.plan import plan
from mindspeed_rl_plugin.tools.rehearse import confine
from mindspeed_rl_plugin.tools.rehearse.capture import CapturedLaunch, capture, run
from mindspeed_rl_plugin.tools.rehearse.entry_script import find_entry


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def captured(tmp_path: Path, text: str) -> CapturedLaunch:
    return capture(written(tmp_path / "train.sh", text), tmp_path / "scratch", 60)


def test_the_launch_is_taken_down_and_not_made(tmp_path):
    launch = captured(
        tmp_path,
        """
        set -euo pipefail
        source /nowhere/set_env.sh
        export HCCL_CONNECT_TIMEOUT=7
        ARGS="--num-layers 2 --name 'a b'"
        torchrun --nproc_per_node 8 --nnodes 2 --node_rank 0 -m mindspeed_rl_plugin pretrain_gpt.py $ARGS | tee log
        python -m torch.distributed.launch --nproc_per_node 8 other.py
        """,
    )
    assert (launch.script, launch.world, launch.started, launch.attached) == ("pretrain_gpt.py", 16, 2, True)
    assert launch.arguments[:2] == ("--num-layers", "2")
    assert launch.missing == ("/nowhere/set_env.sh",)
    assert launch.exported == {"HCCL_CONNECT_TIMEOUT": "7"}
    assert not Path("log").exists()


def test_a_folder_that_is_not_here_is_an_empty_one(tmp_path):
    """Not the folder where the rehearsal was started: the script may remove files in what it takes for its own."""
    precious = written(tmp_path / "precious.txt", "kept")
    launch = captured(tmp_path, f"set -e; cd {tmp_path}; cd /nowhere/llm; rm -f *.txt; torchrun pretrain_gpt.py --a 1")
    assert precious.exists() and launch.missing == ("/nowhere/llm",)
    assert not list(launch.cwd.iterdir())


CAREFUL = """
set -euo pipefail
rm -rf "$SAVE"; mkdir -p "$SAVE/logs"; mv "$SAVE" x; cp a "$SAVE/b"; pkill -9 python; killall python; ray stop
npu-smi info; ssh host rm; scp a host:; docker ps; sudo reboot
sleep 1000 &
kill -9 $1; kill -0 $!
export PATH=/usr/bin:$PATH; rm -rf "$SAVE"
work=$(mktemp -d); mkdir -p "$work/a"; touch "$work/a/b"; mv "$work/a/b" "$work/c"; rm -r "$work/a"; ls "$work"
LIST="a
  b"
torchrun pretrain_gpt.py $LIST "x > y" > "$LOG" 2>&1
"""


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A checkpoint and a log of the user, which the script names SAVE and LOG; whole at the end of the test."""
    checkpoint = written(tmp_path / "save/iter_1/model.pt", "weights")
    log = written(tmp_path / "train.log", "of yesterday")
    monkeypatch.setenv("SAVE", str(tmp_path / "save"))
    monkeypatch.setenv("LOG", str(log))
    monkeypatch.chdir(tmp_path)
    yield
    assert (checkpoint.read_text(), log.read_text()) == ("weights", "of yesterday")
    assert {p.name for p in tmp_path.iterdir()} <= {"save", "train.log", "train.sh", "scratch"}


@pytest.mark.parametrize("landlock", [True, False])
def test_commands_with_side_effects_are_listed_and_not_run(tmp_path, monkeypatch, kept, landlock):
    if landlock and not confine.version():
        pytest.skip("this kernel has no Landlock")
    if not landlock:
        monkeypatch.setattr(confine, "version", lambda: 0)
    with subprocess.Popen(["sleep", "1000"]) as victim:
        try:
            begin = time.monotonic()
            launch = captured(tmp_path, CAREFUL.replace("$1", str(victim.pid)))
            assert time.monotonic() - begin < 40, "what runs on in the background is not waited for"
            assert victim.poll() is None
        finally:
            victim.kill()
    assert launch.arguments == ("a", "b", "x > y") and launch.started == 1 and launch.confined is landlock
    save = os.environ["SAVE"]
    assert launch.skipped == (
        *(f"rm -rf {save}", f"mkdir -p {save}/logs", f"mv {save} x", f"cp a {save}/b"),
        *("pkill -9 python", "killall python", "ray stop", "npu-smi info", "ssh host rm", "scp a host:", "docker ps"),
        *("sudo reboot", f"kill -9 {victim.pid}"),
    )
    assert "TMPDIR" not in launch.exported and launch.env.get("TMPDIR") == os.environ.get("TMPDIR")


@pytest.mark.skipif(not confine.version(), reason="this kernel has no Landlock")
def test_what_no_stand_in_knows_cannot_write_either(tmp_path, kept):
    """A program by its full path, python, an editor, redirections; then a signal, and a network connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, subprocess.Popen(["sleep", "1000"]) as victim:
        launch = captured(
            tmp_path,
            f"""
            /bin/rm -rf "$SAVE"
            python -c "import shutil; shutil.rmtree('$SAVE')"
            sed -i s/yesterday/today/ "$LOG"
            echo new > "$LOG"; echo new >> "$LOG"; echo new > other; find "$SAVE" -delete
            python -c "import os; os.kill({victim.pid}, 9)" && export KILLED=yes
            python -c "import socket; socket.create_connection({server.getsockname()!r})" && export CONNECTED=yes
            echo fine > /dev/null; mktemp > /dev/null && export COULD=yes
            torchrun pretrain_gpt.py --a 1 >> "$LOG"
            """,
        )
        victim.kill()
    allowed = {"COULD"} | ({"KILLED"} if confine.version() < 6 else set())
    allowed |= {"CONNECTED"} if confine.version() < 4 else set()
    assert set(launch.exported) == allowed
    assert (launch.arguments, launch.skipped) == (("--a", "1"), (f"rm -rf {os.environ['SAVE']}",))


@pytest.mark.skipif(not confine.version(), reason="this kernel has no Landlock")
def test_a_script_that_must_write_is_told_that_it_may_not(tmp_path, kept):
    with pytest.raises(ValueError, match="(?s)rehearsal's.*other: Permission denied"):
        captured(tmp_path, "set -e; echo hosts > other; torchrun pretrain_gpt.py")


def test_the_projects_own_launch_script_can_be_rehearsed(tmp_path, monkeypatch):
    """Its torchrun is called by the path of the environment, and it enters a folder first."""
    for name in ("TORCHRUN", "MEGATRON_LM_PATH", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    script = Path(__file__).parents[2] / "examples" / "launch.sh"
    launch = capture(script, tmp_path, 60)
    assert (launch.script, launch.world, launch.started) == ("examples/pretrain_gpt.py", 2, 1)
    entry = find_entry(launch, script, tmp_path)
    assert (entry.script, entry.mindspeed, entry.note) == (script.with_name("pretrain_gpt.py"), False, "")


@pytest.mark.parametrize(
    "text",
    [
        "/opt/bin/torchrun a.py --x 1",
        'ROOT=/opt; cd / && "$ROOT/bin/torchrun" \\\n --nnodes 1 a.py --x 1',
        "A=1 B='2 3' nohup ./torchrun a.py --x 1 &",
        "if true; then numactl --cpunodebind=0 /opt/torchrun a.py --x 1; fi",
        "/usr/bin/python3.11 -m torch.distributed.launch a.py --x 1",
        "IP='your master node IP'; torchrun --master_addr $IP --nnodes 1 a.py --x 1",  # still to be filled in
        "RUN='/opt/torchrun --nnodes 1'\nstart() { $RUN a.py \"$@\" 2>&1 | tee log > /dev/null; }; start --x 1",
        '"${TORCHRUN:-.venv/bin/torchrun}" a.py --x 1',
        "set -- --x 1; eval '/opt/torchrun a.py \"$@\" > /nowhere/log'",
        "export PATH=/usr/bin:/bin; exec torchrun --log-dir /logs/torchrun a.py --x 1",
        "sh -c 'torchrun a.py --x 1'",
        "bash -c '/opt/torchrun a.py --x 1'",
        "X=$(python -m torch.distributed.run a.py --x 1)",
        "echo '/opt/torchrun a.py --x 1' > $TMPDIR/inner.sh; source $TMPDIR/inner.sh",
        "[ -x /opt/torchrun ] || echo /opt/torchrun; ssh a '/opt/torchrun b.py'; torchrun a.py --x 1 # /opt/torchrun",
    ],
)
def test_a_launcher_is_recorded_however_it_is_called(text, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHRUN", raising=False)
    launch = captured(tmp_path, f"#!/bin/bash\nset -euo pipefail\n{text}\n")
    assert (launch.script, launch.arguments, launch.started, launch.attached) == ("a.py", ("--x", "1"), 1, False)


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "train.sh: no such file; give a launch script"),
        ("exit 3", "status 3 without starting torchrun"),
        ("torchrun -m else --a", "starts the module else"),
        ("for h in a b; do ssh $h 'bash run.sh'; done; exit 1", "starts training by ssh (ssh a bash"),
        ("torchrun --nproc_per_node '' a.py", "--nproc-per-node has no value"),
        ("torchrun --nnodes '' a.py", "--nnodes is ''"),
        ("torchrun --master_addr $ADDR a.py 4", "the entry script would be '4', which is no *.py"),
        ("torchrun a.py --num-layers $N --hidden-size 4", "train.sh: --num-layers has no value; is a variable of the"),
    ],
)
def test_what_happened_is_named(text, message, tmp_path, capsys):
    if text is not None:
        (tmp_path / "train.sh").write_text(text)
    assert plan.main([str(tmp_path / "train.sh")]) == 1
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1


def test_shared_memory_of_a_killed_process_is_removed(tmp_path):
    make = "import sys, time; from multiprocessing.shared_memory import SharedMemory; made = SharedMemory(create=True, "
    make += "size=9); print(made.name, flush=True); time.sleep(60)"
    name, *_ = run([sys.executable, "-c", make], tmp_path / "log", 2.0, env=os.environ).lines
    assert not Path("/dev/shm", name).exists()
