"""The functions of `doctor`'s checks of machine, memory and links, with fakes. Real ranks: test_doctor_faults.py."""

import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import TCPStore

from mindspeed_rl_plugin.device.device import Device
from mindspeed_rl_plugin.host import engine_env
from mindspeed_rl_plugin.tools.doctor import doctor, machine, rank_checks
from mindspeed_rl_plugin.tools.doctor.nodes import Nodes
from mindspeed_rl_plugin.tools.doctor.result import FAIL, NOT_RUN, PASS, Check, Result, explained, guilty, merge

NPU = {"vllm-ascend": "0.18.0", "torch-npu": "2.9.0.post1", "torch": "2.9.0+cpu", "vllm": "0.18.0", "CANN": "8.5.1"}
README = Path(machine.__file__).parents[3] / "README.md"


def test_the_table_of_versions_is_that_of_the_readme() -> None:
    rows = re.findall(r"^\| ([\d.rc]+) \| ([\w.]+) \| ([\d.]+) \|", README.read_text(), re.MULTILINE)
    assert {plugin: (npu, cann) for plugin, npu, cann in rows} == machine.NPU_VERSIONS


VERSIONS = [  # device, versions, verdict, words of the limit
    ("npu", NPU, PASS, ""),
    ("npu", NPU | {"CANN": "8.2.RC1"}, FAIL, "CANN 8.5.1"),
    ("npu", {"vllm-ascend": "0.9.1", "CANN": "8.2.RC1", "torch": "2.5.1"}, PASS, ""),
    ("npu", NPU | {"torch-npu": "2.7.1"}, FAIL, "torch-npu 2.9.0"),
    ("npu", NPU | {"vllm": "0.11.0"}, FAIL, "vllm 0.18.0"),
    ("npu", {"vllm-ascend": "0.26.0rc1", "torch-npu": "2.10.0.post4", "vllm": "0.26.0"}, PASS, ""),
    ("npu", {"vllm-ascend": "0.12.0", "torch": "2.8.0"}, NOT_RUN, ""),
    ("cuda", {"vllm": "0.8.5", "torch": "2.6.0"}, FAIL, "vllm 0.9.1 or newer"),
    ("cuda", {"vllm": "0.23.0", "torch": "2.10.0"}, PASS, ""),
]


@pytest.mark.parametrize(("kind", "found", "verdict", "words"), VERSIONS)
def test_versions(kind: str, found: dict[str, str], verdict: str, words: str) -> None:
    one = machine.versions(kind, found)
    assert (one.verdict, words in one.limit) == (verdict, True), one


BITES = [  # device, variable, values that bite, values that do not, condition
    ("cpu", "VLLM_ENABLE_V1_MULTIPROCESSING", ["1"], ["0", ""], ""),
    *(("npu", name, ["1", "2"], ["0"], "") for name in engine_env.REQUIRED_NPU),
    ("cuda", "VLLM_ALLREDUCE_USE_SYMM_MEM", ["1"], ["0"], machine.HIDDEN),
    ("cuda", "CUDA_DEVICE_MAX_CONNECTIONS", ["8", "32"], ["1", ""], machine.ONE_CONNECTION),
    ("npu", "HCCL_CONNECT_TIMEOUT", ["5", "60", "119"], ["120", "1800", ""], ""),
    ("npu", "ASCEND_LAUNCH_BLOCKING", ["1"], ["0"], ""),
    ("npu", "TASK_QUEUE_ENABLE", ["0"], ["1", "2"], ""),
    ("npu", "PYTORCH_NO_NPU_MEMORY_CACHING", ["1"], [""], ""),
    ("cuda", "PYTORCH_NO_CUDA_MEMORY_CACHING", ["1"], [""], ""),
    ("cpu", "GLOO_SOCKET_IFNAME", ["^lo,docker"], ["eth0", "lo"], ""),
    ("npu", "GLOO_SOCKET_IFNAME", ["lo"], ["eth0"], machine.SEVERAL),
    ("npu", "PYTORCH_NPU_ALLOC_CONF", ["expandable_segments:True"], ["max_split_size_mb:99"], ""),
]


