"""The whole command `doctor` on this machine: healthy, interrupted, and with a fault that all its parts see."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from test_doctor_faults import ROOT, environment
from test_doctor_machines import at_fault, results_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare (util-linux)"),
]
PRIVATE = {"USER": "jane-roe", "API_TOKEN": "tk-8f21c0", "CLUSTER_NAME": "blue-whale"}
NOT_ON_A_CPU = {"--save", "ports", "clock", "one rank a device", "memory of other processes", "captured graphs"}
# Each larger copy loses its last element, in the ranks of doctor, in engines and in trainers.
LOSES = """
    def lossy(real, to, *a, **k):
        if type(to) not in (torch.Tensor, torch.nn.Parameter) or to.numel() <= 4000 or not to.is_contiguous():
            return real(to, *a, **k)
        last = to.data.view(-1)[-1:].clone()
        real(to, *a, **k)
        real(to.data.view(-1)[-1:], last)
        return to
    wrap(torch.Tensor, "copy_", lossy)
"""


class Call:
    """A call of `doctor` with results in `out`, whose temporary folder and /dev/shm are its own."""

    def __init__(self, tmp_path: Path, *words: str, code: str = "") -> None:
        self.out, self.log, shared = tmp_path / "doctor.html", tmp_path / "log", tmp_path / "shm"
        shared.mkdir()
        self.private, temporary = PRIVATE | {"RUN_MARK": tmp_path.name}, tempfile.mkdtemp()  # vLLM needs a short one
        self.folders = (temporary, shared)
        env = environment(tmp_path, code) | self.private | {"TMPDIR": temporary}
        own = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', str(shared)]
        doctor = [sys.executable, "-m", "mindspeed_rl_plugin", "doctor", "--out", str(self.out), *words]
        self.began = time.monotonic()
        with open(self.log, "w") as log:
            self.process = subprocess.Popen([*own, *doctor], env=env, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)

    def until(self, line: str) -> None:
        while line not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)

    def end(self) -> tuple[int, list[dict]]:
        """Exit status and results. Nothing is left behind, and the file has nothing private."""
        code = self.process.wait(1100)
        print(f"status {code}, {time.monotonic() - self.began:.0f} s", self.log.read_text())
        left = [
            p for p in psutil.process_iter(["environ"]) if self.private.items() <= (p.info["environ"] or {}).items()
        ]
        assert left == sum(map(os.listdir, self.folders), []) == []
        text = self.out.read_text()
        assert not re.search(r"\b(src|href|https?:)", text), "it opens without a network"
        for word in (*self.private.values(), str(ROOT), str(Path.home()), self.folders[0], socket.gethostname()):
            assert not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text), word
        return code, results_of(self.out)


def test_a_healthy_machine(tmp_path: Path) -> None:
    call = Call(tmp_path)
    code, rows = call.end()
    assert (code, at_fault(rows)) == (0, []) and "nothing is at fault" in call.log.read_text()
    assert {r["check"] for r in rows if r["verdict"] == "not run"} == NOT_ON_A_CPU | {"tensors derived from weights"}
    assert {r["part"] for r in rows if r["verdict"] == "pass"} == {"machine", "memory", "links", "engine", "trainer"}


def test_an_interrupt_in_the_middle(tmp_path: Path) -> None:
    call = Call(tmp_path)
    call.until("doctor: engine")
    time.sleep(10)
    call.process.send_signal(signal.SIGINT)
    code, rows = call.end()
    assert (code, at_fault(rows)) == (130, []) and "interrupted: other checks did not run" in call.log.read_text()
    assert {r["part"] for r in rows} >= {"machine", "memory", "links"}, "what ran before"


def test_one_fault_of_all_parts_is_named_once(tmp_path: Path) -> None:
    code, rows = Call(tmp_path, "--only", "memory", "engine", "trainer", code=LOSES).end()
    assert (code, [one[:2] for one in at_fault(rows)]) == (1, [("copies, blocking", "")])
    failed = [r for r in rows if r["verdict"] == "FAIL"]
    assert {r["part"] for r in failed} >= {"memory", "engine", "trainer"}
    assert {r["follows"] for r in failed} == {"", "memory: copies, blocking"}


@pytest.mark.parametrize(("how", "words"), [("SIGKILL", "rank 1: died after "), ("SIGSTOP", "rank 1: hung for ")])
def test_a_rank_that_is_lost_in_a_collective(tmp_path: Path, how: str, words: str) -> None:
    lost = f"lambda *a, **k: os.kill(os.getpid(), {int(signal.Signals[how])})"
    fault = f"    import torch.distributed as dist\n    if rank == 1:\n        dist.all_to_all_single = {lost}\n"
    code, rows = Call(tmp_path, "--only", "links", code=fault).end()
    ((check, _, figure),) = at_fault(rows)
    assert (code, check) == (1, "all_to_all") and words in figure
