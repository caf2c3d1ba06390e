"""Engines that are no ranks of the launcher. The first trainer writes the secret file that they need to join. It also
runs a process that supervises Ray's engines, and a process for each server of the user. If a server fails, only
its unfinished responses are lost: it is tried again as long as the job runs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.config.schedule_flags import Generators
from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.engine.options import VllmOptions
from mindspeed_rl_plugin.environment import environment_apart, launch_env, say
from mindspeed_rl_plugin.generators.vllm_server import VllmServer, problems

ENGINES_END_SECONDS = 30.0  # time for supervisors to end Ray's tasks, or to leave their server
AGAIN_SECONDS = 5.0  # between the failure of a server and the next try
WORKED_SECONDS = 60.0  # if a server worked for longer, an equal failure is printed again
AT_URL = (sys.executable, "-m", "mindspeed_rl_plugin", "generate", "--engine-url")
ON_RAY = (sys.executable, "-m", "mindspeed_rl_plugin.generators.on_ray")


def check_ray(wanted: Generators, seconds: float) -> Iterator[str]:
    """Why Ray cannot place the engines."""
    if find_spec("ray") is None:
        yield f"--rl-generators {wanted.text} needs Ray: pip install ray, in the version of the cluster"
        return
    try:
        asked = subprocess.run([*_ray(wanted), "--check"], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        yield f"--rl-generators {wanted.text}: Ray did not answer within {seconds:g} s (--rl-wait-timeout)"
        return
    if asked.returncode:
        yield (
            asked.stderr.strip().splitlines() or [f"--rl-generators {wanted.text}: Ray ended with {asked.returncode}"]
        )[-1]


def _ray(wanted: Generators) -> list[str]:
    sizes = ["--engines", str(wanted.engines), "--ranks", str(wanted.tp)]
    return [*ON_RAY, *sizes, "--device", wanted.device or get_device().kind]


def check_servers(config: RLConfig, model: Mapping[str, Any], dtype: str) -> Iterator[str]:
    """Why the user's servers cannot generate; only on the first rank. model, dtype: config and dtype of the engines,
    empty if they are not known yet."""
    urls, most = config.schedule.engine_url, config.data.max_prompt_length + config.rollout.max_response_length
    if launch_env()["rank"]:
        return
    if len(set(urls)) < len(urls):
        yield f"--rl-engine-url {' '.join(urls)}: a server is given twice; give each server once"
    for url in urls:
        try:
            served = VllmServer(url, config.monitor.wait_timeout).check()[0]
        except (ValueError, OSError, RuntimeError) as error:
            yield f"--rl-engine-url: {error}"
        else:
            routes = config.forward.router_replay == "rollout"
            job = VllmOptions(model, max_model_len=most, dtype=dtype or served.dtype, record_routes=routes)
            yield from (f"--rl-engine-url {url}: {why}" for why in problems(served, job, bool(config.rollout.stop)))


@dataclass
class _Supervisor:
    """A process that supervises engines."""

    without: str  # beginning of the message when the process has failed
    log: Path  # file with the output
    command: Sequence[str]
    again: bool  # whether the process is started again after a failure
    due: float = 0.0  # time of the next start, by `time.monotonic`; 0 while the process runs
    said: str = ""  # the last message about a failure
    began: float = 0.0  # time of the last start, by `time.monotonic`

    def start(self) -> None:
        with self.log.open("ab") as log:
            how = {"stdout": log, "stderr": subprocess.STDOUT, "env": environment_apart(), "start_new_session": True}
            self.process, self.due, self.began = subprocess.Popen(self.command, **how), 0.0, time.monotonic()

    def look(self) -> None:
        """Start the process again AGAIN_SECONDS after its end. Raises RuntimeError if it must not be started again."""
        if self.process.poll() is None or time.monotonic() < self.due:
            return
        if self.due:
            self.start()
            return
        lines = self.log.read_text(errors="replace").strip().splitlines()[-1 if self.again else -3 :]
        before, self.said = self.said, f"{self.without} ({self.log}): {' | '.join(lines)}"
        if not self.again:
            raise RuntimeError(self.said)
        if self.said != before or time.monotonic() - self.began > WORKED_SECONDS:
            say(f"warning: {self.said}; its rows are given out again, and it is tried again until it answers")
        self.due = time.monotonic() + AGAIN_SECONDS


class ExternalEngines:
    """Supervisors of Ray's engines and of the user's servers, on the leader.

    secret_file: with which engines join, until `close`; ended: the schedule calls it when the job ends normally;
    ray: engines that Ray places, None: none; urls: of servers that generate; folder: of the run.
    """

    def __init__(
        self,
        address: str,
        secret_file: Path,
        ended: Callable[[], None],
        ray: Generators | None,
        urls: Sequence[str],
        folder: Path,
    ) -> None:
        self.secret_file, self.ended, self._folder = secret_file, ended, folder
        self._join = ["--join", address, "--secret-file", str(secret_file)]
        self._supervisors: list[_Supervisor] = []
        if ray is not None:
            self._start("Ray runs no engines any more", "engines-on-ray", _ray(ray), again=False)
        for number, url in enumerate(urls):
            self._start(f"the server at {url} generates no more", f"engine-at-url-{number}", [*AT_URL, url], again=True)

    def check(self) -> None:
        """Called regularly. Raises RuntimeError if Ray runs no engines any more."""
        for one in self._supervisors:
            one.look()

    def text(self) -> str:
        """Which servers have failed, as the end of an error message."""
        return "".join(f"; {one.said}" for one in self._supervisors if one.said)

    def close(self) -> None:
        """End the supervisors; from now on no engine can join. Idempotent."""
        self.secret_file.unlink(missing_ok=True)
        running = [one.process for one in self._supervisors if one.process.poll() is None]
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(ENGINES_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()

    def _start(self, without: str, name: str, command: Sequence[str], again: bool) -> None:
        self._supervisors.append(_Supervisor(without, self._folder / f"{name}.log", [*command, *self._join], again))
        self._supervisors[-1].start()
