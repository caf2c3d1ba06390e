"""What the first trainer keeps for engines that are no ranks of it: a file with the secret, and processes that bring
those to work which Ray runs, and servers of the user's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.config.schedule_flags import Generators
from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.engine.options import VllmOptions
from mindspeed_rl_plugin.engine.server_api import Server, problems
from mindspeed_rl_plugin.environment import environment_apart, launch_env

END_SECONDS = 30.0  # for Ray to end its tasks, and for servers to be left
AT_URL = (sys.executable, "-m", "mindspeed_rl_plugin", "generate", "--engine-url")
ON_RAY = (sys.executable, "-m", "mindspeed_rl_plugin.generators.on_ray")


def check_ray(wanted: Generators, seconds: float) -> Iterator[str]:
    """Why Ray cannot place the engines that are wanted."""
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
    """Why servers of the user's cannot generate; on the first rank. model, dtype: config and dtype of the engines,
    empty before they are known."""
    urls, most = config.schedule.engine_url, config.data.max_prompt_length + config.rollout.max_response_length
    if launch_env()["rank"]:
        return
    if len(set(urls)) < len(urls):
        yield f"--rl-engine-url {' '.join(urls)}: a server is named twice; give each once"
    for url in urls:
        try:
            served = Server(url, config.monitor.wait_timeout).check()[0]
        except (ValueError, OSError, RuntimeError) as error:
            yield f"--rl-engine-url: {error}"
        else:
            job = VllmOptions(model, max_model_len=most, dtype=dtype or served.dtype)
            yield from (f"--rl-engine-url {url}: {why}" for why in problems(served, job, bool(config.rollout.stop)))


class Guests:
    """On the leader. secret_file: with which engines join until `close`; ended: called when the job has ended well;
    ray: engines that Ray is to run; urls: of servers that generate; folder: of the run."""

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
        self._watched: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
        if ray is not None:
            self._start("Ray runs no engines any more", "engines-on-ray", _ray(ray))
        for number, url in enumerate(urls):
            self._start(f"the server at {url} generates no more", f"engine-at-url-{number}", [*AT_URL, url])

    def check(self) -> None:
        """Raise RuntimeError where engines are gone that are this job's own."""
        for without, log, process in self._watched:
            if process.poll() is not None:
                said = log.read_text(errors="replace").strip().splitlines()[-3:]
                raise RuntimeError(f"{without} ({log}): {' | '.join(said)}")

    def close(self) -> None:
        """Nobody can join any more. Idempotent."""
        self.secret_file.unlink(missing_ok=True)
        running = [process for _, _, process in self._watched if process.poll() is None]
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()

    def _start(self, without: str, name: str, command: Sequence[str]) -> None:
        """without: said where the process fails."""
        path = self._folder / f"{name}.log"
        with path.open("ab") as log:
            process = subprocess.Popen(
                [*command, *self._join],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment_apart(),
                start_new_session=True,
            )
        self._watched.append((without, path, process))
