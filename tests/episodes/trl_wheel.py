"""Download TRL's wheel into .cache/episodes (1 MB, once) and print its path: the tests read chat templates in it.

A wheel that is there is not asked for again. Exits with what pip said when it cannot be had.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "episodes"
PIN = "trl==1.16.0"
WHEEL = CACHE / "trl-1.16.0-py3-none-any.whl"
SHA256 = "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"
TIMEOUT = 600  # seconds


def wheel() -> Path:
    """The wheel, downloaded when the cache lacks it. Raises RuntimeError where it cannot be had, or is another one."""
    if not WHEEL.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", str(CACHE), PIN]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        if done.returncode or not WHEEL.exists():
            raise RuntimeError(
                f"{PIN} could not be downloaded into {CACHE}; with no network, put the wheel there by hand. pip said:\n"
                f"{done.stderr.strip()[-2000:]}"
            )
    if (digest := hashlib.sha256(WHEEL.read_bytes()).hexdigest()) != SHA256:
        raise RuntimeError(f"{WHEEL} has the SHA-256 {digest}, not {SHA256}; remove it")
    return WHEEL


if __name__ == "__main__":
    try:
        print(wheel())
    except RuntimeError as error:
        sys.exit(str(error))
