"""The stand-in for `python` is one: arguments, variables, folder, files and end of a process are its own."""

import os
import signal
import subprocess

import pytest
from commands import gone

SHOW = "import os, sys; print(sys.argv[1:], os.environ['ASKED'], os.getcwd(), __name__); sys.exit(3)"
WAIT = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.mark.parametrize("how", ["-c", "-m", "script"])
def test_a_process_of_its_own(warm_python, tmp_path, how):
    (tmp_path / "shown.py").write_text(SHOW)
    words = {"-c": ["-c", SHOW], "-m": ["-u", "-m", "shown"], "script": ["shown.py"]}[how]
    env = {**os.environ, "ASKED": how}
    done = subprocess.run([warm_python, *words, "a", "b c"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, f"['a', 'b c'] {how} {tmp_path} __main__\n")


def test_an_error_is_shown_and_what_was_imported_is_there(warm_python):
    code = (
        "import sys, torch; print('vllm' in sys.modules, 'mindspeed_rl_plugin.loop' in sys.modules)\n"
        "print(torch.cuda.Stream.__module__); 1 / 0"
    )
    done = subprocess.run([warm_python, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
    imported, stream = done.stdout.splitlines()
    assert imported == "True False" and not stream.startswith("vllm"), "torch is as a job finds it at its start"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_both(warm_python, number):
    """Whichever of them gets it."""
    for to_fork in (True, False):
        with subprocess.Popen([warm_python, "-c", WAIT], stdout=subprocess.PIPE, text=True) as process:
            fork = int(process.stdout.readline())
            os.kill(fork if to_fork else process.pid, number)
            assert process.wait(30) == -number
        assert gone([fork], 30)
