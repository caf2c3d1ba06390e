"""Two machines as far as one can make them on one: network namespaces joined by a cable.

Each has a hostname, a /dev/shm and a temporary folder of its own, and one torchrun agent of the job. It has no route
but to the other. Needs root and iproute2. Left out: what else differs between machines, such as their clocks and files.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CABLE = "cable0"
PORT = 29400  # of the job's master; the namespace is ours alone
# In the machine's own namespaces of mounts and hostnames, then what is asked.
ENTER = 'echo "$1" >/proc/sys/kernel/hostname && mount -t tmpfs tmpfs /dev/shm && shift && exec "$@"'


@dataclass(frozen=True)
class Machine:
    """One end. space: its network namespace."""

    name: str
    space: str
    address: str

    def command(self, words: list[str]) -> list[str]:
        """What runs `words` on this machine, under the id of the process that is started."""
        private = ["unshare", "--mount", "--uts", "sh", "-c", ENTER, "sh", self.name]
        return ["ip", "netns", "exec", self.space, *private, *words]

    def cut(self) -> None:
        """Take the cable out: what is sent is lost, and no connection is closed."""
        ip("-n", self.space, "link", "set", CABLE, "down")

    def processes(self) -> list[int]:
        """Whatever runs on it, the oldest first."""
        return sorted(map(int, ip("netns", "pids", self.space).split()))

    def kill(self) -> None:
        """Kill -9 all of it, the torchrun agent first, so that it tells nobody."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def ip(*words: str) -> str:
    """Output of iproute2's `ip`. Raises RuntimeError with what it says where it fails."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def why_not() -> str | None:
    """What keeps this machine from being two, None where nothing does."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs ip (iproute2) and unshare (util-linux)"
    probe = f"rl-{secrets.token_hex(4)}-probe"
    try:
        ip("netns", "add", probe)
    except RuntimeError as error:
        return str(error)
    ip("netns", "del", probe)
    return None


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Both, connected; at the end their processes are killed, and the namespaces and the cable are gone."""
    own = f"rl-{secrets.token_hex(4)}"  # namespaces of a test that was killed may still be there
    ends = (
        Machine("machine-a", f"{own}-a", "10.77.0.1"),
        Machine("machine-b", f"{own}-b", "10.77.0.2"),
    )
    with contextlib.ExitStack() as undo:
        for end in ends:
            ip("netns", "add", end.space)
            undo.callback(ip, "netns", "del", end.space)
            undo.callback(end.kill)
        one, two = (end.space for end in ends)
        ip("link", "add", CABLE, "netns", one, "type", "veth", "peer", "name", CABLE, "netns", two)
        for end in ends:
            ip("-n", end.space, "address", "add", f"{end.address}/24", "dev", CABLE)
            for link in ("lo", CABLE):
                ip("-n", end.space, "link", "set", link, "up")
        yield ends


def launched(words: list[str], machine: Machine, first: Machine, again: str) -> list[str]:
    """The command of an agent there. again: "" where its ranks are not started again, else by which rendezvous they
    are."""
    words = list(words)
    at = words.index("--node-rank")
    if again == "c10d":
        rendezvous = ["--rdzv-backend", again, "--rdzv-endpoint", f"{first.address}:{PORT}", "--rdzv-id", "job"]
        # By name it would not find out that it is the host: there is nobody to ask.
        host = ["--rdzv-conf", f"is_host={int(machine is first)}", "--local-addr", machine.address]
        words[at : at + 6] = [*rendezvous, *host]
    else:
        words[words.index("--master-addr") + 1] = first.address
    return [*words[:at], *(("--max-restarts", "2") if again else ()), *words[at:]]


def start(job, machines: tuple[Machine, Machine], temporary: Path, again: str = "", first: int = 0) -> None:
    """Start a `Job` with two agents, one on each machine. again: as of `launched`; first: agents from this one on."""
    del job.processes[first:]
    for agent, machine in list(enumerate(machines))[first:]:
        words = launched(job.command(agent, PORT), machine, machines[0], again)
        own = temporary / machine.name
        own.mkdir(parents=True, exist_ok=True)
        more = {"TMPDIR": str(own), "GLOO_SOCKET_IFNAME": CABLE, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with open(job.log_file(agent), "a") as log:
            job.processes.append(
                subprocess.Popen(
                    machine.command(words),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=Path(__file__).parents[2],
                    env=os.environ | more,
                    start_new_session=True,
                )
            )
