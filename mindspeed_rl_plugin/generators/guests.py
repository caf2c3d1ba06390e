"""What the first trainer keeps for engines that are no ranks of it: a file with the secret, and those that Ray runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from mindspeed_rl_plugin.config.schedule_flags import Generators
from mindspeed_rl_plugin.device import get_device

END_SECONDS = 30.0  # for Ray to end its tasks
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


class Guests:
    """On the leader. secret_file: with which engines join, gone at the end; ended: called when the job has ended well;
    ray: engines that Ray is to run; folder: of the run."""

    def __init__(
        self, address: str, secret_file: Path, ended: Callable[[], None], ray: Generators | None, folder: Path
    ) -> None:
        self.secret_file, self.ended, self._log = secret_file, ended, folder / "engines-on-ray.log"
        self._watch: subprocess.Popen[bytes] | None = None
        if ray is not None:
            with self._log.open("ab") as log:
                command = [*_ray(ray), "--join", address, "--secret-file", str(secret_file)]
                self._watch = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def check(self) -> None:
        """Raise RuntimeError where Ray no longer runs engines."""
        if self._watch is not None and self._watch.poll():
            said = self._log.read_text(errors="replace").strip().splitlines()[-3:]
            raise RuntimeError(f"Ray runs no engines any more ({self._log}): {' | '.join(said)}")

    def close(self) -> None:
        """Nobody can join any more. Idempotent."""
        self.secret_file.unlink(missing_ok=True)
        if self._watch is not None and self._watch.poll() is None:
            self._watch.terminate()
            try:
                self._watch.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._watch.kill()
