"""Download TRL's wheel into .cache/episodes (1 MB, once) and print its path: the tests read chat templates in it.

A wheel that is there is not asked for again. Exits with what pip said when it cannot be had.
"""

import hashlib
import sys
from pathlib import Path

import fetch

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "episodes"
SHA256 = "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"


def wheel() -> Path:
    """The wheel, downloaded when the cache lacks it. Raises RuntimeError where it cannot be had, or is another one."""
    path = fetch.download("trl", "1.16.0", CACHE)
    if (digest := hashlib.sha256(path.read_bytes()).hexdigest()) != SHA256:
        raise RuntimeError(f"{path} has the SHA-256 {digest}, not {SHA256}; remove it")
    return path


if __name__ == "__main__":
    try:
        print(wheel())
    except RuntimeError as error:
        sys.exit(str(error))