SLOW = ("TASK_QUEUE_ENABLE", "PYTORCH_NO_NPU_MEMORY_CACHING", "PYTORCH_NO_CUDA_MEMORY_CACHING")


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in {row[0] for row in machine.TRAPS} | {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(("kind", "name", "bad", "good", "condition"), BITES)
def test_a_variable_that_bites_is_named(no_variables, kind, name, bad, good, condition) -> None:
    for value in bad + good:
        no_variables.setenv(name, value)
        found = [(r.check, r.where) for r in machine.variables(kind, {"", condition}) if r.verdict == FAIL]
        check = machine.SLOW_VARIABLES if name in SLOW else machine.VARIABLES_CHECK
        assert found == ([(check.name, name)] if value in bad else []), value
        assert value in good or not condition or machine.variables(kind, {""})[0].verdict == PASS
    assert {row[0] for row in machine.TRAPS} <= {row[1] for row in BITES}


def test_segments_that_may_grow_bite_where_the_engine_cannot_sleep_with_them(no_variables) -> None:
    no_variables.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    for version, verdict in (((0, 22), FAIL), ((0, 23), PASS)):
        no_variables.setattr(engine_env, "vllm_version", lambda v=version: v)
        assert machine.variables("cuda", {""})[0].verdict == verdict
    no_variables.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:32")
    failed = [r.where for r in machine.variables("npu", {""}) if r.verdict == FAIL]
    assert failed == 2 * ["PYTORCH_NPU_ALLOC_CONF"]


def test_a_small_shared_memory_a_full_disk_and_few_files(no_variables) -> None:
    free = {"/dev/shm": 1 << 26, "/save": 5 << 30}
    no_variables.setattr(machine, "free_bytes", free.get)
    no_variables.setattr(machine.resource, "getrlimit", lambda _: (1024, 4096))
    assert [r.check for r in machine.machine_results(Nodes(8), "cpu", "/save") if r.verdict == FAIL] == ["/dev/shm"]
    free |= {"/dev/shm": 64 << 30, "/save": 1 << 20}
    failed = [r.check for r in machine.machine_results(Nodes(8, count=16), "cpu", "/save") if r.verdict == FAIL]
    assert failed == ["open files", "--save"]
    free["/"] = 0
    assert [r.verdict for r in machine.machine_results(Nodes(8), "cpu") if r.check == "--save"] == [NOT_RUN]


def device(kind: str = "cuda", uuid: str = "GPU-1", used: int = 1) -> SimpleNamespace:
    api = SimpleNamespace(get_device_properties=lambda _: SimpleNamespace(uuid=uuid))
    return SimpleNamespace(is_cpu=False, kind=kind, api=api, memory_info=lambda: ((64 - used) << 30, 64 << 30))


def test_ranks_that_share_a_device_and_memory_that_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdicts(one, *others: str) -> list[str]:
        return [r.verdict for r in machine.device_results(one, 1, lambda own: [own, *others])]

    assert verdicts(device(), "GPU-2") == [PASS, PASS] and verdicts(device(used=30), "GPU-2") == [PASS, FAIL]
    assert verdicts(device(), "GPU-2", "GPU-1") == [FAIL, PASS]
    shared = machine.device_results(device(), 1, lambda own: [own, "x", own])[0]
    assert shared.told == "ranks 0, 2: each shares its device"
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,6")
    without = device("npu", "00000000-0000")
    assert verdicts(without, f"{machine.machine()} 6") == [FAIL, PASS] and verdicts(without, "other 6") == [PASS, PASS]
    assert [r.verdict for r in machine.device_results(Device("cpu"), 0, list)] == [NOT_RUN, NOT_RUN]


def of_machines(*clocks, seconds: float = 5.0) -> list[list[Result]]:
    """Results of three machines, of which those with a clock take part."""
    first, found = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), [[] for _ in clocks]
    stores = [TCPStore("127.0.0.1", first.port, is_master=False) for _ in clocks]

    def one(index: int) -> None:
        found[index] += machine.between(
            Nodes(1, 3, index, store=stores[index], own="127.0.0.1"), seconds, clocks[index]
        )

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(clocks))]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    return found


