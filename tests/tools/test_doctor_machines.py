"""`doctor` on two machines (tests/loop/two_machines.py): faults of one of them, of its ranks, and of the cable."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_doctor_faults import ROOT, environment
from two_machines import CABLE, PORT, Machine, ip, two_machines, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(why_not() is not None, reason=f"no second machine: {why_not()}"),
]
AHEAD = "    real = time.time\n    time.time = lambda: real() + 3600.5\n"
DIES = "    import torch.distributed as dist\n    if rank == 2:\n"
DIES += "        dist.all_gather_into_tensor = lambda *a, **k: os._exit(7)\n"
SMALL = ["sh", "-c", 'mount -o remount,size=64m /dev/shm; exec "$@"', "sh"]


def results_of(file: Path) -> list[dict]:
    """Rows of a file of --out."""
    return json.loads(file.read_text().partition('id="doctor">')[2].partition("</script>")[0])["results"]


def at_fault(rows: list[dict]) -> list[tuple[str, str, str]]:
    return [(r["check"], r["where"], r["figure"]) for r in rows if r["verdict"] == "FAIL" and not r["follows"]]


def nothing(one: Machine, two: Machine, log: Path) -> None:
    pass


def close(one: Machine, two: Machine, log: Path) -> None:
    """Nothing of machine 0 reaches machine 1, but what its port of the job answers."""
    rule = ("-n", one.space, "rule", "add", "to", two.address, "ipproto", "tcp", "pref")
    ip(*rule, "10", "sport", str(PORT), "lookup", "main")
    ip(*rule, "20", "blackhole")


def brake(one: Machine, two: Machine, log: Path) -> None:
    limit = ["rate", "200mbit", "burst", "64kb", "latency", "400ms"]
    subprocess.run(["tc", "-n", one.space, "qdisc", "add", "dev", CABLE, "root", "tbf", *limit], check=True)


def kill(one: Machine, two: Machine, log: Path) -> None:
    while "memory and links" not in log.read_text():
        time.sleep(0.1)
    time.sleep(5)  # in the middle of its ranks
    two.kill()


FAULTS = {  # what: code and command of machine 1, ranks of each machine, change, (check, where, words) at fault
    "healthy": ("", [], 2, nothing, []),
    "a clock an hour ahead": (AHEAD, [], 2, nothing, [("clock", "machine 1", "3600.")]),
    "closed ports": ("", [], 2, close, [("ports", "machine 0", "[1]"), ("ports", "machine 1", "[0]")]),
    "a small /dev/shm": ("", SMALL, 2, nothing, [("/dev/shm", "machine 1", "0.06 GiB")]),
    "a slow direction of a cable": ("", [], 1, brake, [("point to point", "0->1", " ms")]),
    "a dead rank": (DIES, [], 2, nothing, [("all_gather", "", "rank 2: died after ")]),
    "a machine that is gone": ("", [], 2, kill, [("results of all machines", "", "[1]")]),
}


def start_doctor(machines, folder: Path, *words: str, ranks: int = 1, code: str = "", inside: Sequence[str] = ()):
    """An agent of torchrun on each machine, with the output in folder/log0 and log1, results in folder/doctor.html.
    code, inside: fault (as in test_doctor_faults.py) and command of machine 1."""
    agents = []
    for index, machine in enumerate(machines):
        (own := folder / machine.name).mkdir()
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--nnodes=2"]
        torchrun += [f"--node-rank={index}", f"--master-addr={machines[0].address}", f"--master-port={PORT}"]
        doctor = ["-m", "mindspeed_rl_plugin", "doctor", *words, "--out", str(folder / "doctor.html")]
        env = environment(own, code * index) | {"TMPDIR": str(own), "GLOO_SOCKET_IFNAME": CABLE}
        with open(folder / f"log{index}", "w") as log:
            call = machine.command([*inside * index, *torchrun, *doctor])
            agents.append(subprocess.Popen(call, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=ROOT))
    return agents


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_machine(tmp_path: Path, fault: str) -> None:
    code, inside, ranks, change, expected = FAULTS[fault]
    first, second = tmp_path / "log0", tmp_path / "log1"
    with two_machines() as machines:
        words = ("--only", "machine", "links")
        agents = start_doctor(machines, tmp_path, *words, ranks=ranks, code=code, inside=inside)
        change(*machines, second)
        began, codes = time.monotonic(), [agent.wait(200) for agent in agents]
        print(f"{time.monotonic() - began:.0f} s", said := first.read_text())
        assert not any(machine.processes() for machine in machines)
    assert codes == [int(bool(expected)), -9 if change is kill else 0]
    assert "part  " in said and "part  " not in second.read_text(), "the first machine has the table"
    rows = results_of(tmp_path / "doctor.html")
    named = at_fault(rows)
    assert [one[:2] for one in named] == [one[:2] for one in expected]
    assert all(words in figure for (*_, figure), (*_, words) in zip(named, expected, strict=True)), named
    assert ("open files", "pass") in {(r["check"], r["verdict"]) for r in rows}, "results that did come are kept"
    if not expected:
        assert {r["figure"][:8] for r in rows if r["check"] == "point to point"} == {"12 pairs"}
        assert {r["check"] for r in rows if r["verdict"] != "pass"} == {
            *("--save", "one rank a device", "memory of other processes")
        }
