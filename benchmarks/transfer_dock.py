"""How fast rows move through this project's dock, beside its peers and the machine's limit.

    python benchmarks/transfer_dock.py --json OUT.json [--scale 0.1] [--arms dock-shm,ray] [--cases short/64]
    python benchmarks/transfer_dock.py --json OUT.json --arms dock-shm --repeats 5 --before WORKTREE

All arms run interleaved in one go, several times; figures are medians over the repeats. Two processes put half of the
rows each, then four worker states one after the other read all rows in batches, shared by both processes, and write
one column back. A get ends when every byte lies in contiguous tensors of the reader's own; all reads are compared by
checksum outside the timed part. --before: the same arm of another tree takes its turns too, and each figure is
compared as a ratio, median of the repeats' own ratios. See README.md beside this file for the metrics.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "transfer"))

import work  # noqa: E402

ARMS = ("dock-shm", "dock-tcp", "transferqueue", "ray", "memcpy")
BEFORE = " before"  # ends the name of an arm of another tree
CASES = ("short/64", "short/512", "long/64", "long/512")
WORLD = 2
ARM_SECONDS = 900.0  # of all cases of an arm in one repeat
Seen = dict[tuple[str, str, str], list[float]]  # (arm, case, metric) -> value of each repeat
UNITS = {
    "put_mb_s": "MB/s",
    "get_mb_s": "MB/s",
    "view_get_mb_s": "MB/s",
    "far_get_mb_s": "MB/s",
    "write_back_mb_s": "MB/s",
    "small_get_p50_ms": "ms",
    "alone_small_get_p50_ms": "ms",
    "cpu_s_per_gb": "s/GB",
    "bytes_ratio": "bytes moved / bytes of payload",
}
# What issue 3 asks for: (case, metric) -> smallest ratio of a dock to a peer, median of the repeats' own ratios.
PEER_TARGETS = {
    "transferqueue": {
        ("short/64", "get_mb_s"): 20.0,
        ("short/64", "put_mb_s"): 10.0,
        ("long/64", "get_mb_s"): 10.0,
        ("long/64", "put_mb_s"): 10.0,
    },
    "ray": {
        (case, metric): 2.0 if case.endswith("/64") else 1.0
        for case in CASES
        for metric in ("get_mb_s", "put_mb_s", "write_back_mb_s")
    },
}
LARGEST = {"small_get_p50_ms": 0.5, "alone_small_get_p50_ms": 0.5, "bytes_ratio": 1.02}  # in every case
DOCKS = ("dock-shm", "dock-tcp")
# What a tree must hold of the one before it: metric -> smallest ratio, and largest.
THROUGHPUT = {m: 0.9 for m in ("put_mb_s", "get_mb_s", "write_back_mb_s", "far_get_mb_s")}
LATENCY = {"alone_small_get_p50_ms": 1.15}


class Arm:
    """The processes of one arm, driven in step. settings: of the arm, where it takes some; seconds: until they are
    ended, whatever they do; tree: whose code it runs."""

    def __init__(
        self,
        name: str,
        python: Path,
        settings: dict[str, Any] | None = None,
        seconds: float = ARM_SECONDS,
        tree: Path = HERE.parent,
    ) -> None:
        self.name, self.seen = name, set[Path]()
        given = [] if settings is None else [json.dumps(settings)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = str(tree)
        environment.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        self._workers = [
            subprocess.Popen(
                [str(python), str(tree / "benchmarks" / "transfer" / "worker.py"), name, str(rank), str(WORLD), *given],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(WORLD)
        ]
        self._limit = threading.Timer(seconds, self.kill)
        self._limit.daemon = True
        self._limit.start()
        try:
            self._replies()
        except BaseException:
            self.kill()
            raise

    def do(self, command: str, **parameters: Any) -> list[dict[str, Any]]:
        """All workers do the same at the same time; their replies."""
        self._send([{"do": command, **parameters}] * WORLD)
        return self._replies()

    def cpu(self) -> float:
        """Seconds of processor time of all processes of the arm so far."""
        return sum(cpu_seconds(w.pid) for w in self._workers)

    def close(self) -> None:
        """End the workers, and those that do not end by themselves."""
        try:
            self.do("close")
            for worker in self._workers:
                worker.stdin.close()
                worker.wait(60)
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            print(f"arm {self.name}: {error}", file=sys.stderr)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the workers, whatever they do."""
        self._limit.cancel()
        for worker in self._workers:
            worker.kill()

    def _send(self, messages: Sequence[dict[str, Any]]) -> None:
        for worker, message in zip(self._workers, messages, strict=True):
            worker.stdin.write(json.dumps(message) + "\n")
            worker.stdin.flush()

    def _replies(self) -> list[dict[str, Any]]:
        """One reply a worker, after as many exchanges among them as they like."""
        while True:
            lines = [w.stdout.readline() for w in self._workers]
            if not all(lines):
                raise RuntimeError(f"arm {self.name}: a worker ended, or took too long; see its message above")
            answers = [json.loads(line) for line in lines]
            if not all("exchange" in f for f in answers):
                return answers
            self._send([{"gathered": [f["exchange"] for f in answers]}] * WORLD)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and all that descend from it."""
    ticks, children = {}, {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                with open(f"/proc/{entry.name}/stat", encoding="utf-8") as file:
                    fields = file.read().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            ticks[int(entry.name)] = int(fields[11]) + int(fields[12])
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        total += ticks.get(one, 0)
        todo += children.get(one, [])
    return total / os.sysconf("SC_CLK_TCK")


def rate(replies: Sequence[dict[str, Any]], nbytes: str = "bytes", seconds: str = "seconds") -> float:
    """MB/s of all workers together: each one's own rate while all of them work."""
    return sum(r[nbytes] / r[seconds] for r in replies if r[seconds]) / 1e6


