"""Which settings TransferQueue is fastest with here: one pass of `transfer_dock.py` for each, interleaved.

    python benchmarks/transferqueue_settings.py [--repeats 3] [--scale 0.25] [--case short/64] [--only SETTING,...]

Each line changes one thing of the settings that `transfer_dock.py` takes (`peers.TransferQueue.BEST`).
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import transfer_dock  # puts its folder on the path
from peers import TransferQueue

SECONDS = 180.0  # of one pass; with some settings the queue does not come up
METRICS = ("put_mb_s", "get_mb_s", "write_back_mb_s", "small_get_p50_ms", "cpu_s_per_gb")
TAKEN = TransferQueue.BEST["environment"]
TRIED: dict[str, dict[str, Any]] = {
    "as taken": {},
    "1 storage unit": {"units": 1},
    "4 storage units": {"units": 4},
    "8 storage units": {"units": 8},
    "8 torch threads": {"environment": {**TAKEN, "TQ_NUM_THREADS": "8"}},
    "2 torch threads": {"environment": {**TAKEN, "TQ_NUM_THREADS": "2"}},
    "1 ZMQ thread a client": {"environment": {**TAKEN, "TQ_CLIENT_ZMQ_IO_THREADS": "1"}},
    "16 pooled sockets": {"environment": {**TAKEN, "TQ_SOCKET_POOL_SIZE": "16"}},
    "ids one by one": {"environment": {k: v for k, v in TAKEN.items() if k != "TQ_PRE_ALLOC_SAMPLE_NUM"}},
    "blocking instead of polling": {"polling": False},
    "strided columns": {"layout": "strided"},
}


def measured(python: Path, settings: dict[str, Any], directory: Path, batch: int, samples: int) -> dict[str, float]:
    """One pass with some settings. Raises RuntimeError where it fails or takes longer than `SECONDS`."""
    with contextlib.closing(transfer_dock.Arm("transferqueue", python, settings, SECONDS)) as arm:
        return transfer_dock.measure(arm, directory, batch, samples)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=0.25, help="part of the 4096 samples, default %(default)s")
    parser.add_argument("--case", default="short/64", help="samples/batch, default %(default)s")
    parser.add_argument("--only", default=",".join(TRIED), help="settings by their names here, default all")
    args = parser.parse_args()
    chosen = args.only.split(",")
    if unknown := [name for name in chosen if name not in TRIED]:
        parser.error(f"--only: unknown {unknown}; known: {', '.join(TRIED)}")
    kind, batch = args.case.split("/")
    python = transfer_dock.interpreter("transferqueue")
    seen: dict[str, list[dict[str, float]]] = {}
    failed: dict[str, str] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with transfer_dock.cases([args.case], args.scale) as directories:
        samples = len(transfer_dock.work.load(directories[kind]).checks["row"])
        for repeat in range(args.repeats):
            for name in (n for n in chosen if n not in failed):
                try:
                    speeds = measured(python, TRIED[name], directories[kind], int(batch), samples)
                except RuntimeError as error:
                    failed[name] = str(error)
                    print(f"{name}: {error}", file=sys.stderr, flush=True)
                    continue
                seen.setdefault(name, []).append(speeds)
                print(f"{repeat + 1}/{args.repeats} {name}: {speeds}", file=sys.stderr, flush=True)
    print(f"| setting | {' | '.join(METRICS)} |\n|---|{'---|' * len(METRICS)}")
    for name in failed:
        seen.pop(name, None)
        print(f"| {name} | {' | '.join(['fails'] * len(METRICS))} |")
    for name, speeds in seen.items():
        values = [statistics.median(f[m] for f in speeds) for m in METRICS]
        print(f"| {name} | {' | '.join(f'{v:.4g}' for v in values)} |")


if __name__ == "__main__":
    main()
