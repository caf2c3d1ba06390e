"""Download the wheels of requirements/ascend.txt into .cache/ascend (200 MB, once) and print one path a line.

Wheels that are there are not asked for again. Exits with what pip said when one cannot be had.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "requirements" / "ascend.txt"
CACHE = ROOT / ".cache" / "ascend"
# Sources are the same in all wheels of a version; every version has one for these.
PYTHON = "3.11"
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 28, 34)) + ("manylinux2014_x86_64",)
TIMEOUT = 600  # seconds per wheel


def pins() -> list[tuple[str, str]]:
    """(package, version), in the order of the file: each vllm-ascend is followed by its torch-npu."""
    lines = (line.strip() for line in PINS.read_text().splitlines())
    return [tuple(line.split("==")) for line in lines if line and not line.startswith("#")]


def cached(package: str, version: str, cache: Path) -> Path | None:
    """The wheel in the cache, if it is there."""
    return next(cache.glob(f"{package.replace('-', '_')}-{version}-*.whl"), None)


def download(package: str, version: str, cache: Path = CACHE) -> Path:
    """The wheel, downloaded when the cache lacks it. Raises RuntimeError where it cannot be had."""
    if wheel := cached(package, version, cache):
        return wheel
    cache.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", PYTHON]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    with tempfile.TemporaryDirectory(dir=cache) as part:  # a wheel is there whole, or not at all
        command += ["--dest", part, f"{package}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        for whole in Path(part).glob("*.whl"):
            whole.replace(cache / whole.name)
    wheel = cached(package, version, cache)
    if done.returncode or wheel is None:
        raise RuntimeError(
            f"{package}=={version} could not be downloaded into {cache}; with no network, put the wheel there"
            f" by hand. pip said:\n{done.stderr.strip()[-2000:]}"
        )
    return wheel


if __name__ == "__main__":
    try:
        for pin in pins():
            print(download(*pin), flush=True)
    except RuntimeError as error:
        sys.exit(str(error))