def measure(arm: Arm, directory: Path, batch: int, samples: int) -> dict[str, float]:
    """One pass of a case through an arm: metric -> value."""
    arm.do("load", directory=str(directory))
    # A pass that is not counted, for memory and connections as in mid-training: a whole one for the first case with
    # samples of this size, after that as much as tells the arm the size of the batches.
    states = list(work.STATES)[: 1 if directory in arm.seen else None]
    arm.seen.add(directory)
    arm.do("put", batch=batch)
    for name in states:
        arm.do("state", name=name, check=False)
    arm.do("clear")
    cpu = arm.cpu()
    puts = arm.do("put", batch=batch)
    states = [arm.do("state", name=name) for name in work.STATES]
    cpu = arm.cpu() - cpu
    gets = [reply for replies in states for reply in replies]
    for replies in states:
        if (seen := sum(r["rows"] for r in replies)) != samples:
            raise RuntimeError(f"arm {arm.name}: a state saw {seen} of {samples} rows")
    per_rank = [{k: sum(s[r][k] for s in states) for k in states[0][r]} for r in range(WORLD)]
    payload = sum(p["bytes"] for p in puts) + sum(g["bytes"] + g["written"] for g in gets)
    out = {
        "put_mb_s": rate(puts),
        "get_mb_s": rate(per_rank),
        "write_back_mb_s": rate(per_rank, "written", "write_seconds"),
        "cpu_s_per_gb": (cpu - sum(g["check_cpu"] for g in gets)) / (payload / 1e9),
        "bytes_ratio": (sum(p["moved"] for p in puts) + sum(g["moved"] for g in gets)) / payload,
        "small_get_p50_ms": statistics.median(t for r in arm.do("probe", turn=None) for t in r["times"]),
        "alone_small_get_p50_ms": statistics.median(
            t for rank in range(WORLD) for r in arm.do("probe", turn=rank) for t in r["times"]
        ),
    }
    if arm.name == "ray":
        out["view_get_mb_s"] = rate(per_rank, "bytes", "view_seconds")
    if arm.name == "dock-tcp":
        out["far_get_mb_s"] = rate(arm.do("far"))
    arm.do("clear")
    return out