def test_clocks_and_ports_between_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = machine.time.time
    assert {r.verdict for rows in of_machines(now, now, lambda: now() + 1) for r in rows} == {PASS}
    failed = guilty(r for rows in of_machines(now, now, lambda: now() - 3600.5) for r in rows)
    assert [r.check for r in failed] == ["clock"] and failed[0].figure.startswith("3600.")
    assert {r.verdict for r in machine.between(Nodes(2))} == {NOT_RUN}
    found = explained([r for rows in of_machines(now, now, seconds=0.5) for r in rows], doctor.ALL_CHECKS)
    assert [r.check for r in guilty(found)] == ["ports", "ports"]  # the third machine never comes
    assert all("port 2" in r.figure for r in guilty(found))

    def refuse(address, timeout):
        raise ConnectionRefusedError

    monkeypatch.setattr(machine.socket, "create_connection", refuse)
    failed = guilty(r for rows in of_machines(now, now, now) for r in rows)
    assert {r.check for r in failed} == {"ports"} and "[0, 1]" in failed[2].figure


@pytest.mark.parametrize("world", [2, 3, 4, 7, 8])
def test_all_pairs_meet_and_no_rank_waits_for_ever(world: int) -> None:
    left = [list(rank_checks.meetings(rank, world)) for rank in range(world)]
    met = []
    while now := {mine[0] for mine in left if mine and all(left[rank][:1] == mine[:1] for rank in mine[0])}:
        met += now
        left = [mine[1:] if mine and mine[0] in now else mine for mine in left]
    assert sorted(met) == [(a, b) for a in range(world) for b in range(world) if a != b]


def named(world: int, slow: dict, machines: str = "") -> list[str]:
    """Names of what is slow; pairs of one machine take a second, others ten."""
    places = machines or "a" * world
    pairs = [(a, b) for a in range(world) for b in range(world) if a != b]
    times = {(a, b): (1 if places[a] == places[b] else 10) * slow.get((a, b), 1.0) for a, b in pairs}
    return list(rank_checks.blame(rank_checks.slow_pairs(times, places), world))


def test_a_slow_link_or_its_slow_rank_is_named() -> None:
    all_of_2 = {pair: 20.0 for r in range(8) for pair in ((2, r), (r, 2))}
    assert named(4, {}) == named(4, {(1, 2): 4.9}) == named(4, {}, "aabb") == []
    assert named(4, {(1, 2): 5.0}) == named(4, {(1, 2): 9.0}, "abba") == named(2 + 1, {(1, 2): 20.0}) == ["1->2"]
    assert named(4, all_of_2) == named(3, all_of_2) == named(8, all_of_2, "aaaabbbb") == ["rank 2"]
    assert named(8, all_of_2 | {(0, 1): 20.0}) == ["rank 2", "0->1"] and named(2, {(0, 1): 20.0}) == ["0->1"]
    bridged = {(a, b): 0.1 for a in range(8) for b in (a ^ 1,)}
    assert named(8, bridged) == [], "pairs with a bridge are fast, the others are not slow"


