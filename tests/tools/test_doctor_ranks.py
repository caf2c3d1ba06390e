"""The ranks of `doctor` on gloo: faults that a sitecustomize.py puts into them."""

import os
from pathlib import Path

import psutil
import pytest

import mindspeed_rl_plugin
from mindspeed_rl_plugin.tools.doctor import rank_checks
from mindspeed_rl_plugin.tools.doctor.links import LINK_CHECKS
from mindspeed_rl_plugin.tools.doctor.machine import DEVICE_CHECKS
from mindspeed_rl_plugin.tools.doctor.nodes import Nodes
from mindspeed_rl_plugin.tools.doctor.program import run_checks
from mindspeed_rl_plugin.tools.doctor.rank_checks import RANK_CHECKS, RANKS_START
from mindspeed_rl_plugin.tools.doctor.result import FAIL, NOT_RUN, Result, explained, guilty

pytestmark = pytest.mark.slow

FAULT = """
import os, time
if "RANK" in os.environ:
    import dataclasses
    import torch
    import torch.distributed as dist
    from mindspeed_rl_plugin.device import device as devices
    rank = int(os.environ["RANK"])

    def replace(name, call):
        real = getattr(dist, name)
        made = lambda *a, **k: call(real, *a, **k)
        setattr(dist, name, made)
        setattr(dist.distributed_c10d, name, made)

    def send_slowly(real, tensor, *a, **k):
        if tensor.nbytes > 1000 and 2 in (*a, *k.values()):
            time.sleep(0.15)
        return real(tensor, *a, **k)

    def late(real, *a, **k):
        time.sleep(0.1)
        return real(*a, **k)

    def slowly(*a):
        began = time.perf_counter()
        out = multiply(*a)
        time.sleep(19 * (time.perf_counter() - began))
        return out

    def wrong(real, out, *a, **k):
        work = real(out, *a, **k)
        work.wait()
        out[-1] += 1
        return work

    multiply, start = torch.mm, devices.ThreadCopier.start
"""
NOT_AWAITED = """
    def start_only(self, copies):
        return dataclasses.replace(start(self, copies), wait=lambda: None)
    devices.ThreadCopier.start = start_only
"""
NOT_SYNCHRONIZED = NOT_AWAITED.replace("wait=", "synchronize=")
OF_RANK_1 = "    if rank == 1:\n        "
SLOW_RANK = OF_RANK_1 + "torch.mm = slowly\n" + "".join(f"        replace('{n}', late)\n" for n in ("isend", "irecv"))
SLOW_MESSAGES = OF_RANK_1 + "[replace(name, late) for name in ('isend', 'irecv')]\n"
SLOW_LINK = OF_RANK_1 + "replace('isend', send_slowly)\n"
HANGS = OF_RANK_1 + "replace('all_reduce', lambda *a, **k: time.sleep(1000))\n"
RAISES = OF_RANK_1 + "replace('all_to_all_single', lambda *a, **k: torch.zeros(2) @ torch.zeros(3))\n"
WRONG = OF_RANK_1 + "replace('broadcast', wrong)\n"
EXPECTED = {  # fault: ranks, the only check that fails, where, words of its figure
    "a wait that returns at once": (NOT_AWAITED, 2, "copies, a stream waits", "", "ranks 0, 1: 16 of 16 wrong"),
    "a synchronize that returns at once": (NOT_SYNCHRONIZED, 2, "copies, the host waits", "", " of 16 wrong"),
    "a slow rank": (SLOW_RANK, 4, "compute speed", "", "rank 1: "),
    "a slow rank of two": (SLOW_RANK, 2, "compute speed", "", "rank 1: "),
    "a rank with slow messages": (SLOW_MESSAGES, 4, "point to point", "rank 1", "all its links are slow"),
    "a slow link": (SLOW_LINK, 4, "point to point", "1->2", " ms"),
    "a rank hangs": (HANGS, 4, "all_reduce", "", "rank 1: hung for "),
    "a rank raises an error": (RAISES, 2, "all_to_all", "", "rank 1 lost one of ranks [0]"),
    "a wrong value": (WRONG, 2, "broadcast", "", "rank 1: "),
}


def run(ranks: int, folder: Path, seconds: float) -> list[Result]:
    found = run_checks(rank_checks.__name__, RANK_CHECKS, Nodes(ranks), folder, seconds, os.environ)
    return explained(found, RANK_CHECKS)


@pytest.mark.parametrize("fault", EXPECTED)
def test_a_fault_is_named_by_its_check_alone(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, ranks, check, where, words = EXPECTED[fault]
    folder = tmp_path / "run"
    (tmp_path / "sitecustomize.py").write_text(FAULT + code)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(mindspeed_rl_plugin.__file__).parents[1]}")
    found = run(ranks, folder, 50.0)
    output = (folder / "log").read_text()
    assert [(r.check, r.where) for r in guilty(found)] == [(check, where)], output
    assert all(words in r.told for r in guilty(found)), [r.told for r in guilty(found)]
    assert len([*folder.glob("rank-*.jsonl")]) == ranks
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(folder) in (p.info["cmdline"] or ())]
    assert {r.check for r in found} == {check.name for check in RANK_CHECKS}
    if code != SLOW_RANK:
        assert [r.check for r in found if r.verdict == FAIL] == [check]


def test_ranks_that_cannot_start_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDSPEED_RL_DEVICE", "abacus")
    one, *others = run(2, tmp_path / "run", 40.0)
    assert (one.check, one.verdict) == (RANKS_START.name, FAIL)
    assert one.told.startswith("rank") and ": died after " in one.told and "abacus" in one.figure
    assert {r.verdict for r in others} == {NOT_RUN}


def test_a_single_rank_has_no_links(tmp_path: Path) -> None:
    not_run = {r.check for r in run(1, tmp_path / "run", 40.0) if r.verdict == NOT_RUN}
    assert not_run == {check.name for check in (*LINK_CHECKS, *DEVICE_CHECKS)}