def interpreter(name: str) -> Path:
    """Python of an arm: this one, but for TransferQueue one with its package, in an environment of the benchmark's own
    that sees everything installed here. Raises CalledProcessError where the package cannot be had."""
    if name != "transferqueue":
        return Path(sys.executable)
    place = HERE / ".venv"
    python = place / "bin" / "python"
    inherited = [p for p in sys.path if p.endswith("site-packages")]
    if not (place / "ready").exists():
        venv.create(place, with_pip=True, clear=True)
        own = next(place.glob("lib/python*/site-packages"))
        (own / "inherited.pth").write_text("\n".join(inherited) + "\n")
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(HERE / "requirements.txt")]
        subprocess.run(install, check=True, timeout=600)
        (place / "ready").touch()
    return python


@contextmanager
def cases(names: Sequence[str], scale: float) -> Iterator[dict[str, Path]]:
    """Directories with the rows of each kind of case, in memory where there is space for such files."""
    root = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="transfer-dock-", dir=root) as directory:
        folders = {}
        unit = WORLD * max(int(name.split("/")[1]) for name in names)  # TransferQueue gives out whole batches alone
        samples = max(int(work.SAMPLES * scale) // unit, 1) * unit
        for kind in dict.fromkeys(name.split("/")[0] for name in names):
            folders[kind] = Path(directory) / kind
            nbytes = work.make(folders[kind], samples, work.FACTORS[kind])
            print(f"{kind}: {samples} samples, {nbytes / 1e6:.1f} MB", file=sys.stderr)
        yield folders


def run(
    names: Sequence[str], chosen: Sequence[str], repeats: int, scale: float, before: Path | None = None
) -> Iterator[Seen]:
    """After each repeat the values so far. before: another tree, whose docks take turns with this one's."""
    seen: Seen = {}
    pythons = {}
    for name in names:
        try:
            pythons[name] = interpreter(name)
        except subprocess.CalledProcessError as error:
            print(f"arm {name} is left out: {error}", file=sys.stderr)
    trees = dict.fromkeys(pythons, HERE.parent)
    if before is not None:
        for name in [n for n in pythons if n in DOCKS]:
            pythons[name + BEFORE], trees[name + BEFORE] = pythons[name], before
    with cases(chosen, scale) as directories:
        samples = len(work.load(next(iter(directories.values()))).checks["row"])
        for repeat in range(repeats):
            order = list(pythons)[repeat % len(pythons) :] + list(pythons)[: repeat % len(pythons)]
            for name in order:
                with closing(Arm(name.removesuffix(BEFORE), pythons[name], tree=trees[name])) as arm:
                    for case in chosen:
                        kind, batch = case.split("/")
                        for metric, value in measure(arm, directories[kind], int(batch), samples).items():
                            seen.setdefault((name, case, metric), []).append(value)
                        done = {m: round(v[-1], 3) for (a, c, m), v in seen.items() if (a, c) == (name, case)}
                        print(f"{repeat + 1}/{repeats} {name} {case} {done}", file=sys.stderr, flush=True)
            yield seen


def medians(seen: Seen) -> list[dict[str, Any]]:
    """Rows of the result."""
    return [
        {"arm": arm, "case": case, "metric": metric, "value": statistics.median(values), "unit": UNITS[metric]}
        for (arm, case, metric), values in seen.items()
    ]


def targets(seen: Mapping[tuple[str, str, str], Sequence[float]]) -> list[dict[str, Any]]:
    """The targets as rows of the result: {"arm", "case", "metric", "value", "unit", "target", "reached"}.

    seen: (arm, case, metric) -> a value for each repeat. What was not measured has no row.
    """
    out = []
    for dock in DOCKS:
        for peer, wanted in PEER_TARGETS.items():
            for (case, metric), least in wanted.items():
                pairs = zip(seen.get((dock, case, metric), ()), seen.get((peer, case, metric), ()), strict=False)
                ratios = [mine / other for mine, other in pairs]
                if ratios:
                    value = statistics.median(ratios)
                    row = {"arm": dock, "case": case, "metric": f"{metric} over {peer}", "value": value}
                    out.append({**row, "unit": "ratio", "target": f">= {least:g}", "reached": value >= least})
        for (arm, case, metric), values in seen.items():
            if arm == dock and metric in LARGEST:
                value, most = statistics.median(values), LARGEST[metric]
                row = {"arm": dock, "case": case, "metric": metric, "value": value, "unit": UNITS[metric]}
                out.append({**row, "target": f"<= {most:g}", "reached": value <= most})
    return out


def compared(seen: Mapping[tuple[str, str, str], Sequence[float]]) -> list[dict[str, Any]]:
    """This tree over the one before it, as rows like those of `targets`."""
    out = []
    for (arm, case, metric), values in seen.items():
        others = seen.get((arm + BEFORE, case, metric))
        if not others or metric not in THROUGHPUT | LATENCY:
            continue
        value = statistics.median(mine / other for mine, other in zip(values, others, strict=False))
        limit = THROUGHPUT.get(metric) or LATENCY[metric]
        asked, reached = (">=", value >= limit) if metric in THROUGHPUT else ("<=", value <= limit)
        row = {"arm": arm, "case": case, "metric": f"{metric} after over before", "value": value, "unit": "ratio"}
        out.append({**row, "target": f"{asked} {limit:g}", "reached": reached})
    return out


def target_table(rows: Sequence[dict[str, Any]]) -> str:
    """`targets` as a Markdown table."""
    lines = ["| arm | case | target | measured | asked | reached |", "|---|---|---|---|---|---|"]
    for r in rows:
        reached = "yes" if r["reached"] else "NO"
        cells = (r["arm"], r["case"], r["metric"], f"{r['value']:.3g}", r["target"], reached)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The result as a Markdown table, a line an arm and case."""
    metrics = [m for m in UNITS if any(r["metric"] == m for r in rows)]
    value = {(r["arm"], r["case"], r["metric"]): r["value"] for r in rows}
    lines = [f"| case | arm | {' | '.join(metrics)} |", f"|---|---|{'---|' * len(metrics)}"]
    for case in dict.fromkeys(r["case"] for r in rows):
        for arm in dict.fromkeys(a for a, *_ in value):
            if any(a == arm and c == case for a, c, _ in value):
                cells = [f"{value[arm, case, m]:.4g}" if (arm, case, m) in value else "" for m in metrics]
                lines.append(f"| {case} | {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file for the rows {arm, case, metric, value, unit}")
    parser.add_argument("--arms", default=",".join(ARMS), help="which to run, default %(default)s")
    parser.add_argument("--cases", default=",".join(CASES), help="samples/batch, default %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="passes of each arm, default %(default)s")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the 4096 samples, default %(default)s")
    parser.add_argument("--before", type=Path, help="another tree of this project, whose docks are compared with these")
    args = parser.parse_args()
    names, chosen = args.arms.split(","), args.cases.split(",")
    for given, known in ((names, ARMS), (chosen, CASES)):
        if unknown := set(given) - set(known):
            parser.error(f"{sorted(unknown)} unknown; known: {', '.join(known)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or the rows would stay in /dev/shm
    before = os.getloadavg()[0]
    begin = time.monotonic()
    for seen in run(names, chosen, args.repeats, args.scale, args.before):
        rows, wanted = medians(seen), targets(seen) + compared(seen)
        args.json.write_text(json.dumps(rows + wanted, indent=1) + "\n")
    print(table(rows))
    print(f"\n## targets\n\n{target_table(wanted)}\n")
    spent = (time.monotonic() - begin) / 60
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    load = f"load {before:.1f} before and {os.getloadavg()[0]:.1f} after"
    print(f"{now}, {os.cpu_count()} cores, {load}, median of {args.repeats}, scale {args.scale:g}, {spent:.1f} min")


if __name__ == "__main__":
    main()