def test_links_at_a_tenth_of_their_speed_fail_on_an_accelerator() -> None:
    def speed(seconds: float, between: float = 0.01, host: bool = False) -> Result:
        pairs = {(a, b): seconds if a // 8 == b // 8 else between for a in range(16) for b in range(16) if a != b}
        return rank_checks.speed_of_most(pairs, "a" * 8 + "b" * 8, host)

    assert speed(0.107).verdict == PASS and speed(0.108).verdict == FAIL  # 512 MiB at 5 GB/s: 107.4 ms
    assert speed(0.1, 0.429).verdict == PASS and speed(0.1, 0.430).verdict == FAIL  # at 1.25 GB/s: 429.5 ms
    assert speed(9.0, host=True).verdict == PASS and speed(0.08, 0.08).figure == "6.71 GB/s, 6.71 GB/s"


class Accelerator(Device):
    """A CPU for which the limits of an accelerator count."""

    is_cpu, host_empty = False, lambda self, shape, dtype: torch.empty(8, dtype=dtype)
    current, copier, synchronize = (lambda self: torch.device("cpu")), (lambda self: None), lambda self: None


def failed_of_memory(one: Device) -> list[str]:
    return [r.check for step in rank_checks.memory_steps(one) for r in step.results() if r.verdict == FAIL]


COPIES = [check.name for check in rank_checks.COPIES]


def nothing() -> None:
    """In place of a wait."""


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    words = rank_checks._pattern(7)
    assert words.isnan().tolist() == [i % 3 == 0 for i in range(7)] and len(set(words.view(torch.int32).tolist())) == 7
    monkeypatch.setattr(rank_checks, "COPY_WORDS", (1, 4097))
    assert failed_of_memory(Device("cpu")) == []
    with monkeypatch.context() as fault:
        idle = SimpleNamespace(start=lambda copies: SimpleNamespace(wait=nothing, synchronize=nothing))
        fault.setattr(Device, "copier", lambda self: idle)
        assert failed_of_memory(Device("cpu")) == COPIES[2:]
    with monkeypatch.context() as change:
        change.setattr(rank_checks, "busy", (work := []).append)
        assert failed_of_memory(Device("cpu")) == [] and len(work) == 3 * 4 * 2  # ways, copies, sizes: behind work
    with monkeypatch.context() as fault:
        copy_, storage = torch.Tensor.copy_, torch.Tensor.untyped_storage
        fault.setattr(torch.Tensor, "copy_", lambda t, o, **k: copy_(t, o).nan_to_num_() if k else copy_(t, o))
        assert failed_of_memory(Device("cpu")) == COPIES  # NaNs are lost
        fault.undo()
        fault.setattr(torch.Tensor, "untyped_storage", lambda tensor: storage(tensor.clone()))
        assert failed_of_memory(Device("cpu")) == [rank_checks.FREED.name]  # views have another storage
    *_, bandwidth = rank_checks.memory_steps(Accelerator("cpu"))
    for seconds, verdict in ((1.2e-8, PASS), (1.3e-8, FAIL)):  # 2.7 and 2.46 GB/s
        monkeypatch.setattr(rank_checks, "timed", lambda device, call, s=seconds: s)
        assert [r.verdict for r in bandwidth.results()] == [verdict]


def test_results_of_ranks_and_machines_become_one_line() -> None:
    rate, reduce = Check("memory", "bandwidth"), Check("links", "all_reduce")

    def told(*found: Result) -> list[tuple[str, str]]:
        return [(r.verdict, r.told) for r in merge(found)]

    def of(one: Result, *ranks: int) -> Result:
        return replace(one, ranks=ranks)

    rates = [rate.result(True, f"{speed} GB/s", value=-speed) for speed in (9.5, 10.0)]
    assert told(*rates, rate.not_run("no device")) == [(PASS, "9.5 GB/s")]
    low = [of(rate.result(False, f"{speed} GB/s", value=-speed), rank) for rank, speed in ((2, 1.5), (5, 0.5))]
    assert told(*rates, *low) == [(FAIL, "ranks 2, 5: 0.5 GB/s")]
    waited = [of(reduce.ended(1, f"rank {rank} is late"), rank) for rank in (3, 0)]
    assert told(*waited, *low) == [(FAIL, "ranks 0, 3: rank 3 is late"), (FAIL, "ranks 2, 5: 0.5 GB/s")]
    hung = of(reduce.ended(2, "hung for 9 s"), 1)
    assert told(*waited, hung) == [(FAIL, "rank 1: hung for 9 s")]
    assert told(hung, *waited, of(reduce.ended(3, "died"), 7)) == [(FAIL, "rank 7: died")], "on another machine"
    assert len(merge([reduce.ended(3, "died", "dense"), reduce.ended(2, "hung", "experts")])) == 2
    wrong = of(reduce.result(False, "3 ms", "x"), 4)
    assert told(wrong, hung) == [(FAIL, "rank 4: 3 ms"), (FAIL, "rank 1: hung for 9 s")]


def test_each_machine_starts_its_own_ranks() -> None:
    assert Nodes(2).torchrun("a", "b")[2:] == ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "a", "b"]
    assert Nodes(8, 2, 1, "first", 29400).torchrun("-m", "x")[3:] == [
        *("--nnodes=2", "--node-rank=1", "--master-addr=first", "--master-port=29400", "--nproc-per-node=8", "-m", "x")
    ]
